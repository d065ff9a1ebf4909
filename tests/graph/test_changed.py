"""The types and shapes of a folded model, taken over from the model, are those that inference finds."""

from pathlib import Path
from random import Random

import onnx
import pytest
from graphs import CASES
from graphs.case import parse
from strategies.model import random_model

from onnxamp._base.errors import OnnxAmpError
from onnxamp._graph.graph import Graph
from onnxamp._model.protos import copied
from onnxamp._rewrite.passes.fold import apply_folds
from onnxamp._rewrite.passes.fold_search import find_folds

MODELS = Path(__file__).parents[2] / "models"
SEEDS = 60


def folded(model: onnx.ModelProto) -> tuple[Graph, Graph] | None:
    """The graph of a model with all its patterns folded, with what it takes over and without; None without patterns."""
    graph = Graph.of(model)
    folds = find_folds(graph)
    if not folds:
        return None
    result = copied(graph.model)
    apply_folds(graph, folds, result)
    return Graph.of(result, before=graph), Graph.of(result)


def check(model: onnx.ModelProto) -> bool:
    """Compare both graphs; return whether the model has patterns."""
    try:
        graphs = folded(model)
    except OnnxAmpError:
        return False
    if graphs is None:
        return False
    taken, inferred = graphs
    assert list(taken.types) == list(inferred.types)
    # onnx does not infer the shapes of every op.
    known = [(mine, shape) for mine, shape in zip(taken.shapes, inferred.shapes, strict=True) if shape is not None]
    assert all(mine == shape for mine, shape in known)
    return True


@pytest.mark.parametrize("name", ["encoder", "decoder", "classifier", "unet"])
def test_models(name: str) -> None:
    check(onnx.load(MODELS / f"{name}.onnx"))


def test_graphs() -> None:
    taken = sum(check(case.build()) for case in CASES.values())
    assert taken > 10, taken


def test_random_models() -> None:
    for seed in range(SEEDS):
        check(random_model(Random(seed)).model)


def test_a_new_weight_may_have_the_name_of_one_that_goes() -> None:
    """The gain of ones is new, and the number of the same name goes."""
    norm = """(float[2,8] X) => (float[2,8] Y)
        <float two = {2}, float eps = {1e-5}, float[8] X_gain = {1, 1, 1, 1, 1, 1, 1, 1}> {
        m = ReduceMean <axes = [-1]> (X)  d = Sub (X, m)  p = Pow (d, two)  v = ReduceMean <axes = [-1]> (p)
        e = Add (v, eps)  s = Sqrt (e)  Y = Div (d, s) }"""
    assert check(parse(norm))
