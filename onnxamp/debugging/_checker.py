"""Switching the check of runs on and off, for the current thread or asyncio task.

New threads start without a checker; ``contextvars.copy_context().run`` takes it along.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from onnxamp._errors import ArgumentTypeError
from onnxamp._paths.paths import made_folder
from onnxamp._public import active_within
from onnxamp.debugging._modes import TensorCheckerConfig
from onnxamp.debugging._records import ValueRecord


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One checked run of a session, or step of training.

    Attributes:
        step: number of the run or step, from 0.
        records: what the mode records, in the order of execution.
        file: the CSV file with the records; None without ``output_dir``.

    Example:
        >>> from onnxamp.debugging import StepCheck
        >>> StepCheck(step=0, records=()).file is None
        True
    """

    step: int
    records: tuple[ValueRecord, ...]
    file: Path | None = None


@dataclass(slots=True)
class TensorChecker:
    """An active check, and what it has recorded.

    Attributes:
        config: what it looks for.
        steps: one :class:`StepCheck` per checked run or step, in order, including aborted ones. They stay in memory
            even if they are on disk: limit long runs with ``debug_step``.

    Example:
        >>> from onnxamp.debugging import TensorChecker, TensorCheckerConfig
        >>> TensorChecker(TensorCheckerConfig(enable=True)).steps
        []
    """

    config: TensorCheckerConfig
    steps: list[StepCheck] = field(default_factory=list)


_ACTIVE: Final[ContextVar[TensorChecker | None]] = ContextVar(
    "onnxamp tensor checker", default=None
)


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> TensorChecker:
    """Check every run of an :class:`InferenceSession` and every training step until the checker is disabled.

    A checked step of :class:`onnxamp.train.TrainNetwork` runs once, with the same results to the last bit, and holds
    all values at the same time. What ONNX Runtime fuses is seen where the fused op ends. If the check aborts, the step
    has not been made. Overflows of scaled gradients in steps that the loss scale skips are expected, and not reported
    unless the config asks for ``scaled_overflows``.

    The counterpart of ``paddle.amp.debugging.enable_tensor_checker``, for the current thread or asyncio task only. It
    replaces the active checker; a config that is not enabled switches checking off. Notebooks may run each cell in its
    own context: use :func:`tensor_checker` there.

    Args:
        checker_config: what to look for.

    Returns:
        The checker, which collects the records (Paddle returns nothing).

    Raises:
        ArgumentTypeError: the argument is not a config.
        OutputError: the output folder cannot be created.

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> config = debugging.TensorCheckerConfig(True, debugging.DebugMode.CHECK_ALL)
        >>> checker = debugging.enable_tensor_checker(config)
        >>> outputs = debugging.InferenceSession("models/encoder.onnx").run(
        ...     None, random_samples("models/encoder.onnx")[0]
        ... )
        >>> debugging.disable_tensor_checker()
        >>> all(record.stats.finite for record in checker.steps[0].records)
        True
    """
    checker = _make_checker(checker_config)
    _ACTIVE.set(checker if checker_config.enable else None)
    return checker


def disable_tensor_checker() -> None:
    """Stop checking runs. Does nothing if no checker is active.

    The counterpart of ``paddle.amp.debugging.disable_tensor_checker``.

    Example:
        >>> from onnxamp import debugging
        >>> debugging.disable_tensor_checker()
    """
    _ACTIVE.set(None)


@contextmanager
def tensor_checker(checker_config: TensorCheckerConfig) -> Iterator[TensorChecker]:
    """:func:`enable_tensor_checker` for the length of a ``with`` block; then the previous checker is active again.

    Args:
        checker_config: what to look for.

    Raises:
        ArgumentTypeError: the argument is not a config.
        OutputError: the output folder cannot be created.

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> session = debugging.InferenceSession("models/encoder.onnx")
        >>> config = debugging.TensorCheckerConfig(True, debugging.DebugMode.CHECK_NAN_INF)
        >>> with debugging.tensor_checker(config) as checker:
        ...     outputs = session.run(None, random_samples("models/encoder.onnx")[0])
        >>> checker.steps
        [StepCheck(step=0, records=(), file=None)]
    """
    checker = _make_checker(checker_config)
    with active_within(_ACTIVE, checker if checker_config.enable else None):
        yield checker


def next_check() -> tuple[TensorChecker, int] | None:
    """Count a run; returns the active checker and the number of the run if it is to be checked."""
    checker = _ACTIVE.get()
    step = None if checker is None else checker.config.next_step()
    return None if checker is None or step is None else (checker, step)


def _make_checker(config: TensorCheckerConfig) -> TensorChecker:
    if not isinstance(config, TensorCheckerConfig):
        raise ArgumentTypeError(
            f"checker_config must be a TensorCheckerConfig, not {type(config).__name__}."
        )
    if config.enable and config.folder is not None:
        made_folder(config.folder)
    return TensorChecker(config)
