"""The gains of quantizers on the errors that reach them, measured by a forward pass in low precision.

A quantizer passes an error d that is small beside its step s on as 0 or, with the probability d / s, as s: its squared
error is s d on average, not d^2. An error of several steps passes as it is, but for the rounding. So the gain of a
quantizer depends on the size of the error that reaches it, and thus on the quantizers upstream.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper

from onnxamp._facts.dtypes import Format, ends
from onnxamp._facts.ops import attribute_of, is_exact, op_facts, op_key
from onnxamp._gradients.quantized import QUANTIZE
from onnxamp._gradients.walk import ROUNDS
from onnxamp._graph.editor import NewNames
from onnxamp._graph.quantized import OPERATORS
from onnxamp._graph.view import Ports
from onnxamp._model.protos import nodes_of_model
from onnxamp._model.weights import SENTINEL, rounded
from onnxamp._runtime.emulate import rounding
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.pieces import Execution, Executor, start
from onnxamp._runtime.sessions.session import Provider
from onnxamp._runtime.sessions.values import Feeds

Floats: TypeAlias = npt.NDArray[np.float32]

_NEAR: Final = 1e-3
"""Distance in steps within which a number counts as on the grid, or as halfway between two steps."""

_NO_PORTS: Final = Ports((), ())

_QUANTIZERS: Final = QUANTIZE | ROUNDS
"""Ops that round numbers to integers."""


def rounds_to_integers(model: ModelProto) -> bool:
    """Return whether a node of a model, or one in its bodies and functions, rounds numbers to integers."""
    keys = _QUANTIZERS | OPERATORS.keys()
    return any(op_key(node) in keys for node in nodes_of_model(model))


@dataclass
class LowPass:
    """A forward pass that rounds everything that a plan lowers, if the model has quantizers.

    Attributes:
        flow: the model in float32.
        provider: where it runs.
        low: the low-precision type.
        lowered: the ports in low precision, by first output of their node.
    """

    flow: DataflowGraph
    provider: Provider
    low: Format
    lowered: Mapping[str, Ports]

    @cached_property
    def quantizers(self) -> Mapping[int, str]:
        """The nodes that round numbers to integers, and their results."""
        return {
            number: node.output[0]
            for number, node in enumerate(self.flow.nodes)
            if op_key(node) in _QUANTIZERS
        }

    @cached_property
    def compared(self) -> Counter[str]:
        """The values that both passes need to be compared."""
        return Counter(chain.from_iterable(map(self._at, self.quantizers)))

    @cached_property
    def executor(self) -> Executor:
        """What runs its pieces."""
        return Executor(self.flow, self.provider, self._rewritten)

    def begin(self, feeds: Feeds, ends: Iterable[str]) -> Execution | None:
        """Return the pass of a sample before its first node; None if nothing is rounded to integers."""
        if not self.quantizers:
            return None
        return start(self.executor, feeds, self.compared + Counter(ends))

    def gains(
        self, part: Sequence[int], exact: Execution, other: Execution
    ) -> Iterator[tuple[str, float]]:
        """Run a piece, and yield the gains of quantizers in it, each with its result."""
        other.run(part)
        for number in part:
            if number in self.quantizers:
                gain = self._gain(self.flow.nodes[number], exact, other)
                yield self.quantizers[number], gain
                for side in (exact, other):
                    side.used(self._at(number))

    def _at(self, number: int) -> list[str]:
        """Return the values at a quantizer that both passes are compared by: its inputs, steps and results."""
        node = self.flow.nodes[number]
        return [*node.input[:2], *filter(None, node.output)]

    def _rewritten(self, piece: ModelProto) -> ModelProto:
        """Return a piece that rounds the low ports, apart from numbers that would become infinite, which plans keep."""
        names = NewNames(
            {*self.flow.names, *(entry.name for entry in piece.graph.input)}
        )
        nodes = list[NodeProto]()
        known = dict[str, str]()
        for node in piece.graph.node:
            ports = self._ports(node)
            for port in ports.inputs:
                name = node.input[port]
                if name not in self._made:
                    if name not in known:
                        known[name] = names.fresh(f"{name}/read")
                        nodes += self._rounded(names, name, known[name])
                    node.input[port] = known[name]
            nodes.append(node)
            for port in () if is_exact(node) else ports.outputs:
                name = node.output[port]
                node.output[port] = names.fresh(f"{name}/exact")
                nodes += self._rounded(names, node.output[port], name)
        del piece.graph.node[:]
        piece.graph.node.extend(nodes)
        return piece

    def _ports(self, node: NodeProto) -> Ports:
        return self.lowered.get(next(filter(None, node.output), ""), _NO_PORTS)

    @cached_property
    def _made(self) -> set[str]:
        """The values that nodes make in low precision."""
        low = set[str]()
        for node in self.flow.nodes:
            low.update(node.output[port] for port in self._ports(node).outputs)
        return low

    def _rounded(
        self, names: NewNames, source: str, target: str
    ) -> Sequence[NodeProto]:
        low = names.fresh(f"{target}/rounded")
        lost = names.fresh(f"{target}/lost")
        return [
            *rounding(names, source, low, self.low.elem),
            helper.make_node("IsInf", [low], [lost]),
            helper.make_node("Where", [lost, source, low], [target]),
        ]

    def _gain(self, node: NodeProto, exact: Execution, other: Execution) -> float:
        """Return the error that leaves a quantizer over that which reaches it, both root mean squares.

        Numbers beyond the ends of the grid do not count, nor do sentinels such as those of masks.
        """
        x, y, scale = self._read(node, exact, ())
        low_x, low_y, low_scale = self._read(node, other, self._ports(node).inputs)
        if x.shape != low_x.shape:
            return 1.0
        inside = _inside(exact.output(node.output[0]))
        with np.errstate(all="ignore"):
            counts = (np.abs(x) < SENTINEL) & inside & np.isfinite(low_x)
            steps = x / scale
            off = np.abs(low_x / low_scale - steps)
            whole = np.floor(off)
            # Of numbers anywhere between two steps, this is the mean.
            mean = whole * whole + (off - whole) * (2 * whole + 1)
            settled = np.abs(2 * steps - np.rint(2 * steps)) < 2 * _NEAR
            moves = np.where(settled, np.square(low_y - y), mean)
            squares = np.square(scale, dtype=np.float64) * moves
            into = np.sum(np.square(low_x - x), where=counts, dtype=np.float64)
            out = np.sum(squares, where=counts & (moves > 0))
        return float(np.sqrt(out / into)) if into else 0.0

    def _read(
        self, node: NodeProto, side: Execution, low: Sequence[int]
    ) -> tuple[Floats, Floats, Floats]:
        """Return the input of a quantizer, its result, and its steps."""
        x = side.output(node.input[0])
        y = side.output(node.output[0]).astype(np.float32)
        scale = np.ones((), np.float32)
        if op_key(node) in op_facts().quantize:
            axis = attribute_of(node, "axis", 1)
            scale = side.output(node.input[1])
            if scale.ndim > 1:  # one for each block of numbers
                times = attribute_of(node, "block_size", 1)
                scale = np.repeat(scale, times, axis).take(range(y.shape[axis]), axis)
            elif scale.size > 1:
                after = y.ndim - 1 - axis % y.ndim
                scale = scale.reshape(-1, *[1] * after)
            else:
                scale = scale.reshape(())
        elif op_key(node) in QUANTIZE:
            scale, zero = (side.output(name) for name in node.output[1:])
            y -= zero
        x = rounded(x, self.low, inf) if 0 in low else x
        return x, y, rounded(scale, self.low, inf) if 1 in low else scale


def shown_errors(
    groups: Iterable[Sequence[str]], exact: Execution, other: Execution
) -> tuple[float, ...]:
    """Return the squared relative errors of groups of outputs, as another pass has them."""
    shown = list[float]()
    for group in groups:
        known = [name for name in group if name in exact.values]
        errors = (
            _squared_error(exact.output(name), other.output(name)) for name in known
        )
        shown.append(sum(errors))
    return tuple(shown)


def _squared_error(exact: Floats, other: Floats) -> float:
    if exact.shape != other.shape:
        return 1.0
    counts = np.isfinite(exact) & (np.abs(exact) < SENTINEL)
    with np.errstate(all="ignore"):
        error = np.sum(np.square(other - exact, dtype=np.float64), where=counts)
        size = np.sum(np.square(exact, dtype=np.float64), where=counts)
    if not np.isfinite(error):
        return 1.0
    return float(error / size) if size else 0.0


def _inside(y: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which integers are neither the first nor the last of their grid."""
    first, last = ends(y.dtype.name)
    numbers = y.astype(np.float64)
    return (first < numbers) & (numbers < last)
