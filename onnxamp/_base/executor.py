"""Distributing work to processes that may die: one loop for processes of this machine and of a cluster.

A *work* is a function that returns another function: it runs once in each worker, which keeps the returned function for
all items. Thus everything that all items need (models, sessions, options) is sent once, and items are small. The work
is called with the worker's memory, a dict in which it may leave objects for later works. A worker has one item at a
time, and the next item is taken from its source when a worker is free. Memory therefore depends on the number of
workers, not on the number of items.

If a worker dies, only the item that it worked on is affected. Other workers retry the item, elsewhere if possible; if
all attempts fail, its result is a :class:`Crash`.
"""

import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

Memory: TypeAlias = dict[str, Any]
Work: TypeAlias = Callable[[Memory], Callable[[Any], Any]]
"""A function that returns the function to call with each item. It must be picklable, including what it refers to."""


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
