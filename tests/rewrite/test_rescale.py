"""Exponents change no number: random models over all ops with random consistent exponents give the same bits."""

from random import Random
from typing import Any

import numpy as np
import pytest
from every import every
from graphs.case import parse
from judge_numbers import run_original
from onnx import ModelProto
from passes import passed
from strategies import all_ops, random_model

import onnxamp
from onnxamp._decide.exponents.equations import find_equations
from onnxamp._decide.exponents.relations import Window
from onnxamp._decide.exponents.rows import rows_of
from onnxamp._decide.exponents.solve import solve
from onnxamp._graph.graph import Graph
from onnxamp._model.exponents import EXPONENTS, store_exponents, stored_exponents
from onnxamp._options.options import Options
from onnxamp._options.values import Rescaling
from onnxamp._rewrite.passes import rescale

LARGEST = 6
"""Exponents are drawn from -6 to 6."""


def random_rescaling(graph: Graph, rng: Random) -> Rescaling:
    """Consistent exponents near random ones."""
    equations = find_equations(graph)
    for variable in equations.values.values():
        exponent = rng.randint(-LARGEST, LARGEST)
        equations.problem.windows[variable] = Window(exponent, exponent)
    return Rescaling(rows_of(equations, solve(equations.problem).exponents, {}))


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if isinstance(one, np.ndarray) and one.dtype.kind == "f":
        return bool(((one == other) | (np.isnan(one) & np.isnan(other))).all())
    return one is other or bool(np.array_equal(one, other))


def check(model: ModelProto, feeds: dict[str, Any], rng: Random) -> int:
    """Compare a model and its rescaled form; the number of exponents."""
    expected = run_original(model, feeds)
    if expected is None:
        return 0
    graph = Graph.of(model)
    rescaling = random_rescaling(graph, rng)
    rescaled = passed(rescale, graph, Options(rescaling=rescaling))
    found = run_original(rescaled.graph.model, feeds)
    assert found is not None
    if any("logarithms" in note for note in rescaled.notes):
        return 0
    assert all(map(same_bits, expected, found)) or any("float32's range" in note for note in rescaled.notes)
    return len(rescaling.scaled)


@pytest.mark.slow
@every(op=all_ops(), parts=4)
def test_each_op_among_others(op: str) -> None:
    for number in range(2):
        rng = Random(f"{op}/{number}")
        generated = random_model(rng, op, 3)
        check(generated.model, generated.feeds, rng)


@pytest.mark.slow
def test_random_models_have_exponents() -> None:
    """Else the other tests would say nothing."""
    counts = []
    for number in range(60):
        rng = Random(number)
        generated = random_model(rng, size=8)
        counts.append(check(generated.model, generated.feeds, rng))
    assert sum(count > 0 for count in counts) > 10


@pytest.mark.slow
def test_the_model_says_how_it_stores_values() -> None:
    """So every value can be compared with the original's, and is equal to the last bit."""
    compared = 0
    for number in range(12):
        rng = Random(number)
        generated = random_model(rng, size=8)
        graph = Graph.of(generated.model)
        rescaled = passed(rescale, graph, Options(rescaling=random_rescaling(graph, rng)))
        if any("logarithms" in note or "float32's range" in note for note in rescaled.notes):
            continue
        report = onnxamp.diff_models(
            generated.model, rescaled.graph.model, layers=True, samples=generated.feeds, provider="cpu"
        )
        for row in report.layers:
            measured = [one for one in (row.local, row.accumulated) if one is not None]
            assert [one.error_max for one in measured] == [0.0] * len(measured), (number, row)
        compared += sum(row.exponent != 0 for row in report.layers)
    assert compared > 5


@pytest.mark.parametrize("text", ["", "[]", "{", '{"y": "2"}', '{"y": true}', '{"y": 1e9}', '{"y": 0}', '{"y": 900}'])
def test_metadata_that_say_nothing(text: str) -> None:
    model = ModelProto()
    model.metadata_props.add(key=EXPONENTS, value=text)
    assert stored_exponents(model) == {}


def test_exponents_add_up() -> None:
    model = ModelProto()
    store_exponents(model, {"x": 3, "y": -2})
    store_exponents(model, {"x": 1, "y": 2})
    assert stored_exponents(model) == {"x": 4}
    assert len(model.metadata_props) == 1


def test_values_of_unknown_type_have_no_exponent() -> None:
    """Nor what is computed from them: nobody knows whether they are floats."""
    model = parse("(float[2] x) => (float[2] y) { u = custom.Op (x) y = Sum (u, u) }", domains={"custom": 1})
    assert all(row.value != "y" for row in random_rescaling(Graph.of(model), Random(0)).scaled)
