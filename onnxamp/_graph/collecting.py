"""Pauses of Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the collection of reference cycles. Pauses nest; also usable as a decorator.

    An analysis creates millions of objects and hardly any cycles, but each collection visits all of them: a third of
    the time of a large model. Reference counting still frees objects; only cycles wait.

    The collector serves all threads. Only a pause that finds it enabled disables and re-enables it, so that it never
    stays disabled, in whatever order threads begin and end their pauses. The pause that disabled it may end before
    those of other threads, which then run more slowly.
    """
    pauses = gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()
