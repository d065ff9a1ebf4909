"""Tensor checkers and op statistics around training: same bits, one run, and no alarm at what a loss scale skips."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_nets import conv_net, feeds, make, mlp, network

import onnxamp
from onnxamp import NumericsError, amp, debugging
from onnxamp.debugging import DebugMode, NumericsWarning, TensorCheckerConfig, collect_operator_stats, tensor_checker
from onnxamp.train import SGD, AdamW, DynamicLossScaleManager, FixedLossScaleManager, TrainNetwork, build_train_network

HUGE = 2.0**40
"""A loss scale at which every gradient overflows in float16."""


def config(mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT, **arguments: Any) -> TensorCheckerConfig:
    return TensorCheckerConfig(True, mode, **arguments)


def trained(scale: float = 1.0, level: str = "O3", *, skips: bool = True, **arguments: Any) -> TrainNetwork:
    manager = FixedLossScaleManager(scale, drop_overflow_update=skips)
    return build_train_network(mlp(), SGD(), "cross-entropy", level, loss_scale_manager=manager, **arguments)


def steep(y: Any, _: Any) -> Any:
    """A loss whose gradients overflow in float16."""
    return (y * 1e7).op("ReduceMean")


def bits(state: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("boost", ["O0", "O1", "O2"])
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_watched_step_runs_once_and_changes_no_bit(level: str, boost: str) -> None:
    plain, watched = (
        build_train_network(
            conv_net(channels=2, dropout=True), AdamW(), "cross-entropy", level, boost,
            loss_scale_manager=FixedLossScaleManager(8),
        )
        for _ in range(2)
    )  # fmt: skip
    batch = feeds(shape=(1, 8, 8), classes=10)
    if boost != "O2":
        watched.session = None  # type: ignore[assignment]  # the ordinary session is not needed
    with tensor_checker(config(DebugMode.CHECK_ALL)) as checker:
        results = [watched.step(batch) for _ in range(2)]
    assert results == [plain.step(batch) for _ in range(2)]
    assert bits(watched.state()) == bits(plain.state())
    assert [check.step for check in checker.steps] == [0, 1]
    seen = {record.tensor: record for record in checker.steps[1].records}
    assert {"train/loss", "train/norm", "c0", "head.w", watched.plan.successors["head.w"]} <= seen.keys()
    assert not any(record.is_bad for record in seen.values())
    # Adam corrects its moments in float64.
    types = {record.dtype for record in seen.values()} - {"float64"}
    assert types == ({"float32"} if level == "O0" else {"float32", "float16"})


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [FixedLossScaleManager, DynamicLossScaleManager])
def test_overflows_that_the_loss_scale_skips_are_expected(kind: Any, accumulate: int) -> None:
    sgd = SGD(accumulate=accumulate)
    net = build_train_network(mlp(), sgd, "cross-entropy", "O3", loss_scale_manager=kind(HUGE))
    with tensor_checker(config()) as checker:
        results = [net.step(feeds()) for _ in range(3)]
    assert [result.overflow for result in results] == [True, True, True]
    assert [check.records for check in checker.steps] == [(), (), ()]
    with tensor_checker(config(DebugMode.CHECK_ALL)) as checker:
        net.step(feeds())
    odd = [record for record in checker.steps[0].records if not record.stats.finite]
    assert odd
    assert not any(record.is_bad or record.fault or record.inherited for record in odd)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [({"scale": HUGE}, {"scaled_overflows": True}), ({"scale": HUGE, "skips": False}, {})],
    ids=["asked for", "not skipped"],
)
def test_other_overflows_of_gradients_are_faults(arguments: dict[str, Any], asked: dict[str, Any]) -> None:
    made, batch = trained(**arguments), feeds()
    before = bits(made.state())
    with tensor_checker(config(**asked)), pytest.raises(NumericsError, match=r"^Run 0: .*Inf in .*gradient"):
        made.step(batch)
    assert bits(made.state()) == before
    assert made.steps == 0
    made.step(batch)  # without the checker it goes on


def test_overflows_at_the_smallest_scale_are_faults() -> None:
    """At a scale of 1, scaling is not to blame: the gradients themselves are too large."""
    results, batch = [], feeds() | {"label": np.zeros((4, 3), np.float32)}
    for scale in (2.0, 1.0):
        manager = DynamicLossScaleManager(scale)
        net = build_train_network(mlp(), SGD(), steep, "O3", loss_scale_manager=manager)
        with tensor_checker(config(DebugMode.CHECK_NAN_INF)) as checker, warnings.catch_warnings(action="ignore"):
            results.append(net.step(batch).overflow)
        assert bool(checker.steps[0].records) == (scale == 1)
    assert results == [True, True]


def test_the_forward_pass_is_always_watched() -> None:
    batch = feeds()
    batch["x"] *= 1e6
    for net in (trained(HUGE), trained(level="O2")):
        with tensor_checker(config()), pytest.raises(NumericsError) as caught:
            net.step(batch)
        assert (caught.value.value, caught.value.op) == ("x_fp16", "Cast")
        assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_nan_of_finite_gradients_is_a_fault_at_any_scale(level: str) -> None:
    """The root of zero has an infinite slope, and the gradient that comes in is zero."""
    nodes = [make("Mul", "x w", "m"), make("Sub", "m m", "z"), make("Sqrt", "z", "y")]
    net = build_train_network(
        network(nodes, {"w": np.ones(3)}, ["N", 3], ["N", 3]), SGD(), "mean-squared-error", level,
        loss_scale_manager=FixedLossScaleManager(1024),
    )  # fmt: skip
    batch = {"x": np.ones((2, 3), np.float32), "label": np.zeros((2, 3), np.float32)}
    with tensor_checker(config()), pytest.raises(NumericsError, match="gradient"):
        net.step(batch)


def test_all_bad_values_are_listed_and_training_goes_on(tmp_path: Path) -> None:
    net = trained(HUGE)
    listed = config(DebugMode.CHECK_NAN_INF, output_dir=tmp_path, scaled_overflows=True)
    with tensor_checker(listed) as checker, pytest.warns(NumericsWarning, match="Run 0: there is NaN or Inf") as told:
        net.step(feeds())
    assert told[0].filename == __file__
    assert net.steps == 1
    records = checker.steps[0].records
    assert len(records) > 10
    assert all(record.is_bad for record in records)
    assert str(debugging.read_dump(tmp_path)) == str(records)


def test_steps_count_for_debug_step() -> None:
    net, checked = trained(), config(DebugMode.CHECK_ALL, debug_step=(1, 3))
    session = onnxamp.InferenceSession(mlp())
    with tensor_checker(checked) as checker:
        net.fit([feeds()] * 4)
        session.run(None, {"x": feeds()["x"]})
    assert [check.step for check in checker.steps] == [1, 2]
    assert net.steps == 4


def test_only_some_ops_are_looked_at() -> None:
    net = trained(HUGE, skips=False)
    gemms = config(DebugMode.CHECK_ALL, checked_op_list=["Gemm"])
    with tensor_checker(gemms) as checker, pytest.warns(NumericsWarning):
        net.step(feeds())
    assert {record.op for record in checker.steps[0].records} == {"Gemm"}


def test_operators_of_steps_are_counted() -> None:
    with amp.auto_cast(level="O1"):
        net = build_train_network(mlp(), SGD(), "cross-entropy")
        with collect_operator_stats() as stats:
            net.step(feeds())
            net.step(feeds())
        net.step(feeds())
    once = collect_operator_stats(net.model)
    assert stats.runs == 2
    assert stats.calls == {key: 2 * count for key, count in once.calls.items()}
    assert stats.calls["Gemm", "float16"] > 0
    enabled = debugging.enable_operator_stats_collection()
    net.step(feeds())
    assert debugging.disable_operator_stats_collection() is enabled
    assert enabled.calls == once.calls


def test_a_checker_sees_networks_of_auto_cast() -> None:
    checker = debugging.enable_tensor_checker(config(DebugMode.CHECK_ALL))
    with amp.auto_cast(level="O2", dtype="bfloat16"):
        net = build_train_network(mlp(), SGD(), "cross-entropy")
        net.step(feeds())
    debugging.disable_tensor_checker()
    net.step(feeds())
    assert len(checker.steps) == 1
    assert {record.dtype for record in checker.steps[0].records} == {"float32", "bfloat16"}


def test_the_first_half_of_a_step_is_watched_as_a_whole_step() -> None:
    plain, watched = (trained(scale=8) for _ in range(2))
    with tensor_checker(config(DebugMode.CHECK_ALL)) as checker:
        watched.apply(watched.gradients(feeds()))
    plain.step(feeds())
    assert bits(watched.state()) == bits(plain.state())
    assert [check.step for check in checker.steps] == [0]
    assert "train/loss" in {record.tensor for record in checker.steps[0].records}
    before = bits(watched.state())
    bad = {**feeds(), "x": feeds()["x"] * np.float32(np.nan)}
    with tensor_checker(config()), pytest.raises(NumericsError):
        watched.gradients(bad)
    assert bits(watched.state()) == before
    assert watched.pending is None
