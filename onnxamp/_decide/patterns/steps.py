"""Steps that the walks through decomposed ops share."""

from collections.abc import Container
from typing import Final

from onnxamp._facts.ops import is_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node

REACH: Final = 32
"""Most nodes that one walk may visit; decomposed normalizations have about 20 at most."""


def back_to_reduction(
    graph: Graph, value: int, reductions: Container[str]
) -> set[int]:
    """Return nodes from ``value`` back to a reduction, through data movement and scaling; empty if there is none."""
    path: set[int] = set()
    for _ in range(REACH):
        node = graph.producer(value)
        if node is None:
            return set()
        path.add(node.index)
        if node.key in reductions:
            return path
        if not is_exact(node.proto) and node.key not in ("Mul", "Div"):
            return set()
        value = node.input(0)
    return set()


def carries_on(node: Node) -> bool:
    """Return whether the node may stand between a root or a sum and its division."""
    return is_exact(node.proto) or node.key == "Reciprocal"


def scales(graph: Graph, node: Node, value: int) -> bool:
    """Return whether the node multiplies or divides the value."""
    return node.key in ("Div", "Mul") and value in map(graph.passed_on, node.inputs)
