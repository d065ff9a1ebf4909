"""Checks of runs: their configuration, and functions that enable them for a thread or asyncio task.

New threads start without a checker; use ``contextvars.copy_context().run`` to pass it on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Final

from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.paths import as_path, made_folder
from onnxamp._base.public import active_within
from onnxamp._options.doors import door
from onnxamp._options.lists import is_known_op, nearest_name
from onnxamp._options.values import checked_flag
from onnxamp.debugging._records import ValueRecord
from onnxamp.debugging._tensors import DebugMode, checked_mode


@door
@dataclass(frozen=True)
class TensorCheckerConfig:
    """The configuration of a checker; see :func:`enable_tensor_checker`.

    The counterpart of ``paddle.amp.debugging.TensorCheckerConfig``, which also seeds random generators and makes
    kernels deterministic; here nothing outside the check changes.

    Args:
        enable: False checks nothing.
        debug_mode: what to record.
        output_dir: folder for one CSV file per checked run. It is created if it is missing; files of the same names
            are replaced. None keeps records in memory only (Paddle prints them).
        checked_op_list: ops to check, by the names of ONNX ("Softmax", or "com.microsoft::Gelu" in other domains),
            Paddle ("elementwise_add") or MindSpore; "" for model inputs. None for all.
        skipped_op_list: ops not to check, by the same names.
        debug_step: (start, end): check only the runs start to end - 1. Runs and training steps are counted from 0, per
            config, over all sessions and networks, no matter how often the config is enabled. (Paddle counts calls of
            ``enable_tensor_checker``.)
        stack_height_limit: how many levels of preceding ops the error of an aborted run lists, because a model has no
            call stack to show.
        scaled_overflows: in training, also report overflows of scaled gradients in steps that the loss scale skips
            (as Paddle does). By default, such overflows are expected while the scale is greater than 1. Problems in the
            forward pass, and NaNs computed from finite gradients, are always reported.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is wrong; the message names it.

    Example:
        >>> from onnxamp.debugging import DebugMode, TensorCheckerConfig
        >>> config = TensorCheckerConfig(True, DebugMode.CHECK_NAN_INF, skipped_op_list=["Softmax"])
    """

    enable: bool
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
    output_dir: str | PathLike[str] | None = None
    checked_op_list: Sequence[str] | None = None
    skipped_op_list: Sequence[str] | None = None
    debug_step: Sequence[int] | None = None
    stack_height_limit: int = 1
    scaled_overflows: bool = field(default=False, kw_only=True)
    _runs: Iterator[int] = field(
        default_factory=count, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        checked_flag("enable", self.enable)
        checked_mode(self.debug_mode)
        if not isinstance(self.stack_height_limit, int) or self.stack_height_limit < 0:
            raise ArgumentError(
                f"stack_height_limit must be 0 or more, not {self.stack_height_limit!r}."
            )
        checked_flag("scaled_overflows", self.scaled_overflows)
        for name in ("checked_op_list", "skipped_op_list"):
            _check_ops(name, getattr(self, name))
        if self.debug_step is not None:
            _check_steps(self.debug_step)
        if self.output_dir is not None and not isinstance(
            self.output_dir, (str, PathLike)
        ):
            raise ArgumentTypeError(
                f"output_dir must be a path, not {self.output_dir!r}."
            )

    @property
    def folder(self) -> Path | None:
        """``output_dir`` as a path."""
        return None if self.output_dir is None else as_path(self.output_dir)

    @property
    def aborts(self) -> bool:
        """Whether the first NaN or Inf aborts the run."""
        return self.debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT

    def next_step(self) -> int | None:
        """Count a run, and return its number if it is to be checked."""
        # itertools.count is atomic, so that threads that share a config get different numbers.
        step = next(self._runs)
        if not self.enable:
            return None
        start, end = self.debug_step or (0, step + 1)
        return step if start <= step < end else None


def _check_ops(name: str, ops: Sequence[str] | None) -> None:
    if ops is None:
        return
    if not isinstance(ops, (list, tuple)) or not all(
        isinstance(op, str) for op in ops
    ):
        raise ArgumentTypeError(
            f"{name} must be a list or tuple of names, not {ops!r}."
        )
    for op in ops:
        near = None if is_known_op(op) or "::" in op or not op else nearest_name(op)
        if near is not None:
            raise ArgumentError(
                f"{name}: no op is called {op!r}; did you mean {near!r}?"
            )


def _check_steps(steps: Sequence[int]) -> None:
    if not isinstance(steps, (list, tuple)) or not all(
        isinstance(step, int) for step in steps
    ):
        raise ArgumentTypeError(
            f"debug_step must be a list or tuple of two whole numbers, not {steps!r}."
        )
    if len(steps) != 2 or not steps[0] < steps[1]:
        raise ArgumentError(
            f"debug_step must be (start, end) with start < end, not {steps!r}."
        )


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One checked run of a session, or one checked training step.

    Attributes:
        step: the number of the run or step, from 0.
        records: the values that the mode records, in the order of execution.
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
    """An active check, and its records.

    Attributes:
        config: what the checker looks for.
        steps: one :class:`StepCheck` per checked run or step, in order, including aborted ones. They stay in memory
            even if they are also on disk, so limit long runs with ``debug_step``.

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


@door
def enable_tensor_checker(checker_config: TensorCheckerConfig) -> TensorChecker:
    """Check every run of an :class:`InferenceSession` and every training step until the checker is disabled.

    A checked step of :class:`onnxamp.train.TrainNetwork` runs once, with the same results to the last bit, and keeps
    all values in memory at the same time. If ONNX Runtime fuses ops, only the output of the fused op is checked. If the
    check aborts, the state of the network does not change. Overflows of scaled gradients in steps that the loss scale
    skips are expected. They are not reported unless the config sets ``scaled_overflows``.

    The counterpart of ``paddle.amp.debugging.enable_tensor_checker``, for the current thread or asyncio task only. It
    replaces the active checker; a config that is not enabled turns checking off. Notebooks may run each cell in its own
    context, so use :func:`tensor_checker` there.

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


@door
def disable_tensor_checker() -> None:
    """Stop checking runs. Do nothing if no checker is active.

    The counterpart of ``paddle.amp.debugging.disable_tensor_checker``.

    Example:
        >>> from onnxamp import debugging
        >>> debugging.disable_tensor_checker()
    """
    _ACTIVE.set(None)


@door
@contextmanager
def tensor_checker(checker_config: TensorCheckerConfig) -> Iterator[TensorChecker]:
    """Enable a checker within a ``with`` block, as :func:`enable_tensor_checker` does, and then restore the previous
    one.

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
    """Count a run, and return the active checker and the number of the run if it is to be checked."""
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
