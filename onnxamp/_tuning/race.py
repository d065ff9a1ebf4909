"""The last choice of a tuning, by the clock of the engine.

The chosen candidate, level O2, everything low, and products alone are timed whole beside float32, and correct the times
of nodes (:mod:`onnxamp._tuning.engine_times`). The cut is solved with these, and what it chooses is timed in turn. The
best of all that holds the tolerance is written.
"""

import json
import logging
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from heapq import nsmallest
from time import monotonic
from typing import Any, Final, NamedTuple, get_type_hints

from onnxamp._convert.analysis import analyse
from onnxamp._convert.estimate import low_nodes
from onnxamp._convert.plan import Plan, plan_json, plan_of
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._ops.facts import op_facts
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._runtime.engines import Engine
from onnxamp._state import Facts, Part, State, as_data, fingerprint, from_data
from onnxamp._tuning.arguments import Search, is_slower, standing
from onnxamp._tuning.candidates import CandidateSolver
from onnxamp._tuning.engine_times import NOTHING, WholeTimes
from onnxamp._tuning.frontier import room
from onnxamp._tuning.job import Job
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import Candidate, KeptNode, Tuned
from onnxamp._tuning.search import TIME, CandidateSearch, front_of, rejected
from onnxamp._tuning.space import CASTS

_LOG: Final = logging.getLogger("onnxamp")
_FINALISTS: Final = 3
"""Choices at most that are timed side by side in the end, beside level O2 and what was chosen."""
_CLOSE: Final = 1.02
"""Models whose times differ by less are equally fast."""
_FACTORS: Final = (1.0, 1 / 4, 4.0, 1 / 16)
"""What Casts are taken to cost, over what the regression says: some are free, others end a fusion."""
_ROUNDS: Final = 3
"""Choices at most that are timed for each."""
_OLD: Final = 4
"""Candidates of the search that are timed."""
_SHARE: Final = 0.5
"""Share of the time of the search that these may take."""
_SPARE: Final = 0.9
"""Share of the squared tolerance that is aimed at."""
_STEP: Final = 0.1
"""The smallest ratio between the squared errors that are aimed at in turn."""


class Race:
    """Choices, how fast they are, and which are within the tolerance: ``errors`` are those of converted models."""

    def __init__(self, search: CandidateSearch, times: WholeTimes) -> None:
        self.job, self.search, self.times = search.job, search, times
        self.errors = dict[frozenset[str], float]()

    def confirmed(self, tuned: Tuned) -> Tuned:
        """The best of what was chosen, of level O2, of what corrected times suggest, and of float32, all timed whole.

        As with estimates, that is the fastest within the tolerance.
        """
        own, times = tuned.candidates[tuned.chosen].low, self.times
        everything, usual, products = self._probes()
        self.errors |= {own: tuned.error, NOTHING: tuned.noise or 0.0}
        try:
            times.add(own, usual)
            self._enter(usual)
            if not self.search.asked.allow_slower:
                times.add(everything, products)
                self._look_further(monotonic() + _SHARE * self.search.asked.seconds)
                times.add(
                    *nsmallest(_FINALISTS, self._held(), key=self._rank),
                    own,
                    usual,
                    again=True,
                )
        except RuntimeFailure as failure:
            _LOG.info("a candidate cannot be timed: %s", failure)
            return tuned
        best = self._best(own)
        shown = next((low for low in (best, own, usual) if low), NOTHING)
        timed = {"float32": NOTHING, "result": shown, "level O2": usual}
        tuned = replace(
            tuned,
            room=None,
            times=f"{tuned.times}, corrected by {len(times.seconds)} models timed whole",
            timed=tuple(
                (name, times.seconds[low])
                for name, low in timed.items()
                if low or name == "float32"
            ),
        )
        return self._written(tuned, best)

    def _probes(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """What tells parts of the time apart: everything low, level O2, and products alone."""
        space, pins = self.job.space, self.job.pins
        units = [unit for unit in space.units if unit.node not in pins]
        usual = low_nodes(
            analyse(space.all_low.graph, replace(space.all_low.options, level=Level.O2))
        )
        return (
            frozenset(unit.key for unit in units),
            frozenset(unit.key for unit in units if unit.node in usual),
            frozenset(unit.key for unit in units if unit.op in op_facts().contractions),
        )

    def _rank(self, low: frozenset[str]) -> tuple[bool, float]:
        """Orders choices that were timed, the best first."""
        return standing(self._candidate(low), self._candidate(NOTHING))

    def _held(self) -> list[frozenset[str]]:
        """Choices that are known to hold the tolerance."""
        return [
            low for low, error in self.errors.items() if self.job.metric.holds(error)
        ]

    def _enter(self, low: frozenset[str]) -> None:
        """Measure the error of a choice, if it would be better than those that hold the tolerance."""
        if low not in self.errors and self._rank(low) < min(
            map(self._rank, self._held())
        ):
            self.errors[low] = self.job.error(low, self.job.plan(low))

    def _candidate(self, low: frozenset[str]) -> Candidate:
        """A choice that was timed."""
        candidate = self.times.solver.candidate(low, self.search.latest, None)
        return replace(candidate, time=self.times.seconds[low] * 1e6)

    def _look_further(self, until: float) -> None:
        """Time what corrected times suggest: candidates of the search, and what the cut chooses with Casts as dear as
        they seem and otherwise, until the time is over.

        Raises:
            RuntimeFailure: a choice does not run.
        """
        corrected = self.times.corrected()
        good = (
            row
            for row in self.search.candidates
            if row.low and row.best_known_error**2 <= self._limit
        )
        for row in nsmallest(
            _OLD, good, key=lambda row: self.times.timed(row, corrected).time
        ):
            if monotonic() < until:
                self.times.add(row.low)
                self._enter(row.low)
        target = min(
            (self._aim(low) for low in self.errors if low), default=self._limit
        )
        for factor in _FACTORS:
            for _ in range(_ROUNDS):
                space = self.times.corrected().corrected({CASTS: factor}, 1.0)
                low = CandidateSolver(space, self.job.base, self.job.broken).within(
                    self.search.latest, target
                )
                if monotonic() > until:
                    return
                if not low or low in self.times.seconds:
                    break
                self.times.add(low)
                self._enter(low)
                target = self._aim(low) if low in self.errors else target

    def _told(self, row: Candidate) -> Candidate:
        """A candidate with the error of its converted model, if that was measured."""
        return (
            replace(row, error=self.errors[row.low], verified=True)
            if row.low in self.errors
            else row
        )

    @property
    def _limit(self) -> float:
        """The squared error that is allowed."""
        return self.search.limit**2

    def _aim(self, low: frozenset[str]) -> float:
        """The predicted squared error to aim at, after what a choice was predicted to have and has."""
        predicted = self.times.solver.predicted(low, self.search.latest)
        error = self.job.metric.amplitude(self.errors[low]) ** 2
        if not predicted or not error:
            return self._limit
        return _SPARE * predicted * max(_STEP, self._limit / error)

    def _best(self, own: frozenset[str]) -> frozenset[str]:
        """The best choice that holds the tolerance, ``own`` if it is about as good."""
        able, float32 = self._held(), self._candidate(NOTHING)
        if self.search.asked.allow_slower:
            able = [low for low in able if low] or able
        else:
            able = [low for low in able if not is_slower(self._candidate(low), float32)]
        best, seconds = min(able, key=self._rank), self.times.seconds
        return (
            own
            if own and own in able and seconds[own] < _CLOSE * seconds[best]
            else best
        )

    def _written(self, tuned: Tuned, best: frozenset[str]) -> Tuned:
        """The outcome with the best choice, and with the times that are known now."""
        job, corrected = self.job, self.times.corrected()
        *lowered, nothing = (
            self._told(self.times.timed(row, corrected)) for row in tuned.candidates
        )
        if best not in (NOTHING, *(row.low for row in lowered)):
            lowered.append(
                self._told(replace(self._candidate(best), predicted=self.errors[best]))
            )
        rows = (*sorted(lowered, key=TIME), nothing)
        chosen = next(number for number, row in enumerate(rows) if row.low == best)
        if best == tuned.candidates[tuned.chosen].low:
            return replace(tuned, candidates=rows, chosen=chosen)
        kept = job.kept(best, self.search.latest)
        return replace(
            tuned,
            plan=job.plan(best, kept),
            candidates=rows,
            chosen=chosen,
            kept=tuple(kept),
            error=self.errors[best],
            conversions=len(job.errors),
        )


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


def verified(search: CandidateSearch, noise: float | None, times: str) -> Tuned:
    """Choose the best candidate whose converted model meets the tolerance on all samples.

    One that is slower than float32 is offered, and float32 is chosen, unless slower ones are allowed: so a wider
    tolerance never takes longer.
    """
    job, asked, nothing = search.job, search.asked, search.aim.nothing
    judge, best = job.metric, _best(search)
    best = best if best is not None and search.aim.writes(best) else None
    low = nothing.low if best is None else best.low
    kept = job.kept(low, search.latest)
    plan = job.plan(low, kept)
    error = _judged(search, low) if best is None else job.errors[low]
    is_same = (
        job.space.all_low.options.keep_io_types is True
    )  # else inputs and outputs are rounded
    own = job.errors.get(nothing.low, noise or 0.0)
    nothing = replace(
        nothing,
        error=judge.amplitude(own),
        verified=is_same or nothing.low in job.errors,
    )
    candidates = search.candidates
    front = front_of(candidates, nothing, allow_slower=asked.allow_slower)
    front = (
        front if low in {item.low for item in front} else _with(front, candidates, low)
    )
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


def _best(search: CandidateSearch) -> Candidate | None:
    """The best candidate that holds once it is converted; None if that is none of those that may be tried.

    Where one misses, what the search expects of others grows. Better ones that were passed over for this are converted
    in the end: what mask runs showed to hold is not given up unseen.
    """
    found: Candidate | None = None
    for attempt in range(_ATTEMPTS):
        found = search.search()
        if found is None or _holds(search, found.low):
            break
        _LOG.info(
            "attempt %d: errors are taken to be %.2f times those of mask runs",
            attempt + 1,
            search.ratio,
        )
    else:
        return None
    for _ in range(len(search.job.errors), _ATTEMPTS):
        better = search.best(boldly=True)
        if better is None or (found is not None and better.low == found.low):
            break
        if _holds(search, better.low):
            return better
    return found


def _holds(search: CandidateSearch, low: frozenset[str]) -> bool:
    """Whether a converted model meets the tolerance."""
    if low not in search.converted:
        search.note(low, search.job.metric.amplitude(_judged(search, low)))
    return search.converted[low] <= search.limit


def _judged(search: CandidateSearch, low: frozenset[str]) -> float:
    """The error of a converted model."""
    job, count = search.job, len(search.job.errors) + 1
    plan = job.plan(low)
    job.run.report("verifying the converted model", count, count)
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
    return replace(
        candidate, predicted=metric.of_amplitude(candidate.predicted), error=error
    )


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


TABLES: Final = "candidates of a tuning"
"""The part of the state file."""


class Table(NamedTuple):
    """Where the candidates of a tuning are kept: ``asked`` are the arguments that they follow from."""

    part: Part
    asked: Mapping[str, Any]

    def keep(self, outcome: Outcome) -> None:
        """Keep the candidates, with the plan that writes each."""
        rows = [outcome.row(number) for number in range(len(outcome.tuned.candidates))]
        data = [{"plan": plan_json(plan), "kept": as_data(kept)} for plan, kept in rows]
        facts = {
            item.name: getattr(outcome.tuned, item.name)
            for item in fields(Tuned)
            if item.name != "plan"
        }
        self.part[self._key] = {
            "asked": self.asked,
            "tuned": as_data(facts),
            "rows": b64encode(zlib.compress(json.dumps(data).encode())).decode(),
        }

    def picked(self, number: int) -> Tuned | None:
        """The outcome with a candidate of the user's choice, as the table that was shown says; None without a table.

        Raises:
            ArgumentError: there is no such candidate, or the table is that of other arguments.
        """
        if self._key not in self.part:
            self._refuse()
            return None
        data = self.part[self._key]
        (plan, kept), tuned = self._row(data, 0), data["tuned"]
        hints = {
            name: hint for name, hint in get_type_hints(Tuned).items() if name in tuned
        }
        facts = {name: from_data(hint, tuned[name]) for name, hint in hints.items()}
        found = Tuned(plan=plan, **facts)
        plan, kept = self._row(data, checked_pick(number, found.candidates))
        error = found.candidates[number].best_known_error
        return replace(
            found,
            plan=plan,
            kept=kept,
            chosen=number,
            error=error,
            held=error <= found.tolerance,
            runs=0,
            recalled=found.recalled + found.runs,
            conversions=0,
            room=found.room if number == found.chosen else None,
        )

    @property
    def _key(self) -> str:
        return fingerprint(json.dumps(self.asked, sort_keys=True))

    @staticmethod
    def _row(data: Mapping[str, Any], number: int) -> tuple[Any, tuple[KeptNode, ...]]:
        row = json.loads(zlib.decompress(b64decode(data["rows"])))[number]
        return plan_of(row["plan"]), from_data(tuple[KeptNode, ...], row["kept"])

    def _refuse(self) -> None:
        """Say what differs from the last table, if there is any.

        Raises:
            ArgumentError: there is one.
        """
        last = next(reversed(list(self.part)), None)
        if last is None:
            return
        known = self.part[last]["asked"]
        changed = [name for name in self.asked if self.asked[name] != known.get(name)]
        told = [f"{name} {known.get(name)}" for name in changed if name != "options"]
        told += ["other options"] if "options" in changed else []
        raise ArgumentError(
            f"The candidates that the state file shows are those of {' and '.join(told)}: a candidate is picked with"
            " the same arguments. Tune without pick (--pick) to see those of these."
        )


def table_of(
    state: State, given: Facts, options: Options, search: Search, engine: Engine
) -> Table | None:
    """Where the candidates are kept that follow from some arguments; None where a function of the user is one.

    Args:
        state: the state file.
        given: what all measurements depend on.
        options: those of the conversion.
        search: how the model is tuned.
        engine: what runs converted models.
    """
    if options.rule is not None:
        return None
    asked = {
        "tolerance": search.tolerance,
        "device": search.device,
        "times": search.times,
        "runs": search.runs,
        "allow_slower": search.allow_slower,
        "provider": engine.name(options.low.name),
        "options": fingerprint(json.dumps(options.as_json(), sort_keys=True)),
    }
    return Table(state.part(TABLES, given), asked)
