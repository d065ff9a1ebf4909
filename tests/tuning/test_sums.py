"""Targets that sum up float16 in float16: exponents keep partial sums in range, and their terms from being flushed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._options.values import Level, Rescaling
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.ranges import measured_ranges

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test the same numbers, whichever tests ran before."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


CANCELS = "(float[2,256] X) => (float[2,64] Y) { h = MatMul (X, w) n = RMSNormalization (h, gain) Y = MatMul (n, v) }"
"""Half of the terms of ``h`` are large, the other half takes them back."""

POOLS = """(float[1,8,128,128] X) => (float[1,8] Y) {
    h = Mul (X, s) g = GlobalAveragePool (h) f = Flatten (g) y = MatMul (f, v) Y = Tanh (y) }"""
"""The sum behind a mean passes 65504; the mean does not."""

FLUSHES = """(float[8,1024] X, float[1024,8] Z) => (float[8,8] Y) {
    a = Mul (X, s) b = Mul (Z, s) h = MatMul (a, b) Y = RMSNormalization (h, gain) }"""
"""The terms of ``h`` are subnormal in float16; what they sum up to is not."""


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def cancels() -> tuple[ModelProto, dict[str, Any]]:
    w = normal(256, 64) + np.repeat(np.float32([40, -40]), 128)[:, None]
    weights = {"w": w, "v": normal(64, 64) / 8, "gain": np.ones(64, np.float32)}
    return add_weights(parse(CANCELS, 23), weights), {"X": 20 + normal(2, 256)}


def pools() -> tuple[ModelProto, dict[str, Any]]:
    weights = {"s": np.float32([[[[300]]]]), "v": normal(8, 8) / 800}
    return add_weights(parse(POOLS, 20), weights), {"X": 1 + RNG.random((1, 8, 128, 128), np.float32)}


def flushes() -> tuple[ModelProto, dict[str, Any]]:
    weights = {"s": np.float32([0.003]), "gain": np.ones(8, np.float32)}
    return add_weights(parse(FLUSHES, 23), weights), {"X": normal(8, 1024), "Z": normal(1024, 8)}


MADE = {"cancels": cancels, "pools": pools, "flushes": flushes}


def plan(name: str, target: str) -> tuple[onnxamp.Plan, Rescaling, dict[str, int]]:
    model, feeds = MADE[name]()
    made = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds, target=target)
    assert made.options.rescaling is not None
    return made, made.options.rescaling, {row.value: row.exponent for row in made.options.rescaling.scaled}


@pytest.mark.parametrize("name", MADE)
def test_float32_accumulators_need_none(name: str) -> None:
    _, rescaling, exponents = plan(name, "cuda")
    assert exponents == {}
    assert rescaling.sums == ()


def test_partial_sums_come_into_range() -> None:
    made, rescaling, exponents = plan("cancels", "webgpu")
    assert exponents["h"] > 0
    assert "h" in rescaling.sums
    assert not made.float32_nodes


def test_magnitudes_bound_every_partial_sum() -> None:
    model, feeds = cancels()
    weights = {tensor.name: np.frombuffer(tensor.raw_data, np.float32) for tensor in model.graph.initializer}
    partial = np.cumsum(feeds["X"][:, :, None] * weights["w"].reshape(256, 64), axis=1)
    options = Options(Level.O3, rescale=True, target="webgpu")
    _, ranges = measured_ranges(Model.of(model), options, Run(inputs=as_samples(feeds, model), provider="cpu"))
    assert ranges.largest["h"] < 65504 < np.abs(partial).max() <= ranges.sums["h"].reach
    assert ranges.sums["h"].terms == 256


def test_measured_sums_count_more_than_guesses(tmp_path: Path) -> None:
    """A mean of many elements stays in float32 unless its sum was measured, and fits with an exponent."""
    model, _ = pools()
    guessed = {row.node: row.reason for row in onnxamp.plan_model(model, "O3", target="webgpu").rows if not row.low}
    assert guessed == {"g": "float16 accumulator"}
    made, rescaling, exponents = plan("pools", "webgpu")
    assert not made.float32_nodes
    assert "g" in rescaling.sums
    assert 2 ** exponents["g"] * 2 >= 128**2 * 600 / 65504
    made.save(tmp_path / "plan.json")
    assert onnxamp.load_plan(tmp_path / "plan.json") == made


def test_terms_leave_the_subnormal_range() -> None:
    _, _, exponents = plan("flushes", "webgpu")
    assert exponents["h"] <= -4


@pytest.mark.webgpu
@pytest.mark.parametrize("name", MADE)
def test_it_is_seen_on_an_engine(name: str) -> None:
    """Without exponents for its accumulators, the first two are infinite or NaN there."""
    model, feeds = MADE[name]()

    def error(target: str) -> float:
        result = onnxamp.convert_model(model, "O3", rescale=True, samples=feeds, target=target)
        report = onnxamp.diff_models(model, result, samples=feeds, provider="webgpu")
        return max(output.rel_l2 for output in report.outputs)

    assert error("webgpu") < (0.5 if name == "cancels" else 1e-2)
    assert error("cuda") > (0.5 if name != "flushes" else 0)


@pytest.mark.parametrize("mean", [0, 1, 30])
def test_normalizations_of_what_is_centered_are_low(mean: float) -> None:
    """WebGPU subtracts the mean in float16, which does no harm where it is small beside the deviation."""
    text = """(float[2,4,8,8] X) => (float[2,4,8,8] Y) {
        x = Elu (X) n = InstanceNormalization (x, gain, shift) Y = LayerNormalization <axis = 2> (n, g) }"""
    weights = {"gain": np.ones(4, np.float32), "shift": np.zeros(4, np.float32), "g": np.ones((8, 8), np.float32)}
    model, feeds = add_weights(parse(text, 20), weights), {"X": normal(2, 4, 8, 8) + np.float32(mean)}
    made = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds, target="webgpu")
    kept = {row.op for row in made.rows if row.reason == "float16 accumulator"}
    assert kept == ({"InstanceNormalization"} if mean == 30 else set())
    assert len(onnxamp.plan_model(model, "O3", target="webgpu").float32_nodes) == 2


@pytest.mark.parametrize("mean", [0, 30])
def test_bodies_are_measured_like_the_main_graph(mean: float) -> None:
    """In both branches the mean is subtracted in float16. The terms of one product add up to more than 65504."""
    text = """(float[2,256] X, bool c) => (float[2,8] Y) {
        x = Elu (X) Y = If (c) <
            then_branch = t () => (float[2,8] a) { n = LayerNormalization (x, g) h = MatMul (n, w) a = Tanh (h) },
            else_branch = e () => (float[2,8] b) { m = LayerNormalization (x, g) k = MatMul (m, v) b = Neg (k) }>}"""
    weights = {"g": np.ones(256, np.float32), "w": normal(256, 8), "v": 2000 * normal(256, 8)}
    samples = [{"X": normal(2, 256) + np.float32(mean), "c": np.array(taken)} for taken in (True, False)]
    model = add_weights(parse(text, 20), weights)
    made = onnxamp.plan_model(model, "O3", rescale=True, samples=samples, target="webgpu")
    assert made.options.rescaling is not None
    assert {name.rpartition("/")[2] for name in made.options.rescaling.sums} == {"h"} | (
        {"n", "m"} if not mean else set()
    )
    kept = {row.op for row in made.rows if row.reason == "float16 accumulator"}
    assert kept == ({"LayerNormalization"} if mean else set())


def test_sums_that_fit_still_lose_digits() -> None:
    """Ranges say nothing of the error of a long product, which stays in float32 if it is not split."""
    model = add_weights(parse("(float[2,9216] X) => (float[2,4] Y) { Y = MatMul (X, w) }", 20), {"w": normal(9216, 4)})
    feeds = {"X": normal(2, 9216)}
    made = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds, target="webgpu", split_k=False)
    assert made.options.rescaling is not None
    assert made.options.rescaling.sums == ("Y",)
    assert {row.reason for row in made.rows if row.op == "MatMul"} == {"long float16 product"}
