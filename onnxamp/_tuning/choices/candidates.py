"""From expected errors to candidates: the choices among which tolerances decide.

They depend on times and error prices, and on no tolerance. The minimum cut with errors charged at every rate gives a
sequence of choices, from everything that pays to nothing. Neighbors in it may differ by much, for example by one
product in every layer. Between them lies a knapsack problem: parts of the difference, each with an error and a time
that it saves. Parts are added one by one, the best saving per error first. A choice of this chain is at most one part
away from the best.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from heapq import nlargest, nsmallest
from itertools import pairwise
from math import inf, log
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from onnxamp._tuning.choices.parts import Choice, ChoicePart
from onnxamp._tuning.choices.rates import CLOSE, LEAST, error_ratio, rated_choices
from onnxamp._tuning.choices.solver import CandidateSolver
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import Candidate

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
            lows |= dict.fromkeys(rated_choices(solver))
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
            self._steps(before, nlargest(_PARTS, less, key=attrgetter("error")))
        )
        starts = {after.low: after, frozenset[str](): self.aim.nothing}
        for low, start in starts.items():
            most = before.predicted**2 - start.predicted**2
            more = [
                part for part in self._parts(free - low, most) if part.error <= most
            ]
            candidates += self._steps(
                start, nsmallest(_PARTS, more, key=attrgetter("error_per_gain"))
            )
        inside = [
            candidate
            for candidate in candidates
            if merit(before) < merit(candidate) < merit(after)
        ]
        front = self._front(inside, self._admitted(self.unpriced))
        return [
            one for one in front if after.predicted < one.predicted < before.predicted
        ]

    def _steps(
        self, start: Candidate, parts: Sequence[ChoicePart]
    ) -> Iterator[Candidate]:
        """Yield a choice with each part changed alone, and then with one after the other, the best first."""
        alone = [(self._priced(start.low ^ part.keys), part.keys) for part in parts]
        yield from (one for one, _ in alone)

        def rate(row: tuple[Candidate, Choice]) -> float:
            error = row[0].predicted ** 2 - start.predicted**2
            gain = self.aim.merit(start) - self.aim.merit(row[0])
            return gain / error if error else 0.0

        # Parts to raise: first those that cost least time per error. Parts to lower: those that save most.
        low = start.low
        rising = sorted(alone, key=rate)
        if not all(part <= start.low for _, part in alone):
            rising = [row for row in rising[::-1] if rate(row) > 0]
        for _, part in rising:
            low ^= part
            yield self._priced(low)

    def _parts(self, keys: Choice, most: float) -> list[ChoicePart]:
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
            is_smaller = error * CLOSE < limit or error == 0 < limit
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
            (error_ratio(after.predicted, before.predicted), before, after)
            for before, after in pairwise(ends)
        ]
        candidates = list[Candidate]()
        least = LEAST * front[0].predicted
        for width, before, after in sorted(gaps, key=itemgetter(0), reverse=True):
            if width <= log(CLOSE) or len(candidates) >= _FILLED:
                break
            if before.predicted > least:
                candidates += map(self._priced, self._chain(before, after))
        return candidates

    def _chain(self, before: Candidate, after: Candidate) -> Iterator[Choice]:
        """Yield choices from ``after`` to ``before`` that add more and more of the difference, the best parts first."""
        gap = before.low - after.low
        parts = self._parts(gap, _SHARE * self.solver.price(gap))
        total = sum(part.error for part in parts) if len(parts) > _STEPS else 0.0
        low = after.low
        spent = 0.0
        step = total / _STEPS
        for part in sorted(parts, key=attrgetter("error_per_gain")):
            if low != after.low and spent + part.error >= step:
                yield low
                spent = 0.0
            low = low | part.keys
            spent = spent + part.error


def room(chosen: Candidate, faster: Iterable[Candidate], metric: Metric) -> float:
    """Return the share of the time of a choice that a better use of the tolerance could still save, at most.

    Between a choice that holds and a faster one that misses, time falls by no more than in proportion to the squared
    error, as long as what saves most per error comes first: a knapsack of which one part may be cut.

    Args:
        chosen: the choice, with its error.
        faster: choices that miss, with theirs.
        metric: measures these errors, and says which is allowed.
    """
    # Metrics that are squares already add up as they are.
    limit = metric.amplitude(metric.tolerance) ** 2
    mine = metric.amplitude(chosen.best_known_error) ** 2
    bound = 0.0
    for one in faster:
        theirs = metric.amplitude(one.best_known_error) ** 2
        if one.time < chosen.time and mine <= limit < theirs < inf:
            share = (limit - mine) / (theirs - mine)
            bound = max(bound, (chosen.time - one.time) * share)
    return bound / chosen.time if chosen.time else 0.0
