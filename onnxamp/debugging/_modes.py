"""The configuration of a checker."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._options.lists import is_known, nearest_name

if TYPE_CHECKING:
    from collections.abc import Iterator


class DebugMode(Enum):
    """What a checker records, and whether a run is aborted.

    Names and values are those of ``paddle.amp.debugging.DebugMode``. In the first two modes, intended infinities are
    ignored: an op that passes on the infinities of a mask is not recorded (Paddle counts every infinity).

    Example:
        >>> from onnxamp.debugging import DebugMode
        >>> DebugMode(0)
        <DebugMode.CHECK_NAN_INF_AND_ABORT: 0>
    """

    CHECK_NAN_INF_AND_ABORT = 0
    """Record the first value with NaN or Inf, and end the run there with an error."""
    CHECK_NAN_INF = 1
    """Record all values with NaN or Inf; the run continues."""
    CHECK_ALL_FOR_OVERFLOW = 2
    """Record all values with NaN or Inf, and float32 and float64 values that would overflow or underflow in float16
    (Paddle: only overflow). Elements that are infinite or beyond 1e30 are excused in constants, and in masks on their
    way to a Softmax."""
    CHECK_ALL = 3
    """Record every float value."""


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
    _runs: "Iterator[int]" = field(
        default_factory=count, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.debug_mode, DebugMode):
            raise ArgumentError(
                f"debug_mode must be a DebugMode, not {self.debug_mode!r}."
            )
        if not isinstance(self.stack_height_limit, int) or self.stack_height_limit < 0:
            raise ArgumentError(
                f"stack_height_limit must be 0 or more, not {self.stack_height_limit!r}."
            )
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
        return None if self.output_dir is None else Path(self.output_dir)

    @property
    def aborts(self) -> bool:
        """Whether the first NaN or Inf aborts the run."""
        return self.debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT

    def next_step(self) -> int | None:
        """Count a run, and return its number if it is to be checked."""
        step = next(
            self._runs
        )  # atomic, so that threads that share a config get different numbers
        if not self.enable:
            return None
        start, end = self.debug_step or (0, step + 1)
        return step if start <= step < end else None


def _check_ops(name: str, ops: Sequence[str] | None) -> None:
    if ops is None:
        return
    if not isinstance(ops, (list, tuple)) or not all(isinstance(op, str) for op in ops):
        raise ArgumentTypeError(
            f"{name} must be a list or tuple of names, not {ops!r}."
        )
    for op in ops:
        near = None if is_known(op) or "::" in op or not op else nearest_name(op)
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
