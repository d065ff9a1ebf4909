"""Whole models that are timed: what their times teach, and what is chosen by them."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine import space_of
from graphs.case import parse
from onnx import ModelProto, TensorProto, numpy_helper

import onnxamp
from onnxamp._tuning.candidates import CandidateSolver
from onnxamp._tuning.engine_times import WholeTimes
from onnxamp._tuning.space import CASTS, SearchSpace

LAYERS = 4
FEEDS = {"x": np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)}


def layered() -> ModelProto:
    """Layers of a product, an addition and a Tanh."""
    body, value = [], "x"
    for layer in range(LAYERS):
        body.append(f"m{layer} = MatMul ({value}, w) a{layer} = Add (m{layer}, b) t{layer} = Tanh (a{layer})")
        value = f"t{layer}"
    model = parse(f"(float[32,64] x) => (float[32,64] y) {{ {' '.join(body)} y = Exp ({value}) }}")
    random = np.random.default_rng(0)
    for name, shape in (("w", (64, 64)), ("b", (64,))):
        model.graph.initializer.append(
            numpy_helper.from_array((random.standard_normal(shape) / 8).astype(np.float32), name)
        )
    return model


def times_of(space: SearchSpace, truth: SearchSpace) -> WholeTimes:
    """Times of whole models as ``truth`` has them, of which ``space`` is an estimate."""
    solver = CandidateSolver(space, space.all_low)

    def run(choices: Sequence[frozenset[str]], _again: bool) -> list[float]:
        return [truth.time(low, solver.casts(low)) * 1e-6 for low in (frozenset(), *choices)]

    return WholeTimes(space, solver, run)


def keys(space: SearchSpace, *ops: str) -> frozenset[str]:
    return frozenset(unit.key for unit in (*space.tunable, *space.followers) if unit.op in ops)


def test_whole_models_correct_what_low_precision_and_casts_are_estimated_to_take() -> None:
    space = space_of(layered())
    truth = space.corrected({"MatMul": 3.0, CASTS: 4.0}, 2.0)
    times = times_of(space, truth)
    everything, products, tanhs = (
        keys(space, "MatMul", "Add", "Tanh", "Exp"),
        keys(space, "MatMul"),
        keys(space, "Tanh"),
    )
    times.add(everything, products, tanhs)
    found = times.corrected()
    for low in (frozenset[str](), everything, products, tanhs, products | tanhs, keys(space, "Add", "Exp")):
        right, estimate, before = (one.time(low, times.solver.casts(low)) for one in (truth, found, space))
        assert estimate == pytest.approx(right, rel=0.02)
        assert abs(estimate - right) < abs(before - right)


def test_nothing_is_learnt_from_what_was_right() -> None:
    space = space_of(layered())
    times = times_of(space, space)
    low = keys(space, "MatMul", "Add")
    times.add(low)
    found = times.corrected()
    assert found.time(low, [0]) == pytest.approx(space.time(low, [0]))


def test_drift_between_measurements_does_not_count() -> None:
    space = space_of(layered())
    slowdown = iter((1.0, 3.0))
    times = times_of(space, space)
    run = times.run
    times.run = lambda choices, _: [seconds * factor for factor in [next(slowdown)] for seconds in run(choices, False)]
    first, second = keys(space, "MatMul"), keys(space, "Tanh")
    times.add(first)
    times.add(first, second)
    assert times.seconds[second] == pytest.approx(space.time(second, times.solver.casts(second)) * 1e-6)


Clock = Callable[[ModelProto], float]


class Bench:
    """Stands in for the clock: what a model takes is a function of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.clock, self.timed = clock, 0
        monkeypatch.setattr("onnxamp._tuning.engine_times.bench_models", self)

    def __call__(self, *models: ModelProto, **_: Any) -> Any:
        self.timed += len(models)
        rows = [SimpleNamespace(latency=SimpleNamespace(median=self.clock(model))) for model in models]
        return SimpleNamespace(timings=rows)


def count(model: ModelProto, *ops: str) -> int:
    return sum(node.op_type in ops for node in model.graph.node)


def low_products(model: ModelProto) -> int:
    halves = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    return sum(node.op_type == "MatMul" and node.input[1] in halves for node in model.graph.node)


def tuned_with(tolerance: float = 1e-2, **how: Any) -> tuple[ModelProto, onnxamp.Tuned]:
    return onnxamp.tune_model(
        layered(), tolerance, samples=FEEDS, provider="webgpu", target="webgpu", times="measured", **how
    )


def clocks() -> dict[str, tuple[Clock, Callable[[ModelProto], bool]]]:
    """What models take, and whether a result is what is fastest then."""
    return {
        "products gain, Casts are free": (
            lambda model: 1.0 - 0.1 * low_products(model),
            lambda model: low_products(model) == LAYERS,
        ),
        "Casts cost more than a product gains, what parts layers more still": (
            lambda model: 1.0 - 0.1 * low_products(model) + 0.12 * count(model, "Cast"),
            lambda model: low_products(model) == LAYERS and count(model, "Cast") == 2,
        ),
        "low precision is slower": (
            lambda model: 1.0 + 0.4 * low_products(model) + 0.1 * count(model, "Cast"),
            lambda model: low_products(model) + count(model, "Cast") == 0,
        ),
    }


@pytest.mark.webgpu
@pytest.mark.parametrize("case", clocks())
def test_what_is_fastest_on_the_clock_is_written(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, is_fastest = clocks()[case]
    Bench(monkeypatch, clock)
    model, tuned = tuned_with()
    assert is_fastest(model), {op: count(model, op) for op in ("MatMul", "Cast")}
    assert tuned.held
    times = dict(tuned.timed)
    assert times["float32"] == pytest.approx(1.0)
    written = tuned.candidates[tuned.chosen]
    assert written.time * 1e-6 == pytest.approx(clock(model))
    assert not written.low or times["result"] == pytest.approx(clock(model))
    assert "does not tell what its kernels take, corrected by " in tuned.times


@pytest.mark.webgpu
def test_what_was_timed_is_kept_and_candidates_can_be_picked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, _ = clocks()["products gain, Casts are free"]
    bench, state = Bench(monkeypatch, clock), tmp_path / "state"
    model, first = tuned_with(2e-4, state=state)
    timed = bench.timed
    assert timed
    again, second = tuned_with(2e-4, state=state)
    assert bench.timed == timed
    assert again == model
    assert second.candidates == first.candidates
    last = len(first.candidates) - 1
    picked, third = tuned_with(2e-4, state=state, pick=last)
    assert (third.chosen, bench.timed) == (last, timed)
    assert low_products(picked) == 0, "the last candidate is float32"


@pytest.mark.webgpu
def test_the_most_in_low_precision_is_written_if_it_may_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, _ = clocks()["low precision is slower"]
    Bench(monkeypatch, clock)
    model, tuned = tuned_with(allow_slower=True)
    assert low_products(model) == LAYERS
    assert dict(tuned.timed)["result"] > dict(tuned.timed)["float32"]


def test_of_layers_that_are_alike_as_many_are_low_as_fit() -> None:
    """At any rate the cut lowers all of them or none."""
    space = space_of(layered())
    space = space.retimed(dict.fromkeys(keys(space, "MatMul"), (5e-05, 1e-05)), 1.0)
    solver = CandidateSolver(space, space.all_low)
    prices = [inf if unit.op in ("Tanh", "Exp") else float(unit.op == "MatMul") for unit in space.tunable]
    for layers in range(LAYERS + 1):
        low = solver.within(prices, layers + 0.5)
        assert len(low & keys(space, "MatMul")) == layers
        assert solver.predicted(low, prices) <= layers + 0.5


@pytest.mark.webgpu
def test_luck_on_the_clock_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model seems faster than float32 when it is timed first, and is not."""
    slow, lucky = clocks()["low precision is slower"][0], set[bytes]()

    def clock(model: ModelProto) -> float:
        known = model.SerializeToString()
        is_first = known not in lucky and low_products(model) > 0
        lucky.add(known)
        return 0.5 if is_first else slow(model)

    Bench(monkeypatch, clock)
    model, tuned = tuned_with()
    assert low_products(model) == 0
    assert dict(tuned.timed)["result"] > dict(tuned.timed)["float32"]
