"""Numbers that lie in a range or in a domain, in place of those that random inputs usually have."""

from enum import Enum
from math import ceil, floor, isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import finfo, iinfo

from onnxamp._base.errors import ArgumentError


class Domain(Enum):
    """Numbers among which random inputs lie, in words."""

    POSITIVE = "positive"
    FRACTION = "between 0 and 1"
    ABOVE_ONE = "above 1"
    NEGATIVE = "negative"


def moved_into_range(
    generator: np.random.Generator, feed: npt.NDArray[Any], ends: tuple[float, float]
) -> npt.NDArray[Any]:
    """Return numbers of a range in place of others, with their shape and type.

    Raises:
        ArgumentError: no number of that type is in the range.
    """
    low, high = ends
    kind = feed.dtype.kind
    if kind not in "biufV":
        raise ArgumentError(f"A range is for numbers, and not for {feed.dtype}.")
    if kind in "biu" or "int" in feed.dtype.name:
        info = iinfo(np.uint8 if kind == "b" else feed.dtype)  # type: ignore[no-untyped-call]
        least = max(ceil(low), int(info.min))
        most = min(floor(high), 1 if kind == "b" else int(info.max))
        if least > most:
            raise ArgumentError(f"No {feed.dtype} is between {low:g} and {high:g}.")
        drawn = feed.dtype if kind in "iu" else np.uint8 if kind == "b" else np.int8
        numbers = generator.integers(least, most, feed.shape, drawn, endpoint=True)
        return numbers.astype(feed.dtype)
    end = float(finfo(feed.dtype).max)  # type: ignore[no-untyped-call]
    low, high = max(low, -end), min(high, end)
    if low > high:
        raise ArgumentError(f"No {feed.dtype} is between {ends[0]:g} and {ends[1]:g}.")
    if isfinite(high - low):
        return generator.uniform(low, high, feed.shape).astype(feed.dtype)
    shares = generator.uniform(0, 1, feed.shape)
    return np.asarray(low * (1 - shares) + high * shares, feed.dtype)


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
