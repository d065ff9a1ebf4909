"""Made-up samples that a verdict can rest on.

They have sizes with which the model runs, and where errors are draws, there are as many as show what the error of an
output is.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import ceil
from time import monotonic
from typing import Any, Final

import numpy as np

from onnxamp._errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._graph.determined import is_consistent
from onnxamp._ops.profiles import sums_low
from onnxamp._runtime.defaults import LEAST, MOST
from onnxamp._runtime.engines import Executable
from onnxamp._runtime.footprint import free_bytes, peak_bytes
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.random_inputs import Draw

NUMBERS: Final = 64
"""Numbers that show what the error of an output is. The root mean square of fewer, n, is less than about the cube root
of n / 64 of that in one case of twenty, as chi-square says for n from 3 on.
"""

_PATIENCE: Final = 20.0
"""Seconds in which other sizes are tried."""

_MOST_BYTES: Final = 2 << 30
"""Bytes that a model's values may take together where sizes are only tried."""


def suited(draw: Draw, reference: Executable) -> Draw:
    """The draw, or that of the first sizes to try with which the model runs if it does not run with the usual ones.

    It runs only if there are such sizes, and keeps its outputs. Where it does not even load, where inputs cannot be
    made up, and where no sizes are found within 20 seconds, the draw stays what it is.

    Raises:
        ArgumentError: a size is given for an unknown dimension, or an impossible one.
    """

    def run(one: Draw) -> None:
        reference.run_sample(0, check_inputs(reference.model.proto, one.make(0)))

    if not draw.maker().has_open:
        return draw
    try:
        run(draw)
    except RuntimeFailure as error:
        return other_sizes(draw, run) if error.loaded else draw
    except (ArgumentError, MemoryError):  # whoever reads the sample tells
        pass
    return draw


def other_sizes(draw: Draw, run: Callable[[Draw], object]) -> Draw:
    """The draw of the first sizes to try with which ``run`` fails neither; itself, and what was tried, without any.

    Sizes with which the model's values take too much memory are left out, and those that contradict one of its ops do
    not run.
    """
    until, tried = monotonic() + _PATIENCE, []
    for other in draw.others():
        graph, shapes = other.maker().graph, other.maker().shapes()
        if peak_bytes(graph, shapes) > min(_MOST_BYTES, free_bytes() // 2):
            continue
        if is_consistent(graph, shapes):
            with suppress(OnnxAmpError, MemoryError):
                run(other)
                return other
        tried.append(other.sizes)
        if monotonic() > until:
            break
    return replace(draw, tried=tuple(tried))


def usual_count(reference: Executable, draw: Draw, *engines: str | None) -> int:
    """How many made-up samples a verdict takes where nobody says.

    One; where an engine (a target or provider) sums up float16 in float16, as many as hold :data:`NUMBERS` numbers of
    each float output, from ``LEAST`` to ``MOST``. Of an output *y*, (Σ *y*²)² / Σ *y*⁴ numbers count: 1 for the
    probabilities of a classifier that is sure, a third of all if they are normally distributed. The first sample tells.

    Args:
        reference: what results are compared with; it keeps its outputs of the first sample.
        draw: what makes up samples.
        engines: what results run on, or are meant for.
    """
    if not sums_low(*engines):
        return 1
    try:
        outputs = reference.run_sample(0, draw.make(0))
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
