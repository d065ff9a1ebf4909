"""Checks of the settings of loss scales."""

from typing import Final

import numpy as np

from onnxamp._errors import ArgumentError, ArgumentTypeError

LARGEST: Final = 2.0**126
"""Keeps the scale finite in float32."""
NEVER: Final = 2**62
"""A window that no counter reaches."""


def checked_scale(name: str, value: float) -> float:
    """A scale.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_number(value) or not 1 <= value <= LARGEST:
        raise ArgumentError(f"{name} must be a number from 1 to 2^126, not {value!r}.")
    return float(value)


def checked_factor(name: str, value: float) -> float:
    """A factor by which a scale rises.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_number(value) or not 1 < value < float("inf"):
        raise ArgumentError(f"{name} must be a finite number greater than 1, not {value!r}.")
    return float(value)


def checked_fraction(name: str, value: float) -> float:
    """A factor by which a scale falls.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_number(value) or not 0 < value < 1:
        raise ArgumentError(f"{name} must be a number between 0 and 1, not {value!r}.")
    return float(value)


def checked_count(name: str, value: int) -> int:
    """A number of updates.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < NEVER:
        raise ArgumentError(f"{name} must be a positive whole number, not {value!r}.")
    return int(value)


def checked_flag(name: str, value: bool) -> bool:
    """A bool.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a bool, not {type(value).__name__}.")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
