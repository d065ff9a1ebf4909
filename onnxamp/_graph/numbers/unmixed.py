"""What arithmetic computes from values of a kind, such as probabilities, before it mixes them with others."""

from collections.abc import Iterable

from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.known import is_known
from onnxamp._graph.view import Node


class Unmixed:
    """Values that arithmetic computes from some values without mixing them with others.

    Attributes:
        values: these values, and the results of :meth:`pass_through`.
        mixing: ops whose result is like any other number if they read another computed value.
    """

    def __init__(self, graph: Graph, values: set[int], mixing: frozenset[str]) -> None:
        self.graph = graph
        self.values = values
        self.mixing = mixing

    def pass_through(self, node: Node) -> None:
        """Add the outputs of a node that computes them from these values and constants, or does not mix others in."""
        # Most nodes read none.
        if self.values.isdisjoint(node.inputs):
            return
        types = self.graph.types
        given = [value for value in node.reads if types[value] in FLOAT_TENSORS]
        if self.values.isdisjoint(given):
            return
        if node.key in self.mixing:
            # A number may be computed of constants, as a Cast of a double.
            for value in given:
                if value not in self.values and not is_known(self.graph, value):
                    return
        self.values.update(node.writes)

    def choose(self, value: int, among: Iterable[int]) -> None:
        """Add a value that is one of several, if any of these is there."""
        if not self.values.isdisjoint(among):
            self.values.add(value)
