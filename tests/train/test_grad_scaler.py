"""GradScaler: loops written as for Paddle, settings and state."""

from typing import Any

import numpy as np
import pytest
from train_nets import Array, conv_net, feeds, mlp

import onnxamp
from onnxamp import amp
from onnxamp.train import SGD, Adam, AdamW, DynamicLossScaleManager, GradScaler, TrainNetwork, build_train_network

OVERFLOWS = (False, True, False, False, True, True, False, False)


def batches(overflows: tuple[bool, ...] = OVERFLOWS) -> list[dict[str, Array]]:
    found = [feeds(6, (1, 8, 8), 10, seed) for seed in range(len(overflows))]
    for batch, is_loud in zip(found, overflows, strict=True):
        batch["x"] = batch["x"] * np.float32(1e30 if is_loud else 1)
    return found


def scaler(**more: Any) -> GradScaler:
    return GradScaler(**{"init_loss_scaling": 1024, "incr_every_n_steps": 2, **more})


def same(one: TrainNetwork, other: TrainNetwork) -> bool:
    a, b = one.state(), other.state()
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def with_steps(loss_scaler: GradScaler, optimizer: Any, boost_level: str = "O0") -> TrainNetwork:
    net = build_train_network(conv_net(), optimizer, "cross-entropy", "O2", boost_level, loss_scale_manager=loss_scaler)
    for batch in batches():
        net.step(batch)
    return net


def loop(net: TrainNetwork, optimizer: Any, loss_scaler: GradScaler, *, unscale: bool) -> None:
    """Paddle's loop, line by line; optimizer.clear_grad() alone has no counterpart."""
    for batch in batches():
        loss = net.gradients(batch)
        scaled = loss_scaler.scale(loss)
        scaled.backward()
        if unscale:
            loss_scaler.unscale_(optimizer)
        loss_scaler.step(optimizer)
        loss_scaler.update()


def test_a_network_owns_the_scale_that_an_update_left_alone() -> None:
    optimizer, mine = Adam(accumulate=2), scaler()
    net = build_train_network(conv_net(), optimizer, "cross-entropy", "O2", loss_scale_manager=mine)
    net.gradients(next(iter(batches())))
    mine.step(optimizer)
    others = [np.full((), -number, np.float32) for number in range(2000)]  # take what memory is free
    assert others
    assert net.state()["train/scale"] == 1024


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("optimizer", [AdamW(clip_norm=1.0), Adam(accumulate=2)])
@pytest.mark.parametrize("boost_level", ["O0", "O1", "O2"])
def test_a_loop_trains_as_steps_do(optimizer: Any, unscale: bool, boost_level: str) -> None:
    mine, theirs = scaler(), scaler()
    net = build_train_network(conv_net(), optimizer, "cross-entropy", "O2", boost_level, loss_scale_manager=mine)
    loop(net, optimizer, mine, unscale=unscale)
    assert same(net, with_steps(theirs, optimizer, boost_level))
    assert mine.state_dict() == theirs.state_dict()


@pytest.mark.slow
def test_minimize() -> None:
    mine, theirs, optimizer = scaler(), scaler(), AdamW()
    with amp.auto_cast(level="O2"):
        net = build_train_network(conv_net(), optimizer, "cross-entropy", loss_scale_manager=mine)
        other = build_train_network(conv_net(), optimizer, "cross-entropy", loss_scale_manager=theirs)
    for batch in batches():
        scaled = mine.scale(net.gradients(batch))
        scaled.backward()
        mine.minimize(optimizer, scaled)
        other.step(batch)
    assert same(net, other)


def test_the_network_stands_for_its_optimizer() -> None:
    mine = scaler()
    net = build_train_network(mlp(), SGD(), "cross-entropy", loss_scale_manager=mine)
    mine.scale(net.gradients(feeds()))
    mine.unscale_(net)
    mine.step(net)
    mine.update()
    assert (net.steps, mine.state_dict()["incr_count"]) == (1, 1)


def test_unscaled_gradients_can_be_clipped() -> None:
    mine, optimizer = scaler(), SGD(learning_rate=1.0)
    net = build_train_network(mlp(), optimizer, "cross-entropy", loss_scale_manager=mine)
    exact = build_train_network(mlp(), SGD(), "cross-entropy").gradients(feeds())
    before, loss = net.state(), net.gradients(feeds())
    mine.unscale_(optimizer)
    assert loss.scale == 1
    for name in loss.gradients:
        np.testing.assert_allclose(loss.gradients[name], exact.gradients[name], rtol=1e-4, atol=1e-6)
        np.clip(loss.gradients[name], -0.01, 0.01, out=loss.gradients[name])
    mine.step(optimizer)
    mine.update()
    moved = [np.abs(before[name] - net.state()[name]).max() for name in net.plan.weights]
    assert max(moved) == pytest.approx(0.01, rel=1e-4)


def test_without_update_the_scale_stays() -> None:
    mine, optimizer = scaler(incr_every_n_steps=1), SGD()
    net = build_train_network(mlp(), optimizer, "cross-entropy", loss_scale_manager=mine)
    net.gradients(feeds())
    mine.step(optimizer)
    assert mine.get_loss_scale() == 1024
    mine.update()
    assert mine.get_loss_scale() == 2048
    mine.update()
    assert mine.get_loss_scale() == 2048


def test_one_scaler_for_two_networks_falls_if_either_overflows() -> None:
    mine, one, two = scaler(), SGD(), Adam()
    first, second = (build_train_network(mlp(), own, "cross-entropy", loss_scale_manager=mine) for own in (one, two))
    first.gradients({**feeds(), "x": feeds()["x"] * np.float32(np.inf)})
    second.gradients(feeds())
    mine.step(one)
    mine.step(two)
    mine.update()
    assert mine.get_loss_scale() == 512


def test_numbers_are_multiplied() -> None:
    assert scaler().scale(0.5) == 512
    np.testing.assert_array_equal(scaler().scale(np.ones(2)), [1024, 1024])
    assert GradScaler(enable=False).scale(0.5) == 0.5


def test_calls_out_of_order() -> None:
    mine, optimizer = scaler(), SGD()
    with pytest.raises(ValueError, match="No network was built with this optimizer"):
        mine.step(optimizer)
    net = build_train_network(mlp(), optimizer, "cross-entropy", loss_scale_manager=mine)
    for call in (mine.step, mine.unscale_, mine.minimize):
        with pytest.raises(RuntimeError, match="no gradients"):
            call(optimizer)
    net.gradients(feeds())
    mine.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="unscale them once"):
        mine.unscale_(optimizer)
    mine.step(optimizer)
    net.gradients(feeds())
    with pytest.raises(onnxamp.CallOrderError, match="call update"):
        mine.step(optimizer)
    mine.update()
    mine.step(optimizer)
    with pytest.raises(TypeError, match="optimizer or its network, not str"):
        mine.step("adam")
    other = build_train_network(mlp(), optimizer, "cross-entropy")
    with pytest.raises(ValueError, match="loss_scale_manager=scaler"):
        mine.scale(other.gradients(feeds()))


@pytest.mark.slow
def test_disabled() -> None:
    mine, optimizer = GradScaler(enable=False), AdamW()
    net = build_train_network(conv_net(), optimizer, "cross-entropy", "O2", loss_scale_manager=mine)
    plain = build_train_network(conv_net(), optimizer, "cross-entropy", "O2", loss_scale_manager=None)
    loop(net, optimizer, mine, unscale=True)
    for batch in batches():
        plain.step(batch)
    assert same(net, plain)
    assert not mine.is_enable()
    assert not mine.is_use_dynamic_loss_scaling()
    assert mine.state_dict() == {}
    assert mine.get_loss_scale() == 1
    mine.load_state_dict({"scale": 3})
    assert repr(mine) == "GradScaler(enable=False)"


def test_bfloat16_disables_it_with_a_warning() -> None:
    mine, optimizer = scaler(), SGD()
    with pytest.warns(onnxamp.OptionWarning, match="bfloat16 .* GradScaler is disabled") as caught:
        net = build_train_network(mlp(), optimizer, "cross-entropy", "O2", dtype="bfloat16", loss_scale_manager=mine)
    assert caught[0].filename == __file__
    assert not mine.is_enable()
    assert net.step(feeds()).scale == 1
    loss = mine.scale(net.gradients(feeds()))
    loss.backward()
    mine.minimize(optimizer, loss)
    assert net.steps == 2
    manager = DynamicLossScaleManager(8)
    kept = build_train_network(mlp(), SGD(), "cross-entropy", "O2", dtype="bfloat16", loss_scale_manager=manager)
    assert kept.step(feeds()).scale == 8


def test_a_scaler_that_another_network_disabled_scales_nothing() -> None:
    mine = scaler()
    net = build_train_network(mlp(), SGD(), "cross-entropy", "O2", loss_scale_manager=mine)
    assert net.step(feeds()).scale == 1024
    with pytest.warns(onnxamp.OptionWarning):
        build_train_network(mlp(), SGD(), "cross-entropy", "O2", dtype="bfloat16", loss_scale_manager=mine)
    assert [net.step(feeds()).scale for _ in range(3)] == [1, 1, 1]


def test_a_scaler_stays_as_it_is_if_a_network_cannot_be_built() -> None:
    mine = scaler()
    wrong = SGD(weights=["nothing"])
    with pytest.raises(onnxamp.ModelError, match="No weight"):
        build_train_network(mlp(), wrong, "cross-entropy", "O2", dtype="bfloat16", loss_scale_manager=mine)
    assert mine.is_enable()
    assert mine.get_loss_scale() == 1024


def test_defaults() -> None:
    mine = GradScaler()
    assert mine.is_enable()
    assert mine.is_use_dynamic_loss_scaling()
    assert mine.get_init_loss_scaling() == mine.get_loss_scale() == 65536
    assert (mine.get_incr_ratio(), mine.get_decr_ratio()) == (2.0, 0.5)
    assert (mine.get_incr_every_n_steps(), mine.get_decr_every_n_nan_or_inf()) == (2000, 1)
    assert GradScaler(True, 8, 3, 0.25, 5, 2, False).is_use_dynamic_loss_scaling() is False


def test_setters_count_while_a_network_is_trained() -> None:
    mine = scaler()
    net = build_train_network(mlp(), SGD(), "cross-entropy", boost_level="O2", loss_scale_manager=mine)
    net.step(feeds())
    mine.set_init_loss_scaling(100)
    mine.set_incr_ratio(3)
    mine.set_decr_ratio(0.1)
    mine.set_incr_every_n_steps(1)
    mine.set_decr_every_n_nan_or_inf(2)
    bad = {**feeds(), "x": feeds()["x"] * np.float32(np.inf)}
    found = [net.step(batch).scale for batch in (feeds(), bad, bad, feeds())]
    assert found == pytest.approx([100, 300, 300, 30])
    assert mine.get_init_loss_scaling() == 100


@pytest.mark.parametrize(("setter", "value"), [
    ("init_loss_scaling", 0), ("init_loss_scaling", 2.0**127), ("incr_ratio", 1), ("decr_ratio", 1.5),
    ("decr_ratio", 0), ("incr_every_n_steps", 0), ("decr_every_n_nan_or_inf", -1),
])  # fmt: skip
def test_values_out_of_range(setter: str, value: Any) -> None:
    mine = GradScaler()
    with pytest.raises(onnxamp.ArgumentError, match=f"{setter} must be"):
        getattr(mine, f"set_{setter}")(value)
    with pytest.raises(onnxamp.ArgumentError, match=f"{setter} must be"):
        GradScaler(**{setter: value})
    with pytest.raises(TypeError, match="must be a bool"):
        GradScaler(enable=1)


def test_a_state_goes_on_in_another_scaler_and_network() -> None:
    mine, theirs = scaler(decr_ratio=0.25), GradScaler()
    net = build_train_network(mlp(), SGD(), "cross-entropy", loss_scale_manager=mine)
    net.step(feeds())
    saved = mine.state_dict()
    assert list(saved) == [
        "scale", "incr_ratio", "decr_ratio", "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_count",
        "decr_count", "use_dynamic_loss_scaling",
    ]  # fmt: skip
    assert saved["scale"].dtype == np.float32
    assert (saved["scale"].tolist(), saved["incr_count"], saved["decr_ratio"]) == ([1024.0], 1, 0.25)
    other = build_train_network(mlp(), SGD(), "cross-entropy", loss_scale_manager=theirs)
    theirs.load_state_dict(saved)
    assert theirs.state_dict() == saved
    assert [other.step(feeds()).scale for _ in range(2)] == [1024, 2048]


@pytest.mark.parametrize(("change", "said"), [
    ({"scale": None}, "needs 'scale'"),
    ({"incr_count": -2}, "incr_count must be"),
    ({"incr_ratio": 0.5}, "incr_ratio must be"),
    ({"scale": np.array([0.0])}, "init_loss_scaling must be"),
])  # fmt: skip
def test_states_that_are_none(change: dict[str, Any], said: str) -> None:
    mine = scaler()
    state = {name: value for name, value in {**mine.state_dict(), **change}.items() if value is not None}
    before = mine.state_dict()
    with pytest.raises(ValueError, match=said):
        mine.load_state_dict(state)
    assert mine.state_dict() == before


def reference(scale: float, overflows: list[bool], every: int, *, floor: float) -> list[float]:
    """The scale after each update, by the algorithm of Paddle and PyTorch."""
    scales, good = [], 0
    for overflow in overflows:
        good = 0 if overflow else good + 1
        if overflow:
            scale = max(scale * 0.5, floor)
        elif good == every:
            scale, good = scale * 2, 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("boost_level", ["O0", "O1", "O2"])
def test_the_scale_falls_below_one_as_in_paddle_and_pytorch(boost_level: str) -> None:
    overflows = [True, True, True, False, False, True, False, False]
    mine = scaler(init_loss_scaling=0.5)
    net = build_train_network(conv_net(), SGD(), "cross-entropy", "O2", boost_level, loss_scale_manager=mine)
    found = [(net.step(batch), mine.get_loss_scale())[1] for batch in batches(tuple(overflows))]
    assert found == reference(0.5, overflows, 2, floor=2.0**-126)
    assert min(found) < 0.1
    assert np.isfinite(net.step(batches((False,))[0]).loss)


def test_the_scale_stays_a_number() -> None:
    mine = scaler(init_loss_scaling=2.0**-125)
    for _ in range(4):
        mine.update_loss_scale(overflow=True)
    assert mine.get_loss_scale() == 2.0**-126
    manager = DynamicLossScaleManager(2.0)
    for _ in range(4):
        manager.update_loss_scale(overflow=True)
    assert manager.get_loss_scale() == 1, "MindSpore keeps it at 1 or above"


def test_the_arguments_and_methods_of_pytorch() -> None:
    mine = GradScaler("cuda", init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3, enabled=True)
    assert mine.state_dict() == GradScaler(True, 64.0, 4.0, 0.25, 3).state_dict()
    assert GradScaler("cuda", 64.0, 4.0, 0.25, 3, True).state_dict() == mine.state_dict()
    assert GradScaler(64.0, 4.0, 0.25, 3, True).state_dict() == mine.state_dict(), "torch.cuda.amp.GradScaler"
    assert GradScaler(device="cpu").state_dict() == GradScaler().state_dict()
    assert (mine.get_scale(), mine.is_enabled(), mine.get_growth_factor()) == (64, True, 4)
    assert (mine.get_backoff_factor(), mine.get_growth_interval()) == (0.25, 3)
    mine.set_growth_factor(2.0)
    mine.set_backoff_factor(0.5)
    mine.set_growth_interval(1)
    mine.update_loss_scale(overflow=False)
    assert mine.get_scale() == 128
    mine.update(new_scale=8.0)
    assert (mine.get_scale(), mine.scale([1.0, (2.0,)])) == (8, [8, (16,)])
    off = GradScaler("cuda", enabled=False)
    assert (off.get_scale(), off.is_enabled(), off.state_dict()) == (1, False, {})
    off.update(4.0)
    assert off.get_scale() == 1
    for wrong in ("x", None, object()):
        with pytest.raises(onnxamp.ArgumentTypeError, match="scale\\(\\) takes"):
            mine.scale(wrong)


def test_a_disabled_scaler_has_the_initial_scale_one_as_in_paddle() -> None:
    assert GradScaler(enable=False).get_init_loss_scaling() == 1
    assert amp.AmpScaler(False, 8.0).get_init_loss_scaling() == 1


def test_a_state_of_pytorch_goes_on() -> None:
    theirs = {"scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}
    mine = GradScaler()
    mine.load_state_dict(theirs)
    mine.update_loss_scale(overflow=False)
    assert (mine.get_scale(), mine.get_growth_interval()) == (64, 2)
    for change, said in (({"scale": "x"}, "must be one number"), ({"_growth_tracker": -1}, "incr_count must be")):
        with pytest.raises(onnxamp.ArgumentError, match=said):
            mine.load_state_dict({**theirs, **change})
    with pytest.raises(onnxamp.ArgumentTypeError, match="what state_dict"):
        mine.load_state_dict([1])
    assert mine.get_scale() == 64


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("unscale", [False, True])
def test_a_loop_of_pytorch(unscale: bool) -> None:
    """The loop of PyTorch's recipe, line by line, but for the forward pass."""
    optimizer, theirs = AdamW(lr=1e-3), GradScaler(init_scale=1024, growth_interval=2)
    with amp.autocast("cuda", dtype="float16"):
        net = build_train_network(conv_net(), optimizer, "cross-entropy", loss_scale_manager=theirs)
        other = build_train_network(conv_net(), AdamW(), "cross-entropy", loss_scale_manager=scaler())
    net.train()
    for batch in batches():
        optimizer.zero_grad(set_to_none=True)
        with amp.autocast("cuda", dtype="float16"):
            loss = net.gradients(batch)
        theirs.scale(loss).backward()
        if unscale:
            theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        other.step(batch)
    assert same(net, other)
