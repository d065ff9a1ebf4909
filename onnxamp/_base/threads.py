"""Threads of this process: how many an operator may use, and functions that run in one at a time, or beside others."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import cache
from threading import RLock, Thread
from typing import Any, Final, Generic, ParamSpec, TypeVar

from onnxamp._base.errors import ArgumentError

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


def beside(function: Callable[[], T]) -> Callable[[], T]:
    """Start a function in another thread, in the context of this one, and return what waits for its result.

    Nothing else waits for it: the process may end meanwhile, as when it is interrupted.
    """
    outcome = Future[T]()
    context = copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome.result
