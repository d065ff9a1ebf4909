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
from onnxamp._tuning.worth import standing

_LOG: Final = logging.getLogger("onnxamp")
_LEAST: Final = 1 / 4
"""Share of the search time that a second tuning has in any case."""


def tune_both(
    options: Options, search: Search, once: Callable[[Options, Search], Tuned], measured: Callable[[Options], Options]
) -> Tuned:
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
    asked = replace(search, pick=None)
    with_them = once(rescaled, asked)
    chosen = with_them.candidates[with_them.chosen]
    without = None
    used = with_them.held and chosen.nodes == with_them.units and not rescaled.rescaling.unfit
    if not used:
        without = once(options, replace(asked, seconds=seconds_left(search, begin)))
        used = rank(with_them, search) < rank(without, search)
    best = without if without is not None and not used else with_them
    other = with_them if best is without else without
    _LOG.info("exponents of %d values are %s", values, "used" if used else "not used")
    if search.pick is not None:
        best = once(rescaled if used else options, search)
    facts = Exponents(values, used, None if other is None else other.candidates[other.chosen],
                      None if other is None else other.error)  # fmt: skip
    return replace(best, exponents=facts)


def _rescaled(options: Options, measured: Callable[[Options], Options]) -> Options | None:
    """The options with exponents; None where that is settled, or no value that overflows takes one."""
    if options.rescale is not None or options.low is not FLOAT16:
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
