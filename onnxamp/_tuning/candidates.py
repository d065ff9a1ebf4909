"""From error prices to candidates: the minimum cut, with errors charged at a rate that is found by bisection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.decision import Decision
from onnxamp._decide.exponents import components
from onnxamp._decide.ports import LOW, NONE
from onnxamp._decide.precision import CutProblem
from onnxamp._graph.view import ABSENT
from onnxamp._tuning.results import Candidate
from onnxamp._tuning.space import SearchSpace, TunableNode, exactly, prices_for

_BREAKS: Final = "its block breaks the outputs"

_CLOSE: Final = 1.05
"""Ratio of rates at which bisection ends; each rate takes one cut."""


@dataclass(slots=True)
class CandidateSolver:
    """Solves the cut for any error prices. ``pinned`` names nodes that must stay float32, with the reason.

    Exact ops have no price. One that would round a float32 value on its way to a float32 reader stays float32.
    """

    space: SearchSpace
    base: Analysis
    pinned: Mapping[str, str] = field(default_factory=dict)
    problem: CutProblem = field(init=False)
    _variables: dict[str, list[int]] = field(init=False)
    """Node -> the precision variables of its low-precision ports."""
    _places: dict[str, int] = field(init=False)
    """Node -> its position in execution order."""
    _work: tuple[int, int] = field(init=False)
    """Arithmetic and elements of all tunable nodes."""
    _priced: tuple[float, ...] = ()
    _costs: dict[frozenset[str], tuple[list[int], int, frozenset[str]]] = field(
        default_factory=dict
    )
    """Choice -> values that are cast, bytes of weights, and the nodes that are lowered for it."""
    _rates: dict[float, frozenset[str]] = field(default_factory=dict)
    """Rate -> choice at the last prices: searches for several targets share most cuts."""

    def __post_init__(self) -> None:
        base, ports = self.base, self.base.ports
        self._variables = {
            unit.key: [
                *(
                    ports.produced[base.graph.nodes[unit.node].outputs[port]]
                    for port in unit.ports.outputs
                ),
                *(ports.consumed[unit.node][port] for port in unit.ports.inputs),
            ]
            for unit in (*self.space.tunable, *self.space.followers)
        }
        order = {index: place for place, index in enumerate(base.graph.order)}
        self._places = {
            unit.key: order[unit.node] for unit in (*self.space.tunable, *self.space.followers)
        }
        self._work = (
            sum(unit.work.flops for unit in self.space.tunable) or 1,
            sum(unit.work.elements for unit in self.space.tunable) or 1,
        )
        self.problem = CutProblem(base.problem, base.pins)

    def choose(self, prices: Sequence[float], rate: float) -> frozenset[str]:
        """The nodes to lower when errors are charged at a rate (cost units per squared error)."""
        units = self.space.tunable
        pins = dict(self.space.pins)
        pins |= {unit.node: why for unit in units if (why := self.pinned.get(unit.key)) is not None}
        pins |= {
            unit.node: _BREAKS for unit, price in zip(units, prices, strict=True) if price == inf
        }
        charged = [0.0 if price == inf else rate * price for price in prices]
        kept, parting = set[int](), self.space.parting()
        decision = self.problem.decide(prices_for(units, charged, pins, parting=parting))
        while rounding := self._rounding(decision) - kept:
            kept |= rounding
            decision = self.problem.decide(prices_for(units, charged, pins, kept, parting))
        nodes = (*units, *self.space.followers)
        return frozenset(
            unit.key for unit in nodes if self._is_low(decision, unit) and unit.node not in pins
        )

    def within(self, prices: Sequence[float], target: float) -> frozenset[str]:
        """The nodes that the cheapest cut lowers whose predicted squared error is at most ``target``.

        Cuts at neighbouring rates may differ by much, as by one product in every layer. Then connected parts of what
        the next one lowers are added, as far as they fit.
        """
        finite = [price for price in prices if 0 < price < inf]
        if not finite:
            return self.choose(prices, 0.0)
        low, high = 1 / sum(finite), 1e3 * self.space.gains / min(finite)
        best = self._at(prices, 0.0)
        if self.predicted(best, prices) <= target:
            return best
        best, above = frozenset[str](), best
        while high > _CLOSE * low:
            middle = (low * high) ** 0.5
            choice = self._at(prices, middle)
            if self.predicted(choice, prices) <= target:
                best, high = choice if len(choice) >= len(best) else best, middle
            else:
                low, above = middle, choice
        return self._filled(best, above, prices, target)

    def _filled(
        self, low: frozenset[str], above: frozenset[str], prices: Sequence[float], target: float
    ) -> frozenset[str]:
        """A choice, and of another one what fits the target beside it: what saves most time per error comes first.

        Complexity: linear in nodes and uses of values, and sorting.
        """
        left, units = target - self.predicted(low, prices), self.space.tunable
        price = dict(zip((unit.key for unit in units), prices, strict=True))
        gains = {unit.key: unit.high - unit.low for unit in units}
        parts = [
            (
                sum(price.get(key, 0.0) for key in part),
                sum(gains.get(key, 0.0) for key in part),
                part,
            )
            for part in self.connected(above - low)
        ]
        for cost, _, part in sorted(parts, key=lambda row: row[0] / row[1] if row[1] > 0 else inf):
            if cost <= left:
                low, left = low | part, left - cost
        return low

    def connected(self, keys: frozenset[str]) -> list[frozenset[str]]:
        """The parts of a choice that no value connects, in execution order."""
        graph, nodes = self.base.graph, (*self.space.tunable, *self.space.followers)
        inside = {unit.node: unit.key for unit in nodes if unit.key in keys}
        joined = (
            (node, reader)
            for node in inside
            for value in graph.nodes[node].outputs
            for reader, _ in (graph.uses[value] if value != ABSENT else ())
            if reader in inside
        )
        return [
            frozenset(inside[node] for node in group)
            for group in components(sorted(inside), joined)
        ]

    def _at(self, prices: Sequence[float], rate: float) -> frozenset[str]:
        if self._priced != (priced := tuple(prices)):
            self._priced, self._rates = priced, {}
        if rate not in self._rates:
            self._rates[rate] = self.choose(prices, rate)
        return self._rates[rate]

    def predicted(self, low: frozenset[str], prices: Sequence[float]) -> float:
        """The squared error of a choice: the sum of its prices."""
        return sum(
            price for unit, price in zip(self.space.tunable, prices, strict=True) if unit.key in low
        )

    def place(self, key: str) -> int:
        """The position of a node in execution order."""
        return self._places[key]

    def work(self, unit: TunableNode) -> float:
        """The share of arithmetic and float traffic that a node does."""
        flops, traffic = self._work
        return unit.work.flops / flops + unit.work.elements / traffic

    def candidate(
        self,
        low: frozenset[str],
        prices: Sequence[float],
        error: float | None,
        predicted: float | None = None,
    ) -> Candidate:
        """A choice with its predicted and measured properties; the prices predict, unless they cannot."""
        units = self.space.tunable
        chosen = [unit for unit in units if unit.key in low]
        casts, weights, _ = self._cost(low)
        flops, traffic = self._work
        return Candidate(
            low=low,
            nodes=len(chosen),
            predicted=self.predicted(low, prices) ** 0.5 if predicted is None else predicted,
            error=error,
            time=self.space.time(low, casts),
            flops=sum(u.work.flops for u in chosen) / flops,
            bytes=sum(u.work.elements for u in chosen) / traffic,
            casts=len(casts),
            weights=weights,
        )

    def casts(self, low: frozenset[str]) -> list[int]:
        """The values that are cast where these nodes are low."""
        return self._cost(low)[0]

    def feasible(self, low: frozenset[str]) -> frozenset[str]:
        """The nodes that are lowered if these are asked for: some depend on others."""
        return self._cost(low)[2]

    def _cost(self, low: frozenset[str]) -> tuple[list[int], int, frozenset[str]]:
        if low not in self._costs:
            space = self.space
            pins = {
                **space.pins,
                **{u.node: self.pinned[u.key] for u in space.tunable if u.key in self.pinned},
            }
            decision = self.problem.decide(exactly(space, low, pins))
            casts = space.estimate.casts(self.base.ports, decision)
            units = (*space.tunable, *space.followers)
            lowered = frozenset(
                u.key for u in units if self._is_low(decision, u) and u.node not in pins
            )
            self._costs[low] = (
                casts,
                space.estimate.weight_bytes(self.base.ports, decision),
                lowered,
            )
        return self._costs[low]

    def _rounding(self, decision: Decision) -> set[int]:
        """Lowered exact ops between a float32 source and a float32 reader.

        Complexity: linear in exact ops and readers.
        """
        graph, ports = self.base.graph, self.base.ports
        low = [unit for unit in self.space.followers if self._is_low(decision, unit)]
        members = {unit.node for unit in low}
        exact: set[int] = set()
        for unit in low:  # in execution order
            node = graph.nodes[unit.node]
            sources = [node.inputs[port] for port in unit.ports.inputs]
            if any(
                self._is_exact(decision, value) or graph.values[value].producer in exact
                for value in sources
            ):
                exact.add(unit.node)
        read: set[int] = set()
        for unit in reversed(low):
            for value in (graph.nodes[unit.node].outputs[port] for port in unit.ports.outputs):
                readers = [
                    ports.consumed[index][port]
                    for index, port in graph.uses[value]
                    if index not in members
                ]
                readers += [
                    ports.returned[key] for key in graph.results[value] if key in ports.returned
                ]
                passed = any(index in read for index, _ in graph.uses[value])
                if passed or any(
                    variable != NONE and not decision.is_low(variable) for variable in readers
                ):
                    read.add(unit.node)
        tied = (
            {root for unit in self.space.tunable for root in self._roots(unit.node)}
            if exact & read
            else set()
        )
        return {index for index in exact & read if not tied & self._roots(index)}

    def _is_exact(self, decision: Decision, value: int) -> bool:
        """Whether a value is available in float32, unrounded."""
        ports = self.base.ports
        return value in ports.free or not decision.is_low(ports.produced[value])

    def _roots(self, node: int) -> set[int]:
        """The variables that decide a node: an exact op that shares one with a tunable node follows it."""
        ports = self.base.ports
        made = [
            ports.produced[value]
            for value in self.base.graph.nodes[node].outputs
            if value != ABSENT
        ]
        return {
            ports.root(variable)
            for variable in (*made, *ports.of_node.get(node, {}).values())
            if variable >= 0
        }

    def _is_low(self, decision: Decision, unit: TunableNode) -> bool:
        low = decision.low
        return any(
            variable == LOW or (variable >= 0 and low[variable])
            for variable in self._variables[unit.key]
        )
