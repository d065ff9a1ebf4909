"""Whole models that are timed, and what is written by their times."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto, numpy_helper

import onnxamp

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


Clock = Callable[[ModelProto], float]


class Bench:
    """Stands in for the clock: what a model takes is a function of the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.clock, self.timed = clock, 0
        monkeypatch.setattr("onnxamp._tuning.job.bench_models", self)

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
    assert "does not report kernel times" in tuned.times


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
