"""Numbers among the arguments of public functions."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from onnxamp._base.errors import ArgumentError, ArgumentTypeError

NUMBERS: Final = (int, float, np.integer, np.floating)
WHOLE: Final = (int, np.integer)
"""Types of numbers, and of whole numbers. Bools do not count."""

_MOST_BITS: Final = 1023
"""Bits up to which no integer overflows float64."""


def checked_number(
    name: str,
    value: Any,
    what: str,
    holds: Callable[[Any], bool],
    kinds: tuple[type, ...] = NUMBERS,
) -> Any:
    """Return a number that has one of the types and meets the condition.

    Raises:
        ArgumentTypeError: it has another type. ArgumentError: it does not meet the condition.
    """
    said = f"{name} must be {what}, not {value!r:.80}."
    # In Python, a bool is an int.
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ArgumentTypeError(said)
    # Python's integers may be larger than any float.
    is_huge = isinstance(value, int) and value.bit_length() > _MOST_BITS
    if is_huge or not holds(value):
        raise ArgumentError(said)
    return value
