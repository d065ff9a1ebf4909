"""Decomposed ops, whose inner values leave the range that inputs and results have."""

from collections import defaultdict
from collections.abc import Iterator
from math import sqrt
from typing import Final

from onnxamp._decide.kinds import Claim, Hazard, HazardKind, in_range
from onnxamp._decide.patterns.find import GROWING, patterns_of
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.exact_walks import before_offsets
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Match
from onnxamp._graph.view import Node

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


def exponential_quotients(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the nodes from an exponential to the quotient of numbers that grow with it, as in exp(x) / (1 + exp(x)).

    Both are infinite from x = 11 on, and their quotient is NaN. So decomposed tanh, Mish and sigmoid may be. The
    logarithm of a sum of exponentials is then infinite as well.

    Complexity: linear, because the walk from each exponential is limited.
    """
    if not low.is_narrow:
        return
    softmax = {match.core for match in patterns_of(graph, "softmax")}
    for node in graph.nodes_of(op_facts().exponentials):
        if node.index in softmax or _is_below_one(graph, node):
            continue
        # The square of the exponential, as in Mish, has to be in range as well.
        claims = (Claim(node.outputs[0], most=sqrt(low.max_finite)),)
        for index in sorted(_quotient(graph, node)):
            why = f"leads from {node.label!r} to a quotient, or to a logarithm, of numbers that grow with it"
            yield Hazard(index, KIND, why, rare=True, unless=claims)


def _is_below_one(graph: Graph, exponential: Node) -> bool:
    """Return whether an exponential is of a difference from the largest number, as softmaxes subtract it."""
    difference = graph.producer(graph.passed_on(exponential.inputs[0]), "Sub")
    if difference is None:
        return False
    number, most = map(graph.passed_on, difference.inputs)
    largest = graph.producer(most, "Max", "ReduceMax")
    return largest is not None and number in map(graph.passed_on, largest.reads)


def _quotient(graph: Graph, exponential: Node) -> set[int]:
    """Return an exponential and the nodes from it to quotients of two numbers computed from it, or to the logarithm of
    a sum; none without any.

    Exponentials may be summed up by a product, as attention does that divides at last, or by a pooling. Only what is
    moved, or gets a constant added, is such a sum after that.
    """
    facts = op_facts()
    summing = facts.contractions | facts.means
    large = {exponential.outputs[0]}
    inverse = set[int]()
    nodes = set[int]()
    summed = set[int]()
    stack = [exponential]
    for _ in range(_REACH):
        if not stack:
            break
        last = stack.pop()
        for reader, _ in graph.readers(last):
            was_summed = last.index in summed
            is_sum = reader.key in summing - facts.odds_arithmetic and not was_summed
            is_carried = reader.key in facts.odds_arithmetic
            if was_summed:
                is_added = reader.key in facts.additive
                is_carried = is_added and _has_constant(graph, reader)
            if reader.index in graph.exact or is_sum or is_carried:
                stack += _spread(reader, large, inverse)
            if is_sum or was_summed:
                summed.add(reader.index)
            is_log = reader.key in facts.logarithms and was_summed
            if is_log or _is_quotient(reader, large, inverse):
                nodes |= _between(graph, reader, large | inverse)
    return nodes


def _has_constant(graph: Graph, node: Node) -> bool:
    """Return whether a constant is among the inputs of a node."""
    return any(map(graph.constants.is_constant, node.reads))


_REACH: Final = 16
"""Nodes whose readers are visited from an exponential: one in a Mish leads to its quotient through five."""


def _spread(node: Node, large: set[int], inverse: set[int]) -> list[Node]:
    """Note what a node computes from large numbers, or their inverses; return the node if that is new."""
    divisors = [node.input(port) for port in op_facts().divisors.get(node.key, ())]
    values = inverse if not large.isdisjoint(divisors) else large
    # Nearly always, there are no inverses, and a Concat may have thousands of inputs.
    if inverse and not divisors and not inverse.isdisjoint(node.inputs):
        values = inverse
    is_new = not values.issuperset(node.writes)
    values.update(node.writes)
    return [node] if is_new else []


def _is_quotient(node: Node, large: set[int], inverse: set[int]) -> bool:
    """Return whether a node divides a large number by another one, or multiplies one by the inverse of another."""
    if node.key == "Div":
        return large.issuperset(node.inputs)
    is_product = node.key == "Mul"
    return is_product and not (
        large.isdisjoint(node.inputs) or inverse.isdisjoint(node.inputs)
    )


def _between(graph: Graph, end: Node, values: set[int]) -> set[int]:
    """Return a node and the nodes before it that compute some values."""
    # Nearly always, there are few values, and a Concat may have thousands of inputs.
    read = defaultdict[int, list[int]](list)
    for value in values:
        for reader, _ in graph.consumers(value):
            read[reader.index].append(value)
    nodes = {end.index}
    stack = [end]
    while stack:
        for value in read[stack.pop().index]:
            maker = graph.producer(value)
            if maker is not None and maker.index not in nodes:
                nodes.add(maker.index)
                stack.append(maker)
    return nodes


def divided_products(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield products whose one part divides the other, with the nodes between.

    Cameras project points like this: pixels, times the distance of the point, are divided by the distance. And so does
    linear attention whose values have a column of ones. The quotient is of ordinary size, whatever the product is.
    """
    if not low.is_narrow:
        return
    for node in graph.nodes_of({"Div"}):
        # Most divisors are constants or lengths.
        divisor = _back_to_product(graph, node.inputs[1])
        dividend = _back_to_product(graph, node.inputs[0]) if divisor else []
        if not dividend or dividend[-1] is not divisor[-1]:
            continue
        parts = (*dividend, *divisor)
        # A part that is computed from the other one is no part.
        if node.index in {part.index for part in parts} or len(dividend) == 1:
            continue
        why = f"makes numbers that {node.label!r} divides by each other"
        for one in (*parts, *_sums_before(graph, dividend[-1]), node):
            claims = in_range(graph, one, low)
            yield Hazard(one.index, KIND, why, rare=True, unless=claims)


def _back_to_product(graph: Graph, value: int) -> list[Node]:
    """Return the nodes from a part of sums of products back to what adds them up, the last; none for other values."""
    path = before_offsets(graph, value, _REACH)
    is_product = bool(path) and path[-1].key in op_facts().contractions
    return path if is_product else []


def _sums_before(graph: Graph, product: Node) -> list[Node]:
    """Return the product of computed values that another such product reads, as the state of linear attention."""
    facts = op_facts()
    if len(graph.computed_inputs(product)) < 2:
        return []
    makers = map(graph.producer, map(graph.passed_on, product.inputs))
    return [
        maker
        for maker in makers
        if maker is not None
        and maker.key in facts.contractions
        and len(graph.computed_inputs(maker)) == 2
    ]


class _Decomposed(HazardKind):
    value = "decomposed pattern"
    title = "part of a decomposed op whose intermediate values exceed the range of low precision"
    looks_at = ("core_of",)
    is_measurable = True
    ends_by_folding = True

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from decomposed_patterns(graph, low)
        yield from exponential_quotients(graph, low)
        yield from divided_products(graph, low)


KIND: Final = _Decomposed()
