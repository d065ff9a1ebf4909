"""Switching the check of runs on and off, for the code at hand alone.

What is on is kept in a context variable: other threads, and other tasks of asyncio, have their own. New threads begin
without; ``contextvars.copy_context().run`` takes a checker along.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from onnxamp._errors import ArgumentTypeError, OutputError
from onnxamp.debugging._modes import TensorCheckerConfig
from onnxamp.debugging._records import StepCheck


@dataclass(slots=True)
class TensorChecker:
    """A check that is switched on, and what it has recorded: a step per checked run, in order.

    Runs that are aborted have a step, too. Steps stay in memory, whether they are on disk or not: bound long runs with
    ``debug_step``.
    """

    config: TensorCheckerConfig
    steps: list[StepCheck] = field(default_factory=list)


_ACTIVE: Final[ContextVar[TensorChecker | None]] = ContextVar("onnxamp tensor checker", default=None)


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> TensorChecker:
    """Check every run of an :class:`~onnxamp.debugging.InferenceSession` from here on, until it is disabled.

    As ``paddle.amp.debugging.enable_tensor_checker``, but for the current thread (or asyncio task) alone, and for
    sessions of this package, since ONNX Runtime itself shows nothing of what is inside a model. What was on before is
    off. A config that is not enabled switches off. Notebooks may run each cell in a context of its own: there,
    :func:`tensor_checker` is the safe form.

    Returns:
        What collects the records (Paddle returns nothing).

    Raises:
        ArgumentTypeError: the argument is no config. OutputError: the folder cannot be made.
    """
    checker = _made(checker_config)
    _ACTIVE.set(checker if checker_config.enable else None)
    return checker


def disable_tensor_checker() -> None:
    """Check no more runs; nothing happens where none are checked. As Paddle's function of the name."""
    _ACTIVE.set(None)


@contextmanager
def tensor_checker(checker_config: TensorCheckerConfig) -> Iterator[TensorChecker]:
    """:func:`enable_tensor_checker` for the length of a ``with`` block; then what was on before is on again."""
    checker = _made(checker_config)
    token = _ACTIVE.set(checker if checker_config.enable else None)
    try:
        yield checker
    finally:
        _ACTIVE.reset(token)


def active_checker() -> TensorChecker | None:
    """The check that is on here."""
    return _ACTIVE.get()


def _made(config: TensorCheckerConfig) -> TensorChecker:
    if not isinstance(config, TensorCheckerConfig):
        raise ArgumentTypeError(f"A TensorCheckerConfig is needed, not {type(config).__name__}.")
    if config.enable and config.folder is not None:
        try:
            config.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"Cannot make the folder {str(config.folder)!r}: {error.strerror}.") from error
    return TensorChecker(config)
