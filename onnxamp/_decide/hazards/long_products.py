"""Long products, which lose digits on a target that accumulates float16 in float16.

The error of a sum of random terms grows with the root of their number. A product that is split into shorter ones, whose
results are added (split-K), is therefore off by less. Products that stay in float32 for other reasons stay whole, as
far as this is known before deciding.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from onnxamp._decide.exponents.rows import unfit_nodes
from onnxamp._decide.kinds import Hazard, HazardKind, hazards_on
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.patterns.split_products import SUM, may_split
from onnxamp._facts.dtypes import FLOAT16, Format
from onnxamp._facts.kernels import float_types
from onnxamp._facts.ops import attribute
from onnxamp._facts.providers import (
    Accumulation,
    Profile,
    emulated_arithmetic,
    profile_of,
)
from onnxamp._facts.tables import device_of, target_names
from onnxamp._graph.constants import terms_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.options import Options
from onnxamp._options.values import Level

_BEARABLE: Final = 5e-3
"""Relative error from which on a product stays in float32: half the limit for a whole model (1e-2)."""

NEGLIGIBLE: Final = _BEARABLE / 2
"""Relative error of one product up to which the error has no price."""
_FEWEST: Final = 64
"""Fewest terms of a part: adding up more and shorter parts costs as many digits as they save."""

_MOVES: Final = ("Reshape", "Transpose")
_RESHAPE: Final = 5
"""First opset whose Reshape takes the shape as an input."""


def long_products(graph: Graph, low: Format, target: str) -> Iterator[Hazard]:
    """Yield products of so many terms that the error of their float16 sum is too large. Complexity: linear in nodes."""
    for node, terms, error in _products(graph, low, target):
        if error > _BEARABLE:
            text = f"{device_of(target)} sums up {terms:,} products in float16, with an error of about {100 * error:.1f} %"
            yield Hazard(node, KIND, text)


def accumulation_shares(graph: Graph, low: Format, target: str) -> Mapping[int, float]:
    """Return products that the target accumulates in float16 -> their squared error as a share of the limit, up to 1,
    if it is not negligible.

    Complexity: linear in nodes.
    """
    errors = {node: error for node, _, error in _products(graph, low, target)}
    # Above the limit, the hazard itself decides.
    return {
        node: min(1.0, (error / _BEARABLE) ** 2)
        for node, error in errors.items()
        if error > NEGLIGIBLE
    }


def _products(
    graph: Graph, low: Format, target: str
) -> Iterator[tuple[int, int, float]]:
    """Yield products that are summed up in float16, with their terms and their relative errors."""
    profile = profile_of(target)
    lossy = _lossy(profile) if profile is not None and low is FLOAT16 else {}
    for node in graph.nodes_of(lossy):
        terms = terms_of(node, graph.shapes)
        if terms is not None:
            yield node.index, terms, lossy[node.key].error(terms)


def _lossy(profile: Profile) -> Mapping[str, Accumulation]:
    """Return the products that a target sums up in float16."""
    return {
        op: fact
        for op, fact in profile.products.items()
        if fact.accumulator == "float16"
    }


def find_splits(graph: Graph, options: Options) -> dict[int, int]:
    """Return product to split -> the number of its parts: the least divisor of its terms that is accurate enough.

    Complexity: linear in nodes, and in the divisors that are tried.
    """
    profile = emulated_arithmetic(options.target)
    low = options.low
    if profile is None or not may_split(options):
        return {}
    hazards = graph.ask(hazards_on, low, options.target)
    long = [graph.nodes[hazard.node] for hazard in hazards if hazard.reason is KIND]
    able = [
        node
        for node in long
        if _is_plain(graph, node) and _may_be_low(graph, parts_of(node), options)
    ]
    kept = _kept(graph, options) if able else set()
    splits = dict[int, int]()
    for node in able:
        terms = terms_of(node, graph.shapes) or 1
        for parts in range(2, terms // _FEWEST + 1):
            error = profile.products["MatMul"].error(terms // parts)
            # A Reshape makes the parts, so they are equally long.
            is_fit = terms % parts == 0 and error <= NEGLIGIBLE
            if is_fit and node.index not in kept:
                splits[node.index] = parts
                break
    return splits


def parts_of(node: Node) -> tuple[str, ...]:
    """Return the ops that a product becomes, apart from data movement."""
    has_bias = node.key == "Gemm" and node.input(2) != ABSENT
    return ("MatMul", SUM, *["Add"] * has_bias)


def _is_plain(graph: Graph, node: Node) -> bool:
    """Return whether it is a float32 MatMul, or a Gemm that only adds a bias, with factors of known sizes."""
    if (
        node.key not in ("MatMul", "Gemm")
        or graph.scopes[node.scope].opaque
        or not graph.is_float_output(node)
    ):
        return False
    first, second = (graph.shapes[value] for value in node.inputs[:2])
    if not first or not second or 0 in second:
        return False
    factors = (
        attribute(node.proto, name) in (None, 1.0) for name in ("alpha", "beta")
    )
    return not attribute(node.proto, "transA") and all(factors)


def _may_be_low(graph: Graph, ops: Sequence[str], options: Options) -> bool:
    """Return whether the level, the user's lists and kernels allow these ops, and their data movement, in float16."""
    listed = {*ops} - {SUM}
    if options.level == Level.O1 and not options.white.issuperset(listed):
        return False
    if SUM in options.user_black or not options.black.isdisjoint(listed):
        return False
    if graph.book.opsets[""] < _RESHAPE:
        return False
    for signature in (graph.book.get("", op) for op in (*ops, *_MOVES)):
        if signature is None:
            return False
        types = float_types(options.target, signature.op_type, signature.since)
        if options.low.tensor not in types:
            return False
    return True


def _kept(graph: Graph, options: Options) -> set[int]:
    """Return nodes that stay in float32 at the user's request, or because their values do not fit low precision."""
    overrides = find_overrides(graph, options).of_node
    return {
        *unfit_nodes(graph, options),
        *(node for node, override in overrides.items() if not override.low),
    }


class _LongProducts(HazardKind):
    value = "long float16 product"
    title = (
        "the target would lose digits of a long product, which it sums up in float16"
    )
    is_measurable = True
    why_low = "the error of its float16 sum is worth it"
    why_high = "the error of its float16 sum is not worth the Casts"

    def find_on(self, graph: Graph, low: Format, target: str, /) -> Iterator[Hazard]:
        return long_products(graph, low, target)

    def ops(self) -> AbstractSet[str]:
        profiles = filter(None, map(profile_of, target_names()))
        return frozenset().union(*map(_lossy, profiles))

    def prices(self, graph: Graph, low: Format, target: str, /) -> Mapping[int, float]:
        return accumulation_shares(graph, low, target)

    def splits(self, graph: Graph, options: Options, /) -> Mapping[int, int]:
        return find_splits(graph, options)


KIND: Final = _LongProducts()
