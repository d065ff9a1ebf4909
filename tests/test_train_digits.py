"""Training on real images: scikit-learn's digits. Skipped where there is none: ``pip install .[train-test]``."""

import numpy as np
import pytest
from train_nets import Array, conv_net

from onnxamp.runtime.session import make_session, run
from onnxamp.train import AdamW, Batches, TrainNetwork, build_train_network

datasets = pytest.importorskip("sklearn.datasets")

HELD_OUT = 400


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    found = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.images[order] / 16).astype(np.float32)[:, None], found.target[order].astype(np.int64)


def trained(digits: tuple[Array, Array], level: str, dtype: str) -> tuple[TrainNetwork, float]:
    """The network after five epochs, and its accuracy on what it has not seen, in percent."""
    images, labels = digits
    net = build_train_network(conv_net(channels=16), AdamW(learning_rate=1e-2), "cross-entropy", level, dtype=dtype)
    for epoch in range(6):
        net.fit(Batches({"x": images[HELD_OUT:], "label": labels[HELD_OUT:]}, 50, epoch=epoch))
    logits = run(make_session(net.export()), {"x": images[:HELD_OUT]})["y"]
    return net, float((logits.argmax(1) == labels[:HELD_OUT]).mean() * 100)


@pytest.mark.slow
def test_low_precision_learns_digits_as_well(digits: tuple[Array, Array]) -> None:
    _, exact = trained(digits, "O0", "float16")
    assert exact > 97
    for level, dtype in (("O1", "float16"), ("O2", "float16"), ("O3", "float16"), ("O2", "bfloat16")):
        _, found = trained(digits, level, dtype)
        assert found >= exact - (0.5 if level == "O2" else 1.5), f"{level} {dtype}: {found} against {exact}"
