"""Gradient rules against PyTorch's, in float32. Skipped where there is none: ``pip install .[torch]``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_cases import Array, Case, gradients_of, one

from onnxamp._runtime.sessions.session import make_session, run

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install .[torch]")
F = torch.nn.functional
RNG = np.random.default_rng(3)


def n(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def batch_norm(x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    return F.batch_norm(x, mean, var, scale, bias, training=True)


def lstm(x: Any, w: Any, r: Any, b: Any) -> tuple[Any, Any, Any]:
    """ONNX orders gates i, o, f, c; PyTorch i, f, c, o."""

    def reordered(a: Any) -> Any:
        i, o, f, c = a.chunk(4, 0)
        return torch.cat([i, f, c, o], 0)

    own, recurrent = b[0].chunk(2, 0)
    flat = [reordered(w[0]), reordered(r[0]), reordered(own), reordered(recurrent)]
    h = torch.zeros(1, x.shape[1], r.shape[2])
    y, last, cell = torch.lstm(x, (h, h), flat, True, 1, 0.0, False, False, False)
    return y[:, None], last, cell


ONES = (np.ones(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32), np.ones(2, np.float32))
TIES = np.array([[1, 2, 2, 0], [3, 3, 3, 1]], np.float32)

PAIRS: list[tuple[Case, Callable[..., Any]]] = [
    (one("Conv", n(2, 4, 9, 8), n(6, 2, 3, 3), n(6), group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
     lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2)),
    (one("Conv", n(2, 4, 11, 8), n(4, 4, 3, 3), n(4), dilations=[2, 2], strides=[2, 1]),
     lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), dilation=2)),
    (one("Conv", n(1, 2, 5, 6, 7), n(3, 2, 3, 2, 3), pads=[1, 0, 1, 1, 0, 1]),
     lambda x, w: F.conv3d(x, w, padding=(1, 0, 1))),
    (one("ConvTranspose", n(2, 4, 5, 5), n(4, 3, 3, 3), n(6), group=2, strides=[2, 2], pads=[1, 1, 1, 1],
         output_padding=[1, 1]),
     lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2)),
    (one("MaxPool", n(2, 3, 7, 7), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
     lambda x: F.max_pool2d(x, 3, 2, 1)),
    (one("AveragePool", n(2, 3, 7, 7), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
     lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    (one("AveragePool", n(2, 3, 8, 8), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
     lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True)),
    (one("BatchNormalization", n(4, 2, 3, 3), *ONES, fixed=(3, 4), training_mode=1), batch_norm),
    (one("LayerNormalization", n(2, 3, 4), n(4), n(4)), lambda x, s, b: F.layer_norm(x, (4,), s, b)),
    (one("GroupNormalization", n(2, 4, 3), n(4), n(4), num_groups=2), lambda x, s, b: F.group_norm(x, 2, s, b)),
    (one("InstanceNormalization", n(2, 4, 3), n(4), n(4)), lambda x, s, b: F.instance_norm(x, weight=s, bias=b)),
    (one("MeanVarianceNormalization", n(2, 3, 2, 2)),
     lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True, correction=0)),
    (one("Gelu", n(3, 4)), F.gelu),
    (one("Gelu", n(3, 4), approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (one("Mish", n(3, 4)), F.mish),
    (one("PRelu", n(2, 3, 4), n(3, 1)), lambda x, s: F.prelu(x, s[:, 0])),
    (one("Relu", TIES - 2), F.relu),
    (one("Clip", TIES, np.float32(1), np.float32(2)), torch.clamp),
    (one("ReduceMax", TIES, ints(1)), lambda x: torch.amax(x, 1, keepdim=True)),
    (one("Max", TIES, TIES[::-1].copy()), torch.maximum),
    (one("ReduceProd", np.array([[0, 2, 3], [0, 0, 1]], np.float32), ints(1)), lambda x: x.prod(1, keepdim=True)),
    (one("Pow", np.array([0, 1, 2], np.float32), np.array([2, 0, 1], np.float32)), torch.pow),
    (one("Pad", n(4, 5), ints(1, -1, -2, 0)), lambda x: F.pad(x, (-1, 0, 1, -2))),
    (one("Pad", n(1, 2, 4, 5), ints(0, 0, 1, 2, 0, 0, 2, 1), mode="reflect"),
     lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect")),
    (one("Resize", n(1, 2, 4, 5), None, np.array([1, 1, 2, 2], np.float32), fixed=(2,), constant=(2,),
         coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
     lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    (one("Resize", n(1, 2, 4, 5), None, None, ints(1, 2, 7, 8), mode="linear",
         coordinate_transformation_mode="pytorch_half_pixel"),
     lambda x: F.interpolate(x, size=(7, 8), mode="bilinear", align_corners=False)),
    (one("Attention", n(2, 4, 3, 8), n(2, 4, 3, 8), n(2, 4, 3, 8), opset=23, is_causal=1),
     lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    (one("SoftmaxCrossEntropyLoss", n(4, 5), ints(0, 4, 2, 2)),
     lambda x: F.cross_entropy(x, torch.tensor([0, 4, 2, 2]))),
    (one("Gather", n(7, 3), ints(1, 1, 6, 0)), lambda x: F.embedding(torch.tensor([1, 1, 6, 0]), x)),
    (one("LSTM", n(4, 2, 3), n(1, 20, 3), n(1, 20, 5), n(1, 40), outputs=3, hidden_size=5), lstm),
]  # fmt: skip


@pytest.mark.parametrize(("case", "function"), PAIRS, ids=[f"{i}-{case.op}" for i, (case, _) in enumerate(PAIRS)])
def test_pytorch_agrees(case: Case, function: Callable[..., Any]) -> None:
    found = gradients_of(case)
    ours = run(make_session(found.model), case.feeds(np.float32), list(found.outputs.values()))
    inputs = {
        f"x{i}": torch.tensor(np.asarray(a), requires_grad=f"x{i}" in case.floats())
        for i, a in enumerate(case.inputs) if a is not None and a.dtype == np.float32 and i not in case.constant
    }  # fmt: skip
    outputs = function(*inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weight = torch.tensor(case.weight().astype(np.float32))
    sum((y.reshape(-1) * weight[: y.numel()]).sum() for y in outputs).backward()
    for name, output in found.outputs.items():
        right = inputs[name].grad.numpy()
        np.testing.assert_allclose(ours[output], right, rtol=1e-4, atol=3e-6 * max(1.0, float(np.abs(right).max())))
