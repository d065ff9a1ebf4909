"""Loops written as their turns, one after the other, so that their bodies have gradients."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied
from onnxamp._ops.facts import attribute

_MOST: Final = 2048
"""Nodes at most that a loop is written as."""


def without_loops(
    model: ModelProto, number: Callable[[str], int | None]
) -> tuple[ModelProto, Mapping[str, str]]:
    """Return a model with its loops written out whose turns are counted and do not end early.

    Args:
        model: the model.
        number: the whole number that an input of the model is, if that is known.

    Returns:
        The model, and for each value of a turn the value of the body that it is.
    """
    graph, names = Graph.of(model), dict[str, str]()
    editor = GraphEditor(graph)
    for node in graph.nodes_of({"Loop", "Scan"}):
        count = _scanned if node.key == "Scan" else _counted
        body = graph.scopes[node.bodies[0][1]]
        is_flat = not any(graph.nodes[index].bodies for index in body.nodes)
        turns = count(graph, node, number) if is_flat and not node.scope else None
        if turns and turns * len(body.nodes) <= _MOST:
            editor.replace(node.index, _Written(graph, node, editor, names).all(turns))
    return (editor.finish() if names else model), names


def _counted(
    graph: Graph, node: Node, number: Callable[[str], int | None]
) -> int | None:
    """How many turns a Loop takes; None if that is not known, or it may end early."""
    count, going = node.input(0), node.input(1)
    body = graph.scopes[node.bodies[0][1]]
    if count == ABSENT or going != ABSENT:
        return None
    passed = body.outputs[0]
    maker = graph.producer(passed)
    while maker is not None and maker.key == "Identity":
        passed = maker.inputs[0]
        maker = graph.producer(passed)
    if passed != body.inputs[1]:
        return None
    known = graph.constants.integers(count)
    return known[0] if known else number(graph.values[count].name)


def _scanned(
    graph: Graph, node: Node, number: Callable[[str], int | None]
) -> int | None:
    """How many turns a Scan takes; None if that is not known."""
    del number
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
