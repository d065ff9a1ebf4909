"""Variances and covariances as differences of moments, E[xy] - E[x] E[y], which lose all digits in low precision.

Exporters write the mean as a sum, a pool, a convolution with a window, or a product with weights that add up to 1. They
scale either term by a constant, or add the negated square.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node

_FACTORS: Final = 8
"""Most factors of a term that are followed. A weighted variance has three: the weight, and the number twice."""

DIFFERENCES: Final = frozenset(("Add", "Sub"))
"""The op types of nodes that :func:`moment_difference` may find something at."""


def moment_difference(graph: Graph, node: Node) -> frozenset[int]:
    """Return the nodes of a difference of moments that ends at a node, from E[xy] back to x and y; none for others."""
    for minuend, subtrahend, between in _differences(graph, node):
        mean = _Term(graph, [minuend])
        square = _Term(graph, [subtrahend])
        second = _reduction(graph, mean.factors)
        firsts = [_reduction(graph, [value]) for value in square.factors]
        if second is None or len(firsts) < 2:
            continue
        nodes = {node.index, *between, *mean.nodes, *square.nodes, second.index}
        known = [first for first in firsts if first is not None]
        sources = _shared(graph, second, known) or _of_places(graph, [second, *known])
        if sources and len(known) == len(firsts):
            return frozenset(nodes | sources)
    return frozenset()


def _differences(graph: Graph, node: Node) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the minuend and the subtrahend of a node, and the nodes that negate the subtrahend."""
    if len(node.inputs) != 2 or ABSENT in node.inputs:
        return
    one, other = node.inputs
    if node.key == "Sub":
        yield one, other, []
    elif node.key == "Add":
        for minuend, value in ((one, other), (other, one)):
            negation = graph.producer(graph.passed_on(value), "Neg")
            if negation is not None:
                yield minuend, negation.inputs[0], [negation.index]


def _reduction(graph: Graph, values: Collection[int]) -> Node | None:
    """Return the node that makes the only value as a mean or a sum; None if there is none."""
    facts = op_facts()
    keys = (
        facts.reductions | facts.means | facts.contractions | facts.growing_reductions
    )
    makers = [graph.producer(graph.passed_on(value), *keys) for value in values]
    return makers[0] if len(makers) == 1 else None


def _shared(graph: Graph, second: Node, firsts: Collection[Node]) -> set[int]:
    """Return the nodes from E[x] E[y], and from E[xy], back to x and y; none if the moments are of other values.

    The first moments may read x and y themselves, moved or not, or products of them and weights.
    """
    read = [_read(graph, first) for first in firsts]
    plain = [_Term(graph, values, ends=values) for values in read]
    moved = [_Term(graph, values, products=0) for values in read]
    weighted = [_Term(graph, values, products=1) for values in read]
    for terms in (plain, moved, weighted):
        ends = set[int]().union(*(term.factors for term in terms))
        product = _Term(graph, _read(graph, second), ends=ends)
        factors = set(product.factors)
        is_product = len(product.factors) > 1
        if is_product and not any(factors.isdisjoint(term.factors) for term in terms):
            nodes = set(product.nodes).union(*(term.nodes for term in terms))
            nodes.update(first.index for first in firsts)
            return nodes | set(_normalizers(graph, ends))
    return set()


def _of_places(graph: Graph, reductions: Sequence[Node]) -> set[int]:
    """Return the nodes from sums of constants, weighted by the same shares of 1, back to these; none for others.

    The constants are places, such as the columns of a heat map, and in the second moment their squares.
    """
    terms = [_Term(graph, _read(graph, reduction)) for reduction in reductions]
    shares = {factor for term in terms for factor in term.factors}
    makers = set(_normalizers(graph, shares))
    if len(shares) != 1 or not makers or any(len(term.factors) != 1 for term in terms):
        return set()
    return makers.union(
        *(term.nodes for term in terms), (reduction.index for reduction in reductions)
    )


def _read(graph: Graph, reduction: Node) -> list[int]:
    """Return the values that a mean or a sum is computed from, twice if it squares them."""
    read = [graph.passed_on(value) for value in graph.float_inputs(reduction)]
    if reduction.key == "ReduceSumSquare":
        return 2 * read[:1]
    return read if reduction.key in op_facts().contractions else read[:1]


def _normalizers(graph: Graph, values: Iterable[int]) -> Iterator[int]:
    """Yield the nodes that make weights: only those that add up to 1 leave no part of the mean in the difference."""
    for value in values:
        maker = graph.producer(value)
        if maker is not None and maker.key in op_facts().normalizing:
            yield maker.index


class _Term:
    """The factors of values, without the constants among them.

    Attributes:
        factors: the values that are multiplied, one for each time.
        nodes: the nodes that multiply and scale them.
    """

    def __init__(
        self,
        graph: Graph,
        values: Iterable[int],
        products: int = _FACTORS,
        ends: Collection[int] = (),
    ) -> None:
        """Find the factors.

        Args:
            graph: the graph.
            values: the values.
            products: how many products within each other are taken apart.
            ends: values that are not taken apart.
        """
        self.factors: list[int] = []
        self.nodes = set[int]()
        stack = [(graph.passed_on(value), products) for value in values]
        while stack and len(self.factors) < _FACTORS:
            value, left = stack.pop()
            if value == ABSENT or graph.constants.is_constant(value):
                continue
            maker = None if value in ends else graph.producer(value)
            further = [] if maker is None else _multiplied(graph, maker)
            is_product = len(further) > 1
            # True counts as 1: a product is taken apart only while one is left.
            if maker is None or not further or left < is_product:
                self.factors.append(value)
                continue
            self.nodes.add(maker.index)
            left -= is_product
            stack += [(graph.passed_on(read), left) for read in further]


def _multiplied(graph: Graph, node: Node) -> list[int]:
    """Return the factors of a node other than divisors, or the value that it moves; none for other nodes."""
    facts = op_facts()
    if node.key == "Mul":
        return list(node.inputs)
    if node.key == "Pow" and graph.constants.uniform(node.input(1)) == 2:
        return 2 * [node.inputs[0]]
    is_passing = node.key in facts.carriers - facts.lookups.keys()
    is_quotient = facts.divisors.get(node.key) == (1,)
    return [node.inputs[0]] if is_passing or is_quotient else []
