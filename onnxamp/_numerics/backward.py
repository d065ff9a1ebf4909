"""The backward pass of a piece of a model, which also computes the cost of rounding each value."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnxamp._dtypes import FLOAT, FLOAT16, Format
from onnxamp._errors import GradientError, ModelError
from onnxamp._gradients.quantized import QUANTIZE
from onnxamp._gradients.sequences import UNROLLED
from onnxamp._gradients.walk import FLAT, ROUNDS, RULES, Pass, finite
from onnxamp._gradients.writer import Call, Grads, Rule, Tensor
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import as_floats
from onnxamp._graph.view import Node, inline_functions
from onnxamp._model.protos import copied
from onnxamp._model.weights import SENTINEL
from onnxamp._ops.facts import op_key
from onnxamp._ops.providers import Profile
from onnxamp._runtime.accumulate import Accumulator
from onnxamp._runtime.flow import DataflowGraph

SUMMED: Final = "\n"
"""Stands for what an accumulator makes of a value."""

_STEP: Final = 2.0**-8
"""The relative change of the inputs of a node without a rule."""

_MOVES: Final = 4
"""How often an input is moved where outputs have few rows."""

_ROWS: Final = 16
"""Rows from which on one move is enough."""

_SCATTER: Final = 12.9898
"""A factor for positions, with which the signs of their sines look random."""


class WrittenPiece:
    """The backward pass of a piece, being written. ``partial`` values hold sentinels, or what is no number."""

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
        self.graph, self.low, self.flow, self.turns = graph, low, flow, turns
        self.partial, self.quantizers = partial, quantizers
        self.gains = dict[str, str]()
        flat = FLAT - ROUNDS
        path = [node for node in graph.order if not node.scope and node.key not in flat]
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
            editor, shapes = self.writer.editor, graph.shapes
            self.accumulator = Accumulator(arithmetic, editor, shapes)
        self.gradients = dict[str, str]()
        self.costs = dict[tuple[str, str], str]()
        self.noted = dict[tuple[str, str], Tensor]()
        self.shared = shared
        self.spread = dict[str, None]()
        self.model = ModelProto()

    def finish(self, seeded: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """Write everything, and return the inputs for gradients from later pieces, by value."""
        fed = dict[str, str]()

        def seeds() -> Mapping[int, Tensor]:
            found = dict[int, Tensor]()
            for name, dims in seeded.items():
                entry = self.writer.editor.names.fresh(f"{name}/seed")
                fed[name] = entry
                found[self.moved[name]] = self.writer.input(
                    entry, TensorProto.FLOAT, tuple(dims)
                )
            return found

        totals = self.backward.write_gradients(seeds, self._spread)
        inputs = {entry.name for entry in self.graph.model.graph.input}
        for name, value in self.moved.items():
            tensor = self.backward.handle(value)
            is_seen = name in self.flow.names or name in self.turns
            if tensor is None or value not in totals or not is_seen:
                continue
            self.writer.prefix = f"{name}/rounding"
            if name in inputs and name in self.flow.maker:
                self.gradients[name] = self._output(totals[value])
                if name in self.shared and name in self.floats:
                    self._share(name, value, self._error(tensor, tensor))
            elif name in self.floats:
                self._cost(name, value, tensor, totals[value])
        self.costs = {key: self._output(cost) for key, cost in self.noted.items()}
        self.model = self.writer.finish()
        return fed

    def _cost(self, name: str, value: int, exact: Tensor, gradient: Tensor) -> None:
        """Write the cost of rounding a value, with and without the error of the target's accumulator."""
        error = self._error(exact, exact)
        self._note((self.turns.get(name, name), ""), gradient, error)
        if name in self.shared:
            self._share(name, value, error)
        node = self.graph.producer(value)
        if self.accumulator is not None and node and value == node.outputs[0]:
            nodes = self.accumulator.nodes(node, node.proto, exact.name)
            self.writer.nodes += nodes
            if nodes:
                summed = replace(exact, name=nodes[-1].output[0])
                self._note(
                    (self.turns.get(name, name), SUMMED),
                    gradient,
                    self._error(summed, exact),
                )

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

    def _error(self, found: Tensor, exact: Tensor) -> Tensor:
        return found.cast(self.low.elem).cast(TensorProto.FLOAT) - exact

    def _note(self, key: tuple[str, str], gradient: Tensor, error: Tensor) -> None:
        # The gradient of a mask is infinite, or no number.
        change = error.equals(0).where(0.0, gradient * error)
        if key[0] in self.partial:  # some elements are undefined, or meet no gradient
            change = finite(change)
        cost = change.op("ReduceSumSquare", keepdims=0)
        known = self.noted.get(key)
        self.noted[key] = cost if known is None else known + cost

    def _output(self, tensor: Tensor) -> str:
        if tensor.name not in self.gradients.values():
            self.writer.output(tensor, None)
        return tensor.name

    def _by_steps(self, rule: Rule) -> Rule:
        """Return the rule of a quantizer with what it does to the errors that reach it."""

        def written(call: Call) -> Grads:
            if call.y.name not in self.quantizers:
                return rule(call)
            entry = self.writer.editor.names.fresh(f"{call.y.name}/gain")
            gain = self.writer.input(entry, TensorProto.FLOAT, ())
            self.gains[call.y.name] = entry
            dy = gain.equals(0).where(0.0, call.dy * gain)
            return rule(replace(call, dys=(dy, *call.dys[1:])))

        return written

    def _spread(self, call: Call) -> Grads:
        """Return the rule for nodes without one: the effect of moving each input, spread over that input."""
        self.spread[call.node.label] = None
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
    zero, one = (writer.constant(np.asarray(n, np.int64)) for n in (0, 1))
    places = zero.op("Range", x.op("Size"), one).cast(TensorProto.FLOAT) * _SCATTER
    step = (x.op("Abs") < SENTINEL).where(x * _STEP, 0.0)
    signs, energy = x, x.like(0.0)
    seen = [
        (port, y, dy)
        for port, (y, dy) in enumerate(zip(call.outputs, call.dys, strict=True))
        if y is not None and dy is not None
    ]
    moves = 1 if max(_rows(y) for _, y, _ in seen) >= _ROWS else _MOVES
    for number in range(moves):
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


def _rows(y: Tensor) -> int:
    """Return how many rows an output has; 1 where that is not known."""
    dims = y.dims or ()
    return prod(dim if isinstance(dim, int) else 1 for dim in dims[:-1])


def _run_again(call: Call, position: int, x: Tensor) -> list[str]:
    """Write a node with another input; returns the names of its outputs."""
    writer, node = call.writer, copied(call.node.proto)
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
    """Return the integers that floats were quantized to, and what is computed from them, up to floats again.

    Args:
        nodes: those of a graph, in order.
        kinds: type by name of a value.
    """
    found = set[str]()
    for node in nodes:
        if op_key(node) in QUANTIZE:
            found.add(node.output[0])
        elif not found.isdisjoint(node.input):
            found.update(name for name in node.output if kinds.get(name) != FLOAT)
    return found


def expanded(model: ModelProto) -> ModelProto:
    """Return a piece whose nodes have gradient rules, as far as possible.

    Recurrent nodes are unrolled, functions inlined, and ops on integers written with floats.
    """
    model = as_floats(inline_functions(model, partly=True))
    refused = set[tuple[str, ...]]()
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
        if _has_body(node)
    }
    try:
        return inline_functions(model, ops) if ops else model
    except ModelError:
        return model


def _has_body(node: Node) -> bool:
    """Return whether a node without a rule has a function body."""
    is_lacking = node.key not in RULES and node.key not in FLAT and not node.bodies
    return (
        is_lacking and node.signature is not None and bool(node.signature.has_function)
    )
