"""Ranges of values in bodies of loops and branches."""

from random import Random
from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from judge_numbers import run_original
from onnx import ModelProto
from strategies import random_model

import onnxamp
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.body_ranges import with_body_ranges
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.ranges import measured_ranges

LOOP = """(float[2] X) => (float[2] Y) <float[1] w = {200}, float[1] v = {0.01}> {
    trips = Constant <value: tensor = int64 {3}> ()
    go = Constant <value: tensor = bool {1}> ()
    [loop] Y = Loop <body = step (int64 i, bool c, float[2] state) => (bool c2, float[2] next) {
        c2 = Identity (c)
        [up] u = Mul (state, w)
        [down] next = Mul (u, v)
    }> (trips, go, X)
}"""
"""The state doubles each round: on 1, ``u`` reaches 800 and ``Y`` 8."""

NESTED = """(float[2] X) => (float[2] Y, float[3,2] Z) <float[1] w = {200}, float[1] v = {0.01}> {
    trips = Constant <value: tensor = int64 {3}> ()
    go = Constant <value: tensor = bool {1}> ()
    [loop] Y, Z = Loop <body = step (int64 i, bool c, float[2] state) => (bool c2, float[2] next, float[2] seen) {
        c2 = Identity (c)
        seen = Neg (state)
        one = Constant <value: tensor = int64 {1}> ()
        late = Greater (i, one)
        [choice] next = If (late) <then_branch = yes () => (float[2] a) {
            [up] u = Mul (state, w)
            a = Mul (u, v)
        }, else_branch = no () => (float[2] b) {
            [half] h = Mul (state, v)
            b = Add (h, state)
        }>
    }> (trips, go, X)
}"""
"""Only the last round takes the first branch."""

SCAN = """(float[3,2] X) => (float[2] Y, float[3,2] Z) <float[2] start = {0, 0}, float[1] w = {200}> {
    [scan] Y, Z = Scan <num_scan_inputs = 1, body = step (float[2] sum, float[2] x) => (float[2] next, float[2] out) {
        next = Add (sum, x)
        [up] u = Mul (next, w)
        out = Neg (u)
    }> (start, X)
}"""


def ranges(text: str, feeds: dict[str, Any], opset: int = 21) -> dict[str, float]:
    model = parse(text, opset)
    options = Options(Level.O3, rescale=True)
    _, found = measured_ranges(Model.of(model), options, Run(inputs=as_samples(feeds, model), provider="cpu"))
    return {name: round(reach, 3) for name, reach in found.largest.items()}


ONES = {"X": np.float32([1, -1])}


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_the_largest_round_counts(opset: int) -> None:
    found = ranges(LOOP, ONES, opset)
    assert found["loop.body/u"] == 800
    assert found["loop.body/next"] == found["Y"] == 8


def test_bodies_in_bodies_pass_on_what_they_find() -> None:
    found = ranges(NESTED, ONES)
    assert found["loop.body/choice.then_branch/u"] == pytest.approx(200 * 1.01**2, rel=1e-4)
    assert found["loop.body/choice.else_branch/h"] == pytest.approx(0.01 * 1.01, rel=0.1)
    assert found["loop.body/seen"] == pytest.approx(1.01**2, rel=1e-2)


def test_scans() -> None:
    found = ranges(SCAN, {"X": np.float32([[1, 0], [2, 0], [-9, 1]])})
    assert found["scan.body/u"] == 1200
    assert found["scan.body/next"] == 6


def test_no_rounds_reach_nothing() -> None:
    found = ranges(LOOP.replace("int64 {3}", "int64 {0}"), ONES)
    assert found["loop.body/u"] == 0


def test_overflow_inside_a_body_is_removed() -> None:
    model = parse(LOOP.replace("{200}", "{20000}").replace("{0.01}", "{0.0001}"), 21)
    feeds = {"X": np.float32([10, -10])}
    plan = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds, target="any")
    assert plan.options.rescaling is not None
    assert {row.value for row in plan.options.rescaling.scaled} == {"loop.body/u"}
    result = onnxamp.apply_plan(model, plan)
    assert not plan.float32_nodes
    assert onnxamp.diff_models(model, result, samples=feeds, provider="cpu").passed
    broken = onnxamp.convert_model(model, "O3", target="any", hazards=False)
    assert not onnxamp.diff_models(model, broken, samples=feeds, provider="cpu").passed


def test_limits_on_data_reach_into_bodies() -> None:
    plan = onnxamp.plan_model(parse(LOOP, 21), "O3", samples=ONES, data_max=100, target="any")
    assert set(plan.options.keep_nodes) == {"up", "down"}


@pytest.mark.slow
def test_measuring_changes_no_result() -> None:
    """On random models with loops and branches."""
    measured = 0
    for seed in range(60):
        rng = Random(seed)
        generated = random_model(rng, rng.choice(["Loop", "Scan", "If"]), 5)
        model: ModelProto = generated.model
        expected = run_original(model, generated.feeds)
        wide, watched = with_body_ranges(Graph.of(model))
        if expected is None or not watched:
            continue
        measured += 1
        found = run_original(wide, generated.feeds)
        assert found is not None, seed
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=str(seed))
    assert measured > 20
