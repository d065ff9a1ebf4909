"""Loops written as their turns, one after the other, so that their bodies have gradients."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto

from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied

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
    for node in graph.nodes_of({"Loop"}):
        turns = _turns(graph, node, number)
        if turns:
            editor.replace(node.index, _Written(graph, node, editor, names).all(turns))
    return (editor.finish() if names else model), names


def _turns(graph: Graph, node: Node, number: Callable[[str], int | None]) -> int | None:
    """How many turns a loop takes; None if that is not known, or it is not to be written out."""
    count, going = node.input(0), node.input(1)
    body = graph.scopes[node.bodies[0][1]]
    nodes = [graph.nodes[index] for index in body.nodes]
    if node.scope or count == ABSENT or going != ABSENT:
        return None
    if any(one.bodies for one in nodes):
        return None
    passed = body.outputs[0]
    maker = graph.producer(passed)
    while maker is not None and maker.key == "Identity":
        passed = maker.inputs[0]
        maker = graph.producer(passed)
    if passed != body.inputs[1]:
        return None
    known = graph.constants.integers(count)
    turns = known[0] if known else number(graph.values[count].name)
    return turns if turns is not None and turns * len(nodes) <= _MOST else None


class _Written:
    """A loop that is being written out."""

    def __init__(
        self, graph: Graph, node: Node, editor: GraphEditor, names: dict[str, str]
    ) -> None:
        self.graph, self.node, self.editor, self.names = graph, node, editor, names
        self.body = graph.scopes[node.bodies[0][1]]
        self.states = len(node.inputs) - 2

    def all(self, turns: int) -> list[NodeProto]:
        """The nodes that make what the loop makes."""
        graph, node, body = self.graph, self.node, self.body
        state = [graph.values[value].name for value in node.inputs[2:]]
        rows: list[list[str]] = [[] for _ in body.outputs[1 + self.states :]]
        found = list[NodeProto]()
        for value in graph.constants.tensors:  # those of the body, for all turns
            held = graph.values[value]
            if held.scope == body.index and held.producer == ABSENT:
                tensor = copied(self.editor.weight(value))
                self.editor.drop_weight(value)
                self.editor.add_weight(0, tensor)
        for turn in range(turns):
            outputs = self._turn(turn, state, found)
            state = outputs[: self.states]
            for row, name in zip(rows, outputs[self.states :], strict=True):
                row.append(name)
        for name, target in zip(state, node.proto.output[: self.states], strict=False):
            if target:
                found.append(self.editor.make("Identity", [name], [target]))
        axis = self.editor.ints([0], "axis")
        for row, target in zip(rows, node.proto.output[self.states :], strict=False):
            if target:
                lifted = [self.editor.names.fresh(f"{name}/row") for name in row]
                found += [
                    self.editor.make("Unsqueeze", [name, axis], [one])
                    for name, one in zip(row, lifted, strict=True)
                ]
                found.append(self.editor.make("Concat", lifted, [target], axis=0))
        return found

    def _turn(self, turn: int, state: list[str], found: list[NodeProto]) -> list[str]:
        """Write one turn; returns the names of what it makes, without its condition."""
        graph, body, editor = self.graph, self.body, self.editor
        renamed = dict[str, str]()

        def named(name: str) -> str:
            renamed[name] = editor.names.fresh(f"{name}/turn{turn}")
            self.names[renamed[name]] = name
            return renamed[name]

        counter, going, *entries = (graph.values[value].name for value in body.inputs)
        renamed[counter] = editor.ints(turn, "turn")
        renamed[going] = editor.constant(np.array(1, bool), "going")
        for entry, name in zip(entries, state, strict=True):
            found.append(editor.make("Identity", [name], [named(entry)]))
        for index in body.nodes:
            copy = copied(graph.nodes[index].proto)
            copy.input[:] = [renamed.get(name, name) for name in copy.input]
            copy.output[:] = [named(name) if name else "" for name in copy.output]
            copy.name = editor.names.fresh(f"{copy.name}/turn{turn}")
            found.append(copy)
        names = (graph.values[value].name for value in body.outputs[1:])
        return [renamed.get(name, name) for name in names]
