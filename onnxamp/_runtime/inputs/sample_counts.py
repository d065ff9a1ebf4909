"""How many random samples a verdict takes."""

from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._facts.providers import sums_low
from onnxamp._runtime import LEAST, MOST
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.draws import Draw

NUMBERS: Final = 64
"""Numbers that are enough to estimate the error of an output. With n < 64 numbers, one estimate in twenty is below
about the cube root of n / 64 of the error (chi-square, n >= 3).
"""

_FURTHER: Final = ((4, 1 / 4), (8, 1 / 2))
"""Numbers of random samples that a verdict takes if the largest error is more than a share of its limit. One sample of
a network with errors near its limit may have half or twice the error of another.
"""


def further_count(count: int, share: float) -> int | None:
    """Return how many random samples a verdict takes that is close; None if these are enough.

    Args:
        count: the number of samples that were compared.
        share: the largest error, as a share of its limit.
    """
    more = (total for total, least in _FURTHER if share > least and total > count)
    return next(more, None)


def usual_count(reference: Session, draw: Draw, *engines: str | None) -> int:
    """Return how many random samples a verdict takes by default.

    One, or a prompt and a step of a decoder with caches; where an engine (a target or provider) sums up float16 in
    float16, as many as hold :data:`NUMBERS` numbers of each float output, from ``LEAST`` to ``MOST``. Of an output *y*,
    (Σ *y*²)² / Σ *y*⁴ numbers count: 1 for the probabilities of a classifier that is sure, a third of all if they are
    normally distributed. The first sample tells.

    Args:
        reference: the model to compare with; it keeps its outputs of the first sample.
        draw: the source of random samples.
        engines: the engines and targets of results.
    """
    turns = draw.maker().turns
    if not sums_low(*engines):
        return turns
    try:
        outputs = reference.run_sample(0, draw.make(0))
    except (ArgumentError, RuntimeFailure):  # the comparison reports it
        return LEAST
    shown = min(_numbers(reference.floats_of(outputs)), default=NUMBERS)
    return min(MOST, max(LEAST, ceil(NUMBERS / shown)))


def _numbers(outputs: Iterable[npt.NDArray[Any]]) -> Iterator[float]:
    """Yield how many numbers of each float output count; outputs that are all zero are left out."""
    for array in outputs:
        squares = np.square(array[np.isfinite(array)].astype(np.float64))
        if squares.any():
            yield float(squares.sum() ** 2 / np.square(squares).sum())
