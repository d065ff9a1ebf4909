"""From expected errors to candidates: the choices among which tolerances decide.

They depend on times and error prices, and on no tolerance. The minimum cut with errors charged at every rate gives a
sequence of choices, from everything that pays to nothing. Neighbors in it may differ by much, for example by one
product in every layer. Between them lies a knapsack problem: parts of the difference, each with an error and a time
that it saves. Parts are added one by one, the best saving per error first. A choice of this chain is at most one part
away from the best.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from heapq import heappop, heappush, nlargest, nsmallest
from itertools import pairwise
from math import inf, log
from operator import itemgetter
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.exponents import components
from onnxamp._decide.ports import NONE
from onnxamp._decide.precision import CutProblem, Decision
from onnxamp._graph.view import ABSENT
from onnxamp._tuning.expected import ExpectedErrors
from onnxamp._tuning.results import Candidate
from onnxamp._tuning.space import SearchSpace, TunableNode, exactly, prices_for

Choice: TypeAlias = frozenset[str]
"""The keys of the nodes that are low."""

Part: TypeAlias = tuple[float, float, Choice]
"""The error of a part of a choice, its saving, and the part."""
_CUTS: Final = 12
"""The largest number of rates at which to solve a cut, for each way to price Casts."""

_CLOSE: Final = 1.02
"""Ratio between two errors, or two rates, below which the search does not look between them."""

_LEAST: Final = 1 / 256
"""Share of the error of the best choice below which the search stops."""

_FACTORS: Final = (1.0, 1 / 4, 4.0)
"""The factor on the estimated cost of Casts; the cut also counts the weights that they save."""

_NEAR: Final = 1e-3
"""Choices whose times differ by less than this share of float32's time count as equally fast."""

_FILLED: Final = 24
"""The largest number of choices that fill gaps."""

_STEPS: Final = 8
"""The largest number of choices that fill one gap."""

_PARTS: Final = 16
"""The largest number of parts to try between two neighboring choices."""

_FINE: Final = 1 / 16
"""Share of the error of a gap above which a part that is raised is halved."""

_SHARE: Final = 1 / 8
"""Share of the error of a gap above which one part of it is halved."""


def per_gain(part: Part) -> float:
    """Return the error of a part per saving."""
    error, gain, _ = part
    return error / gain if gain > 0 else inf


class CandidateSolver:
    """Solves the cut for the errors that are expected. ``pins`` are nodes that must stay in float32, with the reason.

    Exact ops have no price. One that would round a float32 value on its way to a float32 reader stays in float32.
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
        self._variables = {unit.key: self._ports_of(unit) for unit in space.units}
        order = {node.index: place for place, node in enumerate(base.graph.order)}
        self._places = {unit.key: order[unit.node] for unit in space.units}
        self._flops = sum(unit.work.flops for unit in space.tunable) or 1
        self._traffic = sum(unit.work.elements for unit in space.tunable) or 1
        self.problem = CutProblem(base.problem, base.pins)
        self._costs = dict[Choice, tuple[list[int], int, Choice]]()

    def _ports_of(self, unit: TunableNode) -> list[int]:
        """Return the variables of the ports of a node that can be low precision."""
        ports = self.base.ports
        outputs = self.base.graph.nodes[unit.node].outputs
        produced = [ports.produced[outputs[port]] for port in unit.ports.outputs]
        consumed = [ports.consumed[unit.node][port] for port in unit.ports.inputs]
        return produced + consumed

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
        parts = list[Part]()
        rest = self.connected(keys)[::-1]
        while rest:
            piece = rest.pop()
            cost = self.price(piece)
            half = len(piece) // 2
            if half and cost > most:
                rest += [piece[half:], piece[:half]]
            else:
                saved = sum(gains.get(key, 0.0) for key in piece)
                parts.append((cost, saved, frozenset(piece)))
        return parts

    def connected(self, keys: Choice) -> list[list[str]]:
        """Return the parts of a choice that no value connects, each in execution order."""
        graph = self.base.graph
        inside = {unit.node: unit.key for unit in self.space.units if unit.key in keys}
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

    def price(self, keys: Iterable[str]) -> float:
        """Return the sum of the prices of some nodes."""
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
        """Return the nodes that are lowered if these are requested: some depend on others."""
        return self._cost(low)[2]

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

    def priced(self, errors: ExpectedErrors, space: SearchSpace) -> "CandidateSolver":
        """Return the solver for other errors and times of the same nodes; everything else is shared."""
        other = copy(self)
        other.errors = errors
        other.space = space
        return other

    def _rounding(self, decision: Decision) -> set[int]:
        """Return the lowered exact ops between a float32 source and a float32 reader.

        Complexity: linear in exact ops and readers.
        """
        graph = self.base.graph
        ports = self.base.ports
        low = [unit for unit in self.space.followers if self._is_low(decision, unit)]
        members = {unit.node for unit in low}
        exact: set[int] = set()
        for unit in low:  # in execution order
            node = graph.nodes[unit.node]
            for port in unit.ports.inputs:
                value = node.inputs[port]
                is_low = decision.is_low(ports.produced[value])
                is_rounded = value not in ports.free and is_low
                if not is_rounded or graph.values[value].producer in exact:
                    exact.add(unit.node)
        read: set[int] = set()
        for unit in reversed(low):
            outputs = graph.nodes[unit.node].outputs
            for value in (outputs[port] for port in unit.ports.outputs):
                uses = graph.uses[value]
                outside = [use for use in uses if use[0] not in members]
                readers = [ports.consumed[node][at] for node, at in outside]
                readers += (
                    ports.returned.get(key, NONE) for key in graph.results[value]
                )
                is_high = any(v != NONE and not decision.is_low(v) for v in readers)
                if is_high or any(node in read for node, _ in uses):
                    read.add(unit.node)
        rounding = exact & read
        if not rounding:
            return set()
        tied = set[int]()
        for unit in self.space.tunable:
            tied |= self._roots(unit.node)
        return {index for index in rounding if tied.isdisjoint(self._roots(index))}

    def _roots(self, node: int) -> set[int]:
        """Return the variables that decide a node: an exact op that shares one with a tunable node follows it."""
        ports = self.base.ports
        outputs = self.base.graph.nodes[node].outputs
        produced = [ports.produced[value] for value in outputs if value != ABSENT]
        variables = (*produced, *ports.of(node))
        # Ports that are high, low or no floats in any case have negative numbers.
        return {ports.root(variable) for variable in variables if variable >= 0}

    def _is_low(self, decision: Decision, unit: TunableNode) -> bool:
        return any(map(decision.is_low, self._variables[unit.key]))


class Aim(NamedTuple):
    """The order of choices; ``nothing`` is the choice of float32."""

    nothing: Candidate
    allow_slower: bool

    def merit(self, one: Candidate) -> float:
        """Return a key that orders candidates, the best first."""
        return -one.flops - one.bytes if self.allow_slower else one.time

    def are_near(self, one: Candidate, other: Candidate) -> bool:
        """Return whether there is almost no difference between two candidates."""
        unit = 1.0 if self.allow_slower else self.nothing.time
        return abs(self.merit(one) - self.merit(other)) < _NEAR * unit

    def admits(self, one: Candidate) -> bool:
        """Return whether a candidate may be offered, whatever its error."""
        if not one.low:
            return False
        return self.allow_slower or one.time <= self.nothing.time


class Frontier:
    """Makes the list of choices."""

    def __init__(self, solver: CandidateSolver, aim: Aim) -> None:
        self.solver = solver
        self.aim = aim
        self._solvers = [solver]
        if not aim.allow_slower:
            spaces = map(solver.space.with_casts, _FACTORS)
            self._solvers = [solver.priced(solver.errors, space) for space in spaces]

    @cached_property
    def unpriced(self) -> list[Candidate]:
        """The best choices regardless of errors, best first."""
        solvers = dict.fromkeys((self.solver, *self._solvers))
        lows = dict.fromkeys(solver.choose(0.0) for solver in solvers)
        return sorted(map(self._priced, lows), key=self.aim.merit)

    def choices(self) -> list[Candidate]:
        """Return the choices in the order of their merit; each is predicted to have a smaller error than all before it.

        None is better than the best without regard to errors, which an infinite tolerance would choose.

        Complexity: some hundred cuts at most.
        """
        free = self._admitted(self.unpriced)
        if not free:
            return []
        lows = {item.low: None for item in free}
        for solver in self._solvers:
            lows |= dict.fromkeys(_rated(solver))
        candidates = list(map(self._priced, lows))
        candidates += self._between(self._front(candidates, free))
        return self._admitted(self._front(candidates, free))

    def refined(self, before: Candidate, after: Candidate) -> list[Candidate]:
        """Return choices that are better than ``after`` and not as good as ``before``, in the order of their merit.

        They raise the parts of ``before`` that cost least time for the error that they cause, or lower those beyond
        ``after``, or beyond float32, that save most, including the Casts that this takes.

        Complexity: some dozens of cuts.
        """
        if self.aim.are_near(before, after):
            return []
        gap = before.predicted**2 - after.predicted**2
        merit = self.aim.merit
        free = self.unpriced[0].low
        less = self._parts(before.low, _FINE * gap)
        candidates = list(
            self._steps(before, nlargest(_PARTS, less, key=itemgetter(0)))
        )
        starts = {after.low: after, frozenset[str](): self.aim.nothing}
        for low, start in starts.items():
            most = before.predicted**2 - start.predicted**2
            more = [part for part in self._parts(free - low, most) if part[0] <= most]
            candidates += self._steps(start, nsmallest(_PARTS, more, key=per_gain))
        inside = [
            one for one in candidates if merit(before) < merit(one) < merit(after)
        ]
        front = self._front(inside, self._admitted(self.unpriced))
        return [
            one for one in front if after.predicted < one.predicted < before.predicted
        ]

    def _steps(self, start: Candidate, parts: Sequence[Part]) -> Iterator[Candidate]:
        """Yield a choice with each part changed alone, and then with one after the other, the best first."""
        alone = [(self._priced(start.low ^ part), part) for _, _, part in parts]
        yield from (one for one, _ in alone)

        def rate(row: tuple[Candidate, Choice]) -> float:
            error = row[0].predicted ** 2 - start.predicted**2
            gain = self.aim.merit(start) - self.aim.merit(row[0])
            return gain / error if error else 0.0

        # Parts to raise cost least time per error first; parts to lower save most, as long as they save anything.
        low = start.low
        rising = sorted(alone, key=rate)
        if not all(part <= start.low for _, part in alone):
            rising = [row for row in rising[::-1] if rate(row) > 0]
        for _, part in rising:
            low ^= part
            yield self._priced(low)

    def _parts(self, keys: Choice, most: float) -> list[Part]:
        if self.aim.allow_slower:
            return self.solver.parts(keys, most, self.solver.work)
        return self.solver.parts(keys, most)

    def _priced(self, low: Choice) -> Candidate:
        return self.solver.candidate(self.solver.feasible(low))

    def _admitted(self, items: Iterable[Candidate]) -> list[Candidate]:
        return sorted(filter(self.aim.admits, items), key=self.aim.merit)

    def _front(
        self, items: Iterable[Candidate], free: Sequence[Candidate]
    ) -> list[Candidate]:
        """Return the choices that no better one beats in the predicted error, without near duplicates."""
        least = self.aim.merit(free[0])
        known = {item.low for item in free}
        front = list[Candidate]()
        limit = inf
        lowered = (item for item in items if item.low)
        rows = ((self.aim.merit(item), item.predicted, item) for item in lowered)
        for merit, error, item in sorted(rows, key=itemgetter(0, 1)):
            if merit < least and item.low not in known:
                continue
            is_smaller = error * _CLOSE < limit or error == 0 < limit
            if is_smaller or not front:
                front.append(item)
                limit = error
        return self._apart(front)

    def _apart(self, front: Sequence[Candidate]) -> list[Candidate]:
        """Return the front without choices that are hardly better than the next one, whose error is smaller.

        The best choice stays in any case.
        """
        kept = list[Candidate]()
        for number, item in reversed(list(enumerate(front))):
            if not kept or not number or not self.aim.are_near(item, kept[-1]):
                kept.append(item)
        return kept[::-1]

    def _between(self, front: Sequence[Candidate]) -> list[Candidate]:
        """Return choices that fill the gaps of a front, the widest first."""
        ends = [*front, self.aim.nothing]
        gaps = [
            (_width(after.predicted, before.predicted), before, after)
            for before, after in pairwise(ends)
        ]
        candidates = list[Candidate]()
        least = _LEAST * front[0].predicted
        for width, before, after in sorted(gaps, key=itemgetter(0), reverse=True):
            if width <= log(_CLOSE) or len(candidates) >= _FILLED:
                break
            if before.predicted > least:
                candidates += map(self._priced, self._chain(before, after))
        return candidates

    def _chain(self, before: Candidate, after: Candidate) -> Iterator[Choice]:
        """Yield choices from ``after`` to ``before`` that add more and more of the difference, the best parts first."""
        gap = before.low - after.low
        parts = self._parts(gap, _SHARE * self.solver.price(gap))
        total = sum(error for error, _, _ in parts) if len(parts) > _STEPS else 0.0
        low = after.low
        spent = 0.0
        step = total / _STEPS
        for error, _, part in sorted(parts, key=per_gain):
            if low != after.low and spent + error >= step:
                yield low
                spent = 0.0
            low = low | part
            spent = spent + error


def room(chosen: Candidate, faster: Iterable[Candidate], limit: float) -> float:
    """Return the share of the time of a choice that a better use of the tolerance could still save, at most.

    Between a choice that holds and a faster one that misses, time falls by no more than in proportion to the squared
    error, as long as what saves most per error comes first: a knapsack of which one part may be cut.

    Args:
        chosen: the choice, with its error.
        faster: choices that miss, with theirs.
        limit: the error that is allowed.
    """
    mine = chosen.best_known_error**2
    bound = 0.0
    for one in faster:
        theirs = one.best_known_error**2
        if one.time < chosen.time and mine <= limit**2 < theirs < inf:
            share = (limit**2 - mine) / (theirs - mine)
            bound = max(bound, (chosen.time - one.time) * share)
    return bound / chosen.time if chosen.time else 0.0


def _width(low: float, high: float) -> float:
    """Return the distance of two errors."""
    if not 0 < low < inf or not 0 < high < inf:
        return inf if low < high else 0.0
    return log(high / low)


def _rated(solver: CandidateSolver) -> Iterator[Choice]:
    """Yield the cuts at all rates, where their errors differ: the widest gap is halved until none is left."""
    # At the first rate, all errors together cost one unit; at the last, the smallest one outweighs all savings.
    prices = solver.errors.prices
    ends = [1 / sum(prices), 1e3 * (1 + solver.space.gains) / min(prices)]
    rated = [(rate, solver.choose(rate)) for rate in ends]
    yield from (low for _, low in rated)
    gaps = list[tuple[float, float, float, Choice, Choice]]()

    predicted = solver.errors.predicted
    least = _LEAST * predicted(rated[0][1])

    def enter(low: tuple[float, Choice], high: tuple[float, Choice]) -> None:
        """Enter the gap between the choices at two rates, unless it is closed."""
        low_rate, more = low
        high_rate, less = high
        if more == less or high_rate <= _CLOSE * low_rate:
            return
        error = predicted(more)
        width = _width(max(predicted(less), least), error)
        if error > least and width > log(_CLOSE):
            heappush(gaps, (-width, low_rate, high_rate, more, less))

    enter(*rated)
    for _ in range(_CUTS):
        if not gaps:
            return
        _, low_rate, high_rate, more, less = heappop(gaps)
        middle = (low_rate * high_rate) ** 0.5  # rates span many powers of ten
        choice = solver.choose(middle)
        yield choice
        enter((low_rate, more), (middle, choice))
        enter((middle, choice), (high_rate, less))
