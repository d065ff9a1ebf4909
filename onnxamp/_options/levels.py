"""Levels: how much of a model to lower."""

from enum import StrEnum
from typing import Final, Literal

from onnxamp._errors import ArgumentError, ArgumentTypeError

LevelName = Literal["O0", "O1", "O2", "O3", "auto"]
"""Levels by name."""


class Level(StrEnum):
    """How much of a model to lower, by the names of mindspore.amp."""

    O0 = "O0"
    """Nothing."""
    O1 = "O1"
    """White-listed ops, and exact ops if that saves Casts."""
    O2 = "O2"
    """All but black-listed ops, unless an op's Casts cost more than it gains."""
    O3 = "O3"
    """Every op that has a kernel and is not a hazard."""
    AUTO = "auto"
    """What measured errors and estimated times allow; see :mod:`onnxamp._tuning`."""


def check_level(level: object) -> Level:
    """The level called ``level``, in either case.

    Raises:
        ArgumentError: there is no such level.
        ArgumentTypeError: ``level`` is not a string.
    """
    if not isinstance(level, str):
        raise ArgumentTypeError(f"level must be a string such as 'O2', not {type(level).__name__}.")
    found = next((known for known in Level if known.lower() == level.lower()), None)
    if found is None:
        raise ArgumentError(f"Unknown level {level!r}: choose one of {', '.join(Level)}.")
    return found


TOLERANCE: Final = 1e-2
"""The largest error that level auto accepts, by default."""


def is_auto(
    level: str,
    tolerance: float | None,
    samples: object,
    metric: object,
    *,
    measures: bool = False,
    validates: bool = False,
) -> bool:
    """Whether the level is "auto".

    Raises:
        ArgumentError: it is not, but an argument is given that only "auto" takes; samples are taken where ``measures``,
            too, and a tolerance where the result ``validates``.
    """
    unasked = samples is not None and not measures
    is_unheld = tolerance not in (None, TOLERANCE) and not validates
    given = {"tolerance": is_unheld, "samples": unasked, "metric": metric != "auto"}
    unused = [name for name, is_given in given.items() if is_given]
    if check_level(level) != Level.AUTO and unused:
        also = ", rescale, data_max or rounding" if unused[0] == "samples" else ""
        raise ArgumentError(
            f"{unused[0]} is only for level 'auto'{also}, not for {level!r}: leave it out, or change level."
        )
    return level == Level.AUTO
