"""A model of low precision shown as float32, for rules that expect float32 models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import copysign

from onnxamp._facts.dtypes import FLOAT, FLOAT32_MAX, Format
from onnxamp._graph.constants import Constants
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.paths import saturated
from onnxamp._graph.shapes import Shape
from onnxamp._graph.types import Types
from onnxamp._graph.view import Node
from onnxamp._model.constant_stats import ConstantStats


@dataclass
class RaisedConstants(Constants):
    """Constants with saturated sentinels restored to their values before a conversion."""

    saturated: frozenset[float] = frozenset()
    """Magnitudes to which a conversion saturates sentinels."""

    def stats(self, value: int) -> ConstantStats | None:
        """Return the statistics of the constant, with sentinels restored."""
        stored = self.stored(value)
        if (
            stored is None
            or stored.uniform is None
            or abs(stored.uniform) not in self.saturated
        ):
            return stored
        return ConstantStats(FLOAT32_MAX, copysign(FLOAT32_MAX, stored.uniform), 0.0)

    def stored(self, value: int) -> ConstantStats | None:
        """Return the statistics of the numbers as they are stored; None if the value is not constant."""
        return super().stats(value)

    def number(self, value: int) -> float | None:
        """Return the stored number that all elements of the constant have."""
        stored = self.stored(value)
        return None if stored is None else stored.uniform


@dataclass(frozen=True, eq=False, kw_only=True)
class RaisedGraph(Graph):
    """A graph in which the values of one low-precision type look like float32 values."""

    low: Format
    actual: Types
    """The real types."""
    sizes: Sequence[Shape | None]
    """Shapes by value index."""

    @cached_property
    def types(self) -> Types:
        """Type by value index, with float32 for the low-precision type."""
        return [
            None if name is None else name.replace(self.low.tensor, FLOAT)
            for name in self.actual
        ]

    @cached_property
    def shapes(self) -> list[Shape | None]:
        """Shape by value index."""
        return list(self.sizes)

    @cached_property
    def constants(self) -> RaisedConstants:
        """The constants, with float32 statistics for low-precision ones."""
        return RaisedConstants(
            self, self.types, self.folder, saturated=frozenset(saturated(self.low))
        )

    def is_low(self, node: Node) -> bool:
        """Return whether the node computes in low precision. Casts only convert."""
        if node.key == "Cast":
            return False
        return any(
            self.low.tensor in (self.actual[v] or "")
            for v in (*node.reads, *node.writes)
        )

    def low_inputs(self, node: Node) -> Iterator[tuple[int, int]]:
        """Yield (position, value) of the node's low-precision tensor inputs."""
        low = self.low.tensor
        return (
            (port, value)
            for port, value in enumerate(node.inputs)
            if self.actual[value] == low
        )

    def low_stats(self, node: Node) -> list[ConstantStats]:
        """Return the statistics of the node's low-precision constants, as they are stored."""
        stored = (self.constants.stored(value) for _, value in self.low_inputs(node))
        return [stats for stats in stored if stats is not None]

    def low_constants(self, node: Node) -> Iterator[tuple[int, float]]:
        """Yield (position, number) of the node's low-precision inputs that are constants with a single number."""
        for port, value in self.low_inputs(node):
            number = self.constants.number(value)
            if number is not None:
                yield port, number


def raised_graph(
    graph: Graph, low: Format, shapes: Sequence[Shape | None]
) -> RaisedGraph:
    """Return the graph with one low-precision type shown as float32; nothing is resolved or inferred again."""
    return RaisedGraph(
        model=graph.model,
        book=graph.book,
        scopes=graph.scopes,
        nodes=graph.nodes,
        values=graph.values,
        results=graph.results,
        order=graph.order,
        folder=graph.folder,
        low=low,
        actual=graph.types,
        sizes=shapes,
    )
