"""The states of loops, and the nodes of bodies."""

from collections.abc import Sequence
from typing import NamedTuple

from onnxamp._graph.bounds.bound import Bound
from onnxamp._graph.bounds.counters import Increment
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


class Counter(NamedTuple):
    """A state to which each turn of a loop adds something.

    Attributes:
        added: what a turn adds.
        during: the bound before any turn.
        end: the bound after the last turn.
    """

    added: Increment
    during: Bound
    end: Bound


def bodies_of(graph: Graph) -> dict[int, Sequence[Node]]:
    """Return the nodes of the bodies of each node that has any, in the order in which they are computed."""
    found = dict[int, Sequence[Node]]()
    counts = dict[int, int]()
    for position, node in enumerate(graph.order):
        if node.bodies:
            inner = [graph.scopes[body].nodes for _, body in node.bodies]
            count = sum(len(nodes) for nodes in inner)
            count += sum(counts.get(index, 0) for nodes in inner for index in nodes)
            counts[node.index] = count
            found[node.index] = graph.order[position - count : position]
    return found
