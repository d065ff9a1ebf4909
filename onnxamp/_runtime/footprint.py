"""How much memory a model needs to run, and how much there is."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from onnxamp._dtypes import ELEM_NUMBERS
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.view import ABSENT
from onnxamp._model.protos import bytes_of

_UNKNOWN: Final = 4 << 30
"""Bytes that are taken to be free where the system does not tell."""
_GROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files of Linux with the memory that the processes of a container may use together, and do use."""


def peak_bytes(graph: Graph, shapes: Sequence[Shape | None]) -> int:
    """Bytes that values of the main graph take where most of them live: each from its node to its last reader.

    Args:
        graph: the model.
        shapes: by value; sizes that are unknown count as those of average ones.

    Complexity: linear in nodes and values.
    """
    main = graph.scopes[0]
    last = dict.fromkeys(main.outputs, len(graph.order))
    for place, index in enumerate(graph.order):
        last |= dict.fromkeys(
            (value for value in graph.nodes[index].inputs if value != ABSENT), place
        )
    ends: dict[int, list[int]] = {}
    for value, place in last.items():
        ends.setdefault(place, []).append(value)
    alive = {value: _bytes(graph, shapes, value) for value in main.inputs}
    taken = peak = sum(alive.values())
    for place, index in enumerate(graph.order):
        for value in graph.nodes[index].outputs:
            if value != ABSENT and value not in alive:
                alive[value] = _bytes(graph, shapes, value)
                taken += alive[value]
        peak = max(peak, taken)
        taken -= sum(alive.pop(value, 0) for value in ends.get(place, ()))
    return peak


def _bytes(graph: Graph, shapes: Sequence[Shape | None], value: int) -> int:
    elem = ELEM_NUMBERS.get((graph.types[value] or "")[len("tensor(") : -1])
    count = elements(shapes[value])
    return 4 * count if elem is None else bytes_of(elem, (count,))


def free_bytes() -> int:
    """Bytes of memory that this process may still take, as far as the system tells."""
    found = [_available()]
    with suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415 - Windows has none

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(limit - pages * os.sysconf("SC_PAGE_SIZE"))
    for limited, used in _GROUPS:
        with suppress(OSError, ValueError):
            found.append(int(Path(limited).read_text()) - int(Path(used).read_text()))
    return max(0, min(found))


def _available() -> int:
    """Bytes that no process uses, or that the system gives back."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/meminfo").read_text().splitlines()
            return 1024 * int(
                next(line for line in lines if line.startswith("MemAvailable:")).split()[1]
            )
    with suppress(AttributeError, OSError, ValueError):  # half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return _UNKNOWN
