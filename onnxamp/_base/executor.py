"""Distributing work to processes that may die: one loop for processes of this machine and of a cluster.

A *work* is a function that returns another function: it runs once in each worker, which keeps the returned function for
all items. Thus everything that all items need (models, sessions, options) is sent once, and items are small. The work
is called with the worker's memory, a dict in which it may leave objects for later works. A worker has one item at a
time, and the next item is taken from its source when a worker is free. Memory therefore depends on the number of
workers, not on the number of items.

If a worker dies, only the item that it worked on is affected. Other workers retry the item, elsewhere if possible; if
all attempts fail, its result is a :class:`Crash`.
"""

import os
import pickle
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import gettempdir
from threading import RLock
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.extensions import extensions
from onnxamp._base.signals import (
    Watch,
    cleaned_up,
    end_now,
    ignore_terminal,
    interrupts_blocked,
    is_ended,
    survive_truncation,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Memory: TypeAlias = dict[str, Any]
Work: TypeAlias = Callable[[Memory], Callable[[Any], Any]]
"""A function that returns the function to call with each item. It must be picklable, including what it refers to."""
_GRACE: Final = 10.0
"""Seconds that workers get to remove half-written files."""

_GUARD: Final = (
    "Each worker imports the script that started it, so code that starts workers has to be under"
    ' `if __name__ == "__main__":` there.'
)


class Crash(NamedTuple):
    """The death of a worker.

    Attributes:
        code: its exit code, negative for a signal; None if unknown, as on other machines.
        where: the machine; "" for this one.
        attempts: how many workers the same item has killed.
    """

    code: int | None
    where: str = ""
    attempts: int = 1

    @property
    def was_ended(self) -> bool:
        """Whether it may have been killed from outside: by the system, which ran out of memory, or by the user."""
        # Windows has no SIGKILL.
        from_outside = (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM))
        return self.code is None or -self.code in from_outside

    def __str__(self) -> str:
        if self.where:
            died = f"The worker process on {self.where} died"
            if self.attempts > 1:
                died += f", the last of {self.attempts} that tried"
            return (
                f"{died}: it crashed or ran out of memory; Ray's logs there say more."
            )
        end = ending(self.code)
        more = ""
        if end.endswith("SIGKILL"):  # Linux ends processes so when memory runs out
            more = ": perhaps it ran out of memory; fewer --jobs need less"
        return f"The worker process {end}{more}."


class Failed(NamedTuple):
    """An error that the function raised; the worker continues."""

    error: Exception


class Workers(Protocol):
    """Worker processes. Use them with :func:`run`."""

    @property
    def count(self) -> int:
        """The largest number of workers."""

    @property
    def is_cluster(self) -> bool:
        """Whether they belong to a cluster, so that references to its objects are valid."""

    @property
    def attempts(self) -> int:
        """The number of workers that one item may kill."""

    def begin(self, work: Work) -> None:
        """Switch all workers to this work; the same object as before is not sent again.

        Raises:
            ArgumentError: the work cannot be sent to them.
        """

    def free(self) -> int:
        """Return the number of idle workers."""

    def give(self, position: int, item: Any) -> None:
        """Give an item to an idle worker."""

    def wait(self) -> list[tuple[int, Any]]:
        """Wait until something happens, and return (position, result) of finished items, including :class:`Crash`."""

    def stop(self) -> None:
        """End the busy workers, and forget their items."""

    def close(self) -> None:
        """End all workers."""


def run(
    workers: Workers,
    work: Work,
    items: Iterable[Any],
    *,
    started: Callable[[int], None] = lambda _: None,
    window: int | None = None,
) -> Generator[tuple[int, Any]]:
    """Yield (position, result) of each item when it is done, in any order.

    The result is the return value of the work's function, :class:`Failed` if it raised an error, or :class:`Crash`.
    Closing the generator ends the busy workers.

    Args:
        work: the work to do.
        items: the items, taken one by one when a worker is free.
        started: called with the position of each item when a worker gets it.
        window: how far an item may be ahead of the oldest unfinished one, which bounds how many results wait for it.

    Raises:
        ArgumentError: the work cannot be sent to the workers. RuntimeFailure: the cluster has no workers.
    """
    source = enumerate(items)
    waiting = deque[tuple[int, Any]]()
    busy = dict[int, Any]()
    died = Counter[int]()
    workers.begin(work)
    try:
        while True:
            if not waiting:
                waiting.extend(islice(source, 1))
            if not waiting and not busy:
                return
            if waiting and workers.free() and _is_near(waiting[0][0], busy, window):
                position, item = waiting.popleft()
                busy[position] = item
                workers.give(position, item)
                started(position)
                continue
            for position, result in workers.wait():
                item = busy.pop(position)
                died[position] += _may_pass(result)
                if 0 < died[position] < workers.attempts and _may_pass(result):
                    # It goes first, as results of later items wait for it.
                    waiting.appendleft((position, item))
                else:
                    if isinstance(result, Crash):
                        result = result._replace(attempts=died[position])  # noqa: PLW2901
                    yield position, result
    finally:
        workers.stop()


def _is_near(position: int, busy: Iterable[int], window: int | None) -> bool:
    return window is None or position - min(busy, default=position) < window


def _may_pass(result: Any) -> bool:
    """Return whether the item may succeed in another worker."""
    return isinstance(result, Crash) or (
        isinstance(result, Failed) and isinstance(result.error, MemoryError)
    )


AHEAD: Final = 16
"""The number of items per worker that may be ahead of the oldest unfinished one."""


def run_in_order(
    workers: Workers,
    work: Work,
    items: Iterable[Any],
    *,
    done: Callable[[int, Any], None] = lambda *_: None,
) -> Generator[Any]:
    """Yield the results in the order of the items; ``done`` is called with each result as soon as it is available.

    Raises:
        As :func:`run`, and the first error that the work's function raised, in the order of the items.
    """
    ready = dict[int, Any]()
    first = 0
    with closing(run(workers, work, items, window=AHEAD * workers.count)) as results:
        for position, result in results:
            done(position, result)
            ready[position] = result
            while first in ready:
                now = ready.pop(first)
                if isinstance(now, Failed):
                    raise now.error
                first += 1
                yield now


class Station:
    """The state of a worker process: a memory, and the function of the current work."""

    _function: Callable[[Any], Any]

    def __init__(self) -> None:
        self.memory: Memory = {}

    def turn_to(self, pickled: bytes) -> None:
        """Switch to another work; if this fails, each of its items fails with the error."""
        function = _tried(lambda: pickle.loads(pickled)(self.memory))  # noqa: S301 - the main process pickled it
        if isinstance(function, Failed):
            self._function = lambda _: function
        else:
            self._function = function

    def do(self, item: Any) -> Any:
        """Return the result of an item."""
        return _tried(lambda: self._function(item))


def _tried(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - the main process decides what it means
        return Failed(error)


def ending(code: int | None) -> str:
    """Return how a process ended, in a predicate; ``code`` is its exit code, negative for a signal."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    names = (item.name for item in signal.Signals if item == -code)
    return f"was ended by {next(names, f'signal {-code}')}"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder that is removed with its contents at the end of the block."""
    folder = temporary_path()
    with cleaned_up(partial(shutil.rmtree, folder, ignore_errors=True)):
        folder.mkdir(mode=0o700)
        yield folder


def temporary_path() -> Path:
    """Return an unused path for temporary files, so that its removal can be registered before it is created."""
    return Path(gettempdir()) / f"onnxamp-{os.urandom(8).hex()}"


THREADS: Final = "ONNXAMP_THREADS"
"""Environment variable: the number of threads that one operator of ONNX Runtime may use in this process."""


def thread_limit() -> int:
    """Return the value of ONNXAMP_THREADS; 0 if it is not set, which leaves the choice to ONNX Runtime.

    Raises:
        ArgumentError: the value is not a number.
    """
    text = os.environ.get(THREADS, "0")
    if not text.isdecimal():
        raise ArgumentError(
            f"The environment variable {THREADS} must be a number of threads, not {text!r}."
        )
    return int(text)


def core_count() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


P = ParamSpec("P")
T = TypeVar("T")


class Once(Generic[P, T]):
    """A function whose results are cached, as by ``functools.cache``, and that runs in one thread at a time.

    ``functools.cache`` calls a function again if a second thread asks while the first one waits for the result. That is
    wrong if the function starts a process, or redirects a stream of the process and restores it.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self.__doc__: str | None = function.__doc__
        self._turn: Final = RLock()
        self._cached: Final[Any] = cache(function)

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> T:
        """Return the result of the function for these arguments."""
        with self._turn:
            result: T = self._cached(*args, **keywords)
        return result

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._turn:
            self._cached.cache_clear()


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
            cluster = extensions("workers")["cluster"].load("--cluster needs")
            workers = cluster.connect(self.cluster, self.jobs, most, gpus, once=once)
        else:
            cores = core_count()
            wanted = self.jobs or cores
            count = max(1, min(wanted, most or wanted))
            # Workers share the cores: more threads in all than cores would slow down each other.
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
        is_wanted = self.jobs is not None or self.cluster is not None
        if is_wanted and (items is None or items > 1):
            with self.workers(items, gpus) as workers:
                yield workers
        else:
            yield None
