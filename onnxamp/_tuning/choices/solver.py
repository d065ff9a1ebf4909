"""The cut for expected errors: which nodes to lower when errors are charged at a rate, and what a choice comes to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from math import inf
from types import MappingProxyType

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.mincut import Question
from onnxamp._decide.precision import CutProblem, Decision
from onnxamp._decide.variables.ports import NONE
from onnxamp._graph.view import ABSENT
from onnxamp._tuning.choices.parts import Choice, ChoicePart, ChoiceParts
from onnxamp._tuning.choices.space import SearchSpace, TunableNode, exactly, prices_for
from onnxamp._tuning.errors.expected import ExpectedErrors
from onnxamp._tuning.results import Candidate


class CandidateSolver:
    """Solves the cut for the errors that are expected.

    Exact ops have no price. One that would round a float32 value on its way to a float32 reader stays in float32.

    Attributes:
        space: the nodes that can be low, with their times.
        base: the problem without prices.
        errors: the prices of errors.
        pins: nodes that must stay in float32, with the reason.
    """

    def __init__(
        self,
        space: SearchSpace,
        base: Analysis,
        errors: ExpectedErrors,
        pins: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.space = space
        self.base = base
        self.errors = errors
        self.pins = pins
        self.problem = CutProblem(base.problem, base.pins)
        self._parts = ChoiceParts(base.graph, space.units)
        self._variables = {unit.key: self._ports_of(unit) for unit in space.units}
        self._flops = sum(unit.work.flops for unit in space.tunable) or 1
        self._traffic = sum(unit.work.elements for unit in space.tunable) or 1
        self._costs = dict[Choice, tuple[list[int], int, Choice]]()

    def priced(self, errors: ExpectedErrors, space: SearchSpace) -> "CandidateSolver":
        """Return the solver for other errors and times of the same nodes; everything else is shared."""
        other = copy(self)
        other.errors = errors
        other.space = space
        return other

    # -- choices -----------------------------------------------------------------------------------------------

    def choose(self, rate: float) -> Choice:
        """Return the nodes to lower when errors are charged at a rate (cost units per squared error)."""
        units = self.space.tunable
        pins = self.pins
        charged = [rate * price for price in self.errors.prices]
        kept = set[int]()
        parting = self.space.parting()
        decision = self.problem.decide(prices_for(units, charged, pins, kept, parting))
        # The cut sees no price for exact ops, so those that would round are found afterwards, and kept in the next one.
        while rounding := self._rounding(decision) - kept:
            kept |= rounding
            prices = prices_for(units, charged, pins, kept, parting)
            decision = self.problem.decide(prices)
        return self._noted(decision)[2]

    def feasible(self, low: Choice) -> Choice:
        """Return the nodes that are lowered if these are requested: some depend on others."""
        return self._cost(low)[2]

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

    # -- parts of choices --------------------------------------------------------------------------------------

    def parts(
        self,
        keys: Choice,
        most: float = inf,
        gain: Callable[[TunableNode], float] = lambda unit: unit.high - unit.low,
    ) -> list[ChoicePart]:
        """Return the parts of a choice that no value connects, halved until none of several nodes has an error above
        ``most``.

        ``gain`` is the worth of lowering a node, without Casts; exact ops are worth nothing by themselves.
        """
        gains = {unit.key: gain(unit) for unit in self.space.tunable}
        return self._parts.halved(keys, self.errors.price_of, gains, most)

    def price(self, keys: Iterable[str]) -> float:
        """Return the sum of the prices of some nodes."""
        prices = self.errors.price_of
        return sum(prices.get(key, 0.0) for key in keys)

    def work(self, unit: TunableNode) -> float:
        """Return the share of arithmetic and float traffic that a node does."""
        return unit.work.flops / self._flops + unit.work.elements / self._traffic

    # -- decisions ---------------------------------------------------------------------------------------------

    def _cost(self, low: Choice) -> tuple[list[int], int, Choice]:
        if low not in self._costs:
            decision = self.problem.decide(exactly(self.space, low, self.pins))
            self._costs[low] = self._noted(decision)
        return self._costs[low]

    def _noted(self, decision: Decision) -> tuple[list[int], int, Choice]:
        """Return the values that a decision casts, the bytes of its weights, and the nodes that it lowers."""
        low = frozenset(
            unit.key
            for unit in self.space.units
            if self._is_low(decision, unit) and unit.node not in self.pins
        )
        if low not in self._costs:
            estimate = self.space.estimate
            ports = self.base.ports
            casts = estimate.casts(ports, decision)
            bytes_ = estimate.weight_bytes(ports, decision)
            self._costs[low] = casts, bytes_, low
        return self._costs[low]

    def _is_low(self, decision: Decision, unit: TunableNode) -> bool:
        return any(map(decision.is_low, self._variables[unit.key]))

    def _ports_of(self, unit: TunableNode) -> list[Question]:
        """Return the variables of the ports of a node that can be low precision."""
        ports = self.base.ports
        outputs = self.base.graph.nodes[unit.node].outputs
        produced = [ports.produced[outputs[port]] for port in unit.ports.outputs]
        consumed = [ports.consumed[unit.node][port] for port in unit.ports.inputs]
        return produced + consumed

    # -- exact ops ---------------------------------------------------------------------------------------------

    def _rounding(self, decision: Decision) -> set[int]:
        """Return the lowered exact ops between a float32 source and a float32 reader.

        Complexity: linear in exact ops and readers.
        """
        low = [unit for unit in self.space.followers if self._is_low(decision, unit)]
        rounding = self._after_high(decision, low) & self._before_high(decision, low)
        if not rounding:
            return set()
        # An exact op that shares a variable with a tunable node follows it.
        tied = set[Question]()
        for unit in self.space.tunable:
            tied |= self._roots(unit.node)
        return {index for index in rounding if tied.isdisjoint(self._roots(index))}

    def _after_high(self, decision: Decision, low: Sequence[TunableNode]) -> set[int]:
        """Return those of the low exact ops that a float32 value reaches through others of them."""
        graph = self.base.graph
        ports = self.base.ports
        reached = set[int]()
        for unit in low:  # in execution order
            node = graph.nodes[unit.node]
            for value in (node.inputs[port] for port in unit.ports.inputs):
                is_low = decision.is_low(ports.produced[value])
                is_rounded = value not in ports.free and is_low
                if not is_rounded or graph.values[value].producer in reached:
                    reached.add(unit.node)
        return reached

    def _before_high(self, decision: Decision, low: Sequence[TunableNode]) -> set[int]:
        """Return those of the low exact ops from which a float32 reader is reached through others of them."""
        graph = self.base.graph
        members = {unit.node for unit in low}
        reaching = set[int]()
        for unit in reversed(low):
            outputs = graph.nodes[unit.node].outputs
            for value in (outputs[port] for port in unit.ports.outputs):
                is_read = any(node in reaching for node, _ in graph.uses[value])
                if is_read or self._is_read_high(decision, value, members):
                    reaching.add(unit.node)
        return reaching

    def _is_read_high(
        self, decision: Decision, value: int, members: AbstractSet[int]
    ) -> bool:
        """Return whether a value is read in float32 by a node that is no member, or returned so."""
        graph = self.base.graph
        ports = self.base.ports
        uses = [use for use in graph.uses[value] if use[0] not in members]
        readers = [ports.consumed[node][at] for node, at in uses]
        readers += [ports.returned.get(key, NONE) for key in graph.results[value]]
        return any(
            reader != NONE and not decision.is_low(reader) for reader in readers
        )

    def _roots(self, node: int) -> set[Question]:
        """Return the variables that decide a node."""
        ports = self.base.ports
        outputs = self.base.graph.nodes[node].outputs
        produced = [ports.produced[value] for value in outputs if value != ABSENT]
        variables = (*produced, *ports.of(node))
        # Ports that are high, low or no floats in any case have negative numbers.
        return {ports.root(variable) for variable in variables if variable >= 0}
