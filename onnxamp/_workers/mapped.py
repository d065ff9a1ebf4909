"""Memory-mapped files that somebody truncates while they are read.

Reading a page behind the end of a file is SIGBUS, which ends a process on the spot. Here such pages become zeros, and
reading goes on: whoever reads a model looks at its files again before anything is written or reported, and raises that
they have changed (:mod:`onnxamp._model.sources`). So a file that is truncated is an error like any other change, in all
processes and with the usual cleaning up.

Files are mapped since reading a weight into memory would take as much of it, and ONNX Runtime maps data files by
itself. A handler of Python's :mod:`signal` does not help: it runs when native code is back, and the instruction that
reads is repeated for ever. So the handler is a callback of :mod:`ctypes`, which runs in the thread that reads, with the
GIL or without. That is safe because the signal comes from this instruction, not from aside: the thread is in nobody's
allocator, and all that read large data let other threads have the GIL.
"""

import mmap
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import ctypes

_MAPS: Final = Path("/proc/self/maps")
_FIXED: Final = 0x10
"""MAP_FIXED of Linux: what is mapped there goes."""
_TRIES: Final = 100
"""Times that reading is tried again although all files have all their pages: one that is copied over shrinks and grows
again at once.
"""
_KEPT: Final[list[Any]] = []
"""The handler, which lives as long as the process."""


def survive_truncation() -> None:
    """Let files be truncated that this process has mapped; on Linux, as elsewhere nothing tells what is mapped."""
    if sys.platform != "linux" or _KEPT or not _MAPS.exists():
        return
    import ctypes  # noqa: PLC0415 - where it is needed

    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.signal.restype = ctypes.c_void_p
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_Faults(library).handle)
    _KEPT.append(handler)
    library.signal(signal.SIGBUS, handler)


class _Faults:
    """What becomes of pages that cannot be read."""

    def __init__(self, library: "ctypes.CDLL") -> None:
        self._library = library
        self._vain = 0

    def handle(self, number: int) -> None:
        """Mend what can be. What cannot, a disk that fails say, ends the process as it would without a handler."""
        self._vain += 1
        with suppress(OSError):
            for start, size in _gone():
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
                self._library.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
                self._vain = 0
        if self._vain > _TRIES:
            self._library.signal(number, None)


def _gone() -> Iterator[tuple[int, int]]:
    """Find mapped pages of files that no longer have them, as addresses and bytes.

    Raises:
        OSError: the system does not tell. Complexity: linear in what is mapped.
    """
    for line in _MAPS.read_bytes().splitlines():
        addresses, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == b"0" or not name:
            continue
        with suppress(OSError):  # it has no name any more
            status = Path(os.fsdecode(name[0].replace(rb"\012", b"\n"))).stat()
            start, end = (int(text, 16) for text in addresses.split(b"-"))
            there = max(0, -(-status.st_size // mmap.PAGESIZE) * mmap.PAGESIZE - int(offset, 16))
            if stat.S_ISREG(status.st_mode) and status.st_ino == int(inode) and there < end - start:
                yield start + there, end - start - there
