"""Differences of nearly equal numbers, which consist of the last digits of these: low precision has none of them.

An input of the model may be 20 with deviations of 0.01, like pixels, samples of a sensor or prices. float16 rounds it
to multiples of 1/64, and a normalization turns that into noise. The same is true of the difference of two inputs, or of
parts of one, and of an input from which a stored mean is subtracted that is far larger than the deviation by which the
difference is divided. Inside a network, values were computed in low precision anyway, and validation measures them.
Only a variance as the difference of two means, E[x²] - E[x]², cancels everywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind
from onnxamp._facts.dtypes import FLOAT_TENSORS, Format
from onnxamp._facts.ops import attribute, attribute_of, op_facts
from onnxamp._graph.exact_walks import makers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.index_paths import INTEGERS
from onnxamp._graph.match import declared_axes
from onnxamp._graph.moments import DIFFERENCES, moment_difference
from onnxamp._graph.view import ABSENT, Node, Origin


def cancellations(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield normalizations and differences of inputs of the model, with the nodes in between, and differences of means.

    Complexity: linear.
    """
    raw = _Raw(graph)
    scales = _AffineInputs(graph, low)
    for node in graph.computing:
        # Hardly any node reads raw values, and what it does to others is nothing to the walk.
        is_raw = raw.is_read_by(node)
        if is_raw and (raw.is_centered_by(node) or scales.is_far(node, raw.channels)):
            yield from raw.path(node)
        for hazard in _variance(graph, node) if node.key in DIFFERENCES else ():
            yield hazard
            yield from raw.back(graph.nodes[hazard.node])
        if is_raw:
            raw.follow(node)
    yield from _near_one(graph)


class _Raw:
    """Values that are inputs of the model, moved, scaled and shifted, or that one product computes from these."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.channels: dict[int, int | None] = {
            value: None
            for value in graph.scopes[0].inputs
            if graph.values[value].origin in (Origin.INPUT, Origin.DEFAULT)
            and graph.types[value] in FLOAT_TENSORS
        }
        """Raw value -> the axis of the channels that a product made; None if there was none."""
        self.wide = frozenset(
            value
            for value in graph.scopes[0].inputs
            if graph.types[value] in INTEGERS | {"tensor(double)"}
        )
        """Inputs of types that tell more numbers apart than low precision does."""
        self.means: dict[int, int] = {}
        """Mean -> the raw value that it is the mean of, through data movement."""
        self.seen = set[int]()

    def is_read_by(self, node: Node) -> bool:
        """Return whether a node reads a raw value, a mean of one, or an input of a wide type."""
        read = node.inputs
        return not (
            self.channels.keys().isdisjoint(read)
            and self.means.keys().isdisjoint(read)
            and self.wide.isdisjoint(read)
        )

    def follow(self, node: Node) -> None:
        """Note the outputs of a node if they are raw, or a mean of raw values."""
        graph = self.graph
        facts = op_facts()
        given = [value for value in node.reads if graph.types[value] in FLOAT_TENSORS]
        computed = [value for value in given if not graph.constants.is_constant(value)]
        if node.key == "Cast" and node.reads[0] in self.wide:
            self.channels[node.outputs[0]] = None
        if node.key in facts.moves_data and self._are_plain(computed):
            self.channels.update(dict.fromkeys(node.writes))
            return
        if len(computed) != 1:
            return
        (value,) = computed
        passes = node.index in graph.passing or node.key == "Cast"
        if value in self.means:
            if passes or node.index in graph.exact:
                self.means.update(dict.fromkeys(node.writes, self.means[value]))
            return
        if value not in self.channels:
            return
        channel = self.channels[value]
        is_first = node.input(0) == value
        if node.key in facts.means and is_first:
            if self._is_apart(node, channel):
                self.means.update(dict.fromkeys(node.writes, value))
        elif node.key in facts.products:
            made = _channels_of(node)
            if is_first and channel is None and made is not None:
                self.channels[node.outputs[0]] = made
        elif passes or node.key in facts.linear or self._moves(node, channel):
            self.channels.update(dict.fromkeys(node.writes, channel))

    def _are_plain(self, values: Sequence[int]) -> bool:
        """Return whether values are raw, and no product computes them."""
        return bool(values) and all(
            self.channels.get(value, ABSENT) is None for value in values
        )

    def _moves(self, node: Node, channel: int | None) -> bool:
        """Return whether the node is exact, and leaves channels where they are."""
        may_move = channel is None or node.key not in op_facts().moves_data
        return node.index in self.graph.exact and may_move

    def _is_apart(self, node: Node, channel: int | None) -> bool:
        """Return whether a mean is taken of each channel by itself: those of a product differ in their offsets."""
        if channel is None or node.key not in op_facts().reduces_axes:
            return True
        shape = self.graph.shapes[node.inputs[0]]
        axes = declared_axes(self.graph, node)
        if not axes or shape is None:
            return False
        rank = len(shape)
        return channel % rank not in {axis % rank for axis in axes}

    def is_centered_by(self, node: Node) -> bool:
        """Return whether the node subtracts a mean, or another raw value, from a raw value."""
        facts = op_facts()
        value = node.input(0)
        if node.key == "Sub":
            return self._are_plain(node.reads) or any(
                self.means.get(other) in self._sources(one)
                for one, other in (node.inputs, reversed(node.inputs))
                if one in self.channels
            )
        if node.key not in facts.centering or value not in self.channels:
            return False
        channel = self.channels[value]
        shape = self.graph.shapes[value]
        if channel is None:
            return not self._is_shifted_little(node)
        if node.key in facts.centering_axes:
            first = attribute_of(node.proto, "axis", -1)
            return bool(shape and channel % len(shape) < first % len(shape))
        is_trained = bool(attribute(node.proto, "training_mode"))
        return node.key in facts.centering_channels or is_trained

    def _is_shifted_little(self, node: Node) -> bool:
        """Return whether a node subtracts stored means that are no more than a few deviations: few digits cancel."""
        ports = op_facts().moments.get(node.key)
        if ports is None or attribute(node.proto, "training_mode"):
            return False
        constants = self.graph.constants
        mean, variance = (constants.numbers(node.input(port)) for port in ports)
        if mean is None or variance is None:
            return False
        deviation = np.sqrt(np.maximum(variance.astype(np.float64), 0.0))
        return bool((np.abs(mean) <= _LITTLE * deviation).all())

    def _sources(self, value: int) -> set[int]:
        """Return the value, and what is passed on as it."""
        return {value, self.graph.passed_on(value)}

    def path(self, node: Node) -> Iterator[Hazard]:
        """Yield the node, and the nodes from the inputs of the model to it."""
        why = "subtracts numbers that are as large as the model's input"
        yield Hazard(node.index, KIND, why)
        yield from self.back(node)

    def back(self, node: Node) -> Iterator[Hazard]:
        """Yield the nodes from the inputs of the model to what a node subtracts from."""
        stack = list(node.reads)
        while stack:
            value = stack.pop()
            maker = self.graph.producer(value)
            is_known = value in self.channels or value in self.means
            if maker is None or not is_known or maker.index in self.seen:
                continue
            self.seen.add(maker.index)
            why = (
                f"rounds an input of the model before {node.label!r} subtracts from it"
            )
            yield Hazard(maker.index, KIND, why)
            stack += maker.reads


class _AffineInputs:
    """Raw values that constants scale and shift, in the form ``scale * input + shift``."""

    def __init__(self, graph: Graph, low: Format) -> None:
        self.graph = graph
        self.low = low
        self.forms = dict[int, NDArray[np.float64]]()

    def is_far(self, node: Node, raw: Mapping[int, int | None]) -> bool:
        """Return whether a node makes numbers of a few units by a shift so large that low precision rounds them.

        A stored mean of 20 beside a deviation of 0.01 is such a shift. Masks, which are multiples of x - 1, have none.
        """
        form = self._form(node, raw)
        if form is None:
            return False
        self.forms[node.outputs[0]] = form
        scale, shift = np.abs(form)
        rounded = shift * self.low.epsilon > _ROUNDED
        is_scaled = (scale != 1) | (shift > self.low.exact_integers)
        center = shift > _NEAR * scale
        return bool((rounded & is_scaled & center & (shift < _DIGITS)).any())

    def _form(
        self, node: Node, raw: Mapping[int, int | None]
    ) -> NDArray[np.float64] | None:
        """Return the scale and the shift that a node's result has of the input; None if it has another form."""
        constants = self.graph.constants
        known = [value for value in node.reads if constants.is_constant(value)]
        computed = [value for value in node.reads if value not in known]
        if len(computed) != 1 or raw.get(computed[0], ABSENT) is not None:
            return None
        scale, shift = self.forms.get(computed[0], (np.ones(()), np.zeros(())))
        if node.key not in op_facts().linear or len(known) != 1:
            is_uniform = scale.size == shift.size == 1
            return np.stack([scale, shift]) if is_uniform and not known else None
        numbers = constants.numbers(known[0])
        if numbers is None or numbers.size > _MOST:
            return None
        number = numbers.astype(np.float64)
        is_first = node.inputs[0] == known[0]
        # A stored 0 divides to infinity or NaN, which no comparison in is_far accepts.
        with np.errstate(all="ignore"):
            if node.key == "Mul":
                form = scale * number, shift * number
            elif node.key == "Div" and not is_first:
                form = scale / number, shift / number
            elif node.key in ("Add", "Sub"):
                sign = -1 if node.key == "Sub" and not is_first else 1
                own = -1 if node.key == "Sub" and is_first else 1
                form = own * scale, own * shift + sign * number
            else:
                return None
        try:
            return np.stack(np.broadcast_arrays(*form))
        except ValueError:
            return None


_ROUNDED: Final = 1 / 32
"""Rounding error of an input, relative to the result, from which on the result is noise: a few percent."""
_LITTLE: Final = 4.0
"""Deviations of a stored mean up to which what is left of an input is off by a few of its own roundings at most."""
_NEAR: Final = 1.0
"""Centers up to which inputs may be zeros and ones, fractions or colors, which are no larger than their deviations."""
_DIGITS: Final = float(1 << 22)
"""Shifts from here on leave no digits even in float32: they make masks."""
_MOST: Final = 1 << 16
"""Elements of a mean up to which it is compared with deviations."""


def _channels_of(product: Node) -> int | None:
    """Return the axis of the channels that a product makes; None for recurrent ops."""
    form = op_facts().products[product.key][0].form
    return _CHANNELS.get(form)


_CHANNELS: Final = {"matrix": -1, "windows": 1, "spread": 1}
"""Form of a product -> the axis of the channels in its output."""


def _near_one(graph: Graph) -> Iterator[Hazard]:
    """Yield sums 1 + x before a logarithm, and differences exp(x) - 1: if x is small, 1 + x holds none of its digits.

    Complexity: linear.
    """
    facts = op_facts()
    for node in graph.nodes_of(facts.logarithms):
        yield from _leading(graph, node, facts.additive)
    for node in graph.nodes_of(facts.additive):
        if _is_beside_one(graph, node, subtracts=True):
            yield from _leading(graph, node, facts.exponentials)


def _leading(graph: Graph, end: Node, starts: frozenset[str]) -> Iterator[Hazard]:
    """Yield a node, and the exact ops between it and a number near 1 that one of some ops makes, with this op."""
    values = (value for _, value in graph.float_inputs(end))
    makers = chain.from_iterable(makers_through_exact(graph, one) for one in values)
    path = list(islice(makers, _REACH))
    is_sum = starts == op_facts().additive
    last = [one for one in path if one.key in starts]
    if any(not is_sum or _is_beside_one(graph, one) for one in last):
        why = (
            f"leads from a number near 1 to {end.label!r}, which needs its last digits"
        )
        yield from (Hazard(one.index, KIND, why) for one in (*path, end))


_REACH: Final = 16
"""Nodes between a number near 1 and what needs its digits: bounds, movement."""


def _is_beside_one(graph: Graph, node: Node, *, subtracts: bool = False) -> bool:
    """Return whether a node adds something and 1, or subtracts one from the other."""
    numbers = [graph.constants.uniform(value) for value in node.reads]
    known = [number for number in numbers if number is not None]
    if len(numbers) != 2 or len(known) != 1 or abs(known[0]) != 1:
        return False
    return not subtracts or (node.key == "Sub") == (known[0] == 1)


def _variance(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Yield a difference of a mean of squares and the square of a mean, with both, and what reads it."""
    found = moment_difference(graph, node)
    if not found:
        return
    why = "computes a variance as the difference of two means, which are nearly equal"
    readers = {
        reader.index
        for reader, _ in graph.readers(node)
        if graph.is_float_output(reader)
    }
    yield from (Hazard(index, KIND, why) for index in sorted(found | readers))


class _Cancellation(HazardKind):
    value = "cancellation"
    title = "a mean is subtracted from numbers that low precision cannot tell apart"
    looks_at = ("centering", "means")
    is_measurable = True
    fault = Fault(Effect.ROUNDS_AWAY, "{detail}, in LOW")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return cancellations(graph, low)


KIND: Final = _Cancellation()
