"""Numbers near 1 whose last digits decide a result: 1 + x before a logarithm, exp(x) - 1, the cosine before an angle.

If x is small, 1 + x holds none of its digits in low precision. Few samples show that inside a network, because they
make numbers of ordinary size.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.exact_walks import makers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.channels import MOST_WEIGHTS, weight_rows
from onnxamp._graph.numbers.distances import cosine_nodes
from onnxamp._graph.view import Node


class Needed(NamedTuple):
    """A node that must be float32, the reason as a verb phrase, and whether samples may lack what shows it."""

    node: int
    why: str
    rare: bool = False


def near_one(graph: Graph, low: Format) -> Iterator[Needed]:
    """Yield sums 1 + x before a logarithm, and differences exp(x) - 1: if x is small, 1 + x holds none of its digits.

    The same is true of 1 - cos(x) and of sqrt(1 + x) - 1. The angle of a cosine near 1 needs its last digits as well,
    and so do distances in hyperbolic space, acosh(1 + x).

    Complexity: linear.
    """
    facts = op_facts()
    for node in graph.nodes_of(facts.logarithms):
        yield from _leading_sum(graph, node)
        yield from _opposite(graph, node)
    for node in graph.nodes_of(facts.steep):
        yield from _leading_sum(graph, node)
        yield from _cosine_distance(graph, node)
    # Hardly any node reads a 1.
    floats = graph.constants.floats().items()
    ones = {value for value, stats in floats if stats and stats.uniform in _ONES}
    for node in graph.nodes_of(facts.additive):
        if ones.isdisjoint(node.inputs):
            continue
        if _is_beside_one(graph, node, subtracts=True):
            yield from _leading(graph, node, facts.exponentials | facts.ones_at_zero)
            yield from _curved(graph, node)
            yield from _tabulated(graph, low, node)
        if _is_beside_one(graph, node):
            yield from _cosine_distance(graph, node)


def _path_to(graph: Graph, end: Node) -> list[Node]:
    """Return the nodes that compute what a node reads, and the exact ops between."""
    values = graph.float_inputs(end)
    makers = chain.from_iterable(
        makers_through_exact(graph, value) for value in values
    )
    return list(islice(makers, _REACH))


def _cosine_distance(graph: Graph, end: Node) -> Iterator[Needed]:
    """Yield the nodes from the product of normalized vectors to what needs the last digits of their cosine, if any."""
    path = _path_to(graph, end)
    cosines = set[int]().union(*(cosine_nodes(graph, node) for node in path))
    if cosines:
        why = (
            f"leads from a cosine near 1 to {end.label!r}, which needs its last digits"
        )
        nodes = cosines | {end.index, *(node.index for node in path)}
        yield from (Needed(index, why) for index in sorted(nodes))


def _leading_sum(graph: Graph, end: Node) -> Iterator[Needed]:
    """Yield a node, and the exact ops between it and a sum with 1, with this sum."""
    path = _path_to(graph, end)
    sums = [node for node in path if node.key in op_facts().additive]
    if any(_is_beside_one(graph, total) for total in sums):
        yield from _all_of(path, end)


def _leading(graph: Graph, end: Node, starts: frozenset[str]) -> Iterator[Needed]:
    """Yield a node, and the exact ops between it and a number near 1 that one of some ops makes, with this op."""
    path = _path_to(graph, end)
    if any(node.key in starts for node in path):
        yield from _all_of(path, end)


def _all_of(path: Sequence[Node], end: Node) -> Iterator[Needed]:
    """Yield all nodes of a path."""
    why = f"leads from a number near 1 to {end.label!r}, which needs its last digits"
    yield from (Needed(node.index, why) for node in (*path, end))


def _curved(graph: Graph, end: Node) -> Iterator[Needed]:
    """Yield a difference between 1 and a root, a power or the reciprocal of a number near 1, with the nodes from it."""
    path = _path_to(graph, end)
    for curve in path:
        if curve.key not in op_facts().curves - op_facts().logarithms:
            continue
        leading = list(_leading_sum(graph, curve))
        if leading or _is_flat(graph, curve):
            yield from leading
            yield from _all_of(path, end)


def _is_flat(graph: Graph, node: Node) -> bool:
    """Return whether a node raises numbers to a power so small that they become 1 with a few different last digits."""
    exponent = graph.constants.uniform(node.input(1)) if node.key == "Pow" else None
    return exponent is not None and 0 < abs(exponent) <= _FLAT


def _tabulated(graph: Graph, low: Format, end: Node) -> Iterator[Needed]:
    """Yield a difference between 1 and shares of 1 from a table, or quotients of such, and the nodes from the table.

    Schedules of diffusion models hold what is left of an image after each step, 0.9999 after the first.
    """
    facts = op_facts()
    passes = facts.moves_data | facts.linear | facts.curves
    path = list[Node]()
    tables = set[int]()
    stack = graph.float_inputs(end)
    while stack:
        value = stack.pop()
        maker = graph.producer(value)
        if value in graph.constants.tensors:
            tables.add(value)
        elif maker is None or maker.key not in passes or len(path) == _REACH:
            return
        else:
            path.append(maker)
            stack += graph.float_inputs(maker)
    if any(has_near_one(graph, value, low) for value in tables):
        why = f"leads from a table of numbers near 1 to {end.label!r}, which needs their last digits"
        yield from (Needed(node.index, why) for node in (*path, end))


def has_near_one(graph: Graph, value: int, low: Format) -> bool:
    """Return whether a constant holds shares of 1, some of which low precision hardly tells from 1."""
    stats = graph.constants.stats(value)
    if stats is None or not 0 < stats.largest <= 1 or stats.uniform is not None:
        return False
    numbers = graph.constants.numbers(value, most=MOST_WEIGHTS)
    if numbers is None:
        return False
    is_near = (numbers < 1) & (numbers > 1 - _DIGITS * low.epsilon)
    return bool((numbers >= 0).all() and is_near.any())


def _opposite(graph: Graph, end: Node) -> Iterator[Needed]:
    """Yield a logarithm, and the product with weights of both signs before it, with the exact ops between.

    The weights form a difference that is positive on the inputs of the model's domain, and that may be far smaller than
    its terms.
    """
    makers = makers_through_exact(graph, end.input(0))
    path = list(islice(makers, _REACH))
    if any(_has_both_signs(graph, node) for node in path):
        why = f"leads from a difference that weights make to {end.label!r}, which needs its last digits"
        yield from (Needed(node.index, why, rare=True) for node in (*path, end))


def _has_both_signs(graph: Graph, node: Node) -> bool:
    """Return whether a node is a product with a matrix that has a positive and a negative number in a column."""
    if node.key not in ("MatMul", "Gemm"):
        return False
    rows = weight_rows(graph, node)
    if rows is None:
        return False
    return bool(((rows > 0).any(1) & (rows < 0).any(1)).any())


_FLAT: Final = 1 / 16
"""Exponents up to which a power, less 1, has lost a few percent of its digits in float16, unless the base is huge."""
_DIGITS: Final = 64.0
"""Steps below 1 up to which the difference from 1 has lost a percent of its digits."""
_ONES: Final = (1.0, -1.0)
_REACH: Final = 16
"""Nodes between a number near 1 and what needs its digits: bounds, movement."""


def _is_beside_one(graph: Graph, node: Node, *, subtracts: bool = False) -> bool:
    """Return whether a node adds something and 1, or subtracts one from the other."""
    numbers = [graph.constants.uniform(value) for value in node.reads]
    known = [number for number in numbers if number is not None]
    if len(numbers) != 2 or len(known) != 1 or abs(known[0]) != 1:
        return False
    return not subtracts or (node.key == "Sub") == (known[0] == 1)
