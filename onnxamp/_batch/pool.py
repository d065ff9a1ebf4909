"""Worker processes that may die: whatever kills one is the failure of the one item that it worked on.

Workers are spawned, never forked: threads of ONNX Runtime do not survive a fork.
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

_GRACE: Final = 10.0
"""Seconds that workers get to remove what they have half written."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker died; ``code`` is its exit code, negative for a signal."""

    code: int | None

    def __str__(self) -> str:
        if self.code is None or self.code >= 0:
            return f"The worker process ended with exit code {self.code}."
        name = next((item.name for item in signal.Signals if item == -self.code), f"signal {-self.code}")
        more = ": out of memory, perhaps; fewer --jobs need less" if name == "SIGKILL" else ""
        return f"The worker process was ended by {name}{more}."


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    position: int = -1


def run_jobs(
    function: Callable[[Any], Any], items: Sequence[Any], workers: int, threads: int, started: Callable[[int], None]
) -> Generator[tuple[int, Any]]:
    """Yield (position, result) of each item as it is done, and (position, Crash) where its worker died.

    Closing the iterator ends the workers: each one that is at work may first remove what it has half written.

    Args:
        function: importable, or a partial of such a function; may be handed to other processes with each item.
        items: worked on in their order.
        workers: processes at a time.
        threads: what ONNXAMP_THREADS says in each of them.
        started: called with the position of each item when a worker gets it.
    """
    waiting = deque(range(len(items)))
    idle: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _start(function, threads)
                with contextlib.suppress(OSError):  # it died while it had nothing to do: the next one gets the item
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
    theirs.close()  # or the death of the worker could not be seen at our end
    return _Worker(process, ours)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Workers inherit this: Ctrl-C reaches every process of a terminal, and the main one is to decide what ends."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(idle: Sequence[_Worker], busy: Sequence[_Worker]) -> None:
    """End all workers; those that do not end within the grace are killed."""
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
    """What a worker does: one item after the other, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for systems that cannot block it
    signal.signal(signal.SIGTERM, _leave)
    os.environ[THREADS] = str(threads)
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(function(pipe.recv()))


def _leave(*_: object) -> NoReturn:
    """Unwind the stack, so that temporary files are removed on the way."""
    raise SystemExit(128 + signal.SIGTERM)
