"""Tuning with exponents and without: where values overflow, both are tuned, and the better outcome stays."""

import logging
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import RuntimeFailure
from onnxamp._options.options import Options
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.results import Exponents, Tuned
from onnxamp._tuning.verified import Outcome
from onnxamp._tuning.worth import standing

_LOG: Final = logging.getLogger("onnxamp")
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
