"""The graph of a folded model, taken over from that of the model, is the one that its names resolve to."""

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
from onnxamp._rewrite.fold import apply_folds
from onnxamp._rewrite.fold_search import find_folds

MODELS = Path(__file__).parents[2] / "models"
SEEDS = 60


def folded(model: onnx.ModelProto) -> tuple[Graph, Graph] | None:
    """The graph of a model with all its patterns folded: taken over, and resolved; None if there are no patterns."""
    graph = Graph.of(model)
    folds = find_folds(graph)
    if not folds:
        return None
    result = copied(graph.model)
    change = apply_folds(graph, folds, result)
    return graph.changed(result, change), Graph.of(result)


def check(model: onnx.ModelProto) -> bool:
    """Compare both graphs; return whether the model has patterns, and its graph was taken over."""
    try:
        graphs = folded(model)
    except OnnxAmpError:
        return False
    if graphs is None:
        return False
    taken, resolved = graphs
    assert taken.values == resolved.values
    assert taken.nodes == resolved.nodes
    assert taken.order == resolved.order
    assert list(map(list, taken.results)) == list(map(list, resolved.results))
    assert list(taken.types) == list(resolved.types)
    assert taken.scopes == resolved.scopes
    # onnx does not infer the shapes of every op.
    known = [(mine, shape) for mine, shape in zip(taken.shapes, resolved.shapes, strict=True) if shape is not None]
    assert all(mine == shape for mine, shape in known)
    assert taken.constants.tensors == resolved.constants.tensors
    return taken.before is not None


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
