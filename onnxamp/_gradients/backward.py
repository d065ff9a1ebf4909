"""The backward pass of a piece of a model, which also computes the cost of rounding each value.

Loops are written as their turns, one after the other, so that their bodies have gradients.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_tensor_value_info

from onnxamp._base.errors import GradientError, ModelError
from onnxamp._facts.dtypes import FLOAT, FLOAT16, Format
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._facts.providers import Profile
from onnxamp._gradients.quantized import QUANTIZE
from onnxamp._gradients.recurrent import UNROLLED
from onnxamp._gradients.walk import FLAT, ROUNDS, RULES, Pass, finite
from onnxamp._gradients.writer import Call, Grads, Rule, Tensor
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import as_floats
from onnxamp._graph.view import ABSENT, Node, inline_functions
from onnxamp._model.protos import copied
from onnxamp._model.weights import SENTINEL
from onnxamp._runtime.accumulate import Accumulator
from onnxamp._runtime.flow import DataflowGraph

SUMMED: Final = "\n"
"""In place of a reader's name, the cost of summing the value up as the target does."""

_STEP: Final = 2.0**-8
"""The relative change of the inputs of a node without a rule."""

_MOVES: Final = 4
"""How often an input is moved where outputs have few rows."""

_ROWS: Final = 16
"""Rows from which on one move is enough."""

_TURNS: Final = 2048
"""The largest number of nodes into which a loop is unrolled."""

_SCATTER: Final = 12.9898
"""A factor for positions, with which the signs of their sines look random."""


class Backward(NamedTuple):
    """The inputs and outputs of the backward pass of a piece.

    Attributes:
        seeds: value -> the input that takes its gradient from later pieces.
        gradients: value of an earlier piece -> the output that holds its gradient.
        costs: value, and kind of cost -> the output that holds the cost. The kind is "" for rounding the value,
            :data:`SUMMED`, or the first output of a node for which the value is rounded.
        spread: labels of nodes without a rule.
        gains: the result of a quantizer -> the input that takes its gain.
    """

    seeds: dict[str, str]
    gradients: dict[str, str]
    costs: dict[tuple[str, str], str]
    spread: dict[str, None]
    gains: dict[str, str]


class WrittenPiece:
    """The backward pass of a piece, being written. ``partial`` values hold sentinels or NaN."""

    def __init__(
        self,
        *,
        graph: Graph,
        low: Format,
        flow: DataflowGraph,
        arithmetic: Profile | None,
        turns: Mapping[str, str],
        integers: Container[str],
        quantizers: Container[str],
        shared: Container[str],
        partial: Container[str],
    ) -> None:
        self.graph = graph
        self.low = low
        self.flow = flow
        self.turns = turns
        self.partial = partial
        self.quantizers = quantizers
        self.shared = shared
        self.ports = Backward({}, {}, {}, {}, {})
        # Although their derivative is zero, ops that round pass errors on, by whole steps.
        flat = FLAT - ROUNDS
        path = [
            node for node in graph.order if not node.scope and node.key not in flat
        ]
        names = graph.scopes[0].names
        self.floats = {
            name: value for name, value in names.items() if graph.types[value] == FLOAT
        }
        self.moved = self.floats | {
            name: value for name, value in names.items() if name in integers
        }
        rules = {key: self._by_steps(RULES[key]) for key in QUANTIZE}
        rules |= dict.fromkeys(ROUNDS, self._by_steps(lambda call: call.dy))
        moved = frozenset(self.moved.values())
        self.backward = Pass(graph, path, moved, (), {**RULES, **rules})
        self.writer = self.backward.writer
        self.accumulator: Accumulator | None = None
        if arithmetic is not None and low is FLOAT16:
            editor = self.writer.editor
            shapes = graph.shapes
            self.accumulator = Accumulator(arithmetic, editor, shapes)
        self.noted = dict[tuple[str, str], Tensor]()

    def finish(self, seeded: Mapping[str, Sequence[int]]) -> ModelProto:
        """Return the backward pass with gradients of these values, of these shapes, from later pieces."""

        def seeds() -> Mapping[int, Tensor]:
            return {
                self.moved[name]: self._input(self.ports.seeds, name, "seed", dims)
                for name, dims in seeded.items()
            }

        totals = self.backward.write_gradients(seeds, self._spread)
        inputs = {entry.name for entry in self.graph.model.graph.input}
        for name, value in self.moved.items():
            tensor = self.backward.handle(value)
            # Nothing rounds the values that only inlining and unrolling have added.
            is_seen = name in self.flow.names or name in self.turns
            if tensor is None or value not in totals or not is_seen:
                continue
            self.writer.prefix = f"{name}/rounding"
            if name in inputs and name in self.flow.maker:
                self.ports.gradients[name] = self._output(totals[value])
                if name in self.shared and name in self.floats:
                    self._share(name, value, self._error(tensor, tensor))
            elif name in self.floats:
                self._cost(name, value, tensor, totals[value])
        for key, cost in self.noted.items():
            self.ports.costs[key] = self._output(cost)
        return self.writer.finish()

    def _cost(self, name: str, value: int, exact: Tensor, gradient: Tensor) -> None:
        """Write the cost of rounding a value, with and without the error of the target's accumulator."""
        outer = self.turns.get(name, name)
        error = self._error(exact, exact)
        if self._may_mask(name, value):
            # A conversion saturates them, which the nodes that they mask do not show.
            error = (exact.op("Abs") < SENTINEL).where(error, 0.0)
        self._note((outer, ""), gradient, error)
        if name in self.shared:
            self._share(name, value, error)
        node = self.graph.producer(value)
        if self.accumulator is None or node is None or value != node.outputs[0]:
            return
        nodes = self.accumulator.nodes(node, node.proto, exact.name)
        self.writer.nodes += nodes
        if nodes:
            summed = replace(exact, name=nodes[-1].output[0])
            self._note((outer, SUMMED), gradient, self._error(summed, exact))

    def _may_mask(self, name: str, value: int) -> bool:
        """Return whether a value is a weight that may hold sentinels; no factor of a product does."""
        if name in self.flow.maker or name in self.flow.inputs:
            return False  # ``partial`` has those that do
        readers = {self.graph.nodes[node].key for node, _ in self.graph.uses[value]}
        return not readers <= op_facts().contractions

    def _share(self, name: str, value: int, error: Tensor) -> None:
        """Write the cost of rounding a value for each of its readers."""
        for node, _ in dict.fromkeys(self.graph.uses[value]):
            reader = self.graph.nodes[node].first_output
            addends = self.backward.shares.get((value, node), ())
            if addends and reader in self.flow.maker:
                gradient = addends[0]
                for more in addends[1:]:
                    gradient += more
                self._note((name, reader), gradient, error)

    def _error(self, result: Tensor, exact: Tensor) -> Tensor:
        """Return by how much a result is off once it is rounded."""
        return result.cast(self.low.elem).cast(TensorProto.FLOAT) - exact

    def _note(self, key: tuple[str, str], gradient: Tensor, error: Tensor) -> None:
        # The gradient of a mask is infinite, or no number.
        change = error.equals(0).where(0.0, gradient * error)
        if key[0] in self.partial:  # some elements are undefined, or meet no gradient
            change = finite(change)
        cost = change.op("ReduceSumSquare", keepdims=0)
        known = self.noted.get(key)
        self.noted[key] = cost if known is None else known + cost

    def _input(
        self, entries: dict[str, str], name: str, what: str, dims: Sequence[int] = ()
    ) -> Tensor:
        """Return a new input for something of a value."""
        entries[name] = self.writer.editor.names.fresh(f"{name}/{what}")
        return self.writer.input(entries[name], TensorProto.FLOAT, tuple(dims))

    def _output(self, tensor: Tensor) -> str:
        if tensor.name not in self.ports.gradients.values():
            self.writer.output(tensor, None)
        return tensor.name

    def _by_steps(self, rule: Rule) -> Rule:
        """Return the rule of a quantizer, with gradients multiplied by the gain that was measured for it."""

        def written(call: Call) -> Grads:
            if call.y.name not in self.quantizers:
                return rule(call)
            gain = self._input(self.ports.gains, call.y.name, "gain")
            # An infinite gradient times a gain of zero would be NaN.
            dy = gain.equals(0).where(0.0, call.dy * gain)
            return rule(replace(call, dys=(dy, *call.dys[1:])))

        return written

    def _spread(self, call: Call) -> Grads:
        """Return the rule for nodes without one: the effect of moving each input, spread over that input."""
        self.ports.spread[call.node.label] = None
        return [
            None
            if x is None or x.elem != TensorProto.FLOAT
            else partial(_moved, call, position, x)
            for position, x in enumerate(call.inputs)
        ]


def _moved(call: Call, position: int, x: Tensor) -> Tensor:
    """Return a gradient of an input with the energy of the effect that a small change of that input has on the
    outputs.

    Effects on different rows of an output add up as squares, because rows depend on different elements or meet
    independent gradients; with few rows, several moves are averaged. Sentinels, such as those of masks, do not move,
    and undefined elements of an output do not count.
    """
    writer = call.writer
    zero = writer.constant(np.asarray(0, np.int64))
    one = writer.constant(np.asarray(1, np.int64))
    places = zero.op("Range", x.op("Size"), one).cast(TensorProto.FLOAT) * _SCATTER
    step = (x.op("Abs") < SENTINEL).where(x * _STEP, 0.0)
    signs = x
    energy = x.like(0.0)
    seen = [
        (port, y, dy)
        for port, (y, dy) in enumerate(zip(call.outputs, call.dys, strict=True))
        if y is not None and dy is not None
    ]
    rows = max(_rows_of(y) for _, y, _ in seen)
    moves = 1 if rows >= _ROWS else _MOVES
    for number in range(moves):
        # Signs are computed from positions, because the size of the input may be unknown here.
        signs = (places + (number + 0.5)).op("Sin").op("Sign").reshape_like(x)
        names = _run_again(call, position, x + step * signs)
        for port, y, dy in seen:
            again = Tensor(writer, names[port], y.elem).cast(TensorProto.FLOAT)
            change = finite((again - y.cast(TensorProto.FLOAT)) * dy)
            row = [writer.ints([-1])] if y.dims else []
            change = change.op("ReduceSum", *row, keepdims=0)
            energy += change.op("ReduceSumSquare", keepdims=0)
    size = step.op("ReduceL2", keepdims=0).op("Max", x.like(1e-30))
    return signs * ((energy * (1 / moves)).op("Sqrt") / size)


def _rows_of(y: Tensor) -> int:
    """Return the number of rows of a tensor; unknown sizes count as 1."""
    sizes = (y.dims or ())[:-1]
    return prod(size for size in sizes if isinstance(size, int))


def _run_again(call: Call, position: int, x: Tensor) -> list[str]:
    """Write a node with another input, and return the names of its outputs."""
    writer = call.writer
    node = copied(call.node.proto)
    node.input[position] = x.name
    names = [
        writer.editor.names.fresh(f"{writer.prefix}/moved") if name else ""
        for name in node.output
    ]
    node.output[:] = names
    node.name = writer.editor.names.fresh(f"{call.node.label}/moved")
    writer.nodes.append(node)
    return names


def moved_integers(
    nodes: Iterable[NodeProto], kinds: Mapping[str, str | None]
) -> set[str]:
    """Return the integers that floats were quantized to, and the integers computed from them.

    Args:
        nodes: those of a graph, in order.
        kinds: type by name of a value.
    """
    integers = set[str]()
    for node in nodes:
        if op_key(node) in QUANTIZE:
            integers.add(node.output[0])
        elif not integers.isdisjoint(node.input):
            integers.update(name for name in node.output if kinds.get(name) != FLOAT)
    return integers


def expanded(model: ModelProto) -> ModelProto:
    """Return a piece whose nodes have gradient rules, as far as possible.

    Recurrent nodes are unrolled, functions inlined, and ops on integers written with floats.
    """
    model = as_floats(inline_functions(model, partly=True))
    refused = set[tuple[str, ...]]()
    # One node at a time, because unrolling one makes a new graph; a node that is refused is known by its outputs.
    while True:
        graph = Graph.of(model)
        recurrent = graph.nodes_of(UNROLLED)
        waiting = (one for one in recurrent if tuple(one.proto.output) not in refused)
        node = next(waiting, None)
        if node is None:
            break
        try:
            model = Pass(graph, [], (), ()).unrolled([node])
        except GradientError:
            refused.add(tuple(node.proto.output))
    ops = {
        (node.proto.domain, node.proto.op_type)
        for node in graph.nodes
        if node.key not in RULES and node.key not in FLAT and not node.bodies
        if node.signature is not None and node.signature.has_function
    }
    try:
        return inline_functions(model, ops) if ops else model
    except ModelError:
        return model


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
    for node in graph.nodes_of({"Loop", "Scan"}):
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
            self.nodes.append(editor.make("Identity", [name], [named(entry)]))
        for index in body.nodes:
            copy = copied(graph.nodes[index].proto)
            copy.input[:] = [renamed.get(name, name) for name in copy.input]
            copy.output[:] = [named(name) if name else "" for name in copy.output]
            copy.name = editor.names.fresh(f"{copy.name}/turn{turn}")
            self.nodes.append(copy)
        return [renamed.get(name, name) for name in self._outputs()]
