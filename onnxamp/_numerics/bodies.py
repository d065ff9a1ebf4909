"""Ranges of values in bodies of loops and branches, which no run shows from outside.

A copy of the model computes the largest magnitude of each float in a body, and passes it out: as an output per round of
a Loop or Scan, of which the largest counts, or as an output of an If. Nested bodies pass on what theirs pass to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxamp._dtypes import FLOAT
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node, Origin
from onnxamp._model.statistics import SENTINEL

_ROUNDS: Final = frozenset({"Loop", "Scan"})
"""Ops that run their body in rounds, and stack what it returns."""

_LEAST_OPSET: Final = 9
"""Where came with it, and Scan as it is today."""

_AXES_INPUT: Final = 18
"""Opset from which on ReduceMax takes its axes as an input."""


def with_body_ranges(graph: Graph) -> tuple[ModelProto, dict[str, int]]:
    """A copy of the model that also computes the ranges in bodies, and new value -> value whose magnitude it is.

    Complexity: linear in nodes.
    """
    if len(graph.scopes) == 1 or graph.book.opsets.get("", 0) < _LEAST_OPSET:
        return graph.model, {}
    writer = _Writer(graph, GraphEditor(graph))
    vectors: dict[int, tuple[str, list[int]]] = {}
    for scope in range(len(graph.scopes) - 1, -1, -1):  # a scope stands behind the one around it
        for node in (graph.nodes[index] for index in graph.scopes[scope].nodes):
            found = writer.pass_out(node) if _is_open(graph, node) else None
            if found is not None:
                vectors[node.index] = found
        if scope:
            inner = [vectors[index] for index in graph.scopes[scope].nodes if index in vectors]
            writer.measure(scope, inner)
    watched: dict[str, int] = {}
    for index in graph.scopes[0].nodes:
        vector, values = vectors.get(index, ("", []))
        for place, value in enumerate(values):
            name = f"{graph.values[value].name}_largest"
            watched[writer.op(0, "Gather", [vector, writer.integers([place])], name)] = value
    return writer.editor.finish(), watched


def _is_open(graph: Graph, node: Node) -> bool:
    known = node.key == "If" or node.key in _ROUNDS
    return known and not any(graph.scopes[body].opaque for _, body in node.bodies)


@dataclass(slots=True)
class _Writer:
    """Writes into the copy of a model."""

    graph: Graph
    editor: GraphEditor
    made: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    """Scope -> the vector of its magnitudes, and the values that these are of."""

    def floats(self, *numbers: float) -> str:
        """The name of a float32 vector."""
        return self.editor.constant(np.array(numbers, np.float32), "range_constant")

    def integers(self, numbers: Sequence[int]) -> str:
        """The name of an int64 vector."""
        return self.editor.ints(numbers, "range_constant")

    def op(
        self, scope: int, kind: str, inputs: Sequence[str], base: str = "", **attributes: Any
    ) -> str:
        """Append a node to a scope; its output."""
        name = self.editor.names.fresh(base or f"range_{kind}")
        node = self.editor.make(kind, inputs, [name], "", **attributes)
        self.editor.insert(scope, self.graph.scopes[scope].nodes.stop, node)
        return name

    def measure(self, scope: int, inner: Sequence[tuple[str, list[int]]]) -> None:
        """Compute the magnitudes of a body's floats, beside those of the bodies in it."""
        graph, parts, values = self.graph, list[str](), list[int]()
        for value in graph.values:
            if (
                value.scope == scope
                and value.origin is Origin.NODE
                and graph.types[value.index] == FLOAT
            ):
                parts.append(self.largest(scope, value.name))
                values.append(value.index)
        parts += [vector for vector, _ in inner]
        values += [value for _, listed in inner for value in listed]
        if parts:
            self.made[scope] = self.op(scope, "Concat", parts, axis=0), values

    def largest(self, scope: int, name: str) -> str:
        """The largest magnitude below that of sentinels, as a vector of one; 0 of nothing."""
        flat = self.op(scope, "Reshape", [self.op(scope, "Abs", [name]), self.integers([-1])])
        flat = self.op(scope, "Concat", [flat, self.floats(0.0)], axis=0)
        is_usual = self.op(scope, "Less", [flat, self.floats(SENTINEL)])
        usual = self.op(scope, "Where", [is_usual, flat, self.floats(0.0)])
        return self.op(scope, "ReduceMax", [usual], keepdims=1)

    def pass_out(self, node: Node) -> tuple[str, list[int]] | None:
        """Let a node return the magnitudes of its bodies; the vector behind it, and its values."""
        bodies = [(body, *self.made[body]) for _, body in node.bodies if body in self.made]
        if not bodies:
            return None
        proto = self.editor.node(node.index)
        values = [value for _, _, listed in bodies for value in listed]
        output = self.editor.names.fresh("range_output")
        if node.key == "If":
            self.branches(node, values)
        else:
            ((body, vector, _),) = bodies
            self.editor.graphs[body].output.append(_vector(vector, len(values)))
            self.fill(proto, len(self.editor.graphs[body].output) - (node.key == "Loop") - 1)
        proto.output.append(output)
        if node.key == "If":
            return output, values
        none = self.floats(*[0.0] * len(values))
        row = self.op(node.scope, "Reshape", [none, self.integers([1, len(values)])])
        rows = self.op(node.scope, "Concat", [row, output], axis=0)
        if self.graph.book.opsets[""] >= _AXES_INPUT:
            return self.op(node.scope, "ReduceMax", [rows, self.integers([0])], keepdims=0), values
        return self.op(node.scope, "ReduceMax", [rows], axes=[0], keepdims=0), values

    def branches(self, node: Node, values: Sequence[int]) -> None:
        """Let both branches return all magnitudes: those of the other one are 0."""
        for _, body in node.bodies:
            parts = [
                self.made[other][0]
                if other == body
                else self.floats(*[0.0] * len(self.made[other][1]))
                for _, other in node.bodies
                if other in self.made
            ]
            self.editor.graphs[body].output.append(
                _vector(self.op(body, "Concat", parts, axis=0), len(values))
            )
        proto = self.editor.node(node.index)
        self.fill(proto, len(self.editor.graphs[node.bodies[0][1]].output) - 1)

    def fill(self, proto: NodeProto, count: int) -> None:
        """Name as many outputs as the body had, and extend attributes that have an entry for each."""
        proto.output.extend([""] * (count - len(proto.output)))
        for item in proto.attribute:
            if item.name in ("scan_output_axes", "scan_output_directions"):
                item.ints.append(0)


def _vector(name: str, size: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [size])


def of_bodies(
    largest: Mapping[str, float], watched: Mapping[str, int], names: Mapping[int, str]
) -> dict[str, float]:
    """Ranges by full name: those that :func:`with_body_ranges` watched, beside the others."""
    own = set(names.values())
    found = {name: reach for name, reach in largest.items() if name in own}
    return found | {
        names[value]: largest[name] for name, value in watched.items() if name in largest
    }
