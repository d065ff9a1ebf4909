"""The search for candidates: error prices from block runs, choices by the cut, and a mask run to measure each."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from time import monotonic
from typing import Final

from onnxamp._tuning.candidates import CandidateSolver
from onnxamp._tuning.masks import SharedMasks
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import Candidate
from onnxamp._tuning.runs import MaskedModel
from onnxamp._tuning.sensitivity import Block, LocalError, Progress, error_prices, measure_blocks, split
from onnxamp._tuning.space import TunableNode
from onnxamp._tuning.state import TuningState
from onnxamp._tuning.worth import is_worth

SENSITIVITY_RUNS: Final = 32
"""Mask runs that measuring sensitivities may take, by default."""

CANDIDATE_RUNS: Final = 16
"""Mask runs that candidates may take. Two more go to the reference, and to the float32 model against itself."""

_EXTENSION_RUNS: Final = 5
"""Those of them that are reserved for extending the best candidate."""

SECONDS: Final = 60.0
"""Time for all of them, by default; large models take some seconds for each."""

_FOR_BLOCKS: Final = 0.4
"""Share of the time after which no further block is halved."""

_UNTRIED: Final = 0.5
"""Share of the tolerance that a candidate may be predicted to take for which no time or no run was left."""

_REPEATS: Final = 12
"""Cuts in a row that only find known candidates, after which the prices are exhausted."""

_PRIOR: Final = 1e-6
"""Share of the squared tolerance that all local errors together cost where blocks show no error: it ranks ops."""


TIME: Final = attrgetter("time")
"""What a candidate costs."""


@dataclass(slots=True)
class CandidateSearch:
    """Finds candidates and measures them.

    ``locals`` are the local errors of the tunable nodes, ``subset`` the samples of mask runs, ``known`` the errors of
    choices that need no run. Errors are amplitudes here, see :mod:`onnxamp._tuning.metric`.
    """

    solver: CandidateSolver
    masked: MaskedModel | SharedMasks
    state: TuningState
    metric: Metric
    locals: Sequence[LocalError]
    subset: Sequence[int]
    runs: int
    progress: Progress
    known: Mapping[frozenset[str], float] = field(default_factory=dict)
    seconds: float = inf
    """After so many, no further run is begun."""
    candidates: list[Candidate] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    measured: set[frozenset[str]] = field(default_factory=set)
    started: float = field(default_factory=monotonic)
    latest: list[float] = field(default_factory=list)
    """Error prices of the last search."""
    stopped: bool = False
    """Whether a search ended because the time was over."""

    @property
    def left(self) -> int:
        """Mask runs that are left."""
        return 0 if self.is_over else self.runs + CANDIDATE_RUNS - len(self.measured)

    @property
    def spent(self) -> float:
        """The share of the time that is over."""
        return (monotonic() - self.started) / self.seconds if self.seconds else inf

    @property
    def is_over(self) -> bool:
        """Whether all of it is."""
        return self.spent > 1

    def measure(self, low: Iterable[str]) -> float:
        """The error of a choice on the subset of samples, by a mask run unless it is known."""
        return self.measure_all([frozenset(low)])[0]

    def measure_all(self, choices: Sequence[frozenset[str]]) -> list[float]:
        """:meth:`measure` of choices that do not depend on each other."""
        new = [low for low in dict.fromkeys(choices) if low not in self.known]
        found = self.state.errors_of(new, self.subset, partial(self.masked.errors, samples=self.subset))
        errors, most = dict(self.known), self.runs + CANDIDATE_RUNS
        for low in new:
            self.measured.add(low)
            done = len(self.measured)
            self.progress(f"trying blocks and candidates: run {done} of at most {most}", done, most)
            errors[low] = next(found)
        return [self.metric.amplitude(errors[low]) for low in choices]

    def search(self, tolerance: float) -> list[float]:
        """Add to ``candidates``; returns the error price of every tunable node, the ``latest``."""
        self.latest = self._searched(tolerance)
        return self.latest

    def _searched(self, tolerance: float) -> list[float]:
        units = self.solver.space.tunable
        free = [unit for unit in units if unit.seen and unit.key not in self.solver.pinned]
        flat = [0.0] * len(units)
        everything = self.solver.choose(flat, 0.0)
        if not free or not everything:
            return flat
        error = self.measure(everything)
        if error <= tolerance:
            candidate = self.solver.candidate(everything, flat, error)
            self.candidates.append(replace(candidate, predicted=error))  # there are no prices to predict from
            return flat
        if not self.blocks:
            self.blocks = measure_blocks(
                len(free), partial(self.block_errors, free), self.runs, lambda: self.spent > _FOR_BLOCKS
            )
        prices = self.prices(free, tolerance)
        self.candidates.append(self.solver.candidate(everything, prices, error))
        prices = self.refine(free, prices, tolerance, everything)
        self.extend(prices, tolerance)
        self.stopped = self.is_over
        if self.left <= 0 and self.best(tolerance) is None:  # the converted model shows whether the prediction holds
            low = self.solver.within(prices, (self.trust(everything) * tolerance) ** 2)
            self.candidates.append(self.solver.candidate(low, prices, None))
        return prices

    def trust(self, everything: frozenset[str]) -> float:
        """The share of the tolerance that a candidate may be predicted to take: what predictions were worth so far."""
        tried = [item for item in self.candidates if item.error and item.low != everything]
        if not tried:
            return _UNTRIED
        nearest = min(tried, key=lambda item: item.best_known_error)
        return min(1.0, nearest.predicted / nearest.best_known_error)

    def block_errors(self, free: Sequence[TunableNode], blocks: Sequence[range]) -> list[float]:
        """The errors with only a block of nodes lowered, for each of several."""
        return self.measure_all([frozenset(free[i].key for i in members) for members in blocks])

    def prices(self, free: Sequence[TunableNode], tolerance: float) -> list[float]:
        """Error prices of all tunable nodes, zero for pinned ones."""
        units = self.solver.space.tunable
        local = dict(zip((unit.key for unit in units), self.locals, strict=True))
        mine = [local[unit.key].error for unit in free]
        prior = _PRIOR * tolerance**2 / (sum(error**2 for error in mine) or 1)
        costs = [cost + prior * error**2 for cost, error in zip(error_prices(self.blocks, mine), mine, strict=True)]
        by_key = dict(zip((unit.key for unit in free), costs, strict=True))
        return [by_key.get(unit.key, 0.0) for unit in units]

    def refine(
        self, free: Sequence[TunableNode], prices: list[float], tolerance: float, everything: frozenset[str]
    ) -> list[float]:
        """Measure what prices predict: on a miss split a block, on a hit aim higher. Returns the refined prices."""
        target, tried = (0.9 * tolerance) ** 2, {everything: False}
        repeats, step = 0, 2.0
        while self.left > _EXTENSION_RUNS and repeats < _REPEATS:
            low = self.solver.within(prices, target)
            if not low:
                break
            if low in tried:
                target *= step if tried[low] else 1 / step
                repeats, step = repeats + 1, step**0.8
                continue
            error = self.measure(low)
            self.candidates.append(self.solver.candidate(low, prices, error))
            ratio, tried[low] = (tolerance / error) ** 2 if error else inf, error <= tolerance
            if tried[low]:
                target *= min(4.0, max(1.25, 0.8 * ratio))
                continue
            target = self.solver.predicted(low, prices) * max(0.1, min(0.9, 0.8 * ratio))
            worst = self.dominant_block(free, prices, low)
            if worst is not None and self.left >= _EXTENSION_RUNS + 3:
                self.blocks[worst : worst + 1] = split(self.blocks[worst], partial(self.block_errors, free))
                prices = self.prices(free, tolerance)
        return prices

    def dominant_block(self, free: Sequence[TunableNode], prices: Sequence[float], low: frozenset[str]) -> int | None:
        """The block that contributes most to a prediction, among those that can be halved."""
        cost = dict(zip((unit.key for unit in self.solver.space.tunable), prices, strict=True))
        shares = {
            number: sum(cost[free[i].key] for i in range(block.start, block.end) if free[i].key in low)
            for number, block in enumerate(self.blocks)
            if block.end - block.start > 1
        }
        return max(shares, key=lambda number: shares[number], default=None)

    def extend(self, prices: Sequence[float], tolerance: float) -> None:
        """Lower more than the best candidate: all other nodes, or on a miss halves of them, and so on."""
        best, units = self.best(tolerance), self.solver.space.tunable
        low = best.low if best is not None else frozenset[str]()
        order = sorted(zip(units, prices, strict=True), key=lambda pair: pair[1] / pair[0].gain)
        pinned = self.solver.pinned
        chunks = [[u.key for u, cost in order if u.key not in low and u.key not in pinned and cost < inf]]
        while chunks and self.left:
            chunk = chunks.pop()
            if not chunk:
                continue
            more = low | set(chunk)
            choice = self.solver.choose([0.0 if unit.key in more else inf for unit in units], 0.0)
            error = self.measure(choice)
            if error <= tolerance:
                self.candidates.append(self.solver.candidate(choice, prices, error))
                low = more
            elif len(chunk) > 1:
                chunks += [chunk[len(chunk) // 2 :], chunk[: len(chunk) // 2]]

    def best(self, tolerance: float) -> Candidate | None:
        """The candidate within the tolerance with the most in low precision."""
        good = [item for item in self.candidates if item.error is not None and item.error <= tolerance]
        return max(good, key=lambda item: (item.flops + item.bytes, -item.predicted), default=None)


def pareto_front(candidates: Iterable[Candidate], cost: Callable[[Candidate], float] = TIME) -> list[Candidate]:
    """The candidates that no other beats in error, cost (their time) and bytes of weights, least cost first."""
    best: list[Candidate] = []
    unique = {candidate.low: candidate for candidate in candidates}
    for candidate in sorted(unique.values(), key=lambda c: (cost(c), c.best_known_error, c.weights)):
        beaten = (
            one.best_known_error <= candidate.best_known_error and one.weights <= candidate.weights for one in best
        )
        if not any(beaten):
            best.append(candidate)
    return best


def front_of(candidates: Sequence[Candidate], nothing: Candidate, *, allow_slower: bool) -> list[Candidate]:
    """The candidates to choose from, best first; nothing low is the last.

    One that is slower than float32 is among them only if its smaller weights are worth that, or if it is allowed.
    """
    if allow_slower:
        front = pareto_front(candidates, lambda item: -item.flops - item.bytes)
    else:
        front = pareto_front([item for item in (*candidates, nothing) if is_worth(item, nothing)])
    return [item for item in front if item.low] + [nothing]


def rejected(candidates: Sequence[Candidate], front: Sequence[Candidate], target: float) -> Candidate | None:
    """The fastest candidate within the tolerance that is not offered because float32 is faster, and worth more."""
    lost = [item for item in candidates if item.low and item.time > front[-1].time and item not in front]
    return min((item for item in lost if item.best_known_error <= target), key=TIME, default=None)
