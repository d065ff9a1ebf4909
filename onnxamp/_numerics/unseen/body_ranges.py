"""The largest magnitudes of values inside bodies of loops and branches, as outputs of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._model.weights import SENTINEL

_LEAST_OPSET: Final = 9
"""The opset that introduced Where, and Scan in its current form."""


AXES_INPUT: Final = 18
"""Opset from which on reductions take their axes as an input."""


def with_body_ranges(graph: Graph) -> tuple[ModelProto, dict[str, int]]:
    """Return a copy of the model that also computes the ranges in bodies, and new value -> value whose magnitude it is.

    Complexity: linear in nodes.
    """
    if len(graph.scopes) == 1 or graph.book.opsets.get("", 0) < _LEAST_OPSET:
        return graph.model, {}
    writer = _BodyRanges(graph, GraphEditor(graph))
    vectors: dict[int, tuple[str, list[int]]] = {}
    for scope in reversed(graph.scopes):  # a scope comes after the one around it
        for node in graph.at(scope.nodes):
            passed = writer.pass_out(node)
            if passed is not None:
                vectors[node.index] = passed
        if scope.index:
            inner = [vectors[index] for index in scope.nodes if index in vectors]
            writer.measure(scope.index, inner)
    watched: dict[str, int] = {}
    for index in graph.scopes[0].nodes:
        vector, values = vectors.get(index, ("", []))
        for place, value in enumerate(values):
            base = f"{graph.values[value].name}_largest"
            inputs = [vector, writer.integers([place])]
            watched[writer.op(0, "Gather", inputs, base)] = value
    return writer.editor.finish(), watched


@dataclass(slots=True)
class _BodyRanges:
    """Writes nodes that compute the ranges in bodies, and pass them out, into the copy of a model."""

    graph: Graph
    editor: GraphEditor
    made: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    """Scope -> the vector of its magnitudes, and the values that these are of."""

    def floats(self, *numbers: float) -> str:
        """Return the name of a float32 vector."""
        return self.editor.constant(np.array(numbers, np.float32), "range_constant")

    def integers(self, numbers: Sequence[int]) -> str:
        """Return the name of an int64 vector."""
        return self.editor.ints(numbers, "range_constant")

    def op(
        self,
        scope: int,
        kind: str,
        inputs: Sequence[str],
        base: str = "",
        **attributes: Any,
    ) -> str:
        """Append a node to a scope, and return the name of its output."""
        name = self.editor.names.fresh(base or f"range_{kind}")
        node = self.editor.make(kind, inputs, [name], "", **attributes)
        self.editor.insert(scope, self.graph.scopes[scope].nodes.stop, node)
        return name

    def measure(self, scope: int, inner: Sequence[tuple[str, list[int]]]) -> None:
        """Compute the magnitudes of a body's floats, including those of the bodies in it."""
        graph = self.graph
        parts = list[str]()
        values = list[int]()
        nodes = graph.at(graph.scopes[scope].nodes)
        for value in chain.from_iterable(node.writes for node in nodes):
            if graph.types[value] == FLOAT:
                parts.append(self.largest(scope, graph.values[value].name))
                values.append(value)
        for vector, listed in inner:
            parts.append(vector)
            values += listed
        if parts:
            self.made[scope] = self.op(scope, "Concat", parts, axis=0), values

    def largest(self, scope: int, name: str) -> str:
        """Return the largest magnitude below that of sentinels, as a vector of one; 0 of nothing."""
        flat = self.op(
            scope, "Reshape", [self.op(scope, "Abs", [name]), self.integers([-1])]
        )
        flat = self.op(scope, "Concat", [flat, self.floats(0.0)], axis=0)
        is_usual = self.op(scope, "Less", [flat, self.floats(SENTINEL)])
        usual = self.op(scope, "Where", [is_usual, flat, self.floats(0.0)])
        return self.op(scope, "ReduceMax", [usual], keepdims=1)

    def pass_out(self, node: Node) -> tuple[str, list[int]] | None:
        """Let a node also return the magnitudes of its bodies, and return the vector of these, and its values."""
        known = node.key == "If" or node.key in op_facts().loops
        is_opaque = any(self.graph.scopes[body].opaque for _, body in node.bodies)
        bodies = [
            (body, *self.made[body]) for _, body in node.bodies if body in self.made
        ]
        if not known or is_opaque or not bodies:
            return None
        proto = self.editor.node(node.index)
        values = [*chain.from_iterable(listed for _, _, listed in bodies)]
        output = self.editor.names.fresh("range_output")
        if node.key == "If":
            self.branches(node, len(values))
            proto.output.append(output)
            return output, values
        ((body, vector, _),) = bodies
        results = self.editor.graphs[body].output
        results.append(_vector(vector, len(values)))
        _fill(proto, len(results) - (node.key == "Loop") - 1)
        proto.output.append(output)
        # A row of zeros comes first, as a loop may make no turn and then has no rows to take the maximum of.
        none = self.floats(*[0.0] * len(values))
        row = self.op(node.scope, "Reshape", [none, self.integers([1, len(values)])])
        rows = self.op(node.scope, "Concat", [row, output], axis=0)
        inputs = [rows]
        axes = dict[str, Any](axes=[0])
        if self.graph.book.opsets[""] >= AXES_INPUT:
            inputs = [rows, self.integers([0])]
            axes = {}
        return self.op(node.scope, "ReduceMax", inputs, keepdims=0, **axes), values

    def branches(self, node: Node, count: int) -> None:
        """Let both branches return all magnitudes: those of the other one are 0."""
        for _, body in node.bodies:
            parts = list[str]()
            for other in (other for _, other in node.bodies if other in self.made):
                vector, values = self.made[other]
                is_own = other == body
                parts.append(vector if is_own else self.floats(*[0.0] * len(values)))
            results = self.editor.graphs[body].output
            results.append(_vector(self.op(body, "Concat", parts, axis=0), count))
        _fill(self.editor.node(node.index), len(results) - 1)


def _fill(proto: NodeProto, count: int) -> None:
    """Name as many outputs as the body had, and extend attributes that have an entry for each."""
    proto.output.extend([""] * (count - len(proto.output)))
    for item in proto.attribute:
        if item.name in ("scan_output_axes", "scan_output_directions"):
            item.ints.append(0)


def _vector(name: str, size: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [size])
