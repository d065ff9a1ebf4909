"""Loops written as their turns, one after the other, so that their bodies have gradients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_tensor_value_info

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied
from onnxamp._ops.facts import attribute
from onnxamp._runtime.session import Provider, make_session, run_values

if TYPE_CHECKING:
    import onnxruntime as ort

_MOST: Final = 2048
"""Nodes at most that a loop is written as."""


class TurnCounter(NamedTuple):
    """A session that tells how often Loops turn, each by its first output."""

    session: "ort.InferenceSession"
    rows: Mapping[str, str]

    @classmethod
    def of(cls, model: ModelProto, provider: Provider) -> "TurnCounter":
        """Load a model with the Loops; its samples may have any shapes."""
        model, rows = _counting(model)
        session = make_session(model, provider, optimize=False, lean=True)
        return cls(session, rows)

    def turns(self, values: Mapping[str, "ort.OrtValue"]) -> Mapping[str, int]:
        """Run the model, and return how often each of its Loops turns."""
        found = run_values(self.session, dict(values), list(self.rows.values()))
        return {name: found[output].shape()[0] for name, output in self.rows.items()}


def _counting(model: ModelProto) -> tuple[ModelProto, Mapping[str, str]]:
    """Return a model that returns a row for each turn of its Loops, and the name of that output by the loop's first."""
    model, outputs = copied(model), dict[str, str]()
    for node in model.graph.node:
        made = next(filter(None, node.output), "")
        if node.op_type != "Loop" or not made:
            continue
        body = next(item.g for item in node.attribute if item.name == "body")
        outputs[made] = f"{made}/turns"
        held = len(body.output) - 1
        node.output.extend([*[""] * (held - len(node.output)), outputs[made]])
        body.node.add(
            op_type="Identity", input=[body.output[0].name], output=[outputs[made]]
        )
        body.output.append(
            make_tensor_value_info(outputs[made], TensorProto.BOOL, None)
        )
        model.graph.output.add(name=outputs[made])
    return model, outputs


def without_loops(
    model: ModelProto, turns: Mapping[str, int]
) -> tuple[ModelProto, Mapping[str, str]]:
    """Return a model with its loops written out, except for those in others and around others.

    Args:
        model: the model.
        turns: how often each Loop turns, by its first output; the shape of its input tells that of a Scan.

    Returns:
        The model, and for each value of a turn the value of the body that it is.
    """
    graph, names = Graph.of(model), dict[str, str]()
    editor = GraphEditor(graph)
    for node in graph.nodes_of({"Loop", "Scan"}):
        body = graph.scopes[node.bodies[0][1]]
        if node.scope or any(graph.nodes[index].bodies for index in body.nodes):
            continue
        made = node.first_output
        count = _scanned(graph, node) if node.key == "Scan" else turns.get(made)
        if count and count * len(body.nodes) <= _MOST:
            editor.replace(node.index, _Written(graph, node, editor, names).all(count))
    return (editor.finish() if names else model), names


def _scanned(graph: Graph, node: Node) -> int | None:
    """How many turns a Scan takes; None if that is not known."""
    axes = _numbers(node, "scan_input_axes", 1)
    shape = graph.shapes[node.inputs[-attribute(node.proto, "num_scan_inputs")]]
    turns = shape[axes[0]] if shape else None
    return turns if isinstance(turns, int) else None


def _numbers(node: Node, name: str, count: int) -> list[int]:
    """Return an attribute of a Scan, a number for each of its inputs or outputs; zeros by default."""
    return attribute(node.proto, name) or [0] * count


class _Written:
    """A loop that is being written out."""

    def __init__(
        self, graph: Graph, node: Node, editor: GraphEditor, names: dict[str, str]
    ) -> None:
        self.graph, self.node, self.editor, self.names = graph, node, editor, names
        self.body = graph.scopes[node.bodies[0][1]]
        self.scanned = attribute(node.proto, "num_scan_inputs") or 0
        self.given = [
            graph.values[value].name
            for value in (node.inputs if self.scanned else node.inputs[2:])
        ]
        self.states = len(self.given) - self.scanned

    def all(self, turns: int) -> list[NodeProto]:
        """The nodes that make what the loop makes."""
        graph, node, body = self.graph, self.node, self.body
        state, outputs = self.given[: self.states], self._outputs()
        rows: list[list[str]] = [[] for _ in outputs[self.states :]]
        found = list[NodeProto]()
        for value in graph.constants.tensors:  # those of the body, for all turns
            held = graph.values[value]
            if held.scope == body.index and held.producer == ABSENT:
                tensor = copied(self.editor.weight(value))
                self.editor.drop_weight(value)
                self.editor.add_weight(0, tensor)
        for turn in range(turns):
            made = self._turn(
                turn, [*state, *self._elements(turn, turns, found)], found
            )
            state = made[: self.states]
            for row, name in zip(rows, made[self.states :], strict=True):
                row.append(name)
        for name, target in zip(state, node.proto.output[: self.states], strict=False):
            if target:
                found.append(self.editor.make("Identity", [name], [target]))
        axes = _numbers(node, "scan_output_axes", len(rows))
        backwards = _numbers(node, "scan_output_directions", len(rows))
        for place, (row, target) in enumerate(
            zip(rows, node.proto.output[self.states :], strict=False)
        ):
            if target:
                axis = self.editor.ints([axes[place]], "axis")
                lifted = [self.editor.names.fresh(f"{name}/row") for name in row]
                found += [
                    self.editor.make("Unsqueeze", [name, axis], [one])
                    for name, one in zip(row, lifted, strict=True)
                ]
                parts = lifted[::-1] if backwards[place] else lifted
                found.append(
                    self.editor.make("Concat", parts, [target], axis=axes[place])
                )
        return found

    def _outputs(self) -> list[str]:
        """Return the names of what a turn makes, without its condition."""
        outputs = self.body.outputs if self.scanned else self.body.outputs[1:]
        return [self.graph.values[value].name for value in outputs]

    def _elements(self, turn: int, turns: int, found: list[NodeProto]) -> list[str]:
        """Write what a turn of a Scan reads of its sequences; returns the names."""
        names = list[str]()
        axes = _numbers(self.node, "scan_input_axes", self.scanned)
        backwards = _numbers(self.node, "scan_input_directions", self.scanned)
        for place, name in enumerate(self.given[self.states :]):
            index = turns - 1 - turn if backwards[place] else turn
            names.append(self.editor.names.fresh(f"{name}/element"))
            inputs = [name, self.editor.ints(index, "element")]
            found.append(
                self.editor.make("Gather", inputs, [names[-1]], axis=axes[place])
            )
        return names

    def _turn(self, turn: int, given: list[str], found: list[NodeProto]) -> list[str]:
        """Write one turn; returns the names of what it makes, without its condition."""
        graph, body, editor = self.graph, self.body, self.editor
        renamed = dict[str, str]()

        def named(name: str) -> str:
            renamed[name] = editor.names.fresh(f"{name}/turn{turn}")
            self.names[renamed[name]] = name
            return renamed[name]

        entries = [graph.values[value].name for value in body.inputs]
        if not self.scanned:
            counter, going, *entries = entries
            renamed[counter] = editor.ints(turn, "turn")
            renamed[going] = editor.constant(np.array(1, bool), "going")
        for entry, name in zip(entries, given, strict=True):
            found.append(editor.make("Identity", [name], [named(entry)]))
        for index in body.nodes:
            copy = copied(graph.nodes[index].proto)
            copy.input[:] = [renamed.get(name, name) for name in copy.input]
            copy.output[:] = [named(name) if name else "" for name in copy.output]
            copy.name = editor.names.fresh(f"{copy.name}/turn{turn}")
            found.append(copy)
        return [renamed.get(name, name) for name in self._outputs()]
