"""The last step of a search: candidates are converted and judged on all samples, the best first, until one holds."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from onnxamp._convert.plan import Plan
from onnxamp._errors import ArgumentError
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.frontier import room
from onnxamp._tuning.job import Job
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import Candidate, KeptNode, Tuned
from onnxamp._tuning.search import CandidateSearch, front_of, rejected

_LOG: Final = logging.getLogger("onnxamp")
_ATTEMPTS: Final = 12
"""Candidates that may be converted, before the model stays as it is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A tuning, and what it takes to write another candidate.

    ``prices`` are the error prices that the reasons are told by; ``told`` are warnings beside those of the plan.
    """

    tuned: Tuned
    job: Job
    prices: Sequence[float]
    told: tuple[str, ...] = ()

    def row(self, number: int) -> tuple[Plan, tuple[KeptNode, ...]]:
        """The plan that writes a candidate, and the nodes that it keeps float32 because of measurements."""
        low = self.tuned.candidates[number].low
        kept = self.job.kept(low, self.prices)
        plan = self.job.plan(low, kept)
        return replace(plan, warnings=(*plan.warnings, *self.told)), tuple(kept)

    def picked(self, number: int) -> "Outcome":
        """The outcome with a candidate of the user's choice, converted and judged.

        Raises:
            ArgumentError: there is none.
        """
        tuned, job = self.tuned, self.job
        candidate = tuned.candidates[checked_pick(number, tuned.candidates)]
        error = job.error(candidate.low, job.plan(candidate.low))
        rows = list(tuned.candidates)
        rows[number] = replace(candidate, error=error, verified=True)
        plan, kept = self.row(number)
        tuned = replace(
            tuned,
            plan=plan,
            candidates=tuple(rows),
            chosen=number,
            kept=kept,
            error=error,
            held=job.metric.holds(error),
            conversions=len(job.errors),
            room=None,
        )
        return replace(self, tuned=tuned)


def verified(
    job: Job, search: CandidateSearch, noise: float | None, asked: Search, times: str
) -> Tuned:
    """Choose the best candidate whose converted model meets the tolerance on all samples.

    One that is slower than float32 is offered, and float32 is chosen, unless slower ones are allowed: so a wider
    tolerance never takes longer.
    """
    judge, nothing = job.metric, search.aim.nothing
    best = _best(job, search)
    best = best if best is not None and search.aim.writes(best) else None
    low = nothing.low if best is None else best.low
    kept = job.kept(low, search.latest)
    plan = job.plan(low, kept)
    error = _judged(job, search, low) if best is None else job.errors[low]
    is_same = job.space.all_low.options.keep_io_types is True  # else inputs and outputs are rounded
    own = job.errors.get(nothing.low, noise or 0.0)
    nothing = replace(
        nothing, error=judge.amplitude(own), verified=is_same or nothing.low in job.errors
    )
    candidates = search.candidates
    front = front_of(candidates, nothing, allow_slower=asked.allow_slower)
    front = front if low in {item.low for item in front} else _with(front, candidates, low)
    chosen = next(number for number, item in enumerate(front) if item.low == low)
    return Tuned(
        plan=plan,
        metric=judge.name,
        tolerance=judge.tolerance,
        inputs=job.samples.summary,
        samples=len(job.samples),
        noise=noise,
        device_noise=job.device_noise,
        error=error,
        ran_on=job.engine.name(job.low.name),
        runs=search.masked.runs,
        recalled=len(job.state.recalled),
        conversions=len(job.errors),
        units=len(job.space.tunable),
        unseen=tuple(unit.label for unit in job.space.tunable if not unit.seen),
        candidates=tuple(map(partial(_in_metric_units, judge), front)),
        chosen=chosen,
        kept=tuple(kept),
        device=asked.device,
        times=times,
        held=judge.holds(error),
        stopped=search.stopped,
        rejected=rejected(candidates, front, search.limit),
        compensation=job.compensation(search.latest),
        room=None if asked.allow_slower else room(front[chosen], front, search.limit),
    )


def _best(job: Job, search: CandidateSearch) -> Candidate | None:
    """The best candidate that holds once it is converted; None if that is none of those that may be tried.

    Where one misses, what the search expects of others grows. Better ones that were passed over for this are converted
    in the end: what mask runs showed to hold is not given up unseen.
    """
    found: Candidate | None = None
    for attempt in range(_ATTEMPTS):
        found = search.search()
        if found is None or _holds(job, search, found.low):
            break
        _LOG.info(
            "attempt %d: errors are taken to be %.2f times those of mask runs",
            attempt + 1,
            search.ratio,
        )
    else:
        return None
    for _ in range(len(job.errors), _ATTEMPTS):
        better = search.best(boldly=True)
        if better is None or (found is not None and better.low == found.low):
            break
        if _holds(job, search, better.low):
            return better
    return found


def _holds(job: Job, search: CandidateSearch, low: frozenset[str]) -> bool:
    """Whether a converted model meets the tolerance."""
    if low not in search.converted:
        search.note(low, job.metric.amplitude(_judged(job, search, low)))
    return search.converted[low] <= search.limit


def _judged(job: Job, search: CandidateSearch, low: frozenset[str]) -> float:
    """The error of a converted model."""
    plan = job.plan(low)
    search.progress("verifying the converted model", len(job.errors) + 1, len(job.errors) + 1)
    error = job.error(low, plan)
    _LOG.info("%d nodes low: error %.3g", len(low), error)
    return error


def _with(
    front: Sequence[Candidate], candidates: Sequence[Candidate], low: frozenset[str]
) -> list[Candidate]:
    """The front with the candidate that is written, which another one may beat whose error is a guess."""
    mine = next(number for number, item in enumerate(candidates) if item.low == low)
    place = sum(item.low in {one.low for one in candidates[:mine]} for item in front)
    return [*front[:place], candidates[mine], *front[place:]]


def _in_metric_units(metric: Metric, candidate: Candidate) -> Candidate:
    """A candidate with errors in units of the metric instead of amplitudes."""
    error = None if candidate.error is None else metric.of_amplitude(candidate.error)
    return replace(candidate, predicted=metric.of_amplitude(candidate.predicted), error=error)


def checked_pick(pick: int, front: Sequence[Candidate]) -> int:
    """The position of the candidate that the user picks.

    Raises:
        ArgumentError: there is none.
    """
    if not 0 <= pick < len(front):
        raise ArgumentError(
            f"There is no candidate {pick}: there are {len(front)}, counted from 0."
        )
    return pick
