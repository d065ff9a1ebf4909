"""Sums over so many elements that they exceed the range of low precision."""

from collections.abc import Iterator
from math import prod
from typing import Final

from onnxamp._decide.kinds import (
    ByExponents,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    in_range,
)
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT


def large_reductions(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield sums over so many elements that terms of magnitude 1 reach an eighth of the largest finite number."""
    limit = low.max_finite / 8
    for node in graph.nodes_of(op_facts().growing_reductions):
        if ABSENT in (node.input(0), node.outputs[0]):
            continue
        before = graph.shapes[node.inputs[0]]
        after = graph.shapes[node.outputs[0]]
        if before is None or after is None:
            continue
        sizes = [size for size in before if size is not None]
        kept = [size for size in after if size is not None]
        if len(sizes) < len(before) or len(kept) < len(after) or not prod(kept):
            continue
        # Each element of the result adds up its share of the elements that are read.
        count = prod(sizes) // prod(kept)
        if count > limit:
            why = f"sums {count} elements at a time"
            yield Hazard(node.index, KIND, why, unless=in_range(graph, node, low))


class _LargeReductions(HazardKind):
    value = "large reduction"
    title = "a sum over very many elements"
    looks_at = ("growing_reductions",)
    exponents = ByExponents.CURE
    is_measurable = True
    fault = Fault(Effect.GROWS, "{detail} in LOW", ", which ends at {end:.6g}")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return large_reductions(graph, low)


KIND: Final = _LargeReductions()
