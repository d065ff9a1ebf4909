"""How many made-up samples a verdict takes: where errors are draws, as many as show what the error of an output is."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, Final

import numpy as np

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._ops.profiles import sums_low
from onnxamp._runtime.engines import Executable
from onnxamp._runtime.samples import random_samples

NUMBERS: Final = 64
"""Numbers that show what the error of an output is. The root mean square of fewer, n, is less than about the cube root
of n / 64 of that in one case of twenty, as chi-square says for n from 3 on.
"""

LEAST, MOST = 4, 16
"""Samples where float16 is summed up in float16: the error that one of them shows is a draw."""


def usual_count(
    reference: Executable, model: Model, *engines: str | None, seed: int = 0, dims: Mapping[str, int] | None = None
) -> int:
    """How many made-up samples a verdict takes where nobody says.

    One; where an engine (a target or provider) sums up float16 in float16, as many as hold :data:`NUMBERS` numbers of
    each float output, from :data:`LEAST` to :data:`MOST`. Of an output *y*, (Σ *y*²)² / Σ *y*⁴ numbers count: 1 for the
    probabilities of a classifier that is sure, a third of all if they are normally distributed. The first sample tells.

    Args:
        reference: what results are compared with; it keeps its outputs of the first sample.
        model: what samples are made up for.
        engines: what results run on, or are meant for.
        seed, dims: as for :func:`onnxamp.random_samples`.

    Raises:
        ArgumentError: ``dims`` names an unknown dimension or gives an impossible size, or an input cannot be made up.
    """
    if not sums_low(*engines):
        return 1
    feeds = random_samples(model, seed=seed, dims=dims)[0]
    try:
        outputs = reference.run_sample(0, feeds)
    except (ArgumentError, RuntimeFailure):  # the comparison tells
        return LEAST
    shown = min(_numbers(outputs), default=NUMBERS)
    return min(MOST, max(LEAST, ceil(NUMBERS / shown)))


def _numbers(outputs: Mapping[str, Any]) -> Iterator[float]:
    """How many numbers of each float output count; of those that are all zero, none is shown."""
    for output in outputs.values():
        for array in map(np.asarray, output if isinstance(output, list) else [output]):
            if array.dtype.kind != "f":
                continue
            squares = np.square(array[np.isfinite(array)].astype(np.float64))
            if squares.any():
                yield float(squares.sum() ** 2 / np.square(squares).sum())
