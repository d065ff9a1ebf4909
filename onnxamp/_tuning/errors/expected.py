"""Expected errors of choices, from what rounding each value costs (:mod:`onnxamp._gradients.sensitivity`).

The squared errors of all that a choice rounds (:mod:`onnxamp._tuning.errors.roundings`) add up; the worst output on
the worst sample counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import sqrt
from typing import Final

import numpy as np

from onnxamp._convert.plan import ErrorShare, ExpectedError
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._gradients.passes import Sensitivities
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._tuning.errors.cost_table import (
    MOST,
    Numbers,
    Rows,
    cost_tables,
    find_rows,
)
from onnxamp._tuning.errors.lowered import LowNode, Settled
from onnxamp._tuning.errors.roundings import Roundings

_HEADROOM: Final = 4.0
"""Factor by which values of other samples may exceed the measured ones."""

_VANISHING: Final = 0.05
"""Share of the largest magnitude of a value that must not round to zero."""

_PRIOR: Final = 1e-6
"""Share of the squared error of everything that all nodes together cost beside their own: it ranks what costs none."""

_DECISIVE: Final = 16.0
"""The weight of the squared error of values that decide a selection, relative to outputs."""

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

    # -- errors of choices -------------------------------------------------------------------------------------

    def predicted(self, low: AbstractSet[str]) -> float:
        """Return the relative error of the worst output on the worst sample if these nodes are in low precision."""
        rows = self._roundings.of_all(low)
        nodes = sum(key in self._roundings.made for key in low)
        return sqrt(self._sum(rows) + nodes * self._prior)

    def foreseen(self, low: AbstractSet[str]) -> ExpectedError:
        """Return the expected error if these nodes are in low precision, with the nodes that contribute most."""
        owners = self._owners(low)
        rows = list(owners)
        all_rows = self._roundings.of_all(low)
        squares = [columns[all_rows].sum(axis=0) for columns in self._columns]
        by_sample = [float(square.max(initial=0.0)) for square in squares]
        total = max(by_sample, default=0.0)
        spread = chain.from_iterable(sample.spread for sample in self.samples)
        moved = tuple(dict.fromkeys(spread))
        if moved and not total and rows:
            why = f"No error passes through {moved[0]!r}, which has no gradient."
            return ExpectedError(why=why, spread=moved)
        decides = bool(rows) and self._decisive[rows].any()
        jumps = self.graph.nodes_of(op_facts().selections) if decides else ()
        return ExpectedError(
            error=sqrt(total),
            bound=QUANTILE * sqrt(total),
            least=sqrt(min(by_sample, default=0.0)),
            samples=len(self.samples),
            nodes=self._shares(owners, total),
            jumps=tuple(node.label for node in jumps),
            spread=moved,
        )

    def _owners(self, low: AbstractSet[str]) -> dict[int, tuple[str, str]]:
        """Return the rows of all that is rounded, each with the label and op type of the node that does it."""
        given = self._roundings.given(low)
        owners = {row: (name, "Cast") for row, name in given.items()}
        for unit in (*self.computing, *self.exact):
            if unit.key not in low:
                continue
            node = self.graph.nodes[unit.node]
            for row in self._roundings.of_node(unit.key, low):
                owners.setdefault(row, (node.label, node.key))
        return owners

    def _shares(
        self, owners: Mapping[int, tuple[str, str]], total: float
    ) -> tuple[ErrorShare, ...]:
        """Return the nodes that contribute most to the worst output on the worst sample, the largest share first."""
        worst = self._costs[:, self._costs[list(owners)].sum(axis=0).argmax()]
        shares = dict[tuple[str, str], float]()
        for row, owner in owners.items():
            shares[owner] = shares.get(owner, 0.0) + float(worst[row])
        largest = sorted(shares, key=shares.__getitem__, reverse=True)[:_SHOWN]
        return tuple(
            ErrorShare(*owner, shares[owner] / total)
            for owner in largest
            if shares[owner]
        )

    # -- prices and faults of nodes ----------------------------------------------------------------------------

    @cached_property
    def prices(self) -> list[float]:
        """The squared error that each node causes that computes, with the weights and inputs that it reads."""
        roundings = self._roundings
        prices = list[float]()
        for unit in self.computing:
            rows = [*roundings.made[unit.key]]
            if not rows:  # no sample measures its results
                rows = [row for _, row in roundings.read[unit.key]]
            rows += roundings.sources(unit)
            decisive = float(self._decisive[rows].sum())
            prices.append(self._sum(rows) + _DECISIVE * decisive + self._prior)
        return prices

    @cached_property
    def price_of(self) -> Mapping[str, float]:
        """By key: the price of a node that computes."""
        keys = (unit.key for unit in self.computing)
        return dict(zip(keys, self.prices, strict=True))

    @cached_property
    def broken(self) -> dict[str, str]:
        """Nodes that go wrong on their own, by key, with the reason."""
        faults = ((unit.key, self._fault(unit)) for unit in self.computing)
        return {key: fault for key, fault in faults if fault}

    def _fault(self, unit: LowNode) -> str:
        """Return why a node goes wrong on its own, in a clause; "" if it does not."""
        low = self.low
        node = self.graph.nodes[unit.node]
        stored = self.graph.constants.tensors
        values = [node.inputs[port] for port in unit.ports.inputs]
        inputs = self._names(values)
        results = self._names(node.outputs[port] for port in unit.ports.outputs)
        largest = self._largest(results) or self._largest(unit.names)
        read = self._largest(
            self._names(value for value in values if value not in stored)
        )
        end = f"{low.name} ends at {low.max_finite:.6g}"
        if largest * _HEADROOM > low.max_finite:
            return f"it reaches {largest:.4g}; {end}"
        if read > low.max_finite:
            return f"it reads {read:.4g}; {end}"
        for verb, names in (("reaches", results), ("reads", inputs)):
            hardest = max((self._hard.get(name, 0.0) for name in names), default=0.0)
            if hardest:
                return f"it {verb} {hardest:.4g} on inputs made to be hard; {end}"
        rows = list(self._roundings.made[unit.key])
        if self._costs[rows].max(initial=0.0) >= MOST:
            return "it breaks the outputs"
        # Half the smallest number is where rounding to nearest gives zero.
        if 0 < largest * _VANISHING < low.smallest_subnormal / 2:
            return f"it vanishes: its largest magnitude is {largest:.4g}"
        return ""

    def _names(self, values: Iterable[int]) -> set[str]:
        """Return the names of values."""
        return {self.graph.values[value].name for value in values if value != ABSENT}

    def _largest(self, names: Iterable[str]) -> float:
        """Return the largest magnitude of some values; 0 if none is measured."""
        return max((self.largest.get(name, 0.0) for name in names), default=0.0)

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """The largest magnitude of each value."""
        largest = dict[str, float]()
        for sample in self.samples:
            for name, row in sample.values.items():
                largest[name] = max(largest.get(name, 0.0), row.largest)
        return largest

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

    # -- costs -------------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> Rows:
        """The rows of the table of costs."""
        return find_rows(self.samples)

    @cached_property
    def _roundings(self) -> Roundings:
        """The rows that choices round."""
        return Roundings(
            graph=self.graph,
            computing=self.computing,
            exact=self.exact,
            settled=self.settled,
            rows=self._rows,
        )

    @cached_property
    def _tables(self) -> list[Numbers]:
        """The costs of each sample, with those of decisions in the last column."""
        stored = self._names(self.graph.constants.tensors)
        by_row = (self.weights if name in stored else 1.0 for name, _ in self._rows)
        # The low pass of a sample rounds nothing inside loops, so it does not show the error of all.
        has_loops = bool(self.graph.nodes_of(op_facts().loops))
        return cost_tables(
            self.samples,
            self._rows,
            factors=np.fromiter(by_row, np.float64, len(self._rows)),
            lost=[row for (name, _), row in self._rows.items() if name in self._hard],
            everything=None if has_loops else self._roundings.everything,
        )

    @cached_property
    def _columns(self) -> list[Numbers]:
        """The costs of each sample in each group of outputs."""
        groups = [table[:, :-1] for table in self._tables]
        if self.is_joint:
            return [table.mean(axis=1, keepdims=True) for table in groups]
        return groups

    @cached_property
    def _costs(self) -> Numbers:
        """The columns of all samples, one beside the other, after one of zeros."""
        return np.hstack([np.zeros((len(self._rows), 1)), *self._columns])

    @cached_property
    def _decisive(self) -> Numbers:
        """By row: the squared error of the values that decide selections and branches, on the worst sample."""
        none = np.zeros(len(self._rows))
        by_sample = (table[:, -1] for table in self._tables)
        worst: Numbers = np.max([none, *by_sample], 0)
        return worst

    @cached_property
    def _prior(self) -> float:
        """The squared error that a node costs beside its own."""
        everything = set(chain.from_iterable(self._roundings.made.values()))
        whole = [row for row in everything if self._costs[row].max() < MOST]
        total = self._sum(whole) or self.low.epsilon**2
        return _PRIOR * total / max(1, len(self.computing))

    def _sum(self, rows: Iterable[int]) -> float:
        """Return the sum of the costs of some rows, in the worst group of the worst sample."""
        return float(self._costs[list(rows)].sum(axis=0).max())
