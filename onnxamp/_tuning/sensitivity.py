"""Expected errors of choices, from what rounding each value costs (:mod:`onnxamp._numerics.sensitivity`).

A value is rounded once: where its node is in low precision, or else where it is cast for a node that is. The squared
errors of all that a choice rounds add up; the worst output on the worst sample counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._dtypes import Format
from onnxamp._graph.view import ABSENT, Node
from onnxamp._numerics.sensitivity import Sensitivities
from onnxamp._tuning.space import SearchSpace, TunableNode

Numbers: TypeAlias = npt.NDArray[np.float64]

_HEADROOM: Final = 4.0
"""Factor by which values of other samples may exceed the measured ones."""

_VANISHING: Final = 0.05
"""Share of the largest magnitude of a value that must not round to zero."""

_PRIOR: Final = 1e-6
"""Share of the squared error of everything that all nodes together cost beside their own: it ranks what costs none."""

_MADE: Final = "\n"
"""Stands for a value as its node makes it in low precision."""

_REST: Final = "\n\n"
"""Stands for a value as it is cast for readers of which nothing else is known."""

_DECISIVE: Final = 16.0
"""The weight of the squared error of values that decide a selection, relative to outputs."""

_MOST: Final = 1e6
"""The largest squared error that counts: beyond it, all is lost."""


@dataclass(frozen=True, kw_only=True)
class ExpectedErrors:
    """The costs of choices in a search space.

    Attributes:
        space: the nodes.
        samples: what each sample shows.
        weights: factor on the squared error that rounding a weight causes.
        is_joint: whether the mean over all outputs counts, and not the worst.
    """

    space: SearchSpace
    samples: Sequence[Sensitivities]
    weights: float = 1.0
    is_joint: bool = False

    @cached_property
    def costs(self) -> Numbers:
        """By row and column: the squared error that rounding a value causes in a group of outputs of a sample."""
        columns = [np.zeros((len(self._places), 1))]
        for sample in self._tables:
            own = sample[:, :-1]
            columns.append(own.mean(axis=1, keepdims=True) if self.is_joint else own)
        return np.hstack(columns)

    @cached_property
    def decisive(self) -> Numbers:
        """By row: the squared error of what decides about selections and branches, on the worst sample."""
        none = np.zeros(len(self._places))
        worst: Numbers = np.max([none, *(table[:, -1] for table in self._tables)], 0)
        return worst

    @cached_property
    def _tables(self) -> list[Numbers]:
        """The costs of each sample."""
        found, constants = list[Numbers](), self._graph.constants.tensors
        stored = {v.name for v in self._graph.values if v.index in constants}
        weights = [row for (name, _), row in self._places.items() if name in stored]
        for sample in self.samples:
            groups = max((len(row.costs) for row in sample.values.values()), default=2)
            table = np.zeros((len(self._places), groups))
            for name, rounded in sample.values.items():
                table[self._places[name, ""]] = rounded.costs
                table[self._places[name, _MADE]] = rounded.summed or rounded.costs
                for reader, costs in rounded.read.items():
                    table[self._places[name, reader]] = costs
                if rounded.read:
                    known = np.minimum(np.sum([*rounded.read.values()], 0), _MOST)
                    rest = np.minimum(rounded.costs, _MOST) - known
                    table[self._places[name, _REST]] = np.maximum(rest, 0.0)
            table[weights] *= self.weights
            found.append(np.minimum(table, _MOST))
        return found

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """The largest magnitude of each value."""
        found = dict[str, float]()
        for sample in self.samples:
            for name, row in sample.values.items():
                found[name] = max(found.get(name, 0.0), row.largest)
        return found

    @cached_property
    def made(self) -> Mapping[str, tuple[int, ...]]:
        """By key of a node that computes: the values that it rounds, as rows of the table.

        What is inside of a loop rounds what the loop returns.
        """
        return {
            unit.key: self._rows_of(self._graph.nodes[unit.node], unit)
            for unit in self.space.tunable
        }

    @cached_property
    def read(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """By key: the values that are cast for it where they are float32, each after the key of its own node."""
        found = dict[str, tuple[tuple[str, int], ...]]()
        for unit in self.space.units:
            node = self._graph.nodes[unit.node]
            values = dict.fromkeys(node.inputs[port] for port in unit.ports.inputs)
            found[unit.key] = tuple(
                (self._maker(value), row)
                for value in values
                for row in self._at(value, unit.key)
            )
        return found

    def predicted(self, low: AbstractSet[str]) -> float:
        """Return the relative error of the worst output on the worst sample where these nodes are in low precision."""
        rows = {row for key in low for row in self.made.get(key, ())}
        rows.update(
            row for key in low for made, row in self.read[key] if made not in low
        )
        nodes = sum(key in self.made for key in low)
        return sqrt(self._sum(rows) + nodes * self._prior)

    @cached_property
    def prices(self) -> list[float]:
        """The squared error that each node causes that computes, with the weights and inputs that it reads."""
        rows = (
            [*(self.made[unit.key] or self._cast(unit)), *self._sources(unit)]
            for unit in self.space.tunable
        )
        return [
            self._sum(row) + _DECISIVE * float(self.decisive[row].sum()) + self._prior
            for row in rows
        ]

    def broken(self, low: Format) -> dict[str, str]:
        """Return nodes that go wrong on their own, by key, with the reason."""
        found = dict[str, str]()
        for unit in self.space.tunable:
            node = self._graph.nodes[unit.node]
            made = self._largest(node.outputs[port] for port in unit.ports.outputs)
            made = made or max(map(self._size, unit.names))
            stored = self._graph.constants.tensors
            read = self._largest(
                node.inputs[port]
                for port in unit.ports.inputs
                if node.inputs[port] not in stored
            )
            end = f"{low.name} ends at {low.max_finite:.6g}"
            if made * _HEADROOM > low.max_finite:
                found[unit.key] = f"it reaches {made:.4g}; {end}"
            elif read > low.max_finite:
                found[unit.key] = f"it reads {read:.4g}; {end}"
            elif self.costs[list(self.made[unit.key])].max(initial=0.0) >= _MOST:
                found[unit.key] = "it breaks the outputs"
            elif 0 < made * _VANISHING < low.smallest_subnormal / 2:
                found[unit.key] = f"it vanishes: its largest magnitude is {made:.4g}"
        return found

    def _largest(self, values: Iterable[int]) -> float:
        names = (self._graph.values[value].name for value in values if value != ABSENT)
        return max(map(self._size, names), default=0.0)

    def _size(self, name: str) -> float:
        return self.largest.get(name, 0.0)

    @cached_property
    def _prior(self) -> float:
        everything = {row for rows in self.made.values() for row in rows}
        whole = [row for row in everything if self.costs[row].max() < _MOST]
        total = self._sum(whole) or self.space.estimate.low.epsilon**2
        return _PRIOR * total / max(1, len(self.space.tunable))

    def _sum(self, rows: Iterable[int]) -> float:
        return float(self.costs[list(rows)].sum(axis=0).max())

    @property
    def _graph(self) -> Any:
        return self.space.all_low.graph

    @cached_property
    def _places(self) -> Mapping[tuple[str, str], int]:
        """The row of each value: as it is cast, as its node makes it, and as it is cast for one of several readers."""
        names = dict.fromkeys(
            (name, what)
            for sample in self.samples
            for name, rounded in sample.values.items()
            for what in ("", _MADE, *rounded.read, *([_REST] if rounded.read else []))
        )
        return {name: row for row, name in enumerate(names)}

    @cached_property
    def _keys(self) -> Mapping[int, str]:
        """By index: the keys of the nodes that can be in low precision."""
        return {unit.node: unit.key for unit in self.space.units}

    def _at(self, value: int, what: str = "") -> tuple[int, ...]:
        """Return the row of a value; none where no sample shows it."""
        if value == ABSENT:
            return ()
        name = self._graph.values[value].name
        keys = ((name, what), *([(name, _REST)] if what else []), (name, ""))
        return tuple(self._places[key] for key in keys if key in self._places)[:1]

    def _maker(self, value: int) -> str:
        """Return the key of the node that makes a value; "" if that is always float32."""
        return self._keys.get(self._graph.values[value].producer, "")

    def _rows_of(self, node: Node, unit: TunableNode) -> tuple[int, ...]:
        rows = [
            row
            for port in unit.ports.outputs
            for row in self._at(node.outputs[port], _MADE)
        ]
        keys = ((name, _MADE) for name in unit.names)
        rows += [self._places[key] for key in keys if key in self._places]
        scope = node.scope
        while not rows and scope:
            owner = self._graph.nodes[self._graph.scopes[scope].owner]
            rows = [row for value in owner.outputs for row in self._at(value, _MADE)]
            scope = owner.scope
        return tuple(dict.fromkeys(rows))

    def _cast(self, unit: TunableNode) -> list[int]:
        """Return the rows of what a node reads that makes no floats."""
        return [row for _, row in self.read[unit.key]]

    def _sources(self, unit: TunableNode) -> list[int]:
        """Return the rows of weights and other float32 values that a node reads, perhaps through exact nodes."""
        followers = {one.node: one for one in self.space.followers}
        computing = {one.node for one in self.space.tunable}
        found, waiting, seen = list[int](), [unit], set[int]()
        while waiting:
            one = waiting.pop()
            node = self._graph.nodes[one.node]
            for value in (node.inputs[port] for port in one.ports.inputs):
                if value == ABSENT or value in seen:
                    continue
                seen.add(value)
                producer = self._graph.values[value].producer
                if producer in followers:
                    waiting.append(followers[producer])
                elif producer not in computing:
                    found += self._at(value, one.key)
        return found
