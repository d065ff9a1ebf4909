"""From prices to candidates: the same minimum cut, with the errors of nodes charged at a rate that is bisected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from typing import Final

from onnxamp.analysis import Analysis
from onnxamp.constants import Constants
from onnxamp.graph import ABSENT
from onnxamp.precision import Decision, Prices, decide
from onnxamp.roofline import Device
from onnxamp.terms import NONE
from onnxamp.tuning.units import Space, Unit, prices_for

_STEPS: Final = 24
"""Rates that a bisection tries: each is one cut."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice of low nodes.

    ``low``: keys of the nodes that are low, exact ops among them; ``nodes``: how many of them compute;
    ``predicted``: error by prices; ``error``: as measured by a mask run, None where none was made; ``time``: estimated
    microseconds per run, without launches; ``flops`` and ``bytes``: shares of the model's arithmetic and float traffic
    that are low.
    """

    low: frozenset[str]
    nodes: int
    predicted: float
    error: float | None
    time: float
    flops: float
    bytes: float


@dataclass(slots=True)
class Chooser:
    """Solves the cut for any prices. ``pinned`` says which units must stay float32, and why.

    Exact ops have no price. They may be low where that rounds what low ops would round, too; where it would round a
    float32 value on its way to somebody who reads it in float32, they are spared.
    """

    space: Space
    base: Analysis
    device: Device
    constants: Constants
    pinned: Mapping[str, str] = field(default_factory=dict)

    def choose(self, prices: Sequence[float], rate: float) -> frozenset[str]:
        """The nodes that are low when errors are charged at a rate (cost units per squared error)."""
        units = self.space.units
        pins = dict(self.space.pins)
        pins |= {unit.node: why for unit in units if (why := self.pinned.get(unit.key)) is not None}
        for unit, price in zip(units, prices, strict=True):
            if isinf(price):
                pins[unit.node] = "its block breaks the outputs"
        charged = [0.0 if isinf(price) else rate * price for price in prices]
        spared: set[int] = set()
        decision = self._decide(prices_for(units, charged, pins))
        while rounding := self._rounding(decision) - spared:
            spared |= rounding
            decision = self._decide(prices_for(units, charged, pins, spared))
        nodes = (*units, *self.space.followers)
        return frozenset(unit.key for unit in nodes if self._is_low(decision, unit) and unit.node not in pins)

    def within(self, prices: Sequence[float], target: float) -> frozenset[str]:
        """The units of the cheapest cut whose predicted squared error is at most ``target``."""
        finite = [price for price in prices if 0 < price < inf]
        if not finite:
            return self.choose(prices, 0.0)
        gains = sum(unit.gain for unit in self.space.units)
        low, high = 1 / sum(finite), 1e3 * gains / min(finite)
        best = self.choose(prices, 0.0)
        if self.predicted(best, prices) <= target:
            return best
        best = frozenset[str]()
        for _ in range(_STEPS):
            middle = (low * high) ** 0.5
            found = self.choose(prices, middle)
            if self.predicted(found, prices) <= target:
                best, high = found if len(found) >= len(best) else best, middle
            else:
                low = middle
        return best

    def predicted(self, low: frozenset[str], prices: Sequence[float]) -> float:
        """Squared error of a choice by prices, which add up."""
        return sum(price for unit, price in zip(self.space.units, prices, strict=True) if unit.key in low)

    def candidate(self, low: frozenset[str], prices: Sequence[float], error: float | None) -> Candidate:
        """A choice with what is known of it."""
        units = self.space.units
        chosen = [unit for unit in units if unit.key in low]
        time = sum(unit.work.time(self.device, low=unit.key in low) for unit in units)
        flops, traffic = sum(u.work.flops for u in units) or 1, sum(u.work.elements for u in units) or 1
        return Candidate(
            low=low,
            nodes=len(chosen),
            predicted=self.predicted(low, prices) ** 0.5,
            error=error,
            time=time,
            flops=sum(u.work.flops for u in chosen) / flops,
            bytes=sum(u.work.elements for u in chosen) / traffic,
        )

    def _decide(self, prices: Prices) -> Decision:
        base = self.base
        return decide(base.view, base.shapes, self.constants, base.terms, base.pins, prices)

    def _rounding(self, decision: Decision) -> set[int]:
        """Low exact ops between a float32 source and a float32 reader. Complexity: linear in exact ops and readers."""
        view, terms = self.base.view, self.base.terms
        low = [unit for unit in self.space.followers if self._is_low(decision, unit)]
        members = {unit.node for unit in low}
        exact: set[int] = set()
        for unit in low:  # in execution order
            node = view.nodes[unit.node]
            sources = [node.inputs[port] for port in unit.ports.inputs]
            if any(self._is_exact(decision, value) or view.values[value].producer in exact for value in sources):
                exact.add(unit.node)
        read: set[int] = set()
        for unit in reversed(low):
            for value in (view.nodes[unit.node].outputs[port] for port in unit.ports.outputs):
                readers = [terms.consumed[index][port] for index, port in view.uses[value] if index not in members]
                readers += [terms.returned[key] for key in view.results[value] if key in terms.returned]
                passed = any(index in read for index, _ in view.uses[value])
                if passed or any(term != NONE and not decision.is_low(term) for term in readers):
                    read.add(unit.node)
        tied = {root for unit in self.space.units for root in self._roots(unit.node)} if exact & read else set()
        return {index for index in exact & read if not tied & self._roots(index)}

    def _is_exact(self, decision: Decision, value: int) -> bool:
        """Whether a value is there in float32, unrounded."""
        terms = self.base.terms
        return value in terms.free or not decision.is_low(terms.produced[value])

    def _roots(self, node: int) -> set[int]:
        """Deciding variables of a node: an exact op that shares one with a unit goes with it."""
        terms = self.base.terms
        made = [terms.produced[value] for value in self.base.view.nodes[node].outputs if value != ABSENT]
        return {terms.root(term) for term in (*made, *terms.of_node.get(node, {}).values()) if term >= 0}

    def _is_low(self, decision: Decision, unit: Unit) -> bool:
        terms = self.base.terms
        node = self.base.view.nodes[unit.node]
        ports = [terms.produced[node.outputs[port]] for port in unit.ports.outputs]
        ports += [terms.consumed[unit.node][port] for port in unit.ports.inputs]
        return any(map(decision.is_low, ports))
