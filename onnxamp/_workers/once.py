"""Things of which a process has one, whichever thread asks first."""

from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Cache what a function returns for each set of arguments, and call it in one thread at a time.

    ``functools.cache`` calls the function again in a thread that asks while another one waits for the answer. That is
    wrong where the function starts a process, or redirects a stream of the process and puts it back.
    """
    lock, cached = RLock(), cache(function)

    @wraps(function)
    def asked(*args: P.args, **keywords: P.kwargs) -> T:
        with lock:
            return cached(*args, **keywords)

    return asked
