"""Training on real images: scikit-learn's digits. Skipped where there is none: ``pip install .[dev]``."""

import numpy as np
import pytest
from onnx import TensorProto
from repository import ROOT
from train_nets import Array, conv_net

from onnxamp._runtime.sessions.session import cuda_available, make_session, run
from onnxamp.train import (
    AdamW,
    Batches,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    Loss,
    TrainNetwork,
    build_train_network,
)
from onnxamp.train._losses import LOSSES

HELD_OUT = 400
ENCODER = ROOT / "models/encoder.onnx"


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed: pip install .[dev]")
    found = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.images[order] / 16).astype(np.float32)[:, None], found.target[order].astype(np.int64)


def trained(digits: tuple[Array, Array], level: str, dtype: str) -> tuple[TrainNetwork, float]:
    """The network after six epochs, and its accuracy on what it has not seen, in percent."""
    images, labels = digits
    net = build_train_network(conv_net(channels=16), AdamW(learning_rate=1e-2), "cross-entropy", level, dtype=dtype)
    for epoch in range(6):
        net.fit(Batches({"x": images[HELD_OUT:], "label": labels[HELD_OUT:]}, 50, epoch=epoch))
    logits = run(make_session(net.export()), {"x": images[:HELD_OUT]})["y"]
    return net, float((logits.argmax(1) == labels[:HELD_OUT]).mean() * 100)


@pytest.mark.cuda
@pytest.mark.slow
def test_low_precision_learns_digits_as_well(digits: tuple[Array, Array]) -> None:
    """Emulated; for real where there is a device."""
    _, exact = trained(digits, "O0", "float16")
    assert exact > 97
    for level, dtype in (("O1", "float16"), ("O2", "float16"), ("O3", "float16"), ("O2", "bfloat16")):
        net, found = trained(digits, level, dtype)
        assert net.runs_on == ("CUDA" if cuda_available() else "CPU, emulated")
        assert found >= exact - (0.5 if level == "O2" else 1.5), f"{level} {dtype}: {found} against {exact}"


@pytest.mark.slow
def test_without_a_scale_gradients_flush_and_the_report_shows_it(digits: tuple[Array, Array]) -> None:
    """Once the loss is small, gradients of activations leave float16's range on their way to the first layers."""
    images, labels = digits
    data = {"x": images[:400], "label": labels[:400]}
    exact = build_train_network(conv_net(channels=16), AdamW(learning_rate=3e-2), "cross-entropy")
    assert exact.fit(Batches(data, 50), 30)[-1] < 0.02
    errors = {}
    for scale in (1.0, 2.0**18):
        manager = FixedLossScaleManager(scale)
        net = build_train_network(exact.export(), AdamW(), "cross-entropy", "O3", loss_scale_manager=manager)
        errors[scale] = {name: row.error for name, row in net.flushed(data).items()}
    for name in ("c0.w", "c1.w", "n0.s"):
        assert errors[1.0][name] > 0.5
        assert errors[2.0**18][name] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_follows_float32_in_a_transformer(digits: tuple[Array, Array], dtype: str) -> None:
    """Images as sixteen tokens, each the sum of a patch; the encoder has masks and norms that break float16."""
    images, labels = digits
    tokens = (images * 16).reshape(-1, 4, 2, 4, 2).sum((2, 4)).reshape(-1, 16).astype(np.int64)
    data = {"input_ids": tokens[:800], "attention_mask": np.ones_like(tokens[:800]), "label": labels[:800]}
    entropy = LOSSES["cross-entropy"].function
    loss = Loss(
        lambda pooled, label: entropy(pooled * 8.0, label), label_type=TensorProto.INT64, but=1, output="pooled"
    )
    curves = []
    for level in ("O0", "O2"):
        optimizer = AdamW(learning_rate=lambda step: 2e-3 * min(1.0, (step + 1) / 16), clip_norm=1.0)
        scale = DynamicLossScaleManager(2.0**10)
        net = build_train_network(ENCODER, optimizer, loss, level, dtype=dtype, loss_scale_manager=scale)
        curves.append(net.fit(Batches(data, 50), 3))
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.02)
    assert curves[1][2] < 0.5 * curves[1][0]
