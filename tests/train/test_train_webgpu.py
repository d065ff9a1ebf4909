"""Training on WebGPU, where float16 is computed as float16: what is emulated elsewhere is seen here."""

import numpy as np
import pytest
from onnx import numpy_helper
from train_nets import Array, pooled_net

from onnxamp._runtime.sessions.session import make_session, run
from onnxamp.train import (
    AdamW,
    Batches,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    Momentum,
    TrainNetwork,
    build_train_network,
)

pytestmark = pytest.mark.webgpu
HELD_OUT = 397


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed: pip install .[dev]")
    found = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.images[order] / 16).astype(np.float32)[:, None], found.target[order].astype(np.int64)


def trained(digits: tuple[Array, Array], level: str, provider: str, epochs: int = 10) -> tuple[TrainNetwork, float]:
    """The network after some epochs, and its accuracy on what it has not seen, in percent."""
    images, labels = digits
    optimizer = AdamW(learning_rate=2e-2)
    net = build_train_network(pooled_net(), optimizer, "cross-entropy", level, provider=provider)
    for epoch in range(epochs):
        net.fit(Batches({"x": images[HELD_OUT:], "label": labels[HELD_OUT:]}, 200, epoch=epoch))
    logits = run(make_session(net.export()), {"x": images[:HELD_OUT]})["y"]
    return net, float((logits.argmax(1) == labels[:HELD_OUT]).mean() * 100)


@pytest.mark.slow
def test_float16_learns_digits_as_well(digits: tuple[Array, Array]) -> None:
    _, exact = trained(digits, "O0", "cpu")
    net, found = trained(digits, "O2", "webgpu")
    assert net.runs_on.startswith("WebGPU on ")
    assert exact > 95
    assert found >= exact - 0.5


@pytest.mark.slow
def test_gradients_flush_without_a_scale(digits: tuple[Array, Array]) -> None:
    """Once the network is sure of what it has seen, gradients leave the range of float16."""
    images, labels = digits
    sure = trained(digits, "O0", "cpu", 40)[0].export()
    for tensor in sure.graph.initializer:
        if tensor.name.startswith("head"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 4, tensor.name))
    logits = run(make_session(sure), {"x": images})["y"]
    ordered = np.sort(logits, 1)
    known = (logits.argmax(1) == labels) & (ordered[:, -1] - ordered[:, -2] > 11)
    data = {"x": images[known][:800], "label": labels[known][:800]}
    assert len(data["x"]) == 800
    errors = {}
    for scale in (1.0, 2.0**16):
        net = build_train_network(
            sure, AdamW(), "cross-entropy", "O3", provider="webgpu",
            loss_scale_manager=FixedLossScaleManager(scale),
        )  # fmt: skip
        errors[scale] = {name: row.error for name, row in net.flushed(data).items()}
    assert net.runs_on.startswith("WebGPU on ")
    assert max(errors[1.0].values()) > 0.5
    assert max(errors[2.0**16].values()) < 0.1


@pytest.mark.slow
def test_an_overflow_skips_one_update_and_halves_the_scale(digits: tuple[Array, Array]) -> None:
    images, labels = digits
    net = build_train_network(
        pooled_net(), Momentum(learning_rate=0.05), "cross-entropy", "O2", provider="webgpu",
        loss_scale_manager=DynamicLossScaleManager(2.0**10),
    )  # fmt: skip
    good = {"x": images[:200], "label": labels[:200]}
    seen = []
    for data in (good, {**good, "x": good["x"] * 6e4}, good):
        before, result = weights(net), net.step(data)
        moved = any(not np.array_equal(before[name], after) for name, after in weights(net).items())
        seen.append((result.overflow, moved, result.scale))
    assert seen == [(False, True, 2.0**10), (True, False, 2.0**10), (False, True, 2.0**9)]


def weights(net: TrainNetwork) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in net.export().graph.initializer}
