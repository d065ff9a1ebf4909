"""Differences of nearly equal numbers, which consist of the last digits of these: low precision has none of them.

An input of the model may be 20 with deviations of 0.01, like pixels, samples of a sensor or prices. float16 rounds it
to multiples of 1/64, and a normalization turns that into noise. The same is true of the difference or the quotient of
two inputs, or of parts or averages of one, and of an input from which a stored mean is subtracted that is far larger
than the deviation by which the difference is divided. Exporters fold such a mean into the bias of the first layer.
Inside a network, values were computed in low precision anyway, and validation measures them. Only a variance as the
difference of two means, E[x²] - E[x]², and an expanded squared distance cancel everywhere.
"""

from collections.abc import Iterator
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind
from onnxamp._decide.near_one import has_near_one, near_one
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import attribute, attribute_of, op_facts
from onnxamp._graph.exact_walks import makers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.channels import weight_lengths
from onnxamp._graph.numbers.distances import expanded_distances
from onnxamp._graph.numbers.moments import DIFFERENCES, moment_difference
from onnxamp._graph.numbers.offsets import removes_offset
from onnxamp._graph.numbers.raw_inputs import (
    RawInputs,
    raw_inputs,
    raw_makers,
    raw_readers,
)
from onnxamp._graph.view import ABSENT, Node


def cancellations(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield normalizations and differences of inputs of the model, with the nodes in between, and differences of means.

    Complexity: linear.
    """
    raw = graph.ask(raw_inputs)
    raw_nodes = graph.ask(raw_readers)
    centered = _Centered(graph, raw)
    scales = _AffineInputs(graph, low, raw)
    for node in graph.computing:
        if node.index in raw_nodes:
            if (
                centered.is_centered_by(node)
                or centered.is_difference(node)
                or raw.is_comparison(node)
                or scales.is_far(node)
            ):
                yield from centered.path(node)
            for index in _offset_product(graph, low, raw, node):
                yield from centered.path(graph.nodes[index])
        for hazard in _variance(graph, node) if node.key in DIFFERENCES else ():
            yield hazard
            yield from centered.back(graph.nodes[hazard.node])
    for nodes in expanded_distances(graph):
        why = "expands a squared distance into numbers larger than it"
        yield from (Hazard(index, KIND, why) for index in sorted(nodes))
    for index, why, is_rare in near_one(graph, low):
        yield Hazard(index, KIND, why, is_rare)


class _Centered:
    """Nodes that subtract numbers as large as raw values from these, and the nodes from the inputs to them."""

    def __init__(self, graph: Graph, raw: RawInputs) -> None:
        self.graph = graph
        self.raw = raw
        self.seen = set[int]()

    def is_centered_by(self, node: Node) -> bool:
        """Return whether the node subtracts a mean, or another raw value, from a raw value or a mean of some."""
        facts = op_facts()
        value = node.input(0)
        if node.key == "Add":
            return self._adds_negative(node)
        if node.key == "Sub":
            return self.raw.are_levels(node.reads) or any(
                self.raw.means.get(other) in self._sources(one)
                for one, other in (node.inputs, reversed(node.inputs))
                if one in self.raw.channels
            )
        if node.key not in facts.centering or value not in self.raw.channels:
            return False
        channel = self.raw.channels[value]
        shape = self.graph.shapes[value]
        if channel is None:
            return not self._is_shifted_little(node)
        if node.key in facts.centering_axes:
            first = attribute_of(node.proto, "axis", -1)
            return bool(shape and channel % len(shape) < first % len(shape))
        is_trained = bool(attribute(node.proto, "training_mode"))
        return node.key in facts.centering_channels or is_trained

    def _adds_negative(self, node: Node) -> bool:
        """Return whether a node adds raw values, or means of some, one of which is negated."""
        if not self.raw.are_levels(node.reads):
            return False
        makers = [
            list(makers_through_exact(self.graph, value)) for value in node.reads
        ]
        are_negated = {any(one.key == "Neg" for one in path) for path in makers}
        return len(are_negated) == 2

    def is_difference(self, node: Node) -> bool:
        """Return whether the weights of a product make it a difference between raw values, as a finite difference."""
        return node.key in op_facts().products and any(
            self.raw.are_plain([value]) and removes_offset(self.graph, node, value)
            for value in node.reads
        )

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
        why = self._act(node)
        # Random samples lack it. Of a normalization alone, which is a layer as well, level "auto" trusts them.
        is_rare = node.key not in op_facts().centering
        yield Hazard(node.index, KIND, why, rare=is_rare)
        yield from self.back(node, rare=is_rare)

    def _act(self, node: Node) -> str:
        """Return what a node does to an input of the model, as a verb phrase."""
        if self.raw.is_comparison(node):
            return "divides an input of the model by numbers as large as it"
        if node.key in op_facts().logarithms:
            return "takes the logarithm of a quotient of inputs, which may be near 1"
        if node.key in ("Mul", "Div"):
            return "scales what is left of an input of the model after a subtraction"
        return "subtracts from an input of the model numbers as large as it"

    def back(self, node: Node, *, rare: bool = False) -> Iterator[Hazard]:
        """Yield the nodes from the inputs of the model to the raw values that a node reads."""
        why = f"rounds an input of the model, whose last digits {node.label!r} needs"
        for maker, value in raw_makers(self.graph, self.raw, node, self.seen):
            yield Hazard(maker.index, KIND, why, rare, value)


class _AffineInputs:
    """Raw values that constants scale and shift, in the form ``scale * input + shift``."""

    def __init__(self, graph: Graph, low: Format, raw: RawInputs) -> None:
        self.graph = graph
        self.low = low
        self.raw = raw
        self.forms = dict[int, NDArray[np.float64]]()
        self.ratios = set(raw.ratios)
        """Ratios of raw values, scaled and shifted."""

    def is_far(self, node: Node) -> bool:
        """Return whether a node makes numbers of a few units by a shift so large that low precision rounds them.

        A stored mean of 20 beside a deviation of 0.01 is such a shift, and so is 1 where a ratio may be close to it.
        Masks, which are multiples of x - 1, have none.
        """
        if node.key in op_facts().logarithms:
            # A logarithm of a ratio is the difference of two logarithms.
            return node.input(0) in self.raw.ratios
        form = self._form(node)
        if form is None:
            return False
        self.forms[node.outputs[0]] = form
        if not self.ratios.isdisjoint(node.inputs):
            self.ratios.update(node.writes)
            if np.allclose(form[1], -form[0], rtol=_SAME):
                return True
        scale, shift = np.abs(form)
        rounded = shift * self.low.epsilon > _ROUNDED
        # A mean is subtracted; what is added to an input makes its results large, as a mean that is given back.
        is_mean = (shift > _COLORS) & (form[0] * form[1] < 0)
        is_scaled = (scale != 1) | (shift > self.low.exact_integers) | is_mean
        # A difference that divides, or whose logarithm is taken, needs its digits however small it is.
        is_scaled |= any(
            port in op_facts().divisors.get(reader.key, ())
            for reader, port in self.graph.readers(node)
        )
        center = shift > _NEAR * scale
        is_needed = rounded & is_scaled | self._is_magnified(node, shift)
        return bool((is_needed & center & (shift < _DIGITS)).any())

    def _is_magnified(
        self, node: Node, shift: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Return which shifts leave a rounding error that the weights of a reader magnify into noise."""
        readers = (reader for reader, port in self.graph.readers(node) if port == 0)
        lengths = (weight_lengths(self.graph, reader) for reader in readers)
        most = max(
            (length.max() for length in lengths if length is not None), default=0.0
        )
        if most < _MAGNIFIES:
            return np.zeros(shift.shape, bool)
        # As a quotient, so that infinite weights make no NaN of a shift of zero.
        return shift > _ROUNDED / (self.low.epsilon * most)

    def _form(self, node: Node) -> NDArray[np.float64] | None:
        """Return the scale and the shift that a node's result has of the input; None if it has another form."""
        constants = self.graph.constants
        known = [value for value in node.reads if constants.is_constant(value)]
        computed = [value for value in node.reads if value not in known]
        channels = self.raw.channels
        if len(computed) != 1 or channels.get(computed[0], ABSENT) is not None:
            return None
        scale, shift = self._form_of(computed[0])
        if node.key not in op_facts().linear or len(known) != 1:
            is_uniform = scale.size == shift.size == 1
            return np.stack([scale, shift]) if is_uniform and not known else None
        numbers = constants.numbers(known[0], most=_MOST)
        if numbers is None:
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

    def _form_of(self, value: int) -> NDArray[np.float64]:
        """Return the form of a value, or that of the first one that control flow passes on as it, if it is known."""
        while value not in self.forms and value in self.raw.sources:
            value = self.raw.sources[value][0]
        return self.forms.get(value, np.stack([np.ones(()), np.zeros(())]))


_ROUNDED: Final = 1 / 32
"""Rounding error of an input, relative to the result, from which on the result is noise: a few percent."""
_LITTLE: Final = 4.0
"""Deviations of a stored mean up to which what is left of an input is off by a few of its own roundings at most."""
_NEAR: Final = 1.0
"""Centers up to which inputs may be zeros and ones, fractions or colors, which are no larger than their deviations."""
_COLORS: Final = 256.0
"""Shifts up to which the input may be colors, as integers of 8 bits, which low precision holds as they are."""
_DIGITS: Final = float(1 << 22)
"""Shifts from here on leave no digits even in float32: they make masks."""
_MOST: Final = 1 << 16
"""Elements of a mean up to which it is compared with deviations."""
_SAME: Final = 1e-3
"""Relative difference up to which a shift takes a ratio of 1 to zero."""


def _offset_product(
    graph: Graph, low: Format, raw: RawInputs, node: Node
) -> Iterator[int]:
    """Yield a product of an input with weights, and the sum that follows, if its offset takes away a mean of the input.

    Exporters fold (x - mean) / deviation into the first layer, whose bias is then far larger than its weights.
    """
    lengths = weight_lengths(graph, node) if raw.are_plain(node.inputs[:1]) else None
    if lengths is None:
        return
    offsets = [(node, value) for value in node.inputs[2:]]
    for reader, port in graph.readers(node):
        if reader.key in op_facts().additive and len(reader.inputs) == 2:
            offsets.append((reader, reader.inputs[1 - port]))
    for end, value in offsets:
        offset = None if value == ABSENT else graph.constants.numbers(value)
        if offset is None:
            continue
        if node.key == "Conv":
            places = len(graph.shapes[node.inputs[1]] or ()) - 2
            leading = offset.shape[: max(offset.ndim - places, 0)]
            is_of_places = offset.size != prod(leading)
            if end is not node and is_of_places:
                continue
            offset = offset.reshape(-1)
        if offset.shape[-1:] not in ((), (1,), lengths.shape):
            continue
        shift = np.abs(offset.astype(np.float64))
        is_rounded = shift * low.epsilon > _ROUNDED
        if (is_rounded & (shift > _OFFSET * lengths)).any():
            yield from dict.fromkeys((end.index, node.index))


_MAGNIFIES: Final = 4.0
"""Lengths of weights from which on they are made for numbers far below a unit."""
_OFFSET: Final = 8.0
"""Lengths of a weight vector up to which its bias suits inputs of a few units, as nearly all trained ones do."""


def _variance(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Yield a difference of a mean of squares and the square of a mean, with both, and what reads it."""
    difference = moment_difference(graph, node)
    if not difference:
        return
    why = "computes a variance as the difference of two means, which are nearly equal"
    readers = {
        reader.index
        for reader, _ in graph.readers(node)
        if graph.is_float_output(reader)
    }
    yield from (Hazard(index, KIND, why) for index in sorted(difference | readers))


class _Cancellation(HazardKind):
    value = "cancellation"
    title = "numbers are subtracted that low precision cannot tell apart"
    looks_at = ("centering", "means")
    is_measurable = True
    fault = Fault(Effect.ROUNDS_AWAY, "{detail}, in LOW")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return cancellations(graph, low)

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        return has_near_one(graph, weight, low)


KIND: Final = _Cancellation()
