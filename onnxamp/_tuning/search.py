"""The search for candidates: error prices from block runs, choices by the cut, and mask runs that look for the best.

The prices, and so the choices (:mod:`onnxamp._tuning.frontier`), know nothing of the tolerance. It only decides where
their list is halved: at each step the choice in the middle is measured, and the search goes on among better ones if it
holds, else among those with smaller errors. As all tolerances walk the same tree, and look at the same number of
better neighbours in the end, a wider one finds nothing worse than a narrower one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import inf
from operator import attrgetter
from secrets import token_hex
from time import monotonic
from typing import Final, NamedTuple

import numpy as np

from onnxamp._errors import RuntimeFailure
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.loop import SentSample, remembered, sent_samples
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.starting import Surroundings
from onnxamp._tuning.arguments import Search, is_worth
from onnxamp._tuning.candidates import Choice
from onnxamp._tuning.frontier import Aim, Frontier
from onnxamp._tuning.job import Job
from onnxamp._tuning.results import Candidate
from onnxamp._tuning.runs import MaskedModel, Masking
from onnxamp._tuning.sensitivity import Block, error_prices, measure_blocks
from onnxamp._tuning.space import TunableNode
from onnxamp._workers.executor import Crash, Memory, Workers, run_in_order

_MASKED: Final = "tuning switches"
"""Where a worker remembers the switched model while it does something else."""


class MaskItem(NamedTuple):
    """A choice on a sample: its position among those of the work, and a bit for each node that has a switch."""

    position: int
    low: bytes


@dataclass(frozen=True, slots=True)
class MaskWork:
    """:meth:`MaskedModel.error` on one sample, in worker processes."""

    model: SentModel
    how: Masking
    samples: Sequence[SentSample]
    key: str = field(default_factory=token_hex)
    """Stands for all of it in the memory of workers."""
    surroundings: Surroundings = field(default_factory=Surroundings.here)

    def __call__(self, memory: Memory) -> Callable[[MaskItem], float]:
        """Read the model, and prepare its switches for the first sample."""
        self.surroundings.enter()
        masked = remembered(memory, _MASKED, self.key, self._prepared)
        keys = list(self.how.ports)

        def error(item: MaskItem) -> float:
            bits = np.unpackbits(np.frombuffer(item.low, np.uint8), count=len(keys))
            low = frozenset(
                key for key, bit in zip(keys, bits.tolist(), strict=True) if bit
            )
            return masked.error(low, [item.position])

        return error

    def _prepared(self) -> MaskedModel:
        samples = Samples("", [item.read for item in self.samples])
        masked = MaskedModel(self.model.opened(), samples, self.how)
        masked.prepare(range(len(self.samples)))
        return masked


class SharedMasks:
    """What :class:`MaskedModel` does, shared by workers: the samples of a choice, and choices that are independent.

    Args:
        masked: what is shared.
        subset: the samples of all runs.
        workers: who runs them.
    """

    def __init__(
        self, masked: MaskedModel, subset: Sequence[int], workers: Workers
    ) -> None:
        samples = tuple(sent_samples(masked.samples, subset, workers))
        self.work = MaskWork(SentModel.of(masked.model), masked.how, samples)
        self.workers, self.runs = workers, 0

    def errors(
        self, choices: Sequence[AbstractSet[str]], samples: Sequence[int]
    ) -> Iterator[float]:
        """As :meth:`MaskedModel.errors`, for the samples of the work.

        Raises:
            RuntimeFailure: the model does not run in float32, or a sample ends the processes that run it.
        """
        positions = {
            item.number: position for position, item in enumerate(self.work.samples)
        }
        chosen = (
            np.packbits([key in low for key in self.work.how.ports]) for low in choices
        )
        items = (
            MaskItem(positions[number], bits.tobytes())
            for bits in chosen
            for number in samples
        )
        self.runs += not self.runs  # that of the float32 model
        with closing(run_in_order(self.workers, self.work, items)) as results:
            for _ in choices:
                self.runs += 1
                found = list(islice(results, len(samples)))
                for number, one in zip(samples, found, strict=True):
                    if isinstance(one, Crash):
                        which = f"Sample {number + 1} cannot be run with switches."
                        raise RuntimeFailure(
                            f"{which} {one} Leave it out of the inputs."
                        )
                yield max(found)


CANDIDATE_RUNS: Final = 16
"""Mask runs that candidates may take. Two more go to the reference, and to the float32 model against itself."""

_FOR_BLOCKS: Final = 0.4
"""Share of the time after which no further block is halved."""

_FOR_CUTS: Final = 0.7
"""Share of the time after which no further choices are looked for."""

_UNTRIED: Final = 0.5
"""Share of the tolerance that a candidate may be predicted to take where nothing shows what predictions are worth."""

_NEIGHBOURS: Final = 4
"""Better choices that are measured beside the one that halving the list ends at: errors are not quite as predicted."""

_FAR: Final = 4.0
"""Ratio of an error to its prediction above which predictions are worthless."""

_MARGIN: Final = 1.1
"""Factor on what converted models show of the errors of mask runs, once one of them missed the tolerance."""

_MOST: Final = 1 / 0.3
"""The largest step of that factor."""

_PRIOR: Final = 1e-6
"""Share of the squared error that all local errors together cost where blocks show no error: it ranks ops."""


TIME: Final = attrgetter("time")
"""What a candidate costs."""


class CandidateSearch:
    """Finds candidates and measures them. Errors are amplitudes here, see :mod:`onnxamp._tuning.metric`.

    Args:
        job: the model, whose local errors are measured.
        search: how it is tuned.
        masked: what mask runs are made with.
        subset: the samples of these.

    Attributes:
        known: errors of choices that need no run.
        tried: what the search looked at.
        converted: choice -> error of the converted model on all samples.
        choices: the list that is searched; None until its prices are measured.
        frontier: what made it, and what lies between its choices.
        choices_between: position -> choices between the one there and the next better one.
        latest: the error prices of all tunable nodes.
        stopped: whether the search ended because the time was over.
        ratio: what errors of mask runs are multiplied by, after what converted models showed.
    """

    def __init__(
        self,
        job: Job,
        search: Search,
        masked: MaskedModel | SharedMasks,
        subset: Sequence[int],
    ) -> None:
        self.job, self.asked, self.masked, self.subset = job, search, masked, subset
        self.solver = job.solver()
        self.latest = [0.0] * len(self.solver.space.tunable)
        nothing = self.solver.candidate(frozenset(), self.latest, 0.0)
        self.aim = Aim(nothing, search.allow_slower)
        self.known: Mapping[Choice, float] = job.everything_error()
        self.tried = dict[Choice, Candidate]()
        self.converted = dict[Choice, float]()
        self.choices: list[Candidate] | None = None
        self.frontier: Frontier | None = None
        self.choices_between = dict[int, list[Candidate]]()
        self.measured = set[Choice]()
        self.started = monotonic()
        self.stopped = False
        self.ratio = 1.0

    @property
    def left(self) -> int:
        """Mask runs that are left."""
        return (
            0 if self.is_over else self.asked.runs + CANDIDATE_RUNS - len(self.measured)
        )

    @property
    def spent(self) -> float:
        """The share of the time that is over."""
        seconds = self.asked.seconds
        return (monotonic() - self.started) / seconds if seconds else inf

    @property
    def is_over(self) -> bool:
        """Whether all of it is."""
        return self.spent > 1

    @property
    def limit(self) -> float:
        """The error that is allowed."""
        return self.job.metric.amplitude(self.job.metric.tolerance)

    @property
    def candidates(self) -> list[Candidate]:
        """What the search looked at, with the errors that are known best, in the order of its merit."""
        return sorted(map(self._told, self.tried.values()), key=self.aim.merit)

    def measure(self, low: Iterable[str]) -> float:
        """The error of a choice on the subset of samples, by a mask run unless it is known."""
        return self.measure_all([frozenset(low)])[0]

    def measure_all(self, choices: Sequence[Choice]) -> list[float]:
        """:meth:`measure` of choices that do not depend on each other."""
        new = [low for low in dict.fromkeys(choices) if low not in self.known]
        measure = partial(self.masked.errors, samples=self.subset)
        found = self.job.state.errors_of(new, self.subset, measure)
        errors, most = dict(self.known), self.asked.runs + CANDIDATE_RUNS
        for low in new:
            self.measured.add(low)
            done = len(self.measured)
            self.job.run.report(
                f"trying blocks and candidates: run {done} of at most {most}",
                done,
                most,
            )
            errors[low] = next(found)
        return [self.job.metric.amplitude(errors[low]) for low in choices]

    def search(self) -> Candidate | None:
        """The best choice that is expected to hold the tolerance once it is converted, after all that is known."""
        units = self.solver.space.tunable
        free = [
            unit for unit in units if unit.seen and unit.key not in self.solver.pinned
        ]
        everything = self.solver.choose([0.0] * len(units), 0.0)
        if not free or not everything:
            return None
        if self.choices is None:
            error = self.measure(everything)
            whole = self.solver.candidate(everything, self.latest, error, error)
            self.tried.setdefault(everything, whole)
            if error <= self.limit and (found := self._unpriced(error)) is not None:
                return found
            self.latest = self.prices(free, error)
            self.frontier = Frontier(
                self.solver, self.aim, lambda: self.spent > _FOR_CUTS
            )
            self.choices = self.frontier.choices(self.latest)
            self.tried = {
                low: self.solver.candidate(low, self.latest, one.error)
                for low, one in self.tried.items()
            }
        end = self._halved(self.choices)
        if self._is_unpredictable():
            self._extend()
        elif not self._neighbours_hold(self.choices[:end]):
            self._halved(self._between(self.choices, end))
        self.stopped = self.stopped or self.is_over
        return self.best()

    def _unpriced(self, error: float) -> Candidate | None:
        """The best choice that does not depend on errors, where everything holds; None if all of them miss."""
        for one in Frontier(self.solver, self.aim).unpriced(error):
            if self.converted.get(one.low, error) <= self.limit:
                return self.tried.setdefault(one.low, one)
        return None

    def _halved(self, choices: Sequence[Candidate]) -> int:
        """The position of the best choice at which halving the list ends; what it asks for is measured."""
        begin, end = 0, len(choices)
        while begin < end:
            middle = (begin + end) // 2
            if self._holds(choices[middle]):
                end = middle
            else:
                begin = middle + 1
        if end < len(choices):
            self.tried.setdefault(choices[end].low, choices[end])
        return end

    def _neighbours_hold(self, better: Sequence[Candidate]) -> bool:
        """Whether any of the nearest better choices holds, all of which are measured."""
        found = False
        for one in reversed(better[-_NEIGHBOURS:]):
            if self.left > 0 or one.low in self.tried:
                found = self._holds(one) or found
        return found

    def _is_unpredictable(self) -> bool:
        """Whether errors are far beyond what was predicted, as where the order of results flips."""
        tried = (
            one
            for low, one in self.tried.items()
            if low not in self.known and one.predicted
        )
        return any(
            one.error is not None and one.error > _FAR * one.predicted for one in tried
        )

    def _extend(self) -> None:
        """Lower more than the best candidate: all other nodes, or on a miss halves of them, and so on.

        No prediction is needed for that; but what is found depends on the tolerance.
        """
        best, units = self.best(), self.solver.space.tunable
        low = frozenset[str]() if best is None else best.low
        order = sorted(
            zip(units, self.latest, strict=True),
            key=lambda pair: pair[1] / pair[0].gain,
        )
        pinned = self.solver.pinned
        chunks = [
            [
                u.key
                for u, cost in order
                if u.key not in low and u.key not in pinned and cost < inf
            ]
        ]
        while chunks and self.left > 0:
            chunk = chunks.pop()
            if not chunk:
                continue
            more = low | set(chunk)
            choice = self.solver.choose(
                [0.0 if unit.key in more else inf for unit in units], 0.0
            )
            if self._holds(self.solver.candidate(choice, self.latest, None)):
                low = more
            elif len(chunk) > 1:
                chunks += [chunk[len(chunk) // 2 :], chunk[: len(chunk) // 2]]

    def _between(self, choices: Sequence[Candidate], end: int) -> list[Candidate]:
        """Choices between the one that holds and the next better one."""
        if end not in self.choices_between:
            assert self.frontier is not None
            before = choices[end - 1] if end else None
            after = choices[end] if end < len(choices) else self.aim.nothing
            self.choices_between[end] = self.frontier.refined(
                before, after, self.latest
            )
        return self.choices_between[end]

    def _holds(self, one: Candidate) -> bool:
        """Whether a choice is expected to hold the tolerance; it is measured, as long as runs are left."""
        mine = self.tried.get(one.low, one)
        is_known = mine.error is not None or one.low in self.converted
        if not is_known and (self.left > 0 or one.low in self.known):
            mine = self.tried[one.low] = replace(mine, error=self.measure(one.low))
        return self.expected(mine) <= self.limit

    def expected(self, one: Candidate) -> float:
        """The error that the converted model has, or else may be expected to have."""
        if one.low in self.converted:
            return self.converted[one.low]
        if one.low in self.known:
            return one.best_known_error
        if one.error is not None:
            return one.error * self.ratio
        return one.predicted / self.trust()

    def trust(self) -> float:
        """What errors are predicted as a share of what they are, as far as what was tried shows."""
        pairs = [
            (error, one.predicted / error)
            for low, one in self.tried.items()
            if low not in self.known
            and (error := self.converted.get(low, one.error))
            and 0 < one.predicted < inf
        ]
        if not pairs:
            return _UNTRIED
        error, share = min(pairs)
        return min(1.0, share if error <= self.limit else share / _MARGIN)

    def note(self, low: Choice, error: float) -> None:
        """Learn the error of a converted model: what mask runs said of it may be too little for others, too."""
        self.converted[low] = error
        seen = (
            self.tried[low].error
            if low in self.tried and low not in self.known
            else None
        )
        if error > self.limit and seen:
            self.ratio = max(
                self.ratio, min(_MOST * self.ratio, _MARGIN * error / seen)
            )

    def best(self, *, boldly: bool = False) -> Candidate | None:
        """The best of what was tried that is expected to hold the tolerance; ``boldly`` believes mask runs."""
        for one in sorted(self.tried.values(), key=self.aim.merit):
            is_open = boldly and one.low not in self.converted
            error = (
                one.error if is_open and one.error is not None else self.expected(one)
            )
            if self.aim.admits(one) and error <= self.limit:
                return one
        return None

    def _told(self, one: Candidate) -> Candidate:
        """A candidate with what is known of its error."""
        if one.low in self.converted:
            return replace(one, error=self.converted[one.low], verified=True)
        return replace(one, error=None if one.error is None else self.expected(one))

    def block_errors(
        self, free: Sequence[TunableNode], blocks: Sequence[range]
    ) -> list[float]:
        """The errors with only a block of nodes lowered, for each of several."""
        return self.measure_all(
            [frozenset(free[i].key for i in members) for members in blocks]
        )

    def prices(self, free: Sequence[TunableNode], everything: float) -> list[float]:
        """The error prices of all tunable nodes, zero for pinned ones; ``everything`` is the error with all lowered."""
        blocks = measure_blocks(
            len(free),
            partial(self.block_errors, free),
            self.asked.runs,
            lambda: self.spent > _FOR_BLOCKS,
        )
        units = self.solver.space.tunable
        local = dict(zip((unit.key for unit in units), self.job.locals, strict=True))
        mine = [local[unit.key].error for unit in free]
        prior = (
            _PRIOR * _scale(blocks, everything) / (sum(error**2 for error in mine) or 1)
        )
        costs = [
            cost + prior * error**2
            for cost, error in zip(error_prices(blocks, mine), mine, strict=True)
        ]
        by_key = dict(zip((unit.key for unit in free), costs, strict=True))
        return [by_key.get(unit.key, 0.0) for unit in units]


def _scale(blocks: Sequence[Block], everything: float) -> float:
    """The squared error of the whole, of parts of it where that is broken, or else of anything."""
    if everything < inf:
        return everything**2
    return sum(block.error**2 for block in blocks if block.error < inf) or 1.0


def pareto_front(
    candidates: Iterable[Candidate], cost: Callable[[Candidate], float] = TIME
) -> list[Candidate]:
    """The candidates that no other beats in error, cost (their time) and bytes of weights, least cost first."""
    best: list[Candidate] = []
    unique = {candidate.low: candidate for candidate in candidates}
    for candidate in sorted(
        unique.values(), key=lambda c: (cost(c), c.best_known_error, c.weights)
    ):
        beaten = (
            one.best_known_error <= candidate.best_known_error
            and one.weights <= candidate.weights
            for one in best
        )
        if not any(beaten):
            best.append(candidate)
    return best


def front_of(
    candidates: Sequence[Candidate], nothing: Candidate, *, allow_slower: bool
) -> list[Candidate]:
    """The candidates to choose from, best first; nothing low is the last.

    One that is slower than float32 is among them only if its smaller weights are worth that, or if it is allowed.
    """
    if allow_slower:
        front = pareto_front(candidates, lambda item: -item.flops - item.bytes)
    else:
        front = pareto_front(
            [item for item in (*candidates, nothing) if is_worth(item, nothing)]
        )
    return [item for item in front if item.low] + [nothing]


def rejected(
    candidates: Sequence[Candidate], front: Sequence[Candidate], target: float
) -> Candidate | None:
    """Return the fastest candidate within the tolerance that is not offered: float32 is faster, and worth more."""
    lost = [
        item
        for item in candidates
        if item.low and item.time > front[-1].time and item not in front
    ]
    return min(
        (item for item in lost if item.best_known_error <= target),
        key=TIME,
        default=None,
    )
