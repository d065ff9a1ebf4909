"""Pauses of Python's cyclic garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the collection of reference cycles. Pauses nest; also usable as a decorator.

    An analysis creates millions of objects and hardly any cycles, but each collection visits all of them: a third of
    the time of a large model. Reference counting still frees objects; only cycles wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
