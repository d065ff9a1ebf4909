"""From expected errors to candidates: the minimum cut, with errors charged at any rate."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from math import inf
from types import MappingProxyType
from typing import TypeAlias

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.exponents import components
from onnxamp._decide.ports import NONE
from onnxamp._decide.precision import CutProblem, Decision
from onnxamp._graph.view import ABSENT
from onnxamp._numerics.expected import ExpectedErrors
from onnxamp._tuning.results import Candidate
from onnxamp._tuning.space import SearchSpace, TunableNode, exactly, prices_for

Choice: TypeAlias = frozenset[str]
"""The keys of the nodes that are low."""

Part: TypeAlias = tuple[float, float, Choice]
"""A part of a choice, after its error and its saving."""


def per_gain(part: Part) -> float:
    """Return the error of a part per saving."""
    error, gain, _ = part
    return error / gain if gain > 0 else inf


class CandidateSolver:
    """Solves the cut for the errors that are expected. ``pins`` are nodes that must stay float32, with the reason.

    Exact ops have no price. One that would round a float32 value on its way to a float32 reader stays float32.
    """

    def __init__(
        self,
        space: SearchSpace,
        base: Analysis,
        errors: ExpectedErrors,
        pins: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.space, self.base, self.errors, self.pins = space, base, errors, pins
        ports, nodes = base.ports, base.graph.nodes
        self._variables = {  # of the low-precision ports of each node
            unit.key: [
                *(
                    ports.produced[nodes[unit.node].outputs[port]]
                    for port in unit.ports.outputs
                ),
                *(ports.consumed[unit.node][port] for port in unit.ports.inputs),
            ]
            for unit in space.units
        }
        order = {node.index: place for place, node in enumerate(base.graph.order)}
        self._places = {unit.key: order[unit.node] for unit in space.units}
        self._flops = sum(unit.work.flops for unit in space.tunable) or 1
        self._traffic = sum(unit.work.elements for unit in space.tunable) or 1
        self.problem = CutProblem(base.problem, base.pins)
        self._costs = dict[Choice, tuple[list[int], int, Choice]]()

    def choose(self, rate: float) -> Choice:
        """Return the nodes to lower when errors are charged at a rate (cost units per squared error)."""
        units, pins = self.space.tunable, self.pins
        charged = [rate * price for price in self.errors.prices]
        kept, parting = set[int](), self.space.parting()
        decision = self.problem.decide(
            prices_for(units, charged, pins, parting=parting)
        )
        while rounding := self._rounding(decision) - kept:
            kept |= rounding
            decision = self.problem.decide(
                prices_for(units, charged, pins, kept, parting)
            )
        return self._noted(decision)[2]

    def _lowered(self, decision: Decision, pins: Mapping[int, str]) -> Choice:
        return frozenset(
            unit.key
            for unit in self.space.units
            if self._is_low(decision, unit) and unit.node not in pins
        )

    def parts(
        self,
        keys: Choice,
        most: float = inf,
        gain: Callable[[TunableNode], float] = lambda unit: unit.high - unit.low,
    ) -> list[Part]:
        """Return the parts of a choice that no value connects, halved until none of several nodes has an error above
        ``most``.

        ``gain`` is the worth of lowering a node, without Casts; exact ops are worth nothing by themselves.
        """
        gains = {unit.key: gain(unit) for unit in self.space.tunable}
        found, rest = list[Part](), self.connected(keys)[::-1]
        while rest:
            piece = rest.pop()
            cost = self.price(piece)
            if len(piece) > 1 and cost > most:
                rest += [piece[len(piece) // 2 :], piece[: len(piece) // 2]]
            else:
                found.append(
                    (cost, sum(gains.get(key, 0.0) for key in piece), frozenset(piece))
                )
        return found

    def connected(self, keys: Choice) -> list[list[str]]:
        """Return the parts of a choice that no value connects, each in execution order."""
        graph = self.base.graph
        inside = {unit.node: unit.key for unit in self.space.units if unit.key in keys}
        joined = (
            (node, reader)
            for node in inside
            for value in graph.nodes[node].outputs
            for reader, _ in graph.uses[value]
            if reader in inside
        )
        return [
            sorted((inside[node] for node in group), key=self._places.__getitem__)
            for group in components(sorted(inside), joined)
        ]

    def price(self, keys: Iterable[str]) -> float:
        """The sum of the prices of some nodes."""
        prices = self.errors.price_of
        return sum(prices.get(key, 0.0) for key in keys)

    def work(self, unit: TunableNode) -> float:
        """Return the share of arithmetic and float traffic that a node does."""
        return unit.work.flops / self._flops + unit.work.elements / self._traffic

    def candidate(self, low: Choice) -> Candidate:
        """Return a choice with its properties and its expected error."""
        chosen = [unit for unit in self.space.tunable if unit.key in low]
        casts, weights, _ = self._cost(low)
        return Candidate(
            low=low,
            nodes=len(chosen),
            predicted=self.errors.predicted(low),
            error=None,
            time=self.space.time(low, casts),
            flops=sum(u.work.flops for u in chosen) / self._flops,
            bytes=sum(u.work.elements for u in chosen) / self._traffic,
            casts=len(casts),
            weights=weights,
        )

    def feasible(self, low: Choice) -> Choice:
        """Return the nodes that are lowered if these are requested, because some depend on others."""
        return self._cost(low)[2]

    def _cost(self, low: Choice) -> tuple[list[int], int, Choice]:
        if low not in self._costs:
            decision = self.problem.decide(exactly(self.space, low, self.pins))
            self._costs[low] = self._noted(decision)
        return self._costs[low]

    def _noted(self, decision: Decision) -> tuple[list[int], int, Choice]:
        """Return the values that a decision casts, the bytes of its weights, and the nodes that it lowers."""
        low = self._lowered(decision, self.pins)
        if low not in self._costs:
            estimate, ports = self.space.estimate, self.base.ports
            casts = estimate.casts(ports, decision)
            bytes_ = estimate.weight_bytes(ports, decision)
            self._costs[low] = casts, bytes_, low
        return self._costs[low]

    def priced(self, errors: ExpectedErrors, space: SearchSpace) -> "CandidateSolver":
        """Return the solver for other errors and times of the same nodes; everything else is shared."""
        other = copy(self)
        other.errors, other.space = errors, space
        return other

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
            for value in (
                graph.nodes[unit.node].outputs[port] for port in unit.ports.outputs
            ):
                uses = graph.uses[value]
                readers = [
                    ports.consumed[node][at] for node, at in uses if node not in members
                ]
                readers += [
                    ports.returned.get(key, NONE) for key in graph.results[value]
                ]
                is_high = any(v != NONE and not decision.is_low(v) for v in readers)
                if is_high or any(node in read for node, _ in uses):
                    read.add(unit.node)
        found = exact & read
        tunable = self.space.tunable if found else ()
        tied = {root for unit in tunable for root in self._roots(unit.node)}
        return {index for index in found if tied.isdisjoint(self._roots(index))}

    def _is_exact(self, decision: Decision, value: int) -> bool:
        """Return whether a value is available in float32, unrounded."""
        ports = self.base.ports
        return value in ports.free or not decision.is_low(ports.produced[value])

    def _roots(self, node: int) -> set[int]:
        """Return the variables that decide a node: an exact op that shares one with a tunable node follows it."""
        ports = self.base.ports
        made = [
            ports.produced[value]
            for value in self.base.graph.nodes[node].outputs
            if value != ABSENT
        ]
        return {
            ports.root(variable)
            for variable in (*made, *ports.of(node))
            if variable >= 0
        }

    def _is_low(self, decision: Decision, unit: TunableNode) -> bool:
        return any(map(decision.is_low, self._variables[unit.key]))
