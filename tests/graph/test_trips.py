"""How often bodies of loops run: known from a constant or a shape, or guessed."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

from onnxamp._graph.determined import DEFAULT_TRIPS, constant_trips, guessed_scopes, loop_trips
from onnxamp._graph.graph import Graph

BODY = "body = b (int64 i, bool go, float[4] s) => (bool went, float[4] t) { went = Identity (go) t = Relu (s) }"


def counted(count: int) -> ModelProto:
    model = parse(f"(float[4] x, bool first) => (float[4] y) {{ y = Loop <{BODY}> (count, first, x) }}")
    model.graph.initializer.append(numpy_helper.from_array(np.array(count), "count"))
    return model


@pytest.mark.parametrize(("count", "trips"), [(3, 3), (2**63 - 1, None)])
def test_a_loop_of_a_constant_number_of_trips(count: int, trips: int | None) -> None:
    """Exporters write the largest number for loops that only their condition ends."""
    graph = Graph.of(counted(count))
    assert constant_trips(graph, graph.nodes[0]) == trips
    assert loop_trips(graph) == [1, trips or DEFAULT_TRIPS]
    assert guessed_scopes(graph) == (frozenset() if trips else {1})


def test_a_scan_over_an_axis_of_known_size() -> None:
    graph = Graph.of(
        parse("""(float[4] s, float[3,4] x) => (float[4] t, float[3,4] y) {
        t, y = Scan <num_scan_inputs = 1, body = b (float[4] a, float[4] r) => (float[4] o, float[4] q) {
            o = Add (a, r) q = Relu (o) }> (s, x) }""")
    )
    assert loop_trips(graph) == [1, 3]
    assert guessed_scopes(graph) == frozenset()
