"""Decomposed ops, whose inner values leave the range that inputs and results have."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Hazard, HazardKind
from onnxamp._decide.patterns import GROWING, patterns_of
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph


def decomposed_patterns(graph: Graph) -> Iterator[Hazard]:
    """Yield the nodes of decomposed ops whose inner values, such as squares, leave the range of inputs and results."""
    for kind in GROWING:
        for match in patterns_of(graph, kind):
            why = f"part of the {kind} around {graph.nodes[match.core].label!r}"
            yield from (Hazard(index, KIND, why) for index in sorted(match.nodes))


class _Decomposed(HazardKind):
    value = "decomposed pattern"
    title = "part of a decomposed op whose intermediate values exceed the range of low precision"
    looks_at = ("core_of",)
    is_measurable = True
    ends_by_folding = True

    def find(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        return decomposed_patterns(graph)


KIND: Final = _Decomposed()
