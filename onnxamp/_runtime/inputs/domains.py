"""Numbers that lie in a range or in a domain, in place of those that random inputs usually have."""

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt


class Domain(Enum):
    """Numbers among which random inputs lie, in words."""

    POSITIVE = "positive"
    FRACTION = "between 0 and 1"
    ABOVE_ONE = "above 1"
    NEGATIVE = "negative"


def in_range(
    generator: np.random.Generator, feed: npt.NDArray[Any], ends: tuple[float, float]
) -> npt.NDArray[Any]:
    """Return numbers of a range in place of others, with their shape and type."""
    low, high = ends
    if feed.dtype.kind in "iu":
        return generator.integers(int(low), int(high) + 1, feed.shape).astype(
            feed.dtype
        )
    return generator.uniform(low, high, feed.shape).astype(feed.dtype)


def in_domain(
    generator: np.random.Generator, feed: npt.NDArray[Any], domain: Domain
) -> npt.NDArray[Any]:
    """Return numbers in a domain in place of others, with their shape and type."""
    if domain is Domain.FRACTION:
        return generator.uniform(0, 1, feed.shape).astype(feed.dtype)
    numbers: npt.NDArray[Any] = np.abs(feed)
    if domain is Domain.ABOVE_ONE:
        numbers = (numbers + 1).astype(feed.dtype)
    if domain is Domain.NEGATIVE:
        numbers = np.negative(numbers)
    return numbers
