"""Worker processes of this machine. They are spawned when there is work, and kept for more of it."""

import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.executor import Crash, Station, Work
from onnxamp._base.signals import (
    Watch,
    end_now,
    ignore_terminal,
    interrupts_blocked,
    is_ended,
    survive_truncation,
)
from onnxamp._base.threads import THREADS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess


_GRACE: Final = 10.0
"""Seconds that workers get to remove half-written files."""
_GUARD: Final = (
    "Each worker imports the script that started it, so code that starts workers has to be under"
    ' `if __name__ == "__main__":` there.'
)


@dataclass(slots=True)
class _Worker:
    """A worker process, and the item that it works on."""

    process: "BaseProcess"
    pipe: "Connection"
    position: int = -1
    work: bytes = b""
    """The work that it has started."""
    is_ready: bool = False


@dataclass(slots=True)
class Processes:
    """Processes that are started when needed, and kept for further work.

    Attributes:
        count: the number of processes.
        threads: the value of ONNXAMP_THREADS in each process.
        once: whether each process ends after one item.
    """

    count: int
    threads: int
    once: bool = False
    is_cluster: bool = False
    attempts: int = 1
    """One, because a crash or a lack of memory would recur in another process of this machine."""
    _work: bytes = b""
    _begun: Work | None = None
    _idle: list[_Worker] = field(default_factory=list)
    _busy: "dict[Connection, _Worker]" = field(default_factory=dict)

    def begin(self, work: Work) -> None:
        """As :meth:`Workers.begin`."""
        if work is self._begun:
            return
        try:
            self._work = pickle.dumps(work)
            self._begun = work
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ArgumentError(
                f"Worker processes cannot be sent what they need ({error}): functions must be importable by name."
            ) from None

    def free(self) -> int:
        """As :meth:`Workers.free`."""
        return self.count - len(self._busy)

    def give(self, position: int, item: Any) -> None:
        """As :meth:`Workers.give`."""
        while True:
            worker = self._idle.pop() if self._idle else _start(self.threads)
            work = self._work if worker.work is not self._work else None
            with suppress(OSError):  # it died while idle: the next one gets the item
                worker.pipe.send((work, item))
                worker.position = position
                worker.work = self._work
                self._busy[worker.pipe] = worker
                return

    def wait(self) -> list[tuple[int, Any]]:
        """As :meth:`Workers.wait`.

        Raises:
            RuntimeFailure: a worker ends by itself before it is ready, as all others would.
        """
        from multiprocessing.connection import Connection, wait  # noqa: PLC0415 - where there are workers

        done = []
        ready = [
            pipe for pipe in wait(list(self._busy)) if isinstance(pipe, Connection)
        ]
        for worker in [self._busy[pipe] for pipe in ready]:
            try:
                result = worker.pipe.recv()
            except (EOFError, OSError):  # its end of the pipe is closed: it died
                worker.process.join()
                code = worker.process.exitcode
                if not worker.is_ready and code is not None and code > 0:
                    raise RuntimeFailure(
                        f"A worker process ended with exit code {code} as it started. {_GUARD}"
                    ) from None
                result = Crash(code)
            else:
                if not worker.is_ready:
                    worker.is_ready = True
                    continue
                if self.once:
                    _end([worker], terminated=False)
                else:
                    self._idle.append(worker)
            del self._busy[worker.pipe]
            done.append((worker.position, result))
        return done

    def stop(self) -> None:
        """As :meth:`Workers.stop`; busy workers get time to remove half-written files."""
        busy = list(self._busy.values())
        self._busy.clear()
        _end(busy, terminated=True)

    def close(self) -> None:
        """End all workers."""
        self.stop()
        idle = self._idle
        self._idle = []
        _end(idle, terminated=False)


def _start(threads: int) -> _Worker:
    import multiprocessing  # noqa: PLC0415 - where there are workers

    # A forked process would inherit the locks of native libraries, but not the threads that hold them.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
    with interrupts_blocked():
        try:
            process.start()
        except RuntimeError:  # this is a worker that is importing the script
            raise ArgumentError(
                f"A worker process cannot start workers. {_GUARD}"
            ) from None
    theirs.close()  # otherwise, we would not notice the death of the worker
    return _Worker(process, ours)


def _end(workers: Sequence[_Worker], *, terminated: bool) -> None:
    """End workers; kill those that are still running after the grace period."""
    for worker in workers:
        worker.pipe.close()
        if terminated:
            worker.process.terminate()
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()


def _serve(pipe: "Connection", threads: int) -> None:
    """Work on one item after another until the main process closes the pipe."""
    ignore_terminal()
    Watch([signal.SIGTERM])
    survive_truncation()
    os.environ[THREADS] = str(threads)
    station = Station()
    try:
        pipe.send("ready")
        while True:
            work, item = pipe.recv()
            if work is not None:
                station.turn_to(work)
            pipe.send(station.do(item))
    except (EOFError, OSError):  # the main process closed the pipe, or died
        pass
    except BaseException as error:
        if not is_ended(error):
            raise
        end_now(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # exit handlers run to their end
