"""Scales of quantized numbers that low precision cannot hold."""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._decide.kinds import (
    ByExponents,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    computing,
)
from onnxamp._facts.dtypes import Format, Grid, element_name, grids
from onnxamp._facts.ops import op_facts
from onnxamp._graph.exact_walks import makers_through_exact, readers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.scales import magnitudes
from onnxamp._graph.view import Node
from onnxamp._model.weights import read_array

_SHARE: Final = 1.0
"""Steps by which rounding a scale may move the end of its grid."""


def scale_hazards(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes whose scales, or the ends of whose grids, leave the range or the digits of low precision.

    Where an end does, so do the values that are quantized, and what is computed from dequantized ones: the nodes that
    make or read them follow. Complexity: linear in nodes and scales.
    """
    facts = op_facts()
    seen = set[int]()
    for node in graph.nodes_of(facts.quantize | facts.dequantize):
        is_made = node.key in facts.dequantize
        quantized = node.input(0) if is_made else node.outputs[0]
        grid = grids().get(element_name(graph.types[quantized]))
        bounds = graph.ask(_bounds, node.input(1))
        if grid is None or bounds is None:
            continue
        smallest, largest = bounds
        # The weights of a channel with a tiny scale are negligible beside those of others.
        if _are_weights(graph, node, grid) and largest >= low.smallest_normal:
            smallest = largest
        if why := _lost(low, grid, smallest, largest):
            yield Hazard(node.index, KIND, why)
            yield from computing(graph, node.input(1), node, KIND)
        if grid.end * largest > low.max_finite:
            why = f"{node.label!r} has numbers up to {grid.end * largest:.6g}; {low.name} ends at {low.max_finite:.6g}"
            yield Hazard(node.index, KIND, why)
            around = (
                readers_through_exact(graph, node, seen)
                if is_made
                else makers_through_exact(graph, node.input(0))
            )
            yield from (Hazard(one.index, KIND, why) for one in around)


def vanishing_scales(
    graph: Graph, low: Format
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield scales of weights with their numbers, if low precision is allowed and would make some of them 0.

    Engines refuse a scale of 0 (TensorRT-RTX 1.7.1: "Scale coefficients must all be positive"). Complexity: linear in
    scales.
    """
    for node in graph.nodes_of(op_facts().dequantize):
        scale = node.input(1)
        grid = grids().get(element_name(graph.types[node.input(0)]))
        bounds = graph.ask(_bounds, scale)
        if grid is None or bounds is None or not _are_weights(graph, node, grid):
            continue
        smallest, largest = bounds
        source = graph.constants.source(scale)
        if source not in graph.constants.tensors:
            continue
        if smallest <= low.smallest_subnormal / 2 and largest >= low.smallest_normal:
            tensor = graph.constants.tensors[source]
            yield source, read_array(tensor, graph.folder).astype(np.float32)


def _are_weights(graph: Graph, node: Node, grid: Grid) -> bool:
    """Return whether a node dequantizes stored numbers that its scales bound; the scales of sums bound nothing."""
    return grid.end > 1 and graph.constants.is_constant(node.input(0))


def contrib_scales(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes with quantized weights inside if low precision loses all scales; losing a few tiny ones does no harm.

    Complexity: linear in nodes and scales.
    """
    scales = op_facts().scales
    for node in graph.nodes_of(scales):
        known = (graph.ask(_bounds, node.input(port)) for port in scales[node.key])
        for _, largest in filter(None, known):
            if why := _lost(low, grids()["int8"], largest, largest):
                yield Hazard(node.index, KIND, why)


def _bounds(graph: Graph, scale: int) -> tuple[float, float] | None:
    """Return the smallest and the largest magnitude of a scale, zeros aside; None if it is unknown, or zero."""
    numbers = magnitudes(graph, scale)
    if numbers is None:
        return None
    scales = numbers[numbers > 0]
    return (float(scales.min()), float(scales.max())) if scales.size else None


def _lost(low: Format, grid: Grid, smallest: float, largest: float) -> str:
    """Return what low precision loses of scales; "" if nothing."""
    if largest >= low.overflow:
        return f"a scale of {largest:.6g} is out of the range of {low.name}"
    # Half of the smallest number is a tie, which rounds to zero.
    if smallest <= low.smallest_subnormal / 2:
        return f"a scale of {smallest:.6g} is 0 in {low.name}"
    moved = grid.steps * max(low.epsilon, low.smallest_subnormal / smallest) / 2
    if moved <= _SHARE:
        return ""
    return f"rounding a scale of {smallest:.6g} to {low.name} moves the end of its grid by up to {moved:.3g} steps"


def zero_scales(graph: Graph) -> Iterator[Hazard]:
    """Yield the nodes of a converted model with a scale that is 0."""
    facts = op_facts()
    for node in graph.nodes_of(facts.quantize | facts.dequantize):
        tensor = graph.constants.tensors.get(node.input(1))
        if tensor is not None and not read_array(tensor, graph.folder).all():
            yield Hazard(node.index, KIND, "a scale is 0")


class _Scales(HazardKind):
    value = "scale"
    title = "low precision cannot hold its scale, or the numbers that it scales to"
    looks_at = ("quantize", "dequantize", "scales")
    exponents = ByExponents.CURE
    fault = Fault(Effect.GROWS, "its scale does not suit LOW: {detail}")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from scale_hazards(graph, low)
        yield from contrib_scales(graph, low)

    def find_in_low(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from zero_scales(graph)
        yield from self.find(graph, low)

    def low_numbers(
        self, graph: Graph, low: Format, /
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        return vanishing_scales(graph, low)

    def lost_scales(self, graph: Graph, low: Format, /) -> Mapping[int, str]:
        lost = dict[int, str]()
        for hazard in self.find_in_low(graph, low):
            lost.setdefault(hazard.node, hazard.detail)
        return lost


KIND: Final = _Scales()
