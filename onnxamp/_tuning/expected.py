"""Expected errors of choices, from what rounding each value costs (:mod:`onnxamp._gradients.sensitivity`).

A value is rounded once: where its node is in low precision, or else where it is cast for a node that is. The squared
errors of all that a choice rounds add up; the worst output on the worst sample counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import sqrt
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._convert.plan import ErrorShare, ExpectedError
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._gradients.passes import Sensitivities
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, body_sources
from onnxamp._tuning.lowered import LowNode, Settled, computes

Numbers: TypeAlias = npt.NDArray[np.float64]

_HEADROOM: Final = 4.0
"""Factor by which values of other samples may exceed the measured ones."""

_VANISHING: Final = 0.05
"""Share of the largest magnitude of a value that must not round to zero."""

_PRIOR: Final = 1e-6
"""Share of the squared error of everything that all nodes together cost beside their own: it ranks what costs none."""

_MADE: Final = "\n"
"""Marks a value as its node computes it in low precision."""

_REST: Final = "\n\n"
"""Marks a value as it is cast for readers that are not known separately."""

_DECISIVE: Final = 16.0
"""The weight of the squared error of values that decide a selection, relative to outputs."""

_MOST: Final = 1e6
"""The largest squared error that counts: beyond it, all is lost."""

QUANTILE: Final = 3.891
"""The bound that a normal error exceeds in one of 10,000 cases, in multiples of its standard deviation. No sum of the
squares of several has a longer tail (G. J. Székely, N. K. Bakirov: Extremal probabilities for Gaussian quadratic forms,
2003)."""

_SHOWN: Final = 10
"""Number of nodes whose contribution is reported."""


@dataclass(frozen=True, kw_only=True)
class ExpectedErrors:
    """The costs of low precision, for any choice of the nodes that have it.

    Attributes:
        graph: of the float32 model.
        low: the low-precision type.
        computing: the nodes that compute, in execution order.
        exact: those that only move numbers.
        samples: what each sample shows.
        settled: what is rounded whatever the choice.
        weights: factor on the squared error that rounding a weight causes.
        is_joint: whether the mean over all outputs counts, and not the worst.
        stressed: values that leave the range on inputs that are made to be hard, with their largest magnitudes there.
    """

    graph: Graph
    low: Format
    computing: Sequence[LowNode]
    exact: Sequence[LowNode]
    samples: Sequence[Sensitivities]
    settled: Settled
    weights: float = 1.0
    is_joint: bool = False
    stressed: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def costs(self) -> Numbers:
        """By row and column: the squared error that rounding a value causes in a group of outputs of a sample."""
        return np.hstack([np.zeros((len(self._places), 1)), *self._columns])

    @cached_property
    def _columns(self) -> list[Numbers]:
        """The costs of each sample in each group of outputs."""
        own = [table[:, :-1] for table in self._tables]
        if self.is_joint:
            return [table.mean(axis=1, keepdims=True) for table in own]
        return own

    @cached_property
    def decisive(self) -> Numbers:
        """By row: the squared error of the values that decide selections and branches, on the worst sample."""
        none = np.zeros(len(self._places))
        by_sample = (table[:, -1] for table in self._tables)
        worst: Numbers = np.max([none, *by_sample], 0)
        return worst

    @cached_property
    def _tables(self) -> list[Numbers]:
        """The costs of each sample."""
        tables = list[Numbers]()
        constants = self.graph.constants.tensors
        stored = {v.name for v in self.graph.values if v.index in constants}
        weights = [row for (name, _), row in self._places.items() if name in stored]
        hard = [row for (name, _), row in self._places.items() if name in self._hard]
        for sample in self.samples:
            groups = max((len(row.costs) for row in sample.values.values()), default=2)
            table = np.zeros((len(self._places), groups))
            for name, rounded in sample.values.items():
                table[self._places[name, ""]] = rounded.costs
                table[self._places[name, _MADE]] = rounded.costs
                for reader, costs in rounded.read.items():
                    table[self._places[name, reader]] = costs
                if rounded.read:
                    known = np.minimum(np.sum([*rounded.read.values()], 0), _MOST)
                    rest = np.minimum(rounded.costs, _MOST) - known
                    table[self._places[name, _REST]] = np.maximum(rest, 0.0)
            # Before sums count, which the low pass does not round.
            factors = self._factors(table, sample.shown)
            for name, rounded in sample.values.items():
                if rounded.summed:
                    table[self._places[name, _MADE]] = rounded.summed
            table[weights] *= self.weights
            scaled = np.where(np.isfinite(table), table * factors, table)
            scaled[hard] = _MOST
            tables.append(np.minimum(scaled, _MOST))
        return tables

    def _factors(self, table: Numbers, shown: Sequence[float]) -> Numbers:
        """Return factors for the costs, such that their sum is the error that the low pass of a sample shows.

        Beyond a step of a grid, errors are not linear: no cost exceeds the error of all, unless it is infinite. The low
        pass rounds neither inside loops nor the sums of kernels. Without such a pass, nothing is shown.
        """
        if len(shown) != table.shape[1] or self.graph.nodes_of({"Loop", "Scan"}):
            return np.ones_like(table)
        # In other branches, samples may have other outputs.
        alike = [one.shown for one in self.samples if len(one.shown) == len(shown)]
        is_shown = np.any(alike, axis=0)
        counts = np.isfinite(table) & (table > 0)
        limits = np.where(is_shown, shown, np.inf)
        kept = np.where(counts, np.minimum(table, limits), 0.0)
        sums = kept[self._everything].sum(axis=0)
        factors = np.divide(
            shown, sums, np.ones(len(shown)), where=is_shown & (sums > 0)
        )
        ones = np.ones_like(table)
        return np.asarray(np.divide(kept * factors, table, ones, where=counts))

    @cached_property
    def _hard(self) -> Mapping[str, float]:
        """The values that leave the range on inputs that are made to be hard, with their largest magnitudes.

        Sentinels, which count as 0 on samples, saturate.
        """
        return {
            name: magnitude
            for name, magnitude in self.stressed.items()
            if self.largest.get(name)
        }

    @cached_property
    def _everything(self) -> list[int]:
        """The rows of all that is rounded if every node is in low precision."""
        return self._rows_of_all({unit.key for unit in (*self.computing, *self.exact)})

    @cached_property
    def price_of(self) -> Mapping[str, float]:
        """By key: the price of a node that computes."""
        keys = (unit.key for unit in self.computing)
        return dict(zip(keys, self.prices, strict=True))

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """The largest magnitude of each value."""
        largest = dict[str, float]()
        for sample in self.samples:
            for name, row in sample.values.items():
                largest[name] = max(largest.get(name, 0.0), row.largest)
        return largest

    @cached_property
    def made(self) -> Mapping[str, tuple[int, ...]]:
        """By key of a node that computes: the values that it rounds, as rows of the table.

        Nodes in a loop round the results of the loop.
        """
        return {unit.key: self._rows_of(unit) for unit in self.computing}

    @cached_property
    def read(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """By key of a node: the rows of values that are cast for it, each with the key of the node that makes it."""
        read = dict[str, tuple[tuple[str, int], ...]]()
        for unit in (*self.computing, *self.exact):
            node = self.graph.nodes[unit.node]
            rows = list[tuple[str, int]]()
            for value in dict.fromkeys(
                node.inputs[port] for port in unit.ports.inputs
            ):
                if value not in self.settled.stored:
                    maker = self._maker(value)
                    rows += [(maker, row) for row in self._at(value, unit.key)]
            read[unit.key] = tuple(rows)
        return read

    def predicted(self, low: AbstractSet[str]) -> float:
        """Return the relative error of the worst output on the worst sample if these nodes are in low precision."""
        rows = self._rows_rounded(low)
        rows.update(self._given(low))
        nodes = sum(key in self.made for key in low)
        return sqrt(self._sum(rows) + nodes * self._prior)

    def _rows_rounded(self, low: AbstractSet[str]) -> set[int]:
        """Return the rows of all values that these nodes round if they are in low precision."""
        rows = set[int]()
        for key in low:
            rows.update(self.rounded(key, low))
        return rows

    def rounded(self, key: str, low: AbstractSet[str]) -> list[int]:
        """Return the rows of all values that a node rounds: its results, and the values that are cast for it."""
        cast = [row for made, row in self.read[key] if made not in low]
        return [*self.made.get(key, ()), *cast]

    @cached_property
    def _settled(self) -> list[tuple[int, str, set[str]]]:
        """The rows that every choice rounds, each with the name of its value and the nodes that may round it first."""
        rows = list[tuple[int, str, set[str]]]()
        values = self.graph.values
        units = (*self.computing, *self.exact)
        for value in sorted(self.settled.stored):
            name = values[value].name
            rows += [(row, name, set()) for row in self._at(value)]
        for value in sorted(self.settled.returned):
            name = values[value].name
            node = values[value].producer
            makers = {u.key for u in units if node == u.node or name in u.names}
            rows += [(row, name, makers) for row in self._at(value, _REST)]
        return rows

    def _given(self, low: AbstractSet[str]) -> dict[int, str]:
        """Return the rows that every choice rounds and these nodes do not, each with the name of its value."""
        return {row: name for row, name, makers in self._settled if not makers & low}

    def squares(self, low: AbstractSet[str]) -> list[Numbers]:
        """Return the squared error to expect of each group of outputs, by sample."""
        rows = self._rows_of_all(low)
        return [own[rows].sum(axis=0) for own in self._columns]

    def _rows_of_all(self, low: AbstractSet[str]) -> list[int]:
        """Return the rows of all values that are rounded if these nodes are in low precision."""
        return [*(self._rows_rounded(low) | self._given(low).keys())]

    def foreseen(self, low: AbstractSet[str]) -> ExpectedError:
        """Return the expected error if these nodes are in low precision."""
        nodes = [unit for unit in (*self.computing, *self.exact) if unit.key in low]
        owners = {row: (name, "Cast") for row, name in self._given(low).items()}
        for one in nodes:
            node = self.graph.nodes[one.node]
            for row in self.rounded(one.key, low):
                owners.setdefault(row, (node.label, node.key))
        rows = list(owners)
        by_sample = [float(own.max(initial=0.0)) for own in self.squares(low)]
        worst = self.costs[:, self.costs[rows].sum(axis=0).argmax()]
        shares = dict[tuple[str, str], float]()
        for row, owner in owners.items():
            shares[owner] = shares.get(owner, 0.0) + float(worst[row])
        largest = sorted(shares, key=shares.__getitem__, reverse=True)[:_SHOWN]
        total = max(by_sample, default=0.0)
        decides = bool(rows) and self.decisive[rows].any()
        jumps = self.graph.nodes_of(op_facts().selections) if decides else ()
        spread = chain.from_iterable(sample.spread for sample in self.samples)
        moved = tuple(dict.fromkeys(spread))
        if moved and not total and rows:
            why = f"No error passes through {moved[0]!r}, which has no gradient."
            return ExpectedError(why=why, spread=moved)
        return ExpectedError(
            error=sqrt(total),
            bound=QUANTILE * sqrt(total),
            least=sqrt(min(by_sample, default=0.0)),
            samples=len(self.samples),
            nodes=tuple(
                ErrorShare(*owner, shares[owner] / total)
                for owner in largest
                if shares[owner]
            ),
            jumps=tuple(node.label for node in jumps),
            spread=moved,
        )

    @cached_property
    def prices(self) -> list[float]:
        """The squared error that each node causes that computes, with the weights and inputs that it reads."""
        prices = list[float]()
        for unit in self.computing:
            rows = [*self.made[unit.key]]
            if not rows:  # no sample measures its results
                rows = [row for _, row in self.read[unit.key]]
            rows += self._sources(unit)
            decisive = float(self.decisive[rows].sum())
            prices.append(self._sum(rows) + _DECISIVE * decisive + self._prior)
        return prices

    @cached_property
    def broken(self) -> dict[str, str]:
        """Nodes that go wrong on their own, by key, with the reason."""
        reasons = dict[str, str]()
        low = self.low
        for unit in self.computing:
            node = self.graph.nodes[unit.node]
            values = [node.outputs[port] for port in unit.ports.outputs]
            made = self._largest(values)
            made = made or max(map(self._size, unit.names))
            stored = self.graph.constants.tensors
            read = self._largest(
                node.inputs[port]
                for port in unit.ports.inputs
                if node.inputs[port] not in stored
            )
            end = f"{low.name} ends at {low.max_finite:.6g}"
            hard = self._hardest(values)
            hard_read = self._hardest(node.inputs[port] for port in unit.ports.inputs)
            if made * _HEADROOM > low.max_finite:
                reasons[unit.key] = f"it reaches {made:.4g}; {end}"
            elif read > low.max_finite:
                reasons[unit.key] = f"it reads {read:.4g}; {end}"
            elif hard or hard_read:
                what = f"reaches {hard:.4g}" if hard else f"reads {hard_read:.4g}"
                reasons[unit.key] = f"it {what} on inputs made to be hard; {end}"
            elif self.costs[list(self.made[unit.key])].max(initial=0.0) >= _MOST:
                reasons[unit.key] = "it breaks the outputs"
            # Half the smallest number is where rounding to nearest gives zero.
            elif 0 < made * _VANISHING < low.smallest_subnormal / 2:
                reasons[unit.key] = f"it vanishes: its largest magnitude is {made:.4g}"
        return reasons

    def _largest(self, values: Iterable[int]) -> float:
        names = (self.graph.values[value].name for value in values if value != ABSENT)
        return max(map(self._size, names), default=0.0)

    def _hardest(self, values: Iterable[int]) -> float:
        """Return the largest magnitude of those values that leave the range on hard inputs; 0 if none does."""
        names = (self.graph.values[value].name for value in values if value != ABSENT)
        return max((self._hard.get(name, 0.0) for name in names), default=0.0)

    def _size(self, name: str) -> float:
        return self.largest.get(name, 0.0)

    @cached_property
    def _prior(self) -> float:
        everything = set(chain.from_iterable(self.made.values()))
        whole = [row for row in everything if self.costs[row].max() < _MOST]
        total = self._sum(whole) or self.low.epsilon**2
        return _PRIOR * total / max(1, len(self.computing))

    def _sum(self, rows: Iterable[int]) -> float:
        return float(self.costs[list(rows)].sum(axis=0).max())

    @cached_property
    def _places(self) -> Mapping[tuple[str, str], int]:
        """The row of each value: as it is cast, as its node makes it, and as it is cast for one of several readers."""
        places = dict[tuple[str, str], int]()
        for sample in self.samples:
            for name, rounded in sample.values.items():
                rest = [_REST] if rounded.read else []
                for what in ("", _MADE, *rounded.read, *rest):
                    places.setdefault((name, what), len(places))
        return places

    @cached_property
    def _units(self) -> Mapping[int, LowNode]:
        """By index: the nodes that can be in low precision."""
        return {unit.node: unit for unit in (*self.computing, *self.exact)}

    def _at(self, value: int, what: str = "") -> tuple[int, ...]:
        """Return the row of a value; none if no sample measures it."""
        if value == ABSENT:
            return ()
        name = self.graph.values[value].name
        ways = (what, _REST, "") if what else ("",)
        for way in ways:
            if (name, way) in self._places:
                return (self._places[name, way],)
        return ()

    def _maker(self, value: int) -> str:
        """Return the key of the node that computes a value, before its loops; "" if it is always float32."""
        while (outer := self._before.get(value, ABSENT)) != ABSENT:
            value = outer
        unit = self._units.get(self.graph.values[value].producer)
        return unit.key if unit is not None else ""

    @cached_property
    def _before(self) -> Mapping[int, int]:
        """By value that the body of a Loop or Scan takes: the value that it is in the first turn."""
        before = dict[int, int]()
        for node in self.graph.nodes_of({"Loop", "Scan"}):
            for _, scope in node.bodies:
                inner = self.graph.scopes[scope].inputs
                sources = body_sources(node, len(inner))
                for value, source in zip(inner, sources, strict=True):
                    if source != ABSENT:
                        before[value] = node.input(source)
        return before

    def _rows_of(self, unit: LowNode) -> tuple[int, ...]:
        """Return the rows of the values that a node computes."""
        node = self.graph.nodes[unit.node]
        rows = self._rows_made(node.outputs[port] for port in unit.ports.outputs)
        keys = ((name, _MADE) for name in unit.names)
        rows += [self._places[key] for key in keys if key in self._places]
        scope = node.scope
        while not rows and scope:
            owner = self.graph.nodes[self.graph.scopes[scope].owner]
            rows = self._rows_made(owner.outputs)
            scope = owner.scope
        return tuple(dict.fromkeys(rows))

    def _rows_made(self, values: Iterable[int]) -> list[int]:
        """Return the rows of values as their nodes compute them in low precision."""
        return [*chain.from_iterable(self._at(value, _MADE) for value in values)]

    def _sources(self, unit: LowNode) -> list[int]:
        """Return the rows of weights and other float32 values that a node reads, directly or through exact nodes."""
        rows = list[int]()
        waiting = [unit]
        seen = {ABSENT, *self.settled.stored}
        while waiting:
            one = waiting.pop()
            node = self.graph.nodes[one.node]
            for value in (node.inputs[port] for port in one.ports.inputs):
                if value in seen:
                    continue
                seen.add(value)
                producer = self._units.get(self.graph.values[value].producer)
                if producer is None:
                    rows += self._at(value, one.key)
                elif not computes(self.graph.nodes[producer.node]):
                    waiting.append(producer)
        return rows
