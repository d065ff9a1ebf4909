"""How nodes and values of a graph depend on each other, across its bodies."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxamp._graph.view import ABSENT, Node, View


class Wiring(NamedTuple):
    """The main-graph values that main-graph nodes need."""

    needs: Mapping[int, Sequence[int]]
    """Main-graph node -> main-graph values that it or its bodies read or return."""
    readers: Mapping[int, Sequence[int]]
    """Main-graph value -> main-graph nodes that need it."""
    outermost: Sequence[int]
    """Node of any scope -> the main-graph node that contains it, or the node itself."""


def leading_to(view: View, values: Iterable[int]) -> tuple[list[Node], set[int]]:
    """Return the nodes that some values depend on, in order, and the values with all that these nodes read.

    Complexity: linear in nodes.
    """
    needed = set(values)
    nodes = list[Node]()
    for node in reversed(view.order):
        if not needed.isdisjoint(node.writes):
            needed.update(node.reads)
            nodes.append(node)
    return nodes[::-1], needed


def wire(view: View) -> Wiring:
    """Return the wiring of the main graph. Complexity: linear in nodes and reads of all scopes."""
    containers = [ABSENT] * len(view.scopes)
    # A scope comes after the one around it, so the entry of its parent is there.
    for scope in view.scopes[1:]:
        containers[scope.index] = (
            scope.owner if scope.parent == 0 else containers[scope.parent]
        )
    outermost = [
        node.index if node.scope == 0 else containers[node.scope]
        for node in view.nodes
    ]
    # Dictionaries without values are sets that keep their order.
    needs: dict[int, dict[int, None]] = {index: {} for index in view.scopes[0].nodes}
    readers: dict[int, dict[int, None]] = {}
    for value in view.values:
        if value.scope == 0:
            returned = (
                containers[scope]
                for scope, _ in view.results[value.index]
                if scope != 0
            )
            for node in (
                *(outermost[node] for node, _ in view.uses[value.index]),
                *returned,
            ):
                needs[node][value.index] = None
                readers.setdefault(value.index, {})[node] = None
    return Wiring(
        {node: tuple(values) for node, values in needs.items()},
        {value: tuple(nodes) for value, nodes in readers.items()},
        outermost,
    )
