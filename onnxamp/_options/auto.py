"""Which arguments level auto takes."""

from typing import Final

from onnxamp._errors import ArgumentError
from onnxamp._options.levels import Level, check_level

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
