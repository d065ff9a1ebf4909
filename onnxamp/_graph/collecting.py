"""Working on many objects at once without stopping to look for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the search for reference cycles; may be nested, and is a decorator, too.

    An analysis makes millions of objects and no cycles worth mentioning, but each search looks at all of them again:
    a third of the time of a large model. Objects are freed as ever; only cycles wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
