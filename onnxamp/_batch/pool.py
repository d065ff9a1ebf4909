"""Worker processes that may die: if one is killed, only the item it worked on fails.

Workers are spawned, never forked, since threads of ONNX Runtime do not survive a fork.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, NoReturn

from onnxamp._model.threads import THREADS
from onnxamp._runtime.loading import ending

_GRACE: Final = 10.0
"""Seconds that workers get to remove half-written files."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker died; ``code`` is its exit code, negative for a signal."""

    code: int | None

    @property
    def was_ended(self) -> bool:
        """Whether others ended it: the system, which ran out of memory, or the user."""
        return self.code is None or -self.code in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM))

    def __str__(self) -> str:
        end = ending(self.code)
        more = ": perhaps it ran out of memory; fewer --jobs need less" if end.endswith("SIGKILL") else ""
        return f"The worker process {end}{more}."


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    position: int = -1


def run_jobs(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, threads: int, started: Callable[[int], None]
) -> Generator[tuple[int, Any]]:
    """Yield (position, result) when an item is done, and (position, Crash) if its worker died.

    Closing the generator ends the workers; those that are busy get time to remove half-written files.

    Args:
        function: what to call with each item: an importable function, or a partial of one.
        items: worked on in this order.
        workers: number of processes.
        threads: the value of ONNXAMP_THREADS in each of them.
        started: called with the position of each item when a worker gets it.
    """
    waiting = deque(range(len(items)))
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _start(function, threads)
                with contextlib.suppress(OSError):  # it died while idle: the next one gets the item
                    worker.pipe.send(items[waiting[0]])
                    worker.position = waiting.popleft()
                    busy[worker.pipe] = worker
                    started(worker.position)
            for worker in [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]:
                del busy[worker.pipe]
                try:
                    result = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    result = Crash(worker.process.exitcode)
                else:
                    idle.append(worker)
                yield worker.position, result
    finally:
        _end(idle, list(busy.values()))


def _start(function: Callable[[Any], Any], threads: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function, threads), daemon=True)
    with _interrupts_blocked():
        process.start()
    theirs.close()  # else we would not notice the death of the worker
    return _Worker(process, ours)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Workers inherit this. Ctrl-C reaches every process of a terminal, but the main process decides what ends."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(idle: Sequence[_Worker], busy: Sequence[_Worker]) -> None:
    """End all workers; those that are still there after the grace period are killed."""
    for worker in (*idle, *busy):
        worker.pipe.close()
    for worker in busy:
        worker.process.terminate()
    deadline = time.monotonic() + _GRACE
    for worker in (*idle, *busy):
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()


def _serve(pipe: Connection, function: Callable[[Any], Any], threads: int) -> None:
    """What a worker does: work on one item after the other until the main process closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems that cannot block it
    signal.signal(signal.SIGTERM, _leave)
    os.environ[THREADS] = str(threads)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(function(pipe.recv()))


def _leave(*_: object) -> NoReturn:
    """Unwind the stack, which removes temporary files."""
    raise SystemExit(128 + signal.SIGTERM)
