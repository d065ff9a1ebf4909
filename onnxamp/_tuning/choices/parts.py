"""Choices of low nodes, and the parts of a choice that no value connects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeAlias

from onnxamp._decide.exponents.solve import components
from onnxamp._graph.graph import Graph
from onnxamp._tuning.choices.space import TunableNode

Choice: TypeAlias = frozenset[str]
"""The keys of the nodes that are low."""


class ChoicePart(NamedTuple):
    """A part of a choice, with the sums over its nodes of what their errors cost and of what they save."""

    error: float
    gain: float
    keys: Choice

    @property
    def error_per_gain(self) -> float:
        """The error for each unit that is saved."""
        return self.error / self.gain if self.gain > 0 else inf


@dataclass(frozen=True)
class ChoiceParts:
    """Divides choices among the nodes of a graph.

    Attributes:
        graph: the graph.
        units: the nodes that can be low.
    """

    graph: Graph
    units: Iterable[TunableNode]

    def connected(self, keys: Choice) -> list[list[str]]:
        """Return the parts of a choice that no value connects, each in execution order."""
        graph = self.graph
        inside = {unit.node: unit.key for unit in self.units if unit.key in keys}
        joined = list[tuple[int, int]]()
        for node in inside:
            for value in graph.nodes[node].outputs:
                readers = (reader for reader, _ in graph.uses[value])
                joined += ((node, reader) for reader in readers if reader in inside)
        parts = list[list[str]]()
        for group in components(sorted(inside), joined):
            names = (inside[node] for node in group)
            parts.append(sorted(names, key=self._places.__getitem__))
        return parts

    def halved(
        self,
        keys: Choice,
        errors: Mapping[str, float],
        gains: Mapping[str, float],
        most: float,
    ) -> list[ChoicePart]:
        """Return the connected parts, halved until none of several nodes has an error above ``most``."""
        parts = list[ChoicePart]()
        rest = self.connected(keys)[::-1]
        while rest:
            piece = rest.pop()
            error = sum(errors.get(key, 0.0) for key in piece)
            half = len(piece) // 2
            if half and error > most:
                rest += [piece[half:], piece[:half]]
            else:
                gain = sum(gains.get(key, 0.0) for key in piece)
                parts.append(ChoicePart(error, gain, frozenset(piece)))
        return parts

    @cached_property
    def _places(self) -> Mapping[str, int]:
        """By key: the place of a node in the order of execution."""
        order = {node.index: place for place, node in enumerate(self.graph.order)}
        return {unit.key: order[unit.node] for unit in self.units}
