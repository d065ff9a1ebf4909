"""Loops that are written as their turns, one after the other, so that their bodies have gradients."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_tensor_value_info

from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied

_TURNS: Final = 2048
"""The largest number of nodes into which a loop is unrolled."""


def counting(model: ModelProto) -> tuple[ModelProto, Mapping[str, str]]:
    """Return a model that returns a row for each turn of its Loops, and the name of that output by the loop's first."""
    model = copied(model)
    outputs = dict[str, str]()
    for node in model.graph.node:
        first = next(filter(None, node.output), "")
        if node.op_type != "Loop" or not first:
            continue
        body = next(item.g for item in node.attribute if item.name == "body")
        name = outputs[first] = f"{first}/turns"
        # Outputs of a Loop are by position; the first output of its body is its condition, which each turn computes.
        held = len(body.output) - 1
        node.output.extend([*[""] * (held - len(node.output)), name])
        body.node.add(op_type="Identity", input=[body.output[0].name], output=[name])
        body.output.append(make_tensor_value_info(name, TensorProto.BOOL, None))
        model.graph.output.add(name=name)
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
    graph = Graph.of(model)
    names = dict[str, str]()
    editor = GraphEditor(graph)
    for node in graph.nodes_of(op_facts().loops):
        body = graph.scopes[node.bodies[0][1]]
        if node.scope or any(graph.nodes[index].bodies for index in body.nodes):
            continue
        count = turns.get(node.first_output)
        if node.key == "Scan":
            count = _scanned(graph, node)
        if count and count * len(body.nodes) <= _TURNS:
            loop = _WrittenLoop(graph, node, editor, names)
            editor.replace(node.index, loop.written(count))
    return (editor.finish() if names else model), names


def _scanned(graph: Graph, node: Node) -> int | None:
    """Return how many turns a Scan takes; None if that is not known."""
    axes = _numbers(node, "scan_input_axes", 1)
    shape = graph.shapes[node.inputs[-attribute(node.proto, "num_scan_inputs")]]
    turns = shape[axes[0]] if shape else None
    return turns if isinstance(turns, int) else None


def _numbers(node: Node, name: str, count: int) -> list[int]:
    """Return an attribute of a Scan, a number for each of its inputs or outputs; zeros by default."""
    return attribute(node.proto, name) or [0] * count


class _WrittenLoop:
    """A loop that is being written out."""

    def __init__(
        self, graph: Graph, node: Node, editor: GraphEditor, names: dict[str, str]
    ) -> None:
        self.graph = graph
        self.node = node
        self.editor = editor
        self.names = names
        self.body = graph.scopes[node.bodies[0][1]]
        self.scanned = attribute(node.proto, "num_scan_inputs") or 0
        # The first two inputs of a Loop are its number of turns and its condition, both of which are known.
        given = node.inputs if self.scanned else node.inputs[2:]
        self.given = [graph.values[value].name for value in given]
        self.states = len(self.given) - self.scanned
        self.nodes = list[NodeProto]()
        self.moved = dict[str, str]()
        """Weight of the body -> its name in the main graph."""

    def written(self, turns: int) -> list[NodeProto]:
        """Return the loop unrolled: the nodes of that many turns."""
        self._move_weights()
        state = self.given[: self.states]
        rows: list[list[str]] = [[] for _ in self._outputs()[self.states :]]
        for turn in range(turns):
            results = self._turn(turn, [*state, *self._elements(turn, turns)])
            state = results[: self.states]
            for row, name in zip(rows, results[self.states :], strict=True):
                row.append(name)
        targets = self.node.proto.output
        for name, target in zip(state, targets[: self.states], strict=False):
            if target:
                self.nodes.append(self.editor.make("Identity", [name], [target]))
        self._stack(rows, targets[self.states :])
        return self.nodes

    def _move_weights(self) -> None:
        """Move the weights of the body to the main graph, where all turns read them."""
        for value in self.graph.constants.tensors:
            held = self.graph.values[value]
            if held.scope == self.body.index and held.producer == ABSENT:
                tensor = copied(self.editor.weight(value))
                self.editor.drop_weight(value)
                # Bodies of other loops may have weights of the same names.
                tensor.name = self.editor.names.fresh(f"{held.name}/moved")
                self.moved[held.name] = tensor.name
                self.editor.add_weight(0, tensor)

    def _stack(self, rows: Sequence[Sequence[str]], targets: Sequence[str]) -> None:
        """Write the outputs that hold a row of each turn."""
        make = self.editor.make
        axes = _numbers(self.node, "scan_output_axes", len(rows))
        backwards = _numbers(self.node, "scan_output_directions", len(rows))
        outputs = zip(rows, targets, axes, backwards, strict=False)
        for row, target, axis, is_backward in outputs:
            if not target:
                continue
            where = self.editor.ints([axis], "axis")
            lifted = [self.editor.names.fresh(f"{name}/row") for name in row]
            for name, one in zip(row, lifted, strict=True):
                self.nodes.append(make("Unsqueeze", [name, where], [one]))
            parts = lifted[::-1] if is_backward else lifted
            self.nodes.append(make("Concat", parts, [target], axis=axis))

    def _outputs(self) -> list[str]:
        """Return the names of the results of a turn, without its condition."""
        outputs = self.body.outputs if self.scanned else self.body.outputs[1:]
        return [self.graph.values[value].name for value in outputs]

    def _elements(self, turn: int, turns: int) -> list[str]:
        """Write the elements of sequences that a turn of a Scan reads, and return their names."""
        names = list[str]()
        axes = _numbers(self.node, "scan_input_axes", self.scanned)
        backwards = _numbers(self.node, "scan_input_directions", self.scanned)
        for place, name in enumerate(self.given[self.states :]):
            index = turns - 1 - turn if backwards[place] else turn
            names.append(self.editor.names.fresh(f"{name}/element"))
            inputs = [name, self.editor.ints(index, "element")]
            element = self.editor.make("Gather", inputs, [names[-1]], axis=axes[place])
            self.nodes.append(element)
        return names

    def _turn(self, turn: int, given: list[str]) -> list[str]:
        """Write one turn, and return the names of its results, without its condition."""
        graph = self.graph
        body = self.body
        editor = self.editor
        renamed = dict(self.moved)

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
            self.nodes.append(editor.make("Identity", [name], [named(entry)]))
        for index in body.nodes:
            copy = copied(graph.nodes[index].proto)
            copy.input[:] = [renamed.get(name, name) for name in copy.input]
            copy.output[:] = [named(name) if name else "" for name in copy.output]
            copy.name = editor.names.fresh(f"{copy.name}/turn{turn}")
            self.nodes.append(copy)
        return [renamed.get(name, name) for name in self._outputs()]
