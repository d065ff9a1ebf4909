"""The last step of a search: candidates are converted and judged on all samples, until one meets the tolerance."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from onnxamp._errors import ArgumentError
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.job import Job
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import Candidate, Tuned
from onnxamp._tuning.search import CandidateSearch, front_of, rejected
from onnxamp._tuning.worth import standing

_LOG: Final = logging.getLogger("onnxamp")
_ATTEMPTS: Final = 4
"""Searches per tuning: each aims for a smaller error than the last, if its converted models missed the tolerance."""

_MIN_STEP: Final = 0.3
"""Smallest ratio between the errors that successive searches aim for."""


def verified(job: Job, search: CandidateSearch, noise: float | None, asked: Search, times: str) -> Tuned:
    """Choose the best candidate whose converted model meets the tolerance on all samples."""
    judge, pick = job.metric, asked.pick
    tolerance = target = limit = judge.amplitude(judge.tolerance)
    attempt = 0
    while True:
        attempt += 1
        prices = search.search(target)
        nothing = search.solver.candidate(frozenset(), prices, judge.amplitude(noise or 0.0))
        front = front_of(search.candidates, nothing, allow_slower=asked.allow_slower)
        able = [i for i, item in enumerate(front) if item.low and item.best_known_error <= limit]
        if not asked.allow_slower:
            able.sort(key=lambda i: standing(front[i], nothing))
        order = [i for i in able if front[i].best_known_error <= target]
        last = attempt == _ATTEMPTS or not order
        if pick is not None:
            order, last = [checked_pick(pick, front)], True
        elif last:
            order = [*able, len(front) - 1]
        for number in order:
            kept = job.kept(front[number].low, prices)
            plan = job.plan(front[number].low, kept)
            search.progress("verifying the converted model", len(job.errors) + 1, len(job.errors) + 1)
            error = job.error(front[number].low, plan)
            _LOG.info("candidate %d of %d, %d nodes low: error %.3g", number, len(front), front[number].nodes, error)
            if judge.holds(error) or (last and number == order[-1]):
                return Tuned(
                    plan, judge.name, judge.tolerance, job.samples.summary, len(job.samples), noise,
                    job.device_noise, error, job.backend.name(job.low.name), search.masked.runs,
                    len(job.state.recalled), len(job.errors), len(job.space.tunable),
                    tuple(unit.label for unit in job.space.tunable if not unit.seen),
                    tuple(_in_metric_units(judge, item) for item in front), number, tuple(kept), asked.device, times,
                    judge.holds(error), search.stopped, rejected(search.candidates, front, target),
                    compensation=job.compensation(prices),
                )  # fmt: skip
        # Mask runs see some samples only: aim lower by the factor by which the worst of all samples is too high.
        known, ratio = front[number].best_known_error, tolerance / judge.amplitude(error)
        limit, target = min(limit, known * ratio), min(target, known) * max(_MIN_STEP, min(0.9, 0.9 * ratio))


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
        raise ArgumentError(f"There is no candidate {pick}: there are {len(front)}, counted from 0.")
    return pick
