"""Settings for a block of code, kept in context variables: other threads and asyncio tasks have their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def active_within(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Give a context variable a value for the length of a ``with`` block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
