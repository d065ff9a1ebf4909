"""From prices to candidates: the same minimum cut, with the errors of nodes charged at a rate that is bisected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.ports import LOW, NONE
from onnxamp._decide.precision import CutProblem, Decision
from onnxamp._graph.view import ABSENT
from onnxamp._tuning.units import Space, Unit, prices_for

_BREAKS: Final = "its block breaks the outputs"

_CLOSE: Final = 1.05
"""Ratio of rates at which a bisection ends: each rate is one cut."""


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

    @property
    def least(self) -> float:
        """The error, as far as it is known."""
        return self.predicted if self.error is None else self.error


@dataclass(slots=True)
class Chooser:
    """Solves the cut for any prices. ``pinned`` says which units must stay float32, and why.

    Exact ops have no price. They may be low where that rounds what low ops would round, too; where it would round a
    float32 value on its way to somebody who reads it in float32, they are spared.
    """

    space: Space
    base: Analysis
    pinned: Mapping[str, str] = field(default_factory=dict)
    problem: CutProblem = field(init=False)
    _sides: dict[str, list[int]] = field(init=False)
    """PortVariables of what can be low of a unit."""
    _priced: tuple[float, ...] = ()
    _rates: dict[float, frozenset[str]] = field(default_factory=dict)
    """Rate -> choice at the prices that were asked for last: searches for several targets share most cuts."""

    def __post_init__(self) -> None:
        base, ports = self.base, self.base.ports
        self._sides = {
            unit.key: [
                *(ports.produced[base.graph.nodes[unit.node].outputs[port]] for port in unit.ports.outputs),
                *(ports.consumed[unit.node][port] for port in unit.ports.inputs),
            ]
            for unit in (*self.space.units, *self.space.followers)
        }
        self.problem = CutProblem(base.problem, base.pins)

    def choose(self, prices: Sequence[float], rate: float) -> frozenset[str]:
        """The nodes that are low when errors are charged at a rate (cost units per squared error)."""
        units = self.space.units
        pins = dict(self.space.pins)
        pins |= {unit.node: why for unit in units if (why := self.pinned.get(unit.key)) is not None}
        pins |= {unit.node: _BREAKS for unit, price in zip(units, prices, strict=True) if price == inf}
        charged = [0.0 if price == inf else rate * price for price in prices]
        spared: set[int] = set()
        decision = self.problem.decide(prices_for(units, charged, pins), explained=False)
        while rounding := self._rounding(decision) - spared:
            spared |= rounding
            decision = self.problem.decide(prices_for(units, charged, pins, spared), explained=False)
        nodes = (*units, *self.space.followers)
        return frozenset(unit.key for unit in nodes if self._is_low(decision, unit) and unit.node not in pins)

    def within(self, prices: Sequence[float], target: float) -> frozenset[str]:
        """The units of the cheapest cut whose predicted squared error is at most ``target``."""
        finite = [price for price in prices if 0 < price < inf]
        if not finite:
            return self.choose(prices, 0.0)
        gains = sum(unit.gain for unit in self.space.units)
        low, high = 1 / sum(finite), 1e3 * gains / min(finite)
        best = self._at(prices, 0.0)
        if self.predicted(best, prices) <= target:
            return best
        best = frozenset[str]()
        while high > _CLOSE * low:
            middle = (low * high) ** 0.5
            found = self._at(prices, middle)
            if self.predicted(found, prices) <= target:
                best, high = found if len(found) >= len(best) else best, middle
            else:
                low = middle
        return best

    def _at(self, prices: Sequence[float], rate: float) -> frozenset[str]:
        if self._priced != (priced := tuple(prices)):
            self._priced, self._rates = priced, {}
        if rate not in self._rates:
            self._rates[rate] = self.choose(prices, rate)
        return self._rates[rate]

    def predicted(self, low: frozenset[str], prices: Sequence[float]) -> float:
        """Squared error of a choice by prices, which add up."""
        return sum(price for unit, price in zip(self.space.units, prices, strict=True) if unit.key in low)

    def candidate(self, low: frozenset[str], prices: Sequence[float], error: float | None) -> Candidate:
        """A choice with what is known of it."""
        units = self.space.units
        chosen = [unit for unit in units if unit.key in low]
        time = sum(unit.low if unit.key in low else unit.high for unit in units)
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

    def _rounding(self, decision: Decision) -> set[int]:
        """Low exact ops between a float32 source and a float32 reader. Complexity: linear in exact ops and readers."""
        graph, ports = self.base.graph, self.base.ports
        low = [unit for unit in self.space.followers if self._is_low(decision, unit)]
        members = {unit.node for unit in low}
        exact: set[int] = set()
        for unit in low:  # in execution order
            node = graph.nodes[unit.node]
            sources = [node.inputs[port] for port in unit.ports.inputs]
            if any(self._is_exact(decision, value) or graph.values[value].producer in exact for value in sources):
                exact.add(unit.node)
        read: set[int] = set()
        for unit in reversed(low):
            for value in (graph.nodes[unit.node].outputs[port] for port in unit.ports.outputs):
                readers = [ports.consumed[index][port] for index, port in graph.uses[value] if index not in members]
                readers += [ports.returned[key] for key in graph.results[value] if key in ports.returned]
                passed = any(index in read for index, _ in graph.uses[value])
                if passed or any(variable != NONE and not decision.is_low(variable) for variable in readers):
                    read.add(unit.node)
        tied = {root for unit in self.space.units for root in self._roots(unit.node)} if exact & read else set()
        return {index for index in exact & read if not tied & self._roots(index)}

    def _is_exact(self, decision: Decision, value: int) -> bool:
        """Whether a value is there in float32, unrounded."""
        ports = self.base.ports
        return value in ports.free or not decision.is_low(ports.produced[value])

    def _roots(self, node: int) -> set[int]:
        """Deciding variables of a node: an exact op that shares one with a unit goes with it."""
        ports = self.base.ports
        made = [ports.produced[value] for value in self.base.graph.nodes[node].outputs if value != ABSENT]
        return {ports.root(variable) for variable in (*made, *ports.of_node.get(node, {}).values()) if variable >= 0}

    def _is_low(self, decision: Decision, unit: Unit) -> bool:
        low = decision.low
        return any(variable == LOW or (variable >= 0 and low[variable]) for variable in self._sides[unit.key])
