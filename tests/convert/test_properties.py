"""What holds for every model: random graphs over the whole op set, converted in every way.

``ONNXAMP_EXAMPLES=20000 pytest tests/convert/test_properties.py -m slow`` looks for longer than the suite has time for.
"""

import itertools
import os
from random import Random

import onnx
import pytest
from engine import analysis_of
from every import every
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from judge import checker_error
from prices import price
from properties import WAYS, Way, graphs, unchanged, violations
from strategies import NO_RECIPE, all_ops, model_of_products, opsets_of, random_model
from strategies.table import schemas

from onnxamp._base.errors import OpsetError
from onnxamp._convert.analysis import Analysis

EXAMPLES = int(os.environ.get("ONNXAMP_EXAMPLES", "150"))
"""Of the slow tests."""
MAX_OPEN = 8
"""Open questions up to which all answers are tried."""


def examples(count: int) -> settings:
    """So many models, the same ones every time."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


def seeds() -> st.SearchStrategy[int]:
    """What a model is made from. A Random of hypothesis would record each of a thousand draws, which takes longer than
    all that is asked of the model; what shrinks is the size.
    """
    return st.integers(0, 2**64 - 1)


def sizes() -> st.SearchStrategy[int]:
    return st.sampled_from((2, 4, 8, 12))


def test_every_op_has_a_recipe() -> None:
    live = {op for op, rows in schemas().items() if opsets_of(op)}
    assert len(live) > 190
    assert set(all_ops()) | set(NO_RECIPE) == live
    assert len(NO_RECIPE) <= 5
    assert all(NO_RECIPE.values())


@pytest.mark.slow
@every(op=all_ops(), parts=8)
def test_each_op_among_others(op: str) -> None:
    """A few nodes around each op of ai.onnx, which the next test would meet by chance alone."""
    place = all_ops().index(op)
    generated = random_model(Random(f"{op}/0"), op, 3)
    assert op in {node.op_type for graph in graphs(generated.model) for node in graph.node}
    way = WAYS[place * 5 % len(WAYS)]
    assert violations(generated.model, generated.feeds, way, smooth=generated.smooth) == []


@examples(15)
@given(seeds(), sizes(), st.sampled_from(WAYS))
def test_random_models(seed: int, size: int, way: Way) -> None:
    generated = random_model(Random(seed), size=size)
    assert violations(generated.model, generated.feeds, way, smooth=generated.smooth) == []


@every(seed=range(24), parts=4)
def test_products_that_optimizers_take_up(seed: int) -> None:
    generated = model_of_products(Random(seed))
    way = WAYS[seed * 5 % len(WAYS)]
    assert violations(generated.model, generated.feeds, way, smooth=generated.smooth) == []


@pytest.mark.slow
@examples(EXAMPLES)
@given(seeds(), sizes(), st.sampled_from(WAYS), st.sampled_from(all_ops()))
def test_more_random_models(seed: int, size: int, way: Way, op: str) -> None:
    generated = random_model(Random(seed), op, size)
    assert violations(generated.model, generated.feeds, way, smooth=generated.smooth) == []


@examples(30)
@given(seeds(), sizes())
def test_models_that_stay_float32_come_back(seed: int, size: int) -> None:
    assert list(unchanged(random_model(Random(seed), size=size).model)) == []


MISREAD = (
    "K input must be a one-dimensional tensor of size 1",  # onnx 1.19 takes value_ints of a Constant for a scalar
    "'pads' input must be a 1D",  # the same
    "window input must have rank = 1",  # the same with value_floats
    "Number of elements of input 'sizes' (0) must be same as rank",  # where the length of a Resize's sizes is unknown
)
"""What onnx says of models that are valid."""


@examples(40)
@given(seeds(), sizes())
def test_random_models_are_valid(seed: int, size: int) -> None:
    generated = random_model(Random(seed), size=size)
    error = checker_error(generated.model)
    assert error is None or not generated.tidy or any(text in error for text in MISREAD)


def decided(model: onnx.ModelProto, way: Way) -> Analysis | None:
    """What the engine decides, or None where it refuses."""
    try:
        return analysis_of(model, **way.options)
    except OpsetError:
        return None


@pytest.mark.slow
@examples(60)
@given(seeds(), sizes(), st.sampled_from(WAYS))
@example(2000, 8, WAYS[0])  # which raises a constant
def test_the_cut_costs_what_its_casts_cost(seed: int, size: int, way: Way) -> None:
    """And where few questions are open, no other answer costs less."""
    analysis = decided(random_model(Random(seed), size=size).model, way)
    if analysis is None:
        return
    ports, pins, chosen = analysis.ports, analysis.pins, analysis.decision
    assert price(analysis, chosen.low) == chosen.cost
    roots = sorted(set(ports.roots))
    pinned = {root: pins.verdicts[root].low for root in roots if root in pins.verdicts}
    questions = [root for root in roots if root not in pinned]
    for answer in itertools.product((False, True), repeat=len(questions) if len(questions) <= MAX_OPEN else 0):
        low = {**pinned, **dict(zip(questions, answer, strict=False))}
        if len(low) == len(roots) and all(low[ports.root(q)] or not low[ports.root(p)] for p, q in pins.implies):
            assert price(analysis, low) >= chosen.cost
