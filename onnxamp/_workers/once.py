"""Things of which a process has one, whichever thread asks first."""

from collections.abc import Callable
from threading import RLock
from typing import Any, Final, Generic, ParamSpec, TypeVar

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
