"""Tuning with weights rounded to nearest, and where that leaves something to gain, with compensation, too."""

import logging
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import RuntimeFailure
from onnxamp._options.options import Options
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.arguments import Search, is_slower, standing
from onnxamp._tuning.race import Outcome
from onnxamp._tuning.results import Compensation, Exponents, Tuned

_LEAST: Final = 1 / 4
"""Share of the search time that a second tuning has in any case."""


def tune_both(
    options: Options,
    search: Search,
    once: Callable[[Options, Search], Outcome],
    measured: Callable[[Options], Options],
) -> Outcome:
    """Tune as the options say; where they leave it open, with exponents too if these bring values into range.

    With exponents comes first: if all can be low then, nothing without them can be faster. Else what holds the
    tolerance stays, then what takes less time, and then what has the smaller error.

    Args:
        options: the options of the conversion.
        search: how the model is tuned.
        once: tunes it with given exponents.
        measured: the options with the exponents that they ask for.
    """
    rescaled = _rescaled(options, measured)
    if rescaled is None or rescaled.rescaling is None:
        return once(options, search)
    values, begin = len(rescaled.rescaling.scaled), monotonic()
    with_them = once(rescaled, search)
    first = with_them.tuned
    without = None
    used = (
        first.held
        and first.candidates[first.chosen].nodes == first.units
        and not rescaled.rescaling.unfit
    )
    if not used:
        without = once(options, replace(search, seconds=seconds_left(search, begin)))
        used = rank(first, search) < rank(without.tuned, search)
    best = without if without is not None and not used else with_them
    other = without if best is with_them else with_them
    _LOG.info("exponents of %d values are %s", values, "used" if used else "not used")
    left = None if other is None else other.tuned
    facts = Exponents(
        values,
        used,
        None if left is None else left.candidates[left.chosen],
        None if left is None else left.error,
    )
    return replace(best, tuned=replace(best.tuned, exponents=facts))


def _rescaled(options: Options, measured: Callable[[Options], Options]) -> Options | None:
    """The options with exponents; None where that is settled, or no value that overflows takes one."""
    if options.rescale is not None or not options.low.is_narrow:
        return None
    try:
        found = measured(replace(options, rescale=True))
    except RuntimeFailure:  # tuning says what is wrong with the model
        return None
    scaled = found.rescaling.scaled if found.rescaling is not None else ()
    return found if any((row.largest or 0.0) > FLOAT16.max_finite for row in scaled) else None


def seconds_left(search: Search, begin: float) -> float:
    """What another tuning has of the search time, after one that began then."""
    return max(search.seconds - (monotonic() - begin), search.seconds * _LEAST)


def rank(tuned: Tuned, search: Search) -> tuple[bool, bool, float, float, float]:
    """What orders outcomes as the candidates of one tuning."""
    chosen = tuned.candidates[tuned.chosen]
    if search.allow_slower:
        return not tuned.held, False, -chosen.flops - chosen.bytes, chosen.time, tuned.error
    return not tuned.held, *standing(chosen, tuned.candidates[-1]), chosen.time, tuned.error


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
