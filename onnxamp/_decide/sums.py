"""Sums of many terms: whether their terms are shares of 1, and what reads them before anything divides them."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Hazard, HazardKind, in_range
from onnxamp._decide.patterns.find import pattern_nodes
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


def is_weighted(graph: Graph, node: Node, count: int = 0) -> bool:
    """Return whether a sum is a weighted mean: a factor of its terms was normalized, or divided by their ``count``."""
    ports = (2,) if node.key in op_facts().scattered_sums else (0, 1)
    return any(_is_normalized(graph, node.input(port), count) for port in ports)


def averages(graph: Graph, node: Node, value: int, count: int) -> bool:
    """Return whether a node divides a value by a constant that is about the number of terms of a mean."""
    others = [one for one in node.inputs if one != value]
    if node.key not in ("Div", "Mul") or len(others) != 1:
        return False
    number = graph.constants.uniform(others[0])
    if not number or (node.key == "Div" and node.inputs[0] != value):
        return False
    factor = 1 / number if node.key == "Div" else number
    return abs(factor) * count < _ABOUT


_ABOUT: Final = 4.0
"""Factors up to this multiple of 1 / count make a mean of a sum, such as one of the terms that a mask leaves."""


def _is_normalized(graph: Graph, value: int, count: int) -> bool:
    """Return whether a value was divided by its own sum or norm, or by the number of terms of a sum, apart from data
    movement and factors after that.
    """
    facts = op_facts()
    rounding = facts.quantize | facts.dequantize
    ends = graph.ask(pattern_nodes, "softmax")
    stack = [value]
    for _ in range(_REACH):
        if not stack:
            return False
        node = graph.producer(stack.pop())
        if node is None:
            continue
        if node.key in facts.normalizing or node.index in ends:
            return True
        divisor = _divisor(graph, node)
        if divisor != ABSENT and _leads_to_sum(graph, divisor):
            return True
        read = graph.float_inputs(node)
        if count and any(averages(graph, node, one, count) for one in read):
            return True
        is_factor = node.key in ("Mul", "Div")
        if node.index in graph.exact or node.key == "Cast" or is_factor:
            stack += read
        elif node.key in rounding | facts.selections:
            stack.append(node.input(0))
    return False


def _divisor(graph: Graph, node: Node) -> int:
    """Return the value by which, or by a power of which, a node divides; ABSENT if it does not."""
    if node.key == "Pow":
        exponent = graph.constants.uniform(node.input(1))
        return node.input(0) if exponent is not None and exponent < 0 else ABSENT
    return {"Div": node.input(1), "Reciprocal": node.input(0)}.get(node.key, ABSENT)


_REACH: Final = 16
"""Nodes between a sum and the Softmax of its weights: masks, Dropout, movement."""


def _leads_to_sum(graph: Graph, value: int) -> bool:
    """Return whether a divisor is a sum, such as a degree, or a norm."""
    facts = op_facts()
    sums = facts.growing_reductions | facts.reductions | facts.core_of.keys()
    for _ in range(_REACH):
        node = graph.producer(value)
        if node is None:
            return False
        is_reduced = node.key in facts.reduces_axes and node.key in sums
        if is_reduced or node.key in facts.scattered_sums:
            return True
        if node.key not in facts.norm_arithmetic:
            return False
        value = node.input(0)
    return False


def _readers(graph: Graph, node: Node, seen: set[int]) -> Iterator[Node]:
    """Yield the nodes that read a sum as it is, moved, added to something, or multiplied with a matrix.

    One other computed value may be added, as to messages of neighbors. A residual stream goes on from sum to sum, and
    training keeps it in range.
    """
    facts = op_facts()
    stack = [(node, False, False)]
    while stack:
        last, is_product, is_joined = stack.pop()
        for reader, _ in graph.readers(last):
            if reader.index in seen or not graph.is_float_output(reader):
                continue
            is_added = reader.key in facts.additive
            joins = is_added and len(graph.computed_inputs(reader)) > 1
            if joins and (is_joined or is_product):
                continue
            seen.add(reader.index)
            yield reader
            if reader.index in graph.exact:
                stack.append((reader, is_product, is_joined))
            elif not is_product and is_added:
                stack.append((reader, False, is_joined or joins))
            elif not is_product and reader.key in facts.contractions:
                stack.append((reader, True, is_joined))


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
