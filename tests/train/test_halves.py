"""A step in two halves: the same bits as a whole one, and gradients that can be read and changed in between."""

from typing import Any

import numpy as np
import pytest
from train_nets import Array, conv_net, feeds, mlp

import onnxamp
from onnxamp.train import (
    SGD,
    Adam,
    AdamW,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    GradScaler,
    LossScaleManager,
    Momentum,
    TrainNetwork,
    build_train_network,
)

LOUD = np.float32(1e30)


def images(seed: int) -> dict[str, Array]:
    return feeds(6, (1, 8, 8), 10, seed)


def same(one: TrainNetwork, other: TrainNetwork) -> bool:
    a, b = one.state(), other.state()
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


class Wandering(LossScaleManager):
    """A manager as a user would write one."""

    def __init__(self) -> None:
        self.scale, self.told = 100.0, []

    def get_loss_scale(self) -> float:
        return self.scale

    def update_loss_scale(self, overflow: bool) -> None:
        self.told.append(overflow)
        self.scale *= 0.5 if overflow else 1.5


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("boost_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize(("level", "optimizer", "manager"), [
    ("O0", SGD(weight_decay=0.1), lambda: None),
    ("O1", Momentum(accumulate=2, weight_decay=0.1), lambda: None),
    ("O2", AdamW(clip_norm=0.1), lambda: DynamicLossScaleManager(2.0**10, scale_window=2)),
    ("O2", Adam(accumulate=2), lambda: GradScaler(init_loss_scaling=2.0**10, incr_ratio=1.7, incr_every_n_steps=2)),
    ("O3", SGD(), lambda: FixedLossScaleManager(3.0, drop_overflow_update=False)),
    ("O2", SGD(accumulate=2), Wandering),
])  # fmt: skip
def test_both_halves_are_a_step_bit_for_bit(level: str, optimizer: Any, manager: Any, boost_level: str) -> None:
    managers = manager(), manager()
    whole, halved = (
        build_train_network(
            conv_net(dropout=True), optimizer, "cross-entropy", level, boost_level, loss_scale_manager=own
        )
        for own in managers
    )
    for seed in range(6):
        batch = images(seed)
        if seed == 3 and level == "O2":
            batch["x"] = batch["x"] * LOUD
        step = halved.gradients(batch)
        expected = whole.step(batch)
        assert step.loss == expected.loss or np.isnan(expected.loss)
        assert repr(halved.apply()) == repr(expected)
        assert same(whole, halved)
    if managers[0] is not None:
        assert managers[0].get_loss_scale() == managers[1].get_loss_scale()


def test_steps_and_halves_alternate() -> None:
    whole, mixed = (build_train_network(mlp(), Adam(), "cross-entropy", "O2") for _ in range(2))
    for seed in range(6):
        whole.step(feeds(seed=seed))
        if seed % 2:
            mixed.apply(mixed.gradients(feeds(seed=seed)))
        else:
            mixed.step(feeds(seed=seed))
    assert same(whole, mixed)


def test_gradients_are_those_of_the_scaled_loss() -> None:
    scaled = build_train_network(mlp(), SGD(), "cross-entropy", loss_scale_manager=FixedLossScaleManager(1024))
    first, exact = scaled.gradients(feeds()), build_train_network(mlp(), SGD(), "cross-entropy").gradients(feeds())
    assert (first.scale, exact.scale) == (1024, 1)
    assert first.loss == exact.loss
    assert list(first.gradients) == list(scaled.plan.weights)
    for name, gradient in first.gradients.items():
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient / 1024, exact.gradients[name], rtol=1e-5, atol=1e-7)


def test_nothing_is_trained_by_the_first_half() -> None:
    net = build_train_network(conv_net(), SGD(), "cross-entropy", "O2")
    before = net.state()
    net.gradients(images(0))
    assert all(array.tobytes() == before[name].tobytes() for name, array in net.state().items())
    assert net.steps == 0


@pytest.mark.parametrize("boost_level", ["O0", "O1"])
def test_changed_gradients_are_what_the_update_takes(boost_level: str) -> None:
    net = build_train_network(mlp(), SGD(learning_rate=1.0), "cross-entropy", boost_level=boost_level)
    before, step = net.state(), net.gradients(feeds())
    step.gradients["w0"][:] = 2
    step.gradients["b0"] = np.full(5, 3, np.float64)
    step.gradients["w1"] *= 0
    b1 = step.gradients["b1"].copy()
    net.apply(step)
    moved = {name: before[name] - net.state()[name] for name in net.plan.weights}
    np.testing.assert_allclose(moved["w0"], 2, rtol=1e-5)
    np.testing.assert_allclose(moved["b0"], 3, rtol=1e-5)
    np.testing.assert_array_equal(moved["w1"], 0)
    np.testing.assert_allclose(moved["b1"], b1, rtol=1e-4, atol=1e-6)


def test_statistics_can_be_changed() -> None:
    net = build_train_network(conv_net(), SGD(), "cross-entropy", "O1")
    step = net.gradients(images(0))
    assert set(step.statistics) == {"n0.m", "n0.v", "n1.m", "n1.v"}
    step.statistics["n0.m"] = np.arange(8)
    net.apply(step)
    np.testing.assert_array_equal(net.state()["n0.m"], np.arange(8))


def test_an_infinite_gradient_skips_the_update() -> None:
    net = build_train_network(mlp(), SGD(), "cross-entropy", "O2", loss_scale_manager=DynamicLossScaleManager(64))
    before, step = net.state(), net.gradients(feeds())
    step.gradients["w0"][0, 0] = np.inf
    result = net.apply()
    assert (result.overflow, result.scale) == (True, 64)
    assert all(np.array_equal(net.state()[name], before[name]) for name in net.plan.weights)
    assert net.loss_scale_manager is not None
    assert net.loss_scale_manager.get_loss_scale() == 32


def test_gradients_are_used_once_and_while_they_are_the_last() -> None:
    net = build_train_network(mlp(), SGD(), "cross-entropy")
    with pytest.raises(onnxamp.CallOrderError, match="no gradients"):
        net.apply()
    old = net.gradients(feeds())
    new = net.gradients(feeds())
    for call in (lambda: net.apply(old), old.backward):
        with pytest.raises(RuntimeError, match="out of date"):
            call()
    new.backward()
    net.apply(new)
    with pytest.raises(onnxamp.CallOrderError):
        net.apply(new)
    step = net.gradients(feeds())
    net.step(feeds())
    with pytest.raises(onnxamp.CallOrderError):
        net.apply(step)
    with pytest.raises(TypeError, match="takes what gradients"):
        net.apply({"w0": np.zeros((6, 5))})


def test_wrong_arrays() -> None:
    step = build_train_network(mlp(), SGD(), "cross-entropy").gradients(feeds())
    with pytest.raises(ValueError, match="no 'w9'"):
        step.gradients["w9"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"floats of shape \(6, 5\), not float64 of shape \(5,\)"):
        step.gradients["w0"] = np.zeros(5)
    with pytest.raises(ValueError, match="not complex128"):
        step.gradients["b1"] = np.zeros(3, complex)
    with pytest.raises(ValueError, match="cannot be left out"):
        del step.gradients["b1"]
