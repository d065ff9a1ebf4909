"""Shapes by one inference for each form of a node are those that onnx infers of the whole model."""

from collections.abc import Iterator
from random import Random

import pytest
from graphs import CASES
from graphs.case import parse
from onnx import ModelProto
from strategies.model import random_model

from onnxamp._base.errors import OnnxAmpError
from onnxamp._graph import static_shapes
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import read_dims, with_shapes
from onnxamp._graph.static_shapes import static_dims

SEEDS = 60
"""Random models; a part of them has only sizes that are known."""


def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the forms of nodes in small models as well."""
    monkeypatch.setattr(static_shapes, "MANY", 0)
    monkeypatch.setattr(static_shapes, "_REPEATED", 1)


def graphs_of(models: Iterator[ModelProto]) -> Iterator[Graph]:
    """The graphs of those models that have one."""
    for model in models:
        try:
            yield Graph.of(model)
        except OnnxAmpError:
            continue


def models() -> Iterator[ModelProto]:
    yield from (case.build() for case in CASES.values())
    yield from (random_model(Random(seed)).model for seed in range(SEEDS))


def test_shapes_are_those_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere(monkeypatch)
    known = 0
    for graph in graphs_of(models()):
        found = static_dims(graph, graph.types)
        if found is not None:
            known += 1
            assert list(found) == list(read_dims(graph, with_shapes(graph, graph.types))), graph.model
    assert known > 25, known


@pytest.mark.parametrize(
    "text",
    [
        "(float[N,4] X) => (float[N,4] Y) { Y = Relu (X) }",
        "(float[2,4] X) => (float[2,5] Y) { Y = Relu (X) }",
        "(float[2,4] X) => (float[M,4] Y) { Y = Relu (X) }",
        "(float[2,4] X) => (int64[2,M] Y) { Y = NonZero (X) }",
        "(float[2,4] X, int64[2] S) => (float[A,B] Y) { Y = Reshape (X, S) }",
    ],
    ids=["input", "declared-otherwise", "declared-by-name", "by-value", "computed"],
)
def test_unknown_sizes_are_left_to_onnx(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere(monkeypatch)
    graph = Graph.of(parse(text))
    assert static_dims(graph, graph.types) is None


def test_constants_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes differ in nothing but the number of a weight, which is their axis."""
    anywhere(monkeypatch)
    text = """(float[2,3] X) => (float[1,2,3] Y, float[2,1,3] Z) <int64[1] a = {0}, int64[1] b = {1}>
        { Y = Unsqueeze (X, a)  Z = Unsqueeze (X, b) }"""
    graph = Graph.of(parse(text))
    found = static_dims(graph, graph.types)
    assert found is not None
    assert [found[value] for value in graph.scopes[0].outputs] == [(1, 2, 3), (2, 1, 3)]


@pytest.mark.parametrize(("many", "repeated"), [(2, 1), (0, 2)], ids=["few-nodes", "many-forms"])
def test_where_forms_save_nothing_onnx_sees_the_whole(
    many: int, repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_shapes, "MANY", many)
    monkeypatch.setattr(static_shapes, "_REPEATED", repeated)
    graph = Graph.of(parse("(float[2,4] X) => (float[2,4] Y) { Y = Relu (X) }"))
    assert static_dims(graph, graph.types) is None
