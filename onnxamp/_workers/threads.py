"""How many threads to use: processes that share a machine must not each take every core."""

import os
from collections.abc import Callable
from threading import RLock
from typing import Any, Final, Generic, ParamSpec, TypeVar

from onnxamp._errors import ArgumentError

THREADS: Final = "ONNXAMP_THREADS"
"""Environment variable: the number of threads that one operator of ONNX Runtime may use in this process."""


def thread_limit() -> int:
    """The value of ONNXAMP_THREADS; 0 if it is not set, which leaves the choice to ONNX Runtime.

    Raises:
        ArgumentError: it is not a number.
    """
    text = os.environ.get(THREADS, "0")
    if not text.isdecimal():
        raise ArgumentError(
            f"The environment variable {THREADS} must be a number of threads, not {text!r}."
        )
    return int(text)


def core_count() -> int:
    """The number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


P = ParamSpec("P")
T = TypeVar("T")


class Once(Generic[P, T]):
    """A function whose results are cached, as by ``functools.cache``, and that runs in one thread at a time.

    ``functools.cache`` calls a function again in a thread that asks while another one waits for the answer. That is
    wrong where the function starts a process, or redirects a stream of the process and puts it back.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self.__doc__: str | None = function.__doc__
        self._turn: Final = RLock()
        self._function: Final = function
        self._results: Final = dict[Any, T]()

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> T:
        """What the function returned for these arguments."""
        key = args, tuple(sorted(keywords.items()))
        with self._turn:
            if key not in self._results:
                self._results[key] = self._function(*args, **keywords)
            return self._results[key]

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._turn:
            self._results.clear()
