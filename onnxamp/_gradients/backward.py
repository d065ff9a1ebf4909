"""The backward pass of a piece of a model, which also computes the cost of rounding each value."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from onnx import ModelProto, TensorProto

from onnxamp._facts.dtypes import FLOAT, FLOAT16, FLOAT32_MAX, Format
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import Profile
from onnxamp._gradients.moves import by_moving
from onnxamp._gradients.quantized import QUANTIZE
from onnxamp._gradients.walk import FLAT, ROUNDS, RULES, Pass, finite
from onnxamp._gradients.writer import Call, Grads, Rule, Tensor
from onnxamp._graph.graph import Graph
from onnxamp._model.weights import SENTINEL
from onnxamp._runtime.accumulate import Accumulator
from onnxamp._runtime.piecewise.flow import DataflowGraph

SUMMED: Final = "\n"
"""In place of a reader's name, the cost of summing the value up as the target does."""


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
    """The backward pass of a piece, being written.

    Args:
        graph: the piece.
        low: the type to which values are rounded.
        flow: the model that the piece is part of.
        arithmetic: how the target sums up; None if that makes no difference.
        turns: value of an unrolled loop -> the value of the body that it is.
        integers: values that gradients pass through although they are no floats.
        quantizers: results of quantizers for which gains are known.
        shared: values whose rounding costs are counted separately for each reader.
        partial: values that hold sentinels or NaN.

    Attributes:
        ports: the inputs and outputs so far.
        floats: the float32 values, by name.
        moved: these, and the integers that gradients pass through.
        noted: the costs so far.
    """

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
        self.noted = dict[tuple[str, str], Tensor]()
        names = graph.scopes[0].names
        self.floats = {
            name: value for name, value in names.items() if graph.types[value] == FLOAT
        }
        self.moved = self.floats | {
            name: value for name, value in names.items() if name in integers
        }
        self.backward = self._pass()
        self.writer = self.backward.writer
        self.accumulator: Accumulator | None = None
        if arithmetic is not None and low is FLOAT16:
            editor = self.writer.editor
            self.accumulator = Accumulator(arithmetic, editor, graph.shapes)

    def _pass(self) -> Pass:
        """Return the backward pass of the nodes of the piece outside bodies, with rules for quantizers."""
        # Although their derivative is zero, ops that round pass errors on, by whole steps.
        flat = FLAT - ROUNDS
        order = self.graph.order
        path = [node for node in order if not node.scope and node.key not in flat]
        rules = {key: self._by_steps(RULES[key]) for key in QUANTIZE}
        rules |= dict.fromkeys(ROUNDS, self._by_steps(lambda call: call.dy))
        moved = frozenset(self.moved.values())
        return Pass(self.graph, path, moved, (), {**RULES, **rules})

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
        is_weight = name not in self.flow.maker and name not in self.flow.inputs
        is_factor = is_weight and self._is_factor(value)
        # A weight may hold sentinels, unless it is a factor; of other values, ``partial`` has those that do.
        if is_weight and not is_factor:
            # A conversion saturates them, which the nodes that they mask do not show.
            error = (exact.op("Abs") < SENTINEL).where(error, 0.0)
        self._note((outer, ""), gradient, error, is_factor=is_factor)
        if name in self.shared:
            self._share(name, value, error, is_factor=is_factor)
        node = self.graph.producer(value)
        if self.accumulator is None or node is None or value != node.outputs[0]:
            return
        nodes = self.accumulator.nodes(node, node.proto, exact.name)
        self.writer.nodes += nodes
        if nodes:
            summed = replace(exact, name=nodes[-1].output[0])
            self._note((outer, SUMMED), gradient, self._error(summed, exact))

    def _is_factor(self, value: int) -> bool:
        """Return whether only products read a value."""
        readers = {self.graph.nodes[node].key for node, _ in self.graph.uses[value]}
        return readers <= op_facts().contractions

    def _share(
        self, name: str, value: int, error: Tensor, *, is_factor: bool = False
    ) -> None:
        """Write the cost of rounding a value for each of its readers."""
        for node, _ in dict.fromkeys(self.graph.uses[value]):
            reader = self.graph.nodes[node].first_output
            addends = self.backward.shares.get((value, node), ())
            if addends and reader in self.flow.maker:
                gradient = addends[0]
                for more in addends[1:]:
                    gradient += more
                self._note((name, reader), gradient, error, is_factor=is_factor)

    def _error(self, result: Tensor, exact: Tensor) -> Tensor:
        """Return by how much a result is off once it is rounded."""
        return result.cast(self.low.elem).cast(TensorProto.FLOAT) - exact

    def _note(
        self,
        key: tuple[str, str],
        gradient: Tensor,
        error: Tensor,
        *,
        is_factor: bool = False,
    ) -> None:
        if is_factor:
            # A finite gradient times an error of zero is zero. Clip takes a tenth of the time of Where.
            ends = gradient.like(-FLOAT32_MAX), gradient.like(FLOAT32_MAX)
            change = gradient.op("Clip", *ends) * error
        else:
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
        """Return the gradients of a node without a rule, and note the node."""
        self.ports.spread[call.node.label] = None
        return by_moving(call)
