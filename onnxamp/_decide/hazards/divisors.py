"""Divisors that low precision rounds to zero: exponentials, Softplus, squares, and sums and roots of them.

exp(-18) and the square of 0.0001 are ordinary numbers in float32. float16 makes zero of them, so that the quotient is
infinite, or NaN where the dividend vanishes as well. Few samples show it. bfloat16 has the range of float32.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Claim, Effect, Fault, Hazard, HazardKind
from onnxamp._decide.patterns.find import GROWING, pattern_nodes
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.exact_walks import readers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.powers import squared_value
from onnxamp._graph.numbers.unmixed import Unmixed
from onnxamp._graph.view import ABSENT, Node

_REACH: Final = 16
"""Nodes that are followed back from a divisor."""


def vanishing_divisors(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield divisions by values that may vanish, and the nodes that compute these.

    Decomposed normalizations and softmaxes are a hazard of their own.

    Complexity: linear.
    """
    if not low.is_narrow:
        return
    facts = op_facts()
    arithmetic = facts.odds_arithmetic | facts.norm_arithmetic
    # A sum with something else does not vanish, and neither does a product if that is large.
    small = Unmixed(graph, set(), facts.additive | facts.commutative)
    patterns: frozenset[int] | None = None
    read = set[int]()
    for node in graph.computing:
        divisors = [node.input(port) for port in facts.divisors.get(node.key, ())]
        if small.values.isdisjoint(divisors):
            if _vanishes(graph, node):
                small.values.update(node.writes)
            elif node.key in arithmetic:
                small.pass_through(node)
            continue
        if patterns is None:
            patterns = pattern_nodes(graph, *GROWING)
        if node.key not in facts.logarithms and node.index not in patterns:
            yield from _hazards_of(graph, node, small.values, low, read)


def _hazards_of(
    graph: Graph, end: Node, small: set[int], low: Format, read: set[int]
) -> Iterator[Hazard]:
    """Yield a division, the nodes that compute its divisor, and those that read an inverse."""
    (port,) = op_facts().divisors[end.key]
    divisor = end.input(port)
    unless = (Claim(divisor, least=low.smallest_normal),)
    why = "divides by what may be too small"
    yield Hazard(end.index, KIND, why, rare=True, unless=unless)
    why = f"computes the divisor of {end.label!r}"
    for maker in _makers(graph, divisor, small):
        yield Hazard(maker.index, KIND, why, rare=True, unless=unless)
    # A quotient of two small numbers does not leave the range.
    if small.isdisjoint(set(end.reads) - {divisor}):
        why = f"reads the quotient of {end.label!r}, which is large where its divisor is small"
        for reader in readers_through_exact(graph, end, read):
            yield Hazard(reader.index, KIND, why, rare=True, unless=unless)


def _makers(graph: Graph, divisor: int, small: set[int]) -> Iterator[Node]:
    """Yield the nodes that compute a divisor from the ops whose results vanish."""
    seen = set[int]()
    stack = [divisor]
    while stack and len(seen) < _REACH:
        value = stack.pop()
        maker = graph.producer(value) if value in small else None
        if maker is None or maker.index in seen:
            continue
        seen.add(maker.index)
        yield maker
        if not _vanishes(graph, maker):
            stack += maker.reads


def _vanishes(graph: Graph, node: Node) -> bool:
    """Return whether a node maps ordinary numbers to some that underflow."""
    if node.key in op_facts().vanishing:
        return True
    return squared_value(graph, node) != ABSENT and not graph.constants.is_constant(
        node.output(0)
    )


class _Divisors(HazardKind):
    value = "divisor"
    title = "low precision rounds a divisor to zero"
    looks_at = ("divisors", "vanishing")
    is_measurable = True
    fault = Fault(
        Effect.ROUNDS_AWAY,
        "{detail} in LOW, which rounds it to zero",
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return vanishing_divisors(graph, low)


KIND: Final = _Divisors()
