"""A graph with low-precision values, seen as if these were float32: what hazard rules for float32 models can read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import copysign
from typing import Final

import numpy as np

from onnxamp._dtypes import FLOAT, LowType
from onnxamp._graph.constants import Constants
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.statistics import ConstantStats

_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass
class RaisedConstants(Constants):
    """Constants whose saturated sentinels look like the sentinels that they were before a conversion."""

    saturated: frozenset[float] = frozenset()
    """Magnitudes that a conversion gives to sentinels."""

    def stats(self, value: int) -> ConstantStats | None:
        """Statistics of the constant, with sentinels restored."""
        stored = self.stored(value)
        if stored is None or stored.uniform is None or abs(stored.uniform) not in self.saturated:
            return stored
        return ConstantStats(_LARGEST, copysign(_LARGEST, stored.uniform), 0.0)

    def stored(self, value: int) -> ConstantStats | None:
        """Statistics of the numbers as they are stored; None if the value is not constant."""
        return super().stats(value)

    def number(self, value: int) -> float | None:
        """The number that all elements of the constant have, as it is stored."""
        stored = self.stored(value)
        return None if stored is None else stored.uniform


@dataclass(frozen=True, eq=False, kw_only=True)
class RaisedGraph(Graph):
    """A graph in which the values of one low-precision type look like float32 values."""

    low: LowType
    actual: Types
    """The types without disguise."""
    sizes: Sequence[Shape | None]
    """Shapes by value index."""

    @cached_property
    def types(self) -> Types:
        """Type by value index, with float32 for the low-precision type."""
        return [None if name is None else name.replace(self.low.tensor, FLOAT) for name in self.actual]

    @cached_property
    def shapes(self) -> list[Shape | None]:
        """Shape by value index."""
        return list(self.sizes)

    @cached_property
    def constants(self) -> RaisedConstants:
        """The constants, with float32 statistics for low-precision ones."""
        return RaisedConstants(self, self.types, self.folder, saturated=frozenset(saturated(self.low)))

    def is_low(self, node: Node) -> bool:
        """Whether the node computes in low precision. Casts only convert."""
        if node.key == "Cast":
            return False
        return any(self.low.tensor in (self.actual[v] or "") for v in (*node.inputs, *node.outputs) if v != ABSENT)

    def low_inputs(self, node: Node) -> Iterator[tuple[int, int]]:
        """(position, value) of the node's low-precision tensor inputs."""
        low = self.low.tensor
        return ((port, value) for port, value in self.float_inputs(node) if self.actual[value] == low)

    def low_constants(self, node: Node) -> Iterator[tuple[int, float]]:
        """(position, number) of the node's low-precision inputs that are constants of a single number."""
        for port, value in self.low_inputs(node):
            number = self.constants.number(value)
            if number is not None:
                yield port, number


def raised(graph: Graph, low: LowType, shapes: Sequence[Shape | None]) -> RaisedGraph:
    """The graph with one low-precision type seen as float32; nothing is resolved or inferred again."""
    return RaisedGraph(
        graph.model, graph.book, graph.scopes, graph.nodes, graph.values, graph.results, graph.order,
        graph.folder, low=low, actual=graph.types, sizes=shapes,
    )  # fmt: skip


def saturated(low: LowType) -> tuple[float, float]:
    """What conversions make of a sentinel: the largest number of the type, or half of it."""
    return low.max_finite, low.max_finite / 2
