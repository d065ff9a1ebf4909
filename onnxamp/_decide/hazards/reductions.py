"""Sums over so many elements that they exceed the range of low precision."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import (
    ByExponents,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    in_range,
)
from onnxamp._decide.sums import averages, is_weighted, readers_of_sum
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.constants import expected_terms, summed_terms
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def large_reductions(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield sums over so many elements that terms of magnitude 1 reach an eighth of the largest finite number.

    A sum that is divided by the number of its terms is a mean, and meant for terms of any magnitude.
    """
    facts = op_facts()
    limit = low.max_finite / 8
    seen = set[int]()
    for node in graph.nodes_of(facts.growing_reductions):
        count = summed_terms(node, graph.shapes)
        if not count:
            continue
        is_long = count > low.max_finite / _LARGE
        divider = _divider(graph, node, count) if is_long else None
        if count > limit or divider is not None:
            why = f"sums {count} elements at a time"
            yield Hazard(node.index, KIND, why, unless=in_range(graph, node, low))
        if divider is not None:
            why = f"divides the sum of {count} elements"
            yield Hazard(divider.index, KIND, why, unless=in_range(graph, node, low))
        if count > limit and node.key not in facts.means:
            yield from readers_of_sum(graph, node, seen, low, KIND)


def _divider(graph: Graph, total: Node, count: int) -> Node | None:
    """Return the only reader of a sum, if it divides that by about the number of its terms; None for others."""
    if total.key in op_facts().means:
        return None
    (value,) = total.outputs
    reader = graph.only_reader(value)
    if reader is None or not averages(graph, reader, value, count):
        return None
    return reader


def overflowing_products(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield products of computed values with as many terms, and what reads such a product before it is divided.

    Products with weights are small, because training keeps them so; and so is what shares of 1 weigh.
    """
    facts = op_facts()
    is_constant = graph.constants.is_constant
    seen = set[int]()
    for node in graph.nodes_of(facts.contractions - facts.reductions):
        if len(node.inputs) < 2 or is_constant(node.inputs[1]):
            continue
        if is_constant(node.inputs[0]) or not graph.is_float_output(node):
            continue
        shapes = [graph.shapes[value] for value in node.reads]
        if any(shape is None or None in shape for shape in shapes):
            continue  # a dynamic sum, if it may be large
        count = expected_terms(node, graph.shapes) or 0
        if count <= low.max_finite / 8 or is_weighted(graph, node, count):
            continue
        why = f"sums {count} products of computed values at a time"
        yield Hazard(node.index, KIND, why, unless=in_range(graph, node, low))
        yield from readers_of_sum(graph, node, seen, low, KIND)


_LARGE: Final = 64.0
"""Terms of this magnitude are in range one by one, and few ops make larger ones."""


class _LargeReductions(HazardKind):
    value = "large reduction"
    title = "a sum over very many elements"
    looks_at = ("growing_reductions", "contractions")
    exponents = ByExponents.CURE
    is_measurable = True
    fault = Fault(Effect.GROWS, "{detail} in LOW", ", which ends at {end:.6g}")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from large_reductions(graph, low)
        yield from overflowing_products(graph, low)


KIND: Final = _LargeReductions()
