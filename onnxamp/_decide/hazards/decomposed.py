"""Decomposed ops, whose inner values leave the range that inputs and results have."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.patterns import patterns_of
from onnxamp._decide.verdicts import Hazard, Kind
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph


def decomposed_patterns(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Decomposed ops whose inner values, such as squares, leave the range that inputs and results have."""
    for kind in ("normalization", "softmax", "magnitude"):
        for match in patterns_of(graph, kind):
            why = f"part of the {kind} around {graph.nodes[match.core].label!r}"
            yield from (Hazard(index, KIND, why) for index in sorted(match.nodes))


KIND: Final = Kind(
    "decomposed pattern",
    title="part of a decomposed op whose intermediate values exceed the range of low precision",
    rule=decomposed_patterns,
    is_measurable=True,
)
