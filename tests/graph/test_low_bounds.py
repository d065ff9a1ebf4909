"""Bounds hold for what low precision computes: inputs, constants and results are rounded, and terms cancel."""

from random import Random

import numpy as np
import pytest
from graph.test_bounds import OPS, every_value, violations, weights
from graphs.case import parse
from strategies.guards import random_guard
from strategies.model import random_model
from strategies.rounded import rounded
from strategies.wild import wild

from onnxamp import convert_model
from onnxamp._facts.dtypes import BFLOAT16, FLOAT16, FORMATS
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import Graph
from onnxamp._runtime.emulate import emulate

F = np.float32
ONE = {"one": F(1)}


def chain(op, count):
    steps = " ".join(f"a{n + 1} = {op} (a{n}, c)" for n in range(count)).replace("(a0,", "(x,")
    return f"(float[4] x) => (float[4] y) {{ {steps} y = Identity (a{count}) }}"


ATTACKS = {
    "constant": ("(float[4] x) => (float[4] y) { y = Mul (x, c) }", {"c": F(65500)}, (0, 1.0005)),
    "sums": (chain("Add", 200), {"c": F(310.2)}, (0, 3000)),
    "factors": (chain("Mul", 60), {"c": F(1.19995)}, (0, 1.15)),
    "weight": (
        "(float[1,64] x) => (float[1,1] y) { y = MatMul (x, w) }", {"w": np.full((64, 1), 1.00049, F)}, (0, 1023.2),
    ),
    "weights that cancel": (
        "(float[1,2] x) => (float[1,1] y) { a = MatMul (x, w) y = Div (one, a) }",
        {"w": np.array([[1.0004], [-1]], F), **ONE}, (1000, 1000),
    ),
    "bias that cancels": (
        "(float[1,2] x) => (float[1,1] y) { a = Gemm (x, w, b) y = Div (one, a) }",
        {"w": np.array([[1.0004], [1]], F), "b": np.array([-2000], F), **ONE}, (1000, 1000),
    ),
    "sum that cancels": (
        "(float[4] x) => (float[4] y) { a = Sum (x, c, d) y = Div (one, a) }",
        {"c": F(1000.3), "d": F(-2000.2), **ONE}, (1000, 1000),
    ),
    "mean that cancels": (
        "(float[1,1,4] x) => (float[1,1,4] y) { a = BatchNormalization (x, ones, z, m, ones) y = Div (one, a) }",
        {"ones": np.ones(1, F), "z": np.zeros(1, F), "m": np.array([999.6], F), **ONE}, (1000, 1001),
    ),
    "difference": (
        "(float[4] x) => (float[4] y) { a = Sub (x, c) y = Div (one, a) }", {"c": F(2047.6), **ONE}, (2047.9, 2048),
    ),
    "input": (
        "(float[4] x) => (float[4] y) { a = Sub (c, x) y = Div (one, a) }", {"c": F(2048), **ONE}, (0, 2047.6),
    ),
    "small numbers that double": (
        "(float[4] x) => (float[4] y) { a = Mul (x, c) b = Mul (a, c) y = Mul (b, d) }",
        {"c": F(60000), "d": F(360)}, (0, 3.1e-8),
    ),
    "tie that becomes zero": (
        "(float[4] x) => (float[4] y) { a = Add (x, c) y = Div (one, a) }", {"c": F(2.0**-25), **ONE}, (0, 1),
    ),
    "mean that vanishes": (
        "(float[1,64] x) => (float[1,64] y) { e = Exp (x) m = ReduceMean <axes = [-1]> (e) y = Div (e, m) }",
        {}, (-100, -16.6),
    ),
    "norm that vanishes": (
        "(float[1,64] x) => (float[1,64] y) { r = ReduceL2 <axes = [-1]> (x) y = Div (x, r) }", {}, (1e-25, 1e-24),
    ),
    "infinity that comes back": (
        "(float[4] x) => (float[4] y) { a = Mul (x, c) y = Div (a, c) }", {"c": F(30000)}, (1, 3),
    ),
}  # fmt: skip
"""Models, constants and the range of the input."""


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_numbers_stay_within_their_bounds(name, dtype):
    text, constants, (low, high) = ATTACKS[name]
    model = weights(parse(text, 17), **{key: np.asarray(number) for key, number in constants.items()})
    graph = Graph.of(model)
    ends = (float(F(low)), float(F(high)))
    bounds = find_bounds(graph, FORMATS[dtype], (("x", ends),), True)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    mixed = np.full(shape, low, F)
    mixed.flat[0] = high
    samples = [np.full(shape, low, F), np.full(shape, high, F), mixed]
    runs = [model, rounded(model, dtype)]
    for x in samples:
        for shown in runs:
            for value, array in every_value(shown, {"x": x}).items():
                bound = bounds[graph.scopes[0].names[value.removeprefix("rounded/")]]
                assert np.isnan(array).any() or bound.low <= array.min() <= array.max() <= bound.high, value


def test_numbers_that_a_type_counts_but_does_not_reach_are_not_exact():
    text = "(int64[4] i) => (float[4] y) { m = Mod (i, k) c = Cast <to = 1> (m) y = Mul (c, step) }"
    for step, is_exact in ((1024, True), (8192, False)):
        model = weights(parse(text, 17), k=np.array(20), step=np.array(step, F))
        graph = Graph.of(model)
        bounds = find_bounds(graph, FLOAT16, (), True)
        assert bounds.is_exact(graph.scopes[0].names["y"]) == is_exact


@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_an_epsilon_makes_up_for_small_squares_that_vanish(eps):
    text = """(float[N,64] x) => (float[N,64] y) { s = Mul (x, x) m = ReduceMean <axes = [-1]> (s) e = Add (m, eps)
        r = Sqrt (e) y = Div (x, r) }"""
    graph = Graph.of(weights(parse(text, 17), eps=np.array(eps, F)))
    value = graph.scopes[0].names["y"]
    assert find_bounds(graph, FLOAT16, (), True)[value].is_unbounded == (not eps)
    # Squares of float32 numbers vanish as well, where they are smaller than 1e-22.
    assert find_bounds(graph, FLOAT16)[value].is_unbounded == (not eps)


def test_the_largest_of_no_numbers_is_infinite():
    model = parse("(float[N,4] x) => (float[4] y) { y = ReduceMax <axes = [0], keepdims = 0> (x) }", 17)
    graph = Graph.of(model)
    bound = find_bounds(graph, FLOAT16, (("x", (0.0, 1.0)),))[graph.scopes[0].names["y"]]
    assert (bound.low, bound.high) == (-np.inf, pytest.approx(1))
    empty = every_value(model, {"x": np.zeros((0, 4), F)})["y"]
    assert (empty == -np.inf).all()


@pytest.mark.mostly_slow(fast=12)
@pytest.mark.parametrize("op", [*OPS, "If", "Loop", "Scan", "SequenceMap"])
def test_random_models_stay_within_their_bounds_in_low_precision(op):
    for number in range(4):
        rng = Random(f"low {op}{number}")
        made = random_model(rng, op)
        made = wild(made, rng) if number % 2 else made
        low = FLOAT16 if number < 3 else BFLOAT16
        assert violations(made.model, made.feeds, low, rng)[0] == []


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("group", range(12))
def test_what_is_proven_of_a_result_holds_where_it_runs(group):
    """Of conversions with hazards that the range lifts, every rounded value stays within its bound."""
    for number in range(12):
        model, ends = random_guard(Random(f"guard {group} {number}"))
        result = convert_model(model, "O3", target="any", input_ranges={"x": ends})
        graph = Graph.of(result)
        bounds = find_bounds(graph, FLOAT16, (("x", ends),))
        draw = np.random.default_rng(number)
        shape = (4, 8)
        samples = [np.full(shape, end) for end in ends] + [draw.uniform(*ends, shape), draw.choice(ends, shape)]
        for x in samples:
            for name, array in every_value(emulate(result), {"x": x.astype(F)}).items():
                value = graph.scopes[0].names.get(name)
                if value is None or graph.types[value] != FLOAT16.tensor or np.isnan(array).any():
                    continue
                bound = bounds[value]
                assert bound.low <= array.min() <= array.max() <= bound.high, (name, ends)
