"""The place of work: the single implementation of ``--jobs`` and ``--cluster``."""

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._optional import optional
from onnxamp._workers.executor import THREADS, Crash, Station, Work, Workers, core_count
from onnxamp._workers.signals import HANGUP, Ended, Watch, end_now, survive_truncation

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_GRACE: Final = 10.0
"""Seconds that workers get to remove half-written files."""

_READY: Final = "ready"
"""The first message of a worker."""

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
            self._work, self._begun = pickle.dumps(work), work
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
            with contextlib.suppress(
                OSError
            ):  # it died while idle, so the next one gets the item
                worker.pipe.send(
                    (self._work if worker.work is not self._work else None, item)
                )
                worker.position, worker.work = position, self._work
                self._busy[worker.pipe] = worker
                return

    def wait(self) -> list[tuple[int, Any]]:
        """As :meth:`Workers.wait`.

        Raises:
            RuntimeFailure: a worker ends by itself before it is ready, as all others would.
        """
        from multiprocessing.connection import Connection, wait  # noqa: PLC0415 - where there are workers

        done = []
        for worker in [
            self._busy[pipe]
            for pipe in wait(list(self._busy))
            if isinstance(pipe, Connection)
        ]:
            try:
                result = worker.pipe.recv()
            except (EOFError, OSError):
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
        idle, self._idle = self._idle, []
        _end(idle, terminated=False)


def _start(threads: int) -> _Worker:
    import multiprocessing  # noqa: PLC0415 - where there are workers

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
    with _interrupts_blocked():
        try:
            process.start()
        except RuntimeError:  # this is a worker that is importing the script
            raise ArgumentError(
                f"A worker process cannot start workers. {_GUARD}"
            ) from None
    theirs.close()  # otherwise, we would not notice the death of the worker
    return _Worker(process, ours)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block interrupts; workers inherit this. Ctrl-C reaches all processes of a terminal, but the main one decides."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    for number in {signal.SIGINT, HANGUP} - {
        signal.SIGTERM
    }:  # the main process decides what ends
        signal.signal(number, signal.SIG_IGN)
    Watch([signal.SIGTERM])
    survive_truncation()
    os.environ[THREADS] = str(threads)
    station = Station()
    try:
        pipe.send(_READY)
        while True:
            work, item = pipe.recv()
            if work is not None:
                station.turn_to(work)
            pipe.send(station.do(item))
    except (EOFError, OSError):  # the main process closed the pipe, or died
        pass
    except Ended:
        end_now(signal.SIGTERM)
    finally:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # exit handlers must not be interrupted


@dataclass(frozen=True, slots=True)
class Place:
    """The worker processes to use.

    Attributes:
        jobs: the number of workers; None for one per processor.
        cluster: the Ray cluster that they belong to: "local" for one that is started on this machine, or an address.
            None for processes of this machine, without Ray.

    Raises:
        ArgumentError: a value is invalid.
    """

    jobs: int | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ArgumentError(f"jobs must be at least 1, but is {self.jobs}.")
        if self.cluster is not None and not self.cluster:
            raise ArgumentError(
                "The cluster has no address: write 'local', or that of a Ray cluster."
            )

    @contextmanager
    def workers(
        self, most: int | None = None, gpus: int = 0, *, once: bool = False
    ) -> Iterator[Workers]:
        """Provide the workers within a ``with`` block.

        Args:
            most: the maximum number of workers that can be used.
            gpus: the GPUs of a cluster that each worker uses.
            once: whether each worker ends after one item.

        Raises:
            MissingPackageError: the package for clusters is not installed. RuntimeFailure: there is no cluster.
        """
        workers: Workers
        if self.cluster is not None:
            connect = optional("cluster", "--cluster needs").connect
            workers = connect(self.cluster, self.jobs, most, gpus, once=once)
        else:
            cores = core_count()
            wanted = self.jobs or cores
            count = max(1, min(wanted, most or wanted))
            workers = Processes(count, max(1, cores // count), once)
        with closing(workers):
            yield workers

    @contextmanager
    def sharing(
        self, items: int | None = None, gpus: int = 0
    ) -> Iterator[Workers | None]:
        """Provide the workers for this many items, if known; None if this process does them: one item, or by default.

        Raises:
            As :meth:`workers`.
        """
        if (self.jobs is None and self.cluster is None) or (
            items is not None and items < 2
        ):
            yield None
            return
        with self.workers(items, gpus) as workers:
            yield workers
