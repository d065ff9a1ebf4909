"""Signals that can end a process at any time, after its clean-up.

Python calls a handler only when the main thread returns from native code, which may take minutes. A thread therefore
watches: if the handler does not start in time, or the stack does not unwind in time, it ends the process. The ends of
``with`` blocks then do not run, but actions registered with :func:`cleaned_up` do.

This module imports little, so that it loads early.
"""

import atexit
import mmap
import os
import signal
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import ctypes

_MAPS: Final = Path("/proc/self/maps")
_FIXED: Final = 0x10
"""Linux's MAP_FIXED, which replaces existing mappings."""
_TRIES: Final = 100
"""The number of retries although all files have all their pages, because a file that is being overwritten shrinks and
immediately grows again.
"""
_KEPT: Final[list[Any]] = []
"""The handler, which must live as long as the process."""


def survive_truncation() -> None:
    """Survive the truncation of mapped files; only on Linux, because other systems do not list mappings."""
    if sys.platform != "linux" or _KEPT or not _MAPS.exists():
        return
    import ctypes  # noqa: PLC0415 - only Linux needs it

    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    library.signal.restype = ctypes.c_void_p
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_Faults(library).handle)
    _KEPT.append(handler)
    library.signal(signal.SIGBUS, handler)


class _Faults:
    """The handler of pages that cannot be read."""

    def __init__(self, library: "ctypes.CDLL") -> None:
        self._library = library
        self._vain = 0

    def handle(self, number: int) -> None:
        """Replace missing pages. Other faults, such as a failing disk, end the process as they would without a
        handler.
        """
        self._vain += 1
        with suppress(OSError):
            for start, size in _gone():
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
                self._library.mmap(
                    start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
                )
                self._vain = 0
        if self._vain > _TRIES:
            self._library.signal(number, None)


def _gone() -> Iterator[tuple[int, int]]:
    """Yield mapped pages that their files no longer have, as addresses and bytes.

    Raises:
        OSError: the system does not list mappings. Complexity: linear in the number of mappings.
    """
    for line in _MAPS.read_bytes().splitlines():
        addresses, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == b"0" or not name:
            continue
        with suppress(OSError):  # the file no longer has a name
            # Linux lists a line break in a name as \012, and addresses and offsets as hexadecimal numbers.
            status = Path(os.fsdecode(name[0].replace(rb"\012", b"\n"))).stat()
            start, end = (int(text, 16) for text in addresses.split(b"-"))
            # A page is there if the file has any byte of it; the rest of the last page reads as zeros.
            pages = -(-status.st_size // mmap.PAGESIZE)
            there = max(0, pages * mmap.PAGESIZE - int(offset, 16))
            is_same = stat.S_ISREG(status.st_mode) and status.st_ino == int(inode)
            if is_same and there < end - start:
                yield start + there, end - start - there


INTERRUPTED: Final = 128
"""The number that shells add to the signal that ended a process."""

HANGUP: Final = getattr(signal, "SIGHUP", signal.SIGTERM)
"""The signal that a closing terminal sends."""
ENDING: Final = (signal.SIGINT, signal.SIGTERM, HANGUP)
"""Signals that end a command."""

_NATIVE: Final = 3.0
"""Seconds within which native code must return to the interpreter."""
_UNWINDING: Final = 20.0
"""Seconds within which the stack must unwind, longer than workers get to end."""
_CHILDREN: Final = 5.0
"""Seconds that worker processes get if nothing unwinds."""
_SOON: Final = 0.05
"""Seconds after which unwinding is tried again."""
_CLEANING: Final = 10.0
"""Seconds that the last actions get, including child processes."""
_POPEN: Final = "multiprocessing.popen_"
"""How the names of the modules that launch processes begin."""
_AGAIN: Final = 1.0
"""Seconds after which a repeated signal means "at once". A signal that a terminal and a parent both send counts
once.
"""

_ACTS: Final[dict[object, Callable[[], object]]] = {}
"""Actions to run if another thread ends this process, as ``atexit`` runs them at a normal exit."""


@contextmanager
def cleaned_up(act: Callable[[], object]) -> Iterator[None]:
    """Run an action at the end of the block, however it ends, even if another thread ends the process within it.

    Args:
        act: the action. If a signal interrupts it, it runs once more before the process ends.
    """
    key = object()
    _ACTS[key] = act
    try:
        yield
    finally:
        try:
            act()
        except Exception:
            del _ACTS[key]
            raise
        del _ACTS[key]


def at_end(act: Callable[[], object]) -> None:
    """Run an action when the process ends, even if another thread ends it."""
    atexit.register(act)
    _ACTS[object()] = act


def when_gone(owner: object, act: Callable[[], object]) -> None:
    """Run an action when an object is gone or the process ends, even if another thread ends it."""
    key = object()
    _ACTS[key] = act
    weakref.finalize(owner, _done, key, act)


def _done(key: object, act: Callable[[], object]) -> None:
    _ACTS.pop(key, None)
    act()


class Ended(SystemExit):
    """The end of this process by a signal; raised in the main thread to unwind the stack."""


def is_ended(error: BaseException | None) -> bool:
    """Return whether a signal led to an error: Python and libraries may turn :class:`Ended` into other errors."""
    while error is not None and not isinstance(error, Ended):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block interrupts; workers inherit this. Ctrl-C reaches all processes of a terminal, but the main one decides."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal() -> None:
    """Ignore the signals that a terminal sends to all of its processes: the main process decides what ends."""
    for number in {signal.SIGINT, HANGUP} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)


class Watch:
    """A watch that ends this process on signals. Signals that are initially ignored stay ignored, as ``nohup``
    requires.

    Attributes:
        number: the first signal received; 0 if there was none.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        """Start watching, in the main thread."""
        self.number = 0
        self._is_closed = False
        self._handled = threading.Event()
        # Python writes the number of each signal into a pipe, even while native code keeps handlers from running.
        self._ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        if sys.platform != "win32":  # on Windows, only sockets can be woken
            signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        self._numbers = [
            number
            for number in {*numbers}
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        for number in self._numbers:
            signal.signal(number, self._handle)
        sys.unraisablehook = self._unraisable
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """End at once on further signals, because there is nothing left to unwind."""
        self._is_closed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Unwind the stack only once, because the clean-up must not be interrupted."""
        if self._is_closed:
            os._exit(INTERRUPTED + (self.number or number))
        if self.number and self._handled.is_set():
            return
        # The first signal decides the exit code, however many follow.
        self.number = self.number or number
        if _cannot_raise(frame):
            _raise_soon(number)
            return
        self._handled.set()
        raise Ended(INTERRUPTED + number)

    def _unraisable(self, what: Any) -> None:
        """Raise the signal again if its error was raised in a callback, because Python only prints errors there."""
        if isinstance(what.exc_value, Ended):
            self._handled.clear()
            _raise_soon(self.number)
        else:
            sys.__unraisablehook__(what)

    def _watch(self) -> None:
        """Wait for signals in a separate thread."""
        number = self._next()
        begun = monotonic()
        repeated = partial(self._await_next, number, begun)
        threading.Thread(target=repeated, daemon=True).start()
        # If the stack unwinds in time, the main thread ends the process, and this thread with it.
        if self._handled.wait(_NATIVE):
            threading.Event().wait(_UNWINDING)
        end_now(number)

    def _await_next(self, first: int, begun: float) -> None:
        """End at once when a signal is repeated."""
        while True:
            self._next()
            if monotonic() - begun > _AGAIN:
                end_now(first)

    def _next(self) -> int:
        while True:
            for number in os.read(self._ours, 1):
                if number in self._numbers:
                    return number


def _raise_soon(number: int) -> None:
    """Send a signal to the main thread again, which wakes it if the system can address threads."""
    main = threading.main_thread().ident
    send: Callable[[int], object] = signal.raise_signal
    if main and sys.platform != "win32":
        send = partial(signal.pthread_kill, main)
    threading.Timer(_SOON, send, (number,)).start()


def _cannot_raise(frame: FrameType | None) -> bool:
    """Return whether no error can be raised in a frame.

    Native code that is being initialized may abort the process, Python discards errors that are raised while it handles
    an unraisable error, and a process that multiprocessing is launching prints an error if it gets no instructions.
    """
    while frame is not None:
        is_loading = isinstance(frame.f_locals.get("self"), ExtensionFileLoader)
        module = str(frame.f_globals.get("__name__"))
        is_launching = frame.f_code.co_name == "_launch" and module.startswith(_POPEN)
        if is_loading or is_launching or frame.f_code is Watch._unraisable.__code__:
            return True
        frame = frame.f_back
    return False


def end_now(number: int) -> None:
    """End this process as a signal does, from any thread, after its worker processes and the last actions."""
    # The process ends even if an action hangs.
    last = partial(_exit_after, _CLEANING, INTERRUPTED + number)
    threading.Thread(target=last, daemon=True).start()
    with suppress(Exception):
        _end_children()
    # The last action to register comes first, as ends of blocks do.
    while _ACTS:
        with suppress(Exception):
            _ACTS.popitem()[1]()
    os._exit(INTERRUPTED + number)


def _exit_after(seconds: float, code: int) -> None:
    threading.Event().wait(seconds)
    os._exit(code)


def _end_children() -> None:
    """End the processes of multiprocessing, if it is in use. They clean up after themselves."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = monotonic() + _CHILDREN
    for child in children:
        child.join(max(0.0, deadline - monotonic()))
        if child.exitcode is None:
            child.kill()


@contextmanager
def obeyed_signals() -> Iterator[None]:
    """Run a program. Interrupts, termination requests and hang-ups end it within seconds.

    A signal does not tear down the interpreter: the code and threads of native libraries may be
    in any state, and C++ may abort in its clean-up. All clean-up happens while unwinding, or in registered actions. The
    exit code is therefore always 128 plus the number of the signal.

    Raises:
        Any error of the program, if no signal came.
    """
    watch = Watch(ENDING)
    survive_truncation()
    try:
        yield
    except BaseException:
        if not watch.number:
            raise
    finally:
        if not watch.number:
            watch.close()
    if watch.number:
        for stream, text in ((sys.stdout, ""), (sys.stderr, "Aborted!\n")):
            with suppress(OSError, ValueError):  # the terminal may be gone
                stream.write(text)
                stream.flush()
        end_now(watch.number)
