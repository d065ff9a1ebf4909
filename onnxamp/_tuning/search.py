"""The search among candidates: the best one that meets the tolerance after conversion is written.

The list of candidates (:mod:`onnxamp._tuning.choices.candidates`) does not depend on the tolerance. The search
converts and measures the best candidate that is expected to meet the tolerance. It applies the ratio of measured to
expected error to all others, and continues between the best one that passes and those that miss. A wider tolerance
therefore never gives a slower result.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from time import monotonic
from typing import Any, Final

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.records import record
from onnxamp._base.words import count
from onnxamp._convert.analysis import analyze, low_nodes
from onnxamp._options.values import Level
from onnxamp._tuning.choices.candidates import Aim, Frontier, room
from onnxamp._tuning.choices.parts import Choice
from onnxamp._tuning.job import TuningJob, whole_times
from onnxamp._tuning.results import Candidate, Search, Tuned

_LOG: Final = logging.getLogger("onnxamp")

_BOLD: Final = 1.1
"""The largest predicted error, relative to the tolerance, at which a better candidate is tried once one passes."""

_HOPE: Final = 4.0
"""The same before one passes."""

_FAR: Final = 4.0
"""Factor between the ratios of two candidates above which predictions are worth little, for example because the order
of results flips. The search then bisects the list.
"""

_REFINED: Final = 3
"""How often to search between the best candidate that passes and its faster neighbor, which misses."""

_WORTH: Final = 0.998
"""A choice in between is converted and judged only if it takes less than this share of the time of the best."""

_CLOSE: Final = 1.02
"""Models whose times differ by less are equally fast."""


class CandidateSearch:
    """Finds the best candidate. Errors are amplitudes here, see :mod:`onnxamp._tuning.metric`.

    Attributes:
        front: the candidates, best first.
        ratio: the last measured error as a multiple of its prediction.
        is_erratic: whether these ratios differ so much that predictions are worth little.
        stopped: whether the search ended because its time was over.
    """

    def __init__(self, job: TuningJob, asked: Search) -> None:
        self.job = job
        self.asked = asked
        self.solver = job.solver()
        nothing = replace(self.solver.candidate(frozenset()), error=0.0)
        self.aim = Aim(nothing, asked.allow_slower)
        self.frontier = Frontier(self.solver, self.aim)
        self.front = self.frontier.choices() if job.space.tunable else []
        self.ratio = 1.0
        self.is_erratic = False
        self.stopped = False
        self.started = monotonic()

    @property
    def limit(self) -> float:
        """The largest error that is allowed."""
        return self.job.metric.amplitude(self.job.metric.tolerance)

    def best(self) -> Candidate | None:
        """Return the best candidate that may be written and meets the tolerance; None if that is float32."""
        # able[end] is the best that passes, or float32 behind the last one; able[end - 1], the next better one, misses.
        able = self.front
        end = self._searched(able, len(able))
        for _ in range(_REFINED):
            if not end or self.stopped:
                break
            passes = end < len(able)
            after = able[end] if passes else self.aim.nothing
            more = self.frontier.refined(able[end - 1], after)
            if passes:
                more = [one for one in more if one.time < _WORTH * after.time]
            if not more:
                break
            self.front = sorted([*self.front, *more], key=self.aim.merit)
            able = [able[end - 1], *more, *able[end:]]
            end = 1 + self._searched(able[1:], len(more))
        return able[end] if end < len(able) else None

    def _searched(self, able: Sequence[Candidate], end: int) -> int:
        """Return the position of the best candidate that passes, ``end`` if none before it does."""
        first = 0
        while first < end:
            place = self._promising(able, first, end)
            if place is None:
                break
            if able[place].low not in self.job.errors and self._is_over:
                self.stopped = True
                break
            if self.measure(able[place].low) <= self.limit:
                end = place
            else:
                first = place + 1
        return end

    def _promising(
        self, able: Sequence[Candidate], first: int, end: int
    ) -> int | None:
        """Return the position of the best candidate that is expected to pass, or else may; None if none may."""
        for place in range(first, end):
            if self.expected(able[place]) <= self.limit:
                return place
        if self.is_erratic:
            return (first + end) // 2
        hope = _BOLD if end < len(able) else _HOPE
        return end - 1 if self.expected(able[end - 1]) <= hope * self.limit else None

    @property
    def _is_over(self) -> bool:
        spent = monotonic() - self.started
        runs = len(self.job.errors)
        return runs >= self.asked.runs or (runs > 0 and spent > self.asked.seconds)

    def expected(self, one: Candidate) -> float:
        """Return the error of the converted model, or its expected error."""
        if one.low in self.job.errors:
            return self.job.metric.amplitude(self.job.errors[one.low])
        return one.predicted * self.ratio

    def measure(self, low: Choice) -> float:
        """Convert a choice, and learn from its error on all samples."""
        job = self.job
        count = len(self.job.errors) + 1
        if low not in job.errors:
            job.run.report("verifying the converted model", count, count)
            error = job.metric.amplitude(job.error(low))
            predicted = job.expected.predicted(low)
            ratio = error / predicted if predicted else 1.0
            lowest, highest = sorted((ratio, self.ratio))
            self.is_erratic |= count > 1 and highest > _FAR * lowest
            self.ratio = ratio if error < inf else self.ratio * _FAR
            _LOG.info(
                "%d nodes low: error %.3g, %.2f times the one predicted",
                len(low),
                error,
                ratio,
            )
        return job.metric.amplitude(job.errors[low])

    def in_units(self, one: Candidate) -> Candidate:
        """Return a candidate with its errors in units of the metric."""
        metric = self.job.metric
        is_known = one.low in self.job.errors
        return replace(
            one,
            predicted=metric.of_amplitude(one.predicted),
            error=metric.of_amplitude(self.expected(one)),
            verified=is_known,
        )

    def rejected(self) -> Candidate | None:
        """Return the fastest candidate that is not offered because float32 is faster; None if there is none."""
        if not self.job.space.tunable:
            return None
        slower = (
            one
            for one in self.frontier.unpriced
            if one.low and not self.aim.admits(one)
        )
        lost = [one for one in slower if self.expected(one) <= self.limit]
        return min(map(self.in_units, lost), key=attrgetter("time"), default=None)


@record
class TuningOutcome:
    """A tuning, with everything that is needed to write another candidate."""

    tuned: Tuned
    job: TuningJob

    def picked(self, number: int) -> "TuningOutcome":
        """Return the outcome with a candidate of the user's choice, converted and judged.

        Raises:
            ArgumentError: there is none.
        """
        tuned = self.tuned
        job = self.job
        if not 0 <= number < len(tuned.candidates):
            raise ArgumentError(
                f"There is no candidate {number}: the report has {count(len(tuned.candidates), 'candidate')},"
                " counted from 0."
            )
        rows = list(tuned.candidates)
        row = rows[number]
        error = row.error if row.verified and row.error is not None else None
        job.errors[row.low] = job.error(row.low) if error is None else error
        rows[number] = replace(row, error=job.errors[row.low], verified=True)
        written = _written(job, rows, row.low)
        # What was measured of the best candidate says nothing about this one.
        return replace(self, tuned=replace(tuned, **written, room=None, timed=()))


def _written(
    job: TuningJob, rows: Sequence[Candidate], low: Choice, noise: float | None = None
) -> dict[str, Any]:
    """Return the fields of an outcome that depend on the choice that is written, one of its candidates."""
    error = job.errors.get(low, noise or 0.0)
    kept = job.kept(low)
    plan = job.plan(low, kept)
    return {
        "plan": replace(
            plan,
            expected=job.expected.foreseen(low),
            warnings=(*plan.warnings, *job.told),
        ),
        "candidates": tuple(rows),
        "chosen": next(number for number, row in enumerate(rows) if row.low == low),
        "kept": tuple(kept),
        "error": error,
        "held": job.metric.holds(error),
        "conversions": len(job.errors),
    }


def verified(search: CandidateSearch, noise: float | None, times: str) -> Tuned:
    """Choose the best candidate whose converted model meets the tolerance on all samples.

    No candidate is slower than float32, unless that is allowed, so a wider tolerance never gives a slower result.
    """
    job = search.job
    asked = search.asked
    nothing = search.aim.nothing
    judge = job.metric
    best = search.best()
    if best is None and job.errors and noise is None:
        noise = job.noise
    low = nothing.low if best is None else best.low
    search.measure(low)
    keeps_types = job.space.all_low.options.keep_io_types is True
    float32 = replace(
        nothing,
        error=job.errors.get(nothing.low, noise or 0.0),
        verified=nothing.low in job.errors or keeps_types,
    )
    front = (*map(search.in_units, search.front), float32)
    recalled = job.origin.state.recalled if job.sensitivities else 0
    tuned = Tuned(
        **_written(job, front, low),
        metric=judge.name,
        tolerance=judge.tolerance,
        inputs=job.samples.summary,
        samples=len(job.samples),
        noise=noise,
        device_noise=job.device_noise,
        ran_on=job.engine.name(job.low.name),
        runs=len(job.sensitivities) - recalled,
        recalled=recalled,
        units=len(job.space.tunable),
        unseen=tuple(unit.label for unit in job.space.tunable if not unit.seen),
        device=asked.device,
        times=times,
        stopped=search.stopped,
        rejected=search.rejected(),
        compensation=job.compensation(),
    )
    if asked.allow_slower:
        return tuned
    chosen = front[tuned.chosen]
    return replace(tuned, room=room(chosen, front, judge))


def timed_whole(search: CandidateSearch, tuned: Tuned) -> Tuned:
    """Return the outcome with the fastest of the chosen model, level O2 if it holds, and float32, timed whole."""
    job = search.job
    own = tuned.candidates[tuned.chosen].low
    space = job.space
    pins = job.pins
    at_o2 = replace(space.all_low.options, level=Level.O2)
    nodes = low_nodes(analyze(space.all_low.graph, at_o2))
    usual = search.solver.feasible(
        frozenset(u.key for u in space.units if u.node in nodes and u.node not in pins)
    )
    choices = [low for low in dict.fromkeys((own, usual)) if low]
    job.run.report("timing converted models", 0, 1)
    try:
        seconds = whole_times(job, *choices) if choices else None
    except RuntimeFailure as failure:
        _LOG.info("a candidate cannot be timed: %s", failure)
        return tuned
    if seconds is None:
        return tuned
    known = dict(zip((frozenset[str](), *choices), seconds, strict=True))
    able = [own]
    if not search.asked.allow_slower:
        able = [frozenset(), own] if tuned.held else [frozenset()]
        fastest = min(known[low] for low in able)
        is_faster = usual in known and known[usual] * _CLOSE < fastest
        if is_faster and search.measure(usual) <= search.limit:
            able.append(usual)
    # The choice of the search stays unless another one is faster by more than noise.
    best = min(able, key=lambda low: known[low] * (1 if low == own else _CLOSE))
    rows = [*tuned.candidates[:-1]]
    if best and best not in {row.low for row in rows}:
        rows.append(search.in_units(search.solver.candidate(best)))
    # Candidates are in microseconds. Those that were not timed keep their estimates.
    rows = [
        replace(row, time=known.get(row.low, row.time * 1e-6) * 1e6)
        for row in (*rows, tuned.candidates[-1])
    ]
    front = (*sorted(rows[:-1], key=attrgetter("time")), rows[-1])
    names = {"float32": frozenset[str](), "result": best or own or usual}
    shown = {**names, "level O2": usual}
    times = ((name, known[low]) for name, low in shown.items() if low in known)
    return replace(
        tuned,
        **_written(job, front, best, tuned.noise),
        room=None,
        timed=tuple(times),
    )
