"""The choices among which tolerances decide: they depend on times and error prices, and on no tolerance.

The minimum cut with errors charged at every rate gives a sequence of choices, from all that pays to nothing. Two that
follow each other may differ by much, as by one product in every layer. What lies between them is a knapsack: parts of
the difference, each with an error and a time that it saves. Added one by one, what saves most per error first, they
fill the gap; a choice of this chain is at most one part away from the best.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import pairwise
from math import inf, log
from typing import Final, NamedTuple

from onnxamp._tuning.arguments import is_slower, is_worth, standing
from onnxamp._tuning.candidates import CandidateSolver, Choice, Part, per_gain
from onnxamp._tuning.results import Candidate
from onnxamp._tuning.space import CASTS

_CUTS: Final = 24
"""Rates at most at which a cut is solved, for each way to price Casts."""

_FEWEST: Final = 12
"""Rates at which it is solved even where the time is over."""

_CLOSE: Final = 1.02
"""Ratio between errors, and between rates, below which nothing is looked for in between."""

_FACTORS: Final = (1.0, 1 / 4, 4.0)
"""What Casts are taken to cost, over the estimate: the cut counts the weights that they save, too."""

_NEAR: Final = 1e-3
"""Share of the time of float32 that one choice must be better than another by."""

_FILLED: Final = 48
"""Choices at most that fill gaps."""

_STEPS: Final = 8
"""Choices at most that fill one gap."""

_PARTS: Final = 24
"""Parts at most that are tried between two choices that follow each other."""

_FINE: Final = 1 / 16
"""Share of the gap above which one of these is halved."""

_SHARE: Final = 1 / 8
"""Share of the error of a gap above which one part of it is halved."""


class Aim(NamedTuple):
    """What makes one choice better than another: ``nothing`` is that of float32."""

    nothing: Candidate
    allow_slower: bool

    def merit(self, one: Candidate) -> tuple[bool, float]:
        """Orders candidates, the best first."""
        if self.allow_slower:
            return False, -one.flops - one.bytes
        return standing(one, self.nothing)

    def are_near(self, one: Candidate, other: Candidate) -> bool:
        """Whether there is next to nothing between two candidates."""
        (a, x), (b, y) = self.merit(one), self.merit(other)
        unit = 1.0 if self.allow_slower or a else self.nothing.time
        return a == b and abs(x - y) < _NEAR * unit

    def admits(self, one: Candidate) -> bool:
        """Whether a candidate is worth offering at all, whatever its error."""
        return bool(one.low) and (self.allow_slower or is_worth(one, self.nothing))

    def writes(self, one: Candidate) -> bool:
        """Return whether a candidate may be written unasked: what is slower than float32 has to be picked."""
        return self.allow_slower or not is_slower(one, self.nothing)


class Frontier:
    """Makes the list of choices. ``is_late`` says that there is no time to look for more of them."""

    def __init__(
        self,
        solver: CandidateSolver,
        aim: Aim,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.solver, self.aim, self.is_late = solver, aim, is_late
        self._solvers = [solver]
        self._free: list[Choice] | None = (
            None  # the choices that errors have no part in
        )
        for factor in () if aim.allow_slower else _FACTORS:
            space = solver.space.corrected({CASTS: factor}, 1.0)
            self._solvers.append(CandidateSolver(space, solver.base, solver.pinned))

    def unpriced(self, error: float) -> list[Candidate]:
        """The choices that errors have no part in, best first; ``error`` is that with everything lowered."""
        flat = [0.0] * len(self.solver.space.tunable)
        if self._free is None:
            self._free = list(
                dict.fromkeys(solver.choose(flat, 0.0) for solver in self._solvers)
            )
        return self._admitted(
            self.solver.candidate(low, flat, None, error) for low in self._free
        )

    def choices(self, prices: Sequence[float]) -> list[Candidate]:
        """The choices in the order of their merit; each is predicted to have a smaller error than all before it.

        None is better than the best that errors have no part in: that is what a tolerance without end gives.

        Complexity: some hundred cuts at most.
        """
        free = self.unpriced(inf)
        if not free:
            return []
        lows = {item.low: None for item in free}
        for number, solver in enumerate(self._solvers):
            lows |= dict.fromkeys(
                _rated(solver, prices, 0 if number else _FEWEST, self.is_late)
            )
        found = [self._priced(low, prices) for low in lows]
        found += self._between(self._front(found, free), prices)
        return self._front(found, free)

    def refined(
        self, before: Candidate | None, after: Candidate, prices: Sequence[float]
    ) -> list[Candidate]:
        """Choices that are better than ``after`` and not as good as ``before``, in the order of their merit.

        They add to ``after`` what saves most time per error, wherever it is, with the Casts that it takes there.

        Complexity: some dozens of cuts.
        """
        best = self.unpriced(inf)
        if before is None or not best or self.is_late():
            return []
        gap = before.predicted**2 - after.predicted**2
        parts = self._parts((before.low | best[0].low) - after.low, prices, _FINE * gap)
        fitting = nsmallest(
            _PARTS, (row for row in parts if row[0] <= gap), key=per_gain
        )
        alone = [
            (error, self._saved(after, after.low | part, prices), part)
            for error, _, part in fitting
        ]
        low, found, merit = after.low, list[Candidate](), self.aim.merit
        for _, saved, part in sorted(alone, key=per_gain):
            if saved > 0:
                low |= part
                found.append(self._priced(low, prices))
        inside = (one for one in found if merit(before) < merit(one) < merit(after))
        return self._front(
            [one for one in inside if one.predicted < before.predicted], best
        )

    def _saved(self, after: Candidate, low: Choice, prices: Sequence[float]) -> float:
        """What a choice is better by than another one."""
        one = self._priced(low, prices)
        if self.aim.allow_slower:
            return one.flops + one.bytes - after.flops - after.bytes
        return after.time - one.time

    def _parts(self, keys: Choice, prices: Sequence[float], most: float) -> list[Part]:
        if self.aim.allow_slower:
            return self.solver.parts(keys, prices, most, self.solver.work)
        return self.solver.parts(keys, prices, most)

    def _priced(self, low: Choice, prices: Sequence[float]) -> Candidate:
        return self.solver.candidate(self.solver.feasible(low), prices, None)

    def _admitted(self, items: Iterable[Candidate]) -> list[Candidate]:
        return sorted(filter(self.aim.admits, items), key=self.aim.merit)

    def _front(
        self, items: Iterable[Candidate], free: Sequence[Candidate]
    ) -> list[Candidate]:
        """Those that no better one beats in the predicted error, without any that are hardly different."""
        least, known = self.aim.merit(free[0]), {item.low for item in free}
        front, limit = list[Candidate](), inf
        for item in sorted(
            self._admitted(items),
            key=lambda item: (self.aim.merit(item), item.predicted),
        ):
            if self.aim.merit(item) < least and item.low not in known:
                continue
            if (
                not front
                or item.predicted * _CLOSE < limit
                or item.predicted == 0 < limit
            ):
                front.append(item)
                limit = item.predicted
        return self._apart(front)

    def _apart(self, front: Sequence[Candidate]) -> list[Candidate]:
        """The front without what is hardly better than the next one, which has a smaller error; the best stays."""
        kept = list[Candidate]()
        for number, item in reversed(list(enumerate(front))):
            if not kept or not number or not self.aim.are_near(item, kept[-1]):
                kept.append(item)
        return kept[::-1]

    def _between(
        self, front: Sequence[Candidate], prices: Sequence[float]
    ) -> list[Candidate]:
        """Choices that fill the gaps of a front, the widest first."""
        ends = [*front, self.aim.nothing]
        gaps = [
            (_width(after.predicted, before.predicted), number, before, after)
            for number, (before, after) in enumerate(pairwise(ends))
        ]
        found = list[Candidate]()
        for width, _, before, after in sorted(gaps, key=lambda gap: (-gap[0], gap[1])):
            if (
                width <= log(_CLOSE)
                or len(found) >= _FILLED
                or (found and self.is_late())
            ):
                break
            found += (
                self._priced(low, prices) for low in self._chain(before, after, prices)
            )
        return found

    def _chain(
        self, before: Candidate, after: Candidate, prices: Sequence[float]
    ) -> Iterator[Choice]:
        """Choices from ``after`` to ``before``: with parts of the difference, what saves most per error first."""
        gap = before.low - after.low
        parts = self._parts(gap, prices, _SHARE * self.solver.predicted(gap, prices))
        low, spent, step = after.low, 0.0, sum(error for error, _, _ in parts) / _STEPS
        for error, _, part in sorted(parts, key=per_gain)[:-1]:
            low, spent = low | part, spent + error
            if spent >= step:
                spent = 0.0
                yield low


def room(chosen: Candidate, faster: Iterable[Candidate], limit: float) -> float:
    """The share of the time of a choice that a better use of the tolerance could still save, at most.

    Between a choice that holds and a faster one that misses, time falls by no more than in proportion to the squared
    error, as long as what saves most per error comes first: a knapsack of which one part may be cut.

    Args:
        chosen: the choice, with its error.
        faster: choices that miss, with theirs.
        limit: the error that is allowed.
    """
    mine, bound = chosen.best_known_error**2, 0.0
    for one in faster:
        theirs = one.best_known_error**2
        if one.time < chosen.time and mine <= limit**2 < theirs < inf:
            bound = max(
                bound, (chosen.time - one.time) * (limit**2 - mine) / (theirs - mine)
            )
    return bound / chosen.time if chosen.time else 0.0


def _width(low: float, high: float) -> float:
    """How far apart two errors are."""
    if not 0 < low < inf or not 0 < high < inf:
        return inf if low < high else 0.0
    return log(high / low)


def _rated(
    solver: CandidateSolver,
    prices: Sequence[float],
    fewest: int,
    is_late: Callable[[], bool],
) -> Iterator[Choice]:
    """The cuts at all rates, where their errors differ: the widest gap is halved until none is left.

    So many of them are solved even where it is late.
    """
    finite = [price for price in prices if 0 < price < inf]
    ends = (
        [0.0]
        if not finite
        else [1 / sum(finite), 1e3 * (1 + solver.space.gains) / min(finite)]
    )
    rated = [(rate, solver.choose(prices, rate)) for rate in ends]
    yield from (low for _, low in rated)
    gaps = list[tuple[float, float, float, Choice, Choice]]()

    def enter(low: tuple[float, Choice], high: tuple[float, Choice]) -> None:
        errors = (solver.predicted(choice, prices) ** 0.5 for _, choice in (high, low))
        if (
            low[1] != high[1]
            and high[0] > _CLOSE * low[0]
            and (width := _width(*errors)) > log(_CLOSE)
        ):
            heappush(gaps, (-width, low[0], high[0], low[1], high[1]))

    for one, other in pairwise(rated):
        enter(one, other)
    for number in range(_CUTS):
        if not gaps or (number >= fewest and is_late()):
            return
        _, slow, fast, more, less = heappop(gaps)
        middle = (slow * fast) ** 0.5
        choice = solver.choose(prices, middle)
        yield choice
        enter((slow, more), (middle, choice))
        enter((middle, choice), (fast, less))
