"""Sums and means that a target accumulates in float16, where they overflow or cancel."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from math import sqrt
from typing import Final

from onnxamp._decide.kinds import Claim, Hazard, HazardKind, KnownNodes
from onnxamp._facts.dtypes import FLOAT16, Format
from onnxamp._facts.providers import Profile, profile_of
from onnxamp._facts.tables import target_names
from onnxamp._graph.constants import summed_terms
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node

_USUAL: Final = 64
"""Magnitude of activations that means and norms should tolerate."""


def _overflowing_sums(graph: Graph, profile: Profile) -> Iterator[Hazard]:
    """Yield means and norms over so many elements that their sum, or that of squares, may overflow."""
    risky = frozenset(op for op, fact in profile.sums.items() if fact.overflows)
    for node in graph.nodes_of(risky):
        count = summed_terms(node, graph.shapes)
        # An unknown number of elements may be any.
        if count is None or count * _USUAL > FLOAT16.max_finite:
            many = "many" if count is None else f"{count:,}"
            why = f"{profile.name} keeps the sum of {many} elements in float16"
            yield Hazard(node.index, KIND, why, unless=_claims(node, count))


def _claims(node: Node, count: int | None) -> tuple[Claim, ...]:
    """Return the claim that neither the sum of so many elements nor that of their squares overflows.

    Elements may be twice as large after the mean is subtracted from them.
    """
    if not count:
        return ()
    each = FLOAT16.max_finite / count
    # Each addition rounds to the nearest number, which at most doubles what it adds.
    return (Claim(node.input(0), most=min(each / 2, sqrt(each) / 2)),)


def _cancelling(graph: Graph, profile: Profile) -> Iterator[Hazard]:
    """Yield normalizations that subtract the mean in float16, which leaves few digits if it is large."""
    for node in graph.nodes_of(profile.cancelling):
        yield Hazard(node.index, KIND, f"{profile.name} subtracts the mean in float16")


class _Accumulators(HazardKind):
    value = "float16 accumulator"
    title = "the target would sum up or subtract in float16"

    def find_on(self, graph: Graph, low: Format, target: str, /) -> Iterator[Hazard]:
        profile = profile_of(target)
        if profile is not None and low is FLOAT16:
            yield from _overflowing_sums(graph, profile)
            yield from _cancelling(graph, profile)

    def breaks_always(self, op: str, low: Format, target: str, /) -> bool:
        profile = profile_of(target)
        return profile is not None and low is FLOAT16 and op in profile.cancelling

    def ops(self) -> AbstractSet[str]:
        ops = set[str]()
        for profile in filter(None, map(profile_of, target_names())):
            ops |= profile.cancelling
            ops |= {op for op, fact in profile.sums.items() if fact.overflows}
        return ops

    def spared(self, known: KnownNodes, /) -> AbstractSet[int]:
        """Return the nodes whose sums were measured, which overrules estimates."""
        return known.fitting


KIND: Final = _Accumulators()
