"""Long products, of which a target that sums up float16 in float16 loses digits."""

from collections.abc import Iterator, Mapping
from typing import Final

from onnxamp._decide.verdicts import Hazard, Kind
from onnxamp._dtypes import FLOAT16, Format
from onnxamp._graph.constants import terms_of
from onnxamp._graph.graph import Graph
from onnxamp._ops.profiles import Profile, profile_of

_BEARABLE: Final = 5e-3
"""Relative error from which on a product stays float32: half the limit for a whole model (1e-2)."""

NEGLIGIBLE: Final = _BEARABLE / 2
"""Relative error of one product up to which it pays nothing for it."""


def long_products(graph: Graph, low: Format, target: str) -> Iterator[Hazard]:
    """Yield products of so many terms that the error of their float16 sum is too large. Complexity: linear in nodes."""
    profile = profile_of(target)
    if profile is None or low is not FLOAT16:
        return
    for node, terms, error in _products(graph, profile):
        if error > _BEARABLE:
            text = f"{profile.name} sums up {terms:,} products in float16, with an error of about {100 * error:.1f} %"
            yield Hazard(node, KIND, text)


def accumulation_shares(graph: Graph, low: Format, target: str) -> Mapping[int, float]:
    """Return products that the target accumulates in float16 -> their squared error as a share of the limit, up to 1,
    if it is not negligible.

    Complexity: linear in nodes.
    """
    profile = profile_of(target)
    if profile is None or low is not FLOAT16:
        return {}
    errors = (
        (node, error)
        for node, _, error in _products(graph, profile)
        if error > NEGLIGIBLE
    )
    return {node: min(1.0, (error / _BEARABLE) ** 2) for node, error in errors}


def _products(graph: Graph, profile: Profile) -> Iterator[tuple[int, int, float]]:
    """Products that are summed up in float16, their terms and their relative errors."""
    lossy = {
        op: fact
        for op, fact in profile.products.items()
        if fact.accumulator == "float16"
    }
    for node in graph.nodes_of(frozenset(lossy)):
        terms = terms_of(node, graph.shapes)
        if terms is not None:
            yield node.index, terms, lossy[node.key].error(terms)


KIND: Final = Kind(
    "long float16 product",
    title="the target would lose digits of a long product, which it sums up in float16",
    on_target=long_products,
    is_measurable=True,
)
