"""How much memory the values of a model take, and how much there is."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Final

from onnxamp._facts.dtypes import ELEM_NUMBERS
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import DEFAULT_ELEMENTS, Shape, elements
from onnxamp._model.protos import bytes_of

LOADING: Final = 4
"""Bytes that a session may hold while it starts for each byte of the weights, which loading copies."""

_UNKNOWN: Final = 4 << 30
"""Bytes that are assumed to be free if the system does not say."""
# The first pair is that of version 2 of control groups, the second that of version 1.
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
    in_use = peak = sum(alive.values())
    for place, node in enumerate(graph.order):
        for value in node.writes:
            if value not in alive:
                alive[value] = _bytes(graph, shapes, value)
                in_use += alive[value]
        peak = max(peak, in_use)
        in_use -= sum(alive.pop(value, 0) for value in ends.get(place, ()))
    return peak


def _bytes(graph: Graph, shapes: Sequence[Shape | None], value: int) -> int:
    elem = ELEM_NUMBERS.get((graph.types[value] or "")[len("tensor(") : -1])
    shape = shapes[value]
    count = elements(shape)
    if shape is not None and None in shape:  # many unknown sizes are not all average
        count = min(count, DEFAULT_ELEMENTS * prod(size for size in shape if size))
    return 4 * count if elem is None else bytes_of(elem, (count,))


def free_bytes() -> int:
    """Return the bytes of memory that this process may still allocate, according to the system."""
    limits = [_available()]
    for limited, used in _GROUPS:
        # Files of the other version are missing, and a group without a limit says "max".
        with suppress(OSError, ValueError):
            limits.append(int(Path(limited).read_text()) - int(Path(used).read_text()))
    return max(0, min(limits))


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
