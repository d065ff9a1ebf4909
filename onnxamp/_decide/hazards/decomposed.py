"""Decomposed ops, whose inner values leave the range that inputs and results have."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Claim, Hazard, HazardKind, in_range
from onnxamp._decide.patterns import GROWING, patterns_of
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Match

_DIGITS: Final = 64
"""Smallest numbers of the type that make up a number whose rounding is off by less than a percent."""


def decomposed_patterns(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the nodes of decomposed ops whose inner values, such as squares, leave the range of inputs and results."""
    for kind in GROWING:
        for match in patterns_of(graph, kind):
            why = f"part of the {kind} around {graph.nodes[match.core].label!r}"
            claims = _claims(graph, match, low)
            for index in sorted(match.nodes):
                yield Hazard(index, KIND, why, unless=claims)


def _claims(graph: Graph, match: Match, low: Format) -> tuple[Claim, ...]:
    """Return the claims under which an op's inner values suit low precision; none if no range can show it.

    The exponentials of a softmax do if neither they nor their sum leave the range at its upper end, and if they keep
    digits at the lower one. Small squares vanish whatever the range is.
    """
    if match.kind != "softmax":
        return ()
    least = _DIGITS * low.smallest_subnormal
    claims = [Claim(graph.nodes[match.core].outputs[0], least=least)]
    for node in graph.at(match.nodes):
        claims += in_range(graph, node, low)
    return tuple(claims)


class _Decomposed(HazardKind):
    value = "decomposed pattern"
    title = "part of a decomposed op whose intermediate values exceed the range of low precision"
    looks_at = ("core_of",)
    is_measurable = True
    ends_by_folding = True

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return decomposed_patterns(graph, low)


KIND: Final = _Decomposed()
