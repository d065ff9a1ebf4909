"""Hazards of a target that sums up float16 in float16: long products lose digits, means overflow on their way."""

from collections.abc import Iterator, Mapping
from typing import Final

from onnxamp._decide.verdicts import Hazard, Reason
from onnxamp._dtypes import FLOAT16, Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.terms import summed_terms, terms_of
from onnxamp._ops.profiles import Profile, profile_of

_BEARABLE: Final = 5e-3
"""Relative error of one product from which on it stays float32: half of what a whole model may have (1e-2)."""

NEGLIGIBLE: Final = _BEARABLE / 2
"""Relative error of one product up to which it pays nothing for it."""

_USUAL: Final = 64
"""Magnitude of activations that means and norms should bear."""


def accumulator_hazards(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Nodes whose sums the target cannot hold in float16, in node order.

    Complexity: linear in nodes.
    """
    profile = profile_of(target)
    if profile is None or low is not FLOAT16:
        return []
    found = [*_long_products(graph, profile), *_overflowing_sums(graph, profile), *_cancelling(graph, profile)]
    return sorted(found, key=lambda hazard: hazard.node)


def accumulation_shares(graph: Graph, low: Format, target: str) -> Mapping[int, float]:
    """Products that the target sums up in float16 -> their squared error as a share of what is bearable, up to 1; those
    with a share that counts.

    Complexity: linear in nodes.
    """
    profile = profile_of(target)
    if profile is None or low is not FLOAT16:
        return {}
    errors = ((node, error) for node, _, error in _products(graph, profile) if error > NEGLIGIBLE)
    return {node: min(1.0, (error / _BEARABLE) ** 2) for node, error in errors}


def _long_products(graph: Graph, profile: Profile) -> Iterator[Hazard]:
    """Products of so many terms that their float16 sum is off by more than is bearable."""
    for node, terms, error in _products(graph, profile):
        if error > _BEARABLE:
            text = f"{profile.name} sums up {terms:,} products in float16, with an error of about {100 * error:.1f} %"
            yield Hazard(node, Reason.PRODUCT, text)


def _products(graph: Graph, profile: Profile) -> Iterator[tuple[int, int, float]]:
    """Products that are summed up in float16, their terms and their relative errors."""
    lossy = {op: fact for op, fact in profile.products.items() if fact.accumulator == "float16"}
    for node in graph.nodes_of(frozenset(lossy)):
        terms = terms_of(node, graph.shapes)
        if terms is not None:
            yield node.index, terms, lossy[node.key].error(terms)


def _overflowing_sums(graph: Graph, profile: Profile) -> Iterator[Hazard]:
    """Means and norms over so many elements that their sum, or that of squares, may leave the range."""
    risky = frozenset(op for op, fact in profile.sums.items() if fact.overflows)
    for node in graph.nodes_of(risky):
        count = summed_terms(node, graph.shapes)
        if count is None or count * _USUAL > FLOAT16.max_finite:
            many = "many" if count is None else f"{count:,}"
            yield Hazard(node.index, Reason.ACCUMULATION, f"{profile.name} keeps the sum of {many} elements in float16")


def _cancelling(graph: Graph, profile: Profile) -> Iterator[Hazard]:
    """Normalisations that subtract the mean in float16: where it is large, little of the result is left."""
    for node in graph.nodes_of(profile.cancelling):
        yield Hazard(node.index, Reason.ACCUMULATION, f"{profile.name} subtracts the mean in float16")
