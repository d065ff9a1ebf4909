"""Tuning with weights rounded to nearest, and where that leaves something to gain, with compensation, too."""

import logging
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from onnxamp._options.options import Options
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.exponents import rank, seconds_left
from onnxamp._tuning.results import Compensation, Tuned
from onnxamp._tuning.verified import Outcome
from onnxamp._tuning.worth import is_slower

_LOG: Final = logging.getLogger("onnxamp")
_FEWEST: Final = 4
"""Samples from which on compensation is tried unasked: rounding leaves the last quarter of the rows out, so that one
sample at least judges without having been rounded for."""
_SHARE: Final = 1 / 4
"""The share of the squared error that the rounding of weights must be able to have."""


def tune_rounded(
    options: Options,
    search: Search,
    samples: Samples,
    tuned_with: Callable[[Options, Search], Outcome],
    once: Callable[[Options, Search], Outcome],
    *,
    is_free: bool,
) -> Outcome:
    """Tune as the options say; where they leave rounding open, with compensation too if the fastest candidate misses.

    What is rounded to nearest stays, unless compensation makes a faster candidate hold the tolerance.

    Args:
        options: the options of the conversion.
        search: how the model is tuned.
        samples: inputs of the model.
        tuned_with: tunes it, and finds exponents where the options leave them open.
        once: tunes it with given exponents.
        is_free: whether weights can be rounded with compensation.
    """
    begin, best = monotonic(), tuned_with(options, search)
    nearest = best.tuned
    if options.rounding != "auto" or not is_free:
        return replace(best, tuned=replace(nearest, compensation=None))
    facts = _untried(nearest, samples, search)
    if facts is not None and not facts.why:
        found = nearest.plan.options
        compensated = replace(
            options, rounding="compensated", rescale=found.rescale, rescaling=found.rescaling
        )
        other = once(compensated, replace(search, seconds=seconds_left(search, begin)))
        used = rank(other.tuned, search)[:-1] < rank(nearest, search)[:-1]
        left = nearest if used else other.tuned
        best = other if used else best
        facts = replace(facts, used=used, other=left.candidates[left.chosen], error=left.error)
        _LOG.info("weights are rounded %s", "with compensation" if used else "to nearest")
    return replace(best, tuned=replace(best.tuned, exponents=nearest.exponents, compensation=facts))


def _leaves_room(tuned: Tuned, search: Search) -> bool:
    """Return whether a smaller error at the same time could bring a candidate that is better and may be written."""
    better, float32 = tuned.candidates[: tuned.chosen], tuned.candidates[-1]
    return not tuned.held or any(
        search.allow_slower or not is_slower(one, float32) for one in better
    )


def _untried(tuned: Tuned, samples: Samples, search: Search) -> Compensation | None:
    """What is known before compensation is tried, and what speaks against it; None if nothing is to be gained."""
    known = tuned.compensation
    if known is None or not known.seconds or not _leaves_room(tuned, search):
        return None
    if known.share < _SHARE:
        return replace(
            known,
            why=f"the nodes that read weights cause only {known.share:.0%} of the squared error",
        )
    if samples.made_up:
        return replace(known, why="the inputs are made up")
    if len(samples) < _FEWEST:
        return replace(known, why=f"that takes {_FEWEST} inputs or more")
    if known.seconds > search.seconds:
        return replace(
            known, why=f"that takes about {known.seconds:.0f} s, more than --search-time"
        )
    return known
