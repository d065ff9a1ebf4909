"""``is_float16_supported`` and ``is_bfloat16_supported`` where there is a CUDA device, or the stand-in for one."""

import pytest

from onnxamp import amp
from onnxamp._runtime.sessions.plugins import compute_capability
from onnxamp._runtime.sessions.session import cuda_available


@pytest.mark.cuda
@pytest.mark.placement
@pytest.mark.skipif(not cuda_available(), reason="neither a CUDA device nor the stand-in")
def test_the_compute_capability_decides() -> None:
    capability = compute_capability()
    for device in (None, "cuda", "gpu", "gpu:0", "CUDAExecutionProvider"):
        assert amp.is_float16_supported(device) == (capability >= (5, 3))
        assert amp.is_bfloat16_supported(device) == (capability >= (8, 0))
    assert not amp.is_float16_supported("cpu")
