"""Rounding errors of numbers, and of the ends of bounds."""

from functools import cache
from math import inf, sqrt
from typing import Final

import numpy as np

from onnxamp._base.records import record
from onnxamp._facts.dtypes import LOW_TENSORS, Format

_LONGEST: Final = 2.0**40
"""Elements that an axis of unknown size may have: more than any memory holds."""


@record
class Rounding:
    """The rounding of numbers to a type of few digits, once or several times.

    Attributes:
        error: the largest relative error.
        least: the largest error of a number that is too small to have all digits: half of the smallest number.
        most: the largest number of the type, which stands for larger ones where they are clipped.
        overflow: the smallest magnitude that may become infinite.
    """

    error: float
    least: float
    most: float
    overflow: float

    def downward(self, end: float) -> float:
        """Return the least to which a number may be rounded that is no less than ``end``."""
        if not end:
            return end
        if end > 0.0:
            held = min(end, self.most)
            return max(held - self._off(held), 0.0)
        lower = end - self._off(end)
        return -inf if lower <= -self.overflow else lower

    def upward(self, end: float) -> float:
        """Return the most to which a number may be rounded that is no more than ``end``."""
        return -self.downward(-end)

    def _off(self, end: float) -> float:
        return max(abs(end) * self.error, self.least)

    def length(self, norm: float, size: int | None) -> float:
        """Return the largest L2 norm of a vector of so many numbers after rounding; None if they may be any number."""
        count = _LONGEST if size is None else size
        # Rounding to the nearest number doubles none, because half of the smallest one becomes zero.
        return norm * (1.0 + self.error) + min(norm, sqrt(count) * self.least)

    def total(self, total: float, size: int | None) -> float:
        """Return the largest sum of magnitudes of so many numbers after rounding; None if they may be any number."""
        count = _LONGEST if size is None else size
        return total * (1.0 + self.error) + min(total, count * self.least)


_FLOAT32: Final = np.finfo(np.float32)
_LARGEST: Final = float(_FLOAT32.max)
_BEYOND: Final = _LARGEST * (1.0 + 2.0**-25)
"""The smallest magnitude that float32 rounds to infinity."""


@cache
def rounding(low: Format, kind: str, steps: float, *, is_lowered: bool) -> Rounding:
    """Return the rounding of a float of a type in a model that is computed in low precision.

    A number that is not low is given the same relative error, so that sums of many float32 numbers are allowed for.

    Args:
        low: the low-precision type.
        kind: the type of the number.
        steps: how many times it may be rounded.
        is_lowered: whether float32 values count as if they were in low precision.
    """
    held = low if is_lowered else LOW_TENSORS.get(kind)
    if held is None:
        least = float(_FLOAT32.smallest_subnormal) / 2.0
        return Rounding(steps * low.epsilon / 2.0, least, _LARGEST, _BEYOND)
    error = steps * max(held.epsilon, low.epsilon) / 2.0
    least = held.smallest_subnormal / 2.0
    return Rounding(error, least, held.max_finite, held.overflow)
