"""The values of the main graph that each of its nodes needs, also through bodies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxamp._graph.view import ABSENT, View


@dataclass(frozen=True, slots=True)
class Wiring:
    """The main-graph values that main-graph nodes need."""

    needs: Mapping[int, Sequence[int]]
    """Main-graph node -> main-graph values that it or its bodies read or return."""
    readers: Mapping[int, Sequence[int]]
    """Main-graph value -> main-graph nodes that need it."""
    outermost: Sequence[int]
    """Node of any scope -> the main-graph node that contains it, or the node itself."""


def wire(view: View) -> Wiring:
    """Resolve the main graph. Complexity: linear in nodes and reads of all scopes."""
    containers = [ABSENT] * len(view.scopes)
    for scope in view.scopes[1:]:  # a scope comes after the one around it
        containers[scope.index] = (
            scope.owner if scope.parent == 0 else containers[scope.parent]
        )
    outermost = [
        node.index if node.scope == 0 else containers[node.scope] for node in view.nodes
    ]
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
