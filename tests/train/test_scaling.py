"""Loss scale managers as objects: what they say of themselves, and how networks follow them."""

from typing import Any

import numpy as np
import pytest
from train_nets import feeds, mlp

import onnxamp
from onnxamp.train import (
    FROM_LEVEL,
    SGD,
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    GradScaler,
    LossScaleManager,
    ScaleUpdate,
    TrainNetwork,
    build_train_network,
)


def built(manager: Any, **more: Any) -> TrainNetwork:
    return build_train_network(mlp(), SGD(learning_rate=1e-3), "cross-entropy", loss_scale_manager=manager, **more)


def loud() -> dict[str, Any]:
    return {**feeds(), "x": feeds()["x"] * np.float32(np.inf)}


def test_fixed() -> None:
    manager = FixedLossScaleManager()
    assert (manager.get_loss_scale(), manager.get_drop_overflow_update()) == (128.0, True)
    assert manager.get_update_cell() is None
    manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 128
    assert FixedLossScaleManager(drop_overflow_update=False).get_drop_overflow_update() is False
    assert repr(FixedLossScaleManager(2)) == "FixedLossScaleManager(loss_scale=2, drop_overflow_update=True)"


def test_dynamic() -> None:
    manager = DynamicLossScaleManager()
    assert (manager.get_loss_scale(), manager.get_drop_overflow_update()) == (2.0**24, True)
    assert manager.get_update_cell() == ScaleUpdate(2, 0.5, 2000, 1)
    manager = DynamicLossScaleManager(64, 4, 2)
    scales = []
    for overflow in (False, False, True, False, True, True, True):
        manager.update_loss_scale(overflow)
        scales.append(manager.get_loss_scale())
    assert scales == [64, 256, 64, 64, 16, 4, 1]
    assert repr(manager) == "DynamicLossScaleManager(loss_scale=1, scale_factor=4, scale_window=2)"


@pytest.mark.parametrize("boost_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("make", [
    lambda: DynamicLossScaleManager(100, 1.3, 2),
    lambda: GradScaler(init_loss_scaling=77, incr_ratio=1.7, decr_ratio=0.3, incr_every_n_steps=2,
                       decr_every_n_nan_or_inf=2),
    lambda: DynamicLossScaleManager(2.0**125, 3, 1),
])  # fmt: skip
def test_the_graph_and_the_manager_count_alike(make: Any, boost_level: str) -> None:
    manager, alone = make(), make()
    net = built(manager, boost_level=boost_level)
    for overflow in (False, False, True, False, True, True, False, False, False):
        assert net.step(loud() if overflow else feeds()).scale == alone.get_loss_scale()
        alone.update_loss_scale(overflow)
        assert manager.get_loss_scale() == alone.get_loss_scale()


class Own(LossScaleManager):
    def __init__(self, scale: Any = 16.0, drops: bool = True) -> None:
        self.scale, self.drops, self.told = scale, drops, []

    def get_loss_scale(self) -> Any:
        return self.scale

    def update_loss_scale(self, overflow: bool) -> None:
        self.told.append(overflow)
        self.scale = self.scale / 2 if overflow else self.scale + 1

    def get_drop_overflow_update(self) -> bool:
        return self.drops


@pytest.mark.parametrize("boost_level", ["O0", "O2"])
def test_a_users_manager_is_asked_before_and_told_after_each_step(boost_level: str) -> None:
    manager = Own()
    net = built(manager, level="O2", boost_level=boost_level)
    results = [net.step(batch) for batch in (feeds(), loud(), feeds())]
    assert [result.scale for result in results] == [16, 17, 8.5]
    assert manager.told == [False, True, False]
    assert net.loss_scale_manager is manager
    assert "train/scale" not in net.state()
    keeps = built(Own(drops=False))
    keeps.step(loud())
    assert not np.isfinite(keeps.state()["w0"]).all()


def test_a_users_manager_is_told_once_per_update() -> None:
    manager = Own()
    net = build_train_network(mlp(), SGD(accumulate=3), "cross-entropy", loss_scale_manager=manager)
    for _ in range(6):
        net.step(feeds())
    assert manager.told == [False, False]


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "128", None, np.ones(2)])
def test_a_scale_must_be_a_number(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"get_loss_scale\(\) of Own must return a number"):
        built(Own(scale)).step(feeds())


def test_a_manager_without_methods() -> None:
    with pytest.raises(NotImplementedError, match="must define get_loss_scale"):
        built(LossScaleManager()).step(feeds())


class Slow(DynamicLossScaleManager):
    """Changes what its base class does."""

    def update_loss_scale(self, overflow: bool) -> None:
        super().update_loss_scale(overflow)
        super().update_loss_scale(overflow)


class Named(DynamicLossScaleManager):
    """Adds to what its base class does."""

    name = "mine"


def test_subclasses_of_built_in_managers() -> None:
    for kind, expected in ((Slow, 16), (Named, 32)):
        manager = kind(64)
        net = built(manager)
        net.step(loud())
        assert manager.get_loss_scale() == expected
        assert net.step(feeds()).scale == expected


def test_a_scale_that_somebody_else_changes_counts_from_the_next_step() -> None:
    for boost_level in ("O0", "O1", "O2"):
        manager = DynamicLossScaleManager(64)
        net = built(manager, boost_level=boost_level)
        net.step(feeds())
        manager.update_loss_scale(overflow=True)
        assert net.step(feeds()).scale == 32
        assert float(net.state()["train/scale"]) == manager.get_loss_scale() == 32


def test_networks_share_the_scale_of_their_manager() -> None:
    manager = DynamicLossScaleManager(64)
    first, second = built(manager), built(manager, boost_level="O2")
    first.step(loud())
    assert second.step(loud()).scale == 32
    assert first.step(feeds()).scale == manager.get_loss_scale() == 16


def test_a_state_brings_its_scale() -> None:
    net = built(DynamicLossScaleManager(64, scale_window=3))
    net.step(feeds())
    state = net.state()
    net.step(loud())
    manager = DynamicLossScaleManager(2, scale_window=3)
    other = built(manager, boost_level="O2")
    other.load_state(state)
    assert manager.get_loss_scale() == 64
    other.step(feeds())
    other.step(feeds())
    assert manager.get_loss_scale() == 128


@pytest.mark.parametrize("is_own", [False, True])
def test_a_state_brings_the_scale_of_a_scaler(is_own: bool) -> None:
    """The scale of a class of the user's own stays with it: only its methods know how it changes."""

    class Careful(DynamicLossScaler):
        def adjust(self, grads_finite: bool) -> bool:
            return super().adjust(grads_finite) and super().adjust(grads_finite)

    kind = Careful if is_own else DynamicLossScaler
    scaler = kind(64, 2, 3)
    net = built(scaler)
    for batch in (loud(), feeds(), feeds()):
        net.step(batch)
    assert scaler.scale_value == 32
    resumed = kind(2, 2, 3)
    other = built(resumed)
    other.load_state(net.state())
    assert resumed.scale_value == (2 if is_own else 32)
    other.step(feeds())
    assert resumed.scale_value == (2 if is_own else 64)


@pytest.mark.parametrize(("name", "value"), [
    ("scale", np.nan), ("scale", np.inf), ("scale", 0.0), ("good", -1), ("bad", -1), ("updates", -1.0),
    ("updates", np.inf), ("steps", -1),
])  # fmt: skip
def test_a_state_with_an_impossible_scale_or_counter_changes_nothing(name: str, value: float) -> None:
    net = built(DynamicLossScaleManager(64, scale_window=3))
    net.step(feeds())
    state = net.state()
    with pytest.raises(onnxamp.ArgumentError, match=r"[Tt].* state"):
        net.load_state({**state, f"train/{name}": np.array(value, state[f"train/{name}"].dtype)})
    assert {key: array.tobytes() for key, array in net.state().items()} == {k: a.tobytes() for k, a in state.items()}


@pytest.mark.slow
def test_none_turns_scaling_off_and_the_default_asks_the_level() -> None:
    assert repr(FROM_LEVEL) == "FROM_LEVEL"
    assert built(None, level="O2").loss_scale_manager is None
    assert isinstance(built(FROM_LEVEL, level="O2").loss_scale_manager, DynamicLossScaleManager)
    assert built(FROM_LEVEL, level="O3").loss_scale_manager is None
    assert built(None, level="O2").step(feeds()).scale == 1


@pytest.mark.parametrize(("call", "name"), [
    (lambda: FixedLossScaleManager(0.5), "loss_scale"),
    (lambda: FixedLossScaleManager(float("nan")), "loss_scale"),
    (lambda: FixedLossScaleManager(2.0**127), "loss_scale"),
    (lambda: DynamicLossScaleManager(0), "init_loss_scale"),
    (lambda: DynamicLossScaleManager(scale_factor=1), "scale_factor"),
    (lambda: DynamicLossScaleManager(scale_factor=float("inf")), "scale_factor"),
    (lambda: DynamicLossScaleManager(scale_window=0), "scale_window"),
])  # fmt: skip
def test_values_out_of_range(call: Any, name: str) -> None:
    with pytest.raises(onnxamp.ArgumentError, match=f"^{name} must be"):
        call()


def test_a_flag_must_be_a_bool() -> None:
    with pytest.raises(TypeError, match="drop_overflow_update must be a bool"):
        FixedLossScaleManager(1, drop_overflow_update="no")
