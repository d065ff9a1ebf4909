"""The results of a node, followed into bodies and out of them."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, passed_values


class PassedResults(NamedTuple):
    """The results of a node, and the values as which control flow passes them on.

    Attributes:
        values: the results and these values.
        owners: nodes of control flow, each with the value that it passes on.
    """

    values: Collection[int]
    owners: Sequence[tuple[int, int]]

    def readers(self, graph: Graph) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that read any of the values, with the input position."""
        for value in self.values:
            yield from graph.consumers(value)


def passed_on(graph: Graph, node: Node) -> PassedResults:
    """Return the results of a node, and the values that they become inside and after bodies."""
    passed = graph.ask(passed_values)
    seen = dict.fromkeys(node.writes)
    stack = [*seen] if passed else []
    owners = list[tuple[int, int]]()
    while stack:
        for value in passed.get(stack.pop(), ()):
            if value not in seen:
                seen[value] = None
                stack.append(value)
                maker = graph.values[value].producer
                scope = graph.scopes[graph.values[value].scope]
                owners.append((scope.owner if maker == ABSENT else maker, value))
    return PassedResults(seen, owners)
