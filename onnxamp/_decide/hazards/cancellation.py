"""Differences from a mean: what is left of nearly equal numbers are their last digits, which low precision lacks.

An input of the model may be 20 with deviations of 0.01, as pixels, samples of a sensor or prices are. float16 rounds it
to multiples of 1/64: a normalization turns that into noise. Inside a network, values were computed in low precision
anyway, and validation measures them. A variance as the difference of two means, E[x²] - E[x]², cancels everywhere.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind
from onnxamp._decide.patterns import squared_value
from onnxamp._facts.dtypes import FLOAT_TENSORS, Format
from onnxamp._facts.ops import attribute, attribute_of, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import declared_axes
from onnxamp._graph.view import ABSENT, Node, Origin


def cancellations(graph: Graph) -> Iterator[Hazard]:
    """Yield normalizations of an input of the model, with the nodes in between, and differences of two means.

    Complexity: linear.
    """
    raw = _Raw(graph)
    for node in graph.order:
        if not graph.is_float_output(node):
            continue
        if raw.is_centered_by(node):
            yield from raw.path(node)
        yield from _variance(graph, node)
        raw.follow(node)


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
        self.means: dict[int, int] = {}
        """Mean -> the raw value that it is the mean of, through data movement."""
        self.seen = set[int]()

    def follow(self, node: Node) -> None:
        """Note the outputs of a node if they are raw, or a mean of raw values."""
        graph = self.graph
        facts = op_facts()
        given = [value for value in node.reads if graph.types[value] in FLOAT_TENSORS]
        computed = [value for value in given if not graph.constants.is_constant(value)]
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
        """Return whether the node subtracts a mean from a raw value."""
        facts = op_facts()
        value = node.input(0)
        if node.key == "Sub":
            return any(
                self.means.get(other) in self._sources(one)
                for one, other in (node.inputs, reversed(node.inputs))
                if one in self.channels
            )
        if node.key not in facts.centering or value not in self.channels:
            return False
        channel = self.channels[value]
        shape = self.graph.shapes[value]
        if channel is None:
            return True
        if node.key in facts.centering_axes:
            first = attribute_of(node.proto, "axis", -1)
            return bool(shape and channel % len(shape) < first % len(shape))
        is_trained = bool(attribute(node.proto, "training_mode"))
        return node.key in facts.centering_channels or is_trained

    def _sources(self, value: int) -> set[int]:
        """Return the value, and what is passed on as it."""
        return {value, self.graph.passed_on(value)}

    def path(self, node: Node) -> Iterator[Hazard]:
        """Yield the node, and the nodes from the inputs of the model to it."""
        why = "subtracts the mean of an input of the model"
        yield Hazard(node.index, KIND, why)
        stack = list(node.reads)
        while stack:
            value = stack.pop()
            maker = self.graph.producer(value)
            is_known = value in self.channels or value in self.means
            if maker is None or not is_known or maker.index in self.seen:
                continue
            self.seen.add(maker.index)
            why = f"rounds an input of the model before {node.label!r} subtracts its mean"
            yield Hazard(maker.index, KIND, why)
            stack += maker.reads


def _channels_of(product: Node) -> int | None:
    """Return the axis of the channels that a product makes; None for recurrent ops."""
    form = op_facts().products[product.key][0].form
    return _CHANNELS.get(form)


_CHANNELS: Final = {"matrix": -1, "windows": 1, "spread": 1}
"""Form of a product -> the axis of the channels in its output."""


def _variance(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Yield a difference of the mean of squares and the square of the mean, with both, and what reads it."""
    if node.key != "Sub" or ABSENT in node.inputs:
        return
    facts = op_facts()
    mean = graph.producer(graph.passed_on(node.inputs[0]))
    square = graph.producer(graph.passed_on(node.inputs[1]))
    if mean is None or square is None or mean.key not in facts.reductions:
        return
    inner = graph.producer(graph.passed_on(mean.inputs[0]))
    reduced = graph.producer(squared_value(graph, square))
    if inner is None or reduced is None or reduced.key not in facts.reductions:
        return
    base = squared_value(graph, inner)
    if base == ABSENT or base != graph.passed_on(reduced.inputs[0]):
        return
    why = "computes a variance as the difference of two means, which are nearly equal"
    nodes = {node.index, mean.index, square.index, inner.index, reduced.index}
    nodes.update(
        reader.index
        for reader, _ in graph.readers(node)
        if graph.is_float_output(reader)
    )
    yield from (Hazard(index, KIND, why) for index in sorted(nodes))


class _Cancellation(HazardKind):
    value = "cancellation"
    title = "a mean is subtracted from numbers that low precision cannot tell apart"
    looks_at = ("centering", "means")
    is_measurable = True
    fault = Fault(Effect.ROUNDS_AWAY, "{detail}, in LOW")

    def find(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        return cancellations(graph)


KIND: Final = _Cancellation()
