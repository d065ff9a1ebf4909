"""Sums of many terms: whether their terms are shares of 1, and what reads them before anything divides them."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Hazard, HazardKind, in_range
from onnxamp._decide.patterns.find import patterns_of
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def is_weighted(graph: Graph, node: Node) -> bool:
    """Return whether a sum is a weighted mean: one factor of its terms was normalized."""
    return any(_is_normalized(graph, value) for value in node.inputs[:2])


def _is_normalized(graph: Graph, value: int) -> bool:
    """Return whether a value was divided by its own sum or norm, apart from data movement and factors after that."""
    facts = op_facts()
    rounding = facts.quantize | facts.dequantize
    ends = graph.ask(_softmax_nodes)
    stack = [value]
    for _ in range(_REACH):
        if not stack:
            return False
        node = graph.producer(stack.pop())
        if node is None:
            continue
        if node.key in facts.normalizing or node.index in ends:
            return True
        if node.key in facts.divisors and _leads_to_sum(graph, node):
            return True
        is_factor = node.key in ("Mul", "Div")
        if node.index in graph.exact or node.key == "Cast" or is_factor:
            stack += node.reads
        elif node.key in rounding:
            stack.append(node.input(0))
    return False


_REACH: Final = 16
"""Nodes between a sum and the Softmax of its weights: masks, Dropout, movement."""


def _softmax_nodes(graph: Graph) -> frozenset[int]:
    """Return the nodes of decomposed softmaxes."""
    return frozenset().union(*(match.nodes for match in patterns_of(graph, "softmax")))


def _leads_to_sum(graph: Graph, division: Node) -> bool:
    """Return whether a node divides by a sum or a norm."""
    facts = op_facts()
    sums = facts.growing_reductions | facts.reductions | facts.core_of.keys()
    value = division.input(facts.divisors[division.key][0])
    for _ in range(_REACH):
        node = graph.producer(value)
        if node is None:
            return False
        if node.key in facts.reduces_axes and node.key in sums:
            return True
        if node.key not in facts.norm_arithmetic:
            return False
        value = node.input(0)
    return False


def _readers(graph: Graph, node: Node, seen: set[int]) -> Iterator[Node]:
    """Yield the nodes that read a sum as it is, moved, added to something, or multiplied with a matrix."""
    facts = op_facts()
    stack = [(node, False)]
    while stack:
        last, is_product = stack.pop()
        for reader, _ in graph.readers(last):
            if reader.index in seen or not graph.is_float_output(reader):
                continue
            seen.add(reader.index)
            yield reader
            if reader.index in graph.exact:
                stack.append((reader, is_product))
            elif not is_product and reader.key in facts.additive:
                stack.append((reader, False))
            elif not is_product and reader.key in facts.contractions:
                stack.append((reader, True))


def readers_of_sum(
    graph: Graph, node: Node, seen: set[int], low: Format, kind: HazardKind
) -> Iterator[Hazard]:
    """Yield the hazards of the nodes that read a sum, up to those that divide it.

    Nodes are added to ``seen``, so that all walks of a graph together take linear time.
    """
    for reader in _readers(graph, node, seen):
        why = f"reads the sum of {node.label!r} before anything divides it"
        if reader.key == "Div":
            why = f"divides the sum of {node.label!r}"
        yield Hazard(reader.index, kind, why, unless=in_range(graph, reader, low))
