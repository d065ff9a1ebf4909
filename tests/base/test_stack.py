"""The stack of frames: calls under a function with room for its callees map no memory, however deep they are."""

import sys

import pytest

from onnxamp._base.stack import with_room_for_callees

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.implementation.name != "cpython",
    reason="only Linux counts the page faults of a thread, and only CPython keeps frames in chunks",
)

CALLS = 100
DEPTH = 400


def wide(*, a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0, l=0, m=0, n=0, o=0, p=0):  # noqa: E741
    """A function whose frame is larger than that of :func:`deeper`, so that some depth has room for one alone."""


def faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def deeper(depth: int) -> int:
    """The most page faults of as many calls, at the depths that are left."""
    before = faults()
    for _ in range(CALLS):
        wide()
    return max(faults() - before, deeper(depth - 1) if depth else 0)


def test_calls_map_no_memory() -> None:
    assert deeper(DEPTH) >= CALLS
    assert with_room_for_callees(lambda: deeper(DEPTH))() < CALLS // 4
