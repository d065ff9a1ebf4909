"""Numbers of loss scaling, checked: scales, their factors, and counts of updates."""

from math import inf
from typing import Final

from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp.train._step import LARGEST

_MOST: Final = 2**62
"""The number of updates that no window may reach."""

SMALLEST: Final = 1 / LARGEST
"""The smallest loss scale whose reciprocal is finite in float32."""


def checked_small_scale(name: str, value: float) -> float:
    """Return a scale that may be below 1, checked."""
    what = "a positive number from 2^-126 to 2^126"
    number = checked_number(name, value, what, lambda n: SMALLEST <= n <= LARGEST)
    return float(number)


def checked_scale(name: str, value: float) -> float:
    """Return a scale, checked."""
    return float(
        checked_number(
            name, value, "a number from 1 to 2^126", lambda n: 1 <= n <= LARGEST
        )
    )


def checked_factor(name: str, value: float) -> float:
    """Return a factor by which a scale rises, checked."""
    what = "a finite number greater than 1"
    return float(checked_number(name, value, what, lambda n: 1 < n < inf))


def checked_fraction(name: str, value: float) -> float:
    """Return a factor by which a scale falls, checked."""
    what = "a number between 0 and 1"
    return float(checked_number(name, value, what, lambda n: 0 < n < 1))


def checked_count(name: str, value: int) -> int:
    """Return a number of updates, checked."""
    what = "a positive whole number"
    return int(checked_number(name, value, what, lambda n: 1 <= n < _MOST, WHOLE))


def checked_updates(name: str, value: int) -> int:
    """Return a number of updates that may be 0, checked."""
    what = "a whole number, 0 or greater"
    return int(checked_number(name, value, what, lambda n: 0 <= n < _MOST, WHOLE))
