"""Bounds of sums that a target adds up in float16."""

from random import Random

import numpy as np
import pytest
from graph.test_bounds import every_value, weights
from graphs.case import parse

from onnxamp._facts.dtypes import FLOAT16
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import Graph

F = np.float32


def bound_of(model, target, ends, name="y"):
    graph = Graph.of(model)
    bounds = find_bounds(graph, FLOAT16, (("x", ends),), True, target)
    return bounds[graph.scopes[0].names[name]]


def added(terms):
    """The sum of numbers, each of which is rounded to float16 after it is added."""
    total = np.float16(0)
    with np.errstate(over="ignore"):
        for term in terms:
            total = np.float16(total + np.float16(term))
    return float(total)


SUM = "(float[1,N] x) => (float[1,1] y) { y = ReduceSum (x, last) }"
MEAN = "(float[1,N] x) => (float[1,1] y) { y = ReduceMean <axes = [-1]> (x) }"


def model_of(text, size):
    return weights(parse(text.replace("N]", f"{size}]"), 17), last=np.array([-1]))


def test_sums_may_round_up_with_each_term():
    model = model_of(SUM, 3853)
    ends = (0.0, 17.0)  # 17 * 3853 is 65,501
    assert added([17] * 3853) == np.inf
    assert bound_of(model, "cuda", ends).high < np.inf or 3853 * 17 * (1 + 2**-9) > 65520
    assert bound_of(model, "webgpu", ends).high == np.inf
    assert bound_of(model, "cuda", (0.0, 16.0)).high < 65520


@pytest.mark.parametrize("seed", range(8))
def test_random_sums_stay_within_their_bounds_in_any_order(seed):
    draw = np.random.default_rng(seed)
    size = int(draw.integers(2, 5000))
    low, high = sorted(draw.uniform(-8, 8, 2))
    bound = bound_of(model_of(SUM, size), "webgpu", (float(low), float(high)))
    for terms in (draw.uniform(low, high, size), np.full(size, high), np.full(size, low)):
        order = list(terms)
        Random(seed).shuffle(order)
        assert bound.low <= added(order) <= bound.high


def test_partial_sums_do_not_cancel_in_a_product():
    model = weights(
        parse("(float[1,200] x) => (float[1,1] y) { y = MatMul (x, w) }", 17),
        w=np.repeat(np.array([[1], [-1]], F), 100, axis=0),
    )
    ends = (1000.0, 1001.0)
    assert bound_of(model, "cuda", ends).high < 2000
    assert bound_of(model, "webgpu", ends).high == np.inf
    assert added([1000] * 100 + [-1000] * 100) == np.inf


def test_a_mean_is_unknown_where_its_sum_overflows():
    model = model_of(MEAN, 100)
    for largest, is_known in ((100.0, True), (1000.0, False)):
        assert bound_of(model, "webgpu", (0.0, largest)).is_unbounded != is_known
        assert not bound_of(model, "cuda", (0.0, largest)).is_unbounded
    assert float(every_value(model, {"x": np.full((1, 100), 1000, F)})["y"].max()) == 1000


def test_counts_are_exact_in_float16_too():
    text = "(bool[1,N] m, float[1,1] x) => (float[1,N] y) { c = Cast <to = 1> (m) y = CumSum (c, one) }"
    for size, is_exact in ((2000, True), (3000, False)):
        model = weights(parse(text.replace("N]", f"{size}]"), 17), one=np.array(1))
        bound = bound_of(model, "webgpu", (0.0, 1.0))
        assert (bound.high == size) == is_exact
