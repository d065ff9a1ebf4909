"""Random samples that a verdict can rely on.

The model runs with their sizes, and if errors are random, there are enough samples to estimate the error of an output.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import ceil, prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxamp._dtypes import ELEM_NUMBERS
from onnxamp._errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._graph.determined import is_consistent
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import DEFAULT_ELEMENTS, Shape, elements
from onnxamp._model.protos import bytes_of
from onnxamp._ops.providers import sums_low
from onnxamp._runtime import LEAST, MOST
from onnxamp._runtime.engines import Session
from onnxamp._runtime.random_inputs import Draw
from onnxamp._runtime.values import check_inputs

_UNKNOWN: Final = 4 << 30
"""Bytes that are assumed to be free if the system does not say."""
_GROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Files of Linux with the memory that the processes of a container may use together, and do use."""


def peak_bytes(graph: Graph, shapes: Sequence[Shape | None]) -> int:
    """Return the peak bytes of the values of the main graph, each of which lives from its node to its last reader.

    Args:
        graph: the model.
        shapes: by value; sizes that are unknown count as those of average ones.

    Complexity: linear in nodes and values.
    """
    main = graph.scopes[0]
    last = dict.fromkeys(main.outputs, len(graph.order))
    for place, node in enumerate(graph.order):
        last |= dict.fromkeys(node.reads, place)
    ends: dict[int, list[int]] = {}
    for value, place in last.items():
        ends.setdefault(place, []).append(value)
    alive = {value: _bytes(graph, shapes, value) for value in main.inputs}
    taken = peak = sum(alive.values())
    for place, node in enumerate(graph.order):
        for value in node.writes:
            if value not in alive:
                alive[value] = _bytes(graph, shapes, value)
                taken += alive[value]
        peak = max(peak, taken)
        taken -= sum(alive.pop(value, 0) for value in ends.get(place, ()))
    return peak


def _bytes(graph: Graph, shapes: Sequence[Shape | None], value: int) -> int:
    elem = ELEM_NUMBERS.get((graph.types[value] or "")[len("tensor(") : -1])
    shape = shapes[value]
    count = elements(shape)
    if shape is not None and None in shape:  # many unknown sizes are not all average
        count = min(count, DEFAULT_ELEMENTS * prod(size for size in shape if size))
    return 4 * count if elem is None else bytes_of(elem, (count,))


def free_bytes() -> int:
    """Return the bytes of memory that this process may still allocate, as far as the system says."""
    found = [_available()]
    for limited, used in _GROUPS:
        with suppress(OSError, ValueError):
            found.append(int(Path(limited).read_text()) - int(Path(used).read_text()))
    return max(0, min(found))


def _available() -> int:
    """Return the bytes that no process uses, or that the system can reclaim."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            lines = Path("/proc/meminfo").read_text().splitlines()
            (line,) = (line for line in lines if line.startswith("MemAvailable:"))
            return 1024 * int(line.split()[1])
    with suppress(AttributeError, OSError, ValueError):  # half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _UNKNOWN


NUMBERS: Final = 64
"""Numbers that are enough to estimate the error of an output. With n < 64 numbers, one estimate in twenty is below
about the cube root of n / 64 of the error (chi-square, n >= 3).
"""

_TRIES: Final = 64
"""Other sizes that are tried at most. A limit in seconds would find other sizes on another machine."""

_MOST_BYTES: Final = 2 << 30
"""Bytes that the values of a model may take while sizes are only tried."""


def suited(draw: Draw, reference: Session) -> Draw:
    """Return the draw, or that of the first sizes to try with which the model runs if it does not run with the usual
    ones.

    It runs only if there are such sizes, and keeps its outputs. The draw stays as it is if the model does not load, if
    inputs cannot be random, or if no sizes are found among the first 64 to try.

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
    except (ArgumentError, MemoryError):  # reading the sample reports this
        pass
    return draw


def other_sizes(draw: Draw, run: Callable[[Draw], object]) -> Draw:
    """Return a draw with the first sizes with which ``run`` does not fail. Without such sizes, return this draw and
    what was tried.

    Sizes with which the values take too much memory are skipped; sizes that contradict an op do not run.
    """
    tried = []
    for other in islice(draw.others(), _TRIES):
        graph = other.maker().graph
        shapes = other.maker().shapes()
        if peak_bytes(graph, shapes) > min(_MOST_BYTES, free_bytes() // 2):
            continue
        if is_consistent(graph, shapes):
            with suppress(OnnxAmpError, MemoryError):
                run(other)
                return other
        tried.append(other.sizes)
    return draw._replace(tried=tuple(tried))


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
    except (ArgumentError, RuntimeFailure):  # the comparison tells
        return LEAST
    shown = min(_numbers(outputs), default=NUMBERS)
    return min(MOST, max(LEAST, ceil(NUMBERS / shown)))


def _numbers(outputs: Mapping[str, Any]) -> Iterator[float]:
    """Yield how many numbers of each float output count; of those that are all zero, none is shown."""
    for output in outputs.values():
        for array in map(np.asarray, output if isinstance(output, list) else [output]):
            if array.dtype.kind != "f":
                continue
            squares = np.square(array[np.isfinite(array)].astype(np.float64))
            if squares.any():
                yield float(squares.sum() ** 2 / np.square(squares).sum())
