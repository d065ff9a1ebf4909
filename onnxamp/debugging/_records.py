"""Checks of runs: their configuration, their records in memory and as CSV files, and functions that enable them for a
thread or asyncio task.

New threads start without a checker; use ``contextvars.copy_context().run`` to pass it on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import chain, count
from os import PathLike
from pathlib import Path
from typing import Any, Final

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, printable
from onnxamp._base.paths import as_path, made_folder
from onnxamp._base.public import active_within
from onnxamp._options.doors import door
from onnxamp._options.lists import is_known, nearest_name
from onnxamp.debugging._tables import Cell, read_csv, write_table
from onnxamp.debugging._tensors import LOST_ABOVE, DebugMode, TensorStats


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One float value in one run.

    Attributes:
        step: the number of the run, from 0.
        position: the index of the node in the order of execution, from 0; -1 for inputs and weights.
        op: the op type of the node that produces the value; "" for inputs and weights.
        node: the name of the node, or of the value if the node has none; "" for inputs and weights.
        tensor: the name of the value.
        dtype: the type of the value, such as "float16".
        stats: the statistics of its elements.
        fault: the problem that arises in this node although its inputs are fine: "NaN", "Inf", "saturated", "flushed",
            "vanished" or "all zero".
        inherited: whether the value only passes on an earlier fault.
        fp16: how the value exceeds the range of float16: "NaN", "overflow", "underflow", or None. Values that
            are already low precision can overflow only by being infinite. Elements beyond 1e30 or infinite are excused
            in constants, and in masks on their way to a Softmax.

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> session = debugging.InferenceSession("models/encoder.onnx")
        >>> config = debugging.TensorCheckerConfig(True, debugging.DebugMode.CHECK_ALL)
        >>> with debugging.tensor_checker(config) as checker:
        ...     outputs = session.run(None, random_samples("models/encoder.onnx")[0])
        >>> record = checker.steps[0].records[-1]
        >>> record.tensor, record.op, record.dtype, record.is_bad
        ('pooled', 'Tanh', 'float32', False)
    """

    step: int
    position: int
    op: str
    node: str
    tensor: str
    dtype: str
    stats: TensorStats
    fault: str | None
    inherited: bool
    fp16: str | None = None

    @classmethod
    def given(
        cls,
        step: int,
        tensor: str,
        dtype: str,
        stats: TensorStats,
        *,
        is_excused: bool,
    ) -> "ValueRecord":
        """Return the record of an input or weight, where NaN is a fault; infinities may be intended, as in masks."""
        return cls(
            step=step,
            position=-1,
            op="",
            node="",
            tensor=tensor,
            dtype=dtype,
            stats=stats,
            fault="NaN" if stats.num_nan else None,
            inherited=False,
            fp16=range_fault(stats, dtype, is_excused=is_excused),
        )

    @property
    def is_bad(self) -> bool:
        """Whether the value contains NaN or an unintended Inf; infinities of masks are fine."""
        is_fault = self.inherited or self.fault in ("NaN", "Inf")
        return is_fault and not self.stats.finite

    def concerns(self, mode: DebugMode) -> bool:
        """Return whether a checker in this mode records the value."""
        if mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
            return self.fp16 is not None or self.is_bad
        return mode is DebugMode.CHECK_ALL or self.is_bad

    def __str__(self) -> str:
        made = f"{self.op} {self.node!r}" if self.op else "given"
        return printable(f"{self.tensor!r} ({made}, {self.dtype}): {self.stats}")


def range_fault(stats: TensorStats, dtype: str, *, is_excused: bool) -> str | None:
    """Return how a value exceeds the range of float16.

    Args:
        stats: the statistics of its elements.
        dtype: its type.
        is_excused: whether its elements beyond 1e30 stand for infinity.
    """
    if stats.num_nan:
        return "NaN"
    if dtype not in ("float32", "float64"):
        return "overflow" if stats.num_inf and not is_excused else None
    if is_excused and not stats.fp16_over:
        return "underflow" if stats.fp16_loss > LOST_ABOVE else None
    return stats.fp16


def counted(records: Sequence[ValueRecord]) -> str:
    """Return the number of values, in words."""
    return "1 value" if len(records) == 1 else f"{len(records)} values"


_FACTS: Final = ("step", "position", "op", "node", "tensor", "dtype")
_STATS: Final = tuple(field.name for field in fields(TensorStats))
COLUMNS: Final = (*_FACTS, *_STATS, "fp16", "fault", "inherited")
"""Columns of a dump."""

_KINDS: Final[Mapping[str, Any]] = {
    item.name: item.type
    for item in (*fields(ValueRecord), *fields(TensorStats))
    if item.name in (*_FACTS, *_STATS)
}


def dump_path(folder: Path, step: int) -> Path:
    """Return the path of the file of a checked run; file names sort by run number."""
    return folder / f"step-{step:06}.csv"


def write_dump(path: Path, records: Iterable[ValueRecord]) -> None:
    """Write records as a CSV file.

    Raises:
        OutputError: the file cannot be written.
    """
    write_table(path, COLUMNS, map(_cells, records))


def _cells(record: ValueRecord) -> list[Cell]:
    facts = [getattr(record, name) for name in _FACTS]
    stats = [getattr(record.stats, name) for name in _STATS]
    return [
        *facts,
        *stats,
        record.fp16,
        record.fault,
        "yes" if record.inherited else None,
    ]


@door
def read_dump(path: str | PathLike[str]) -> tuple[ValueRecord, ...]:
    """Read the dump that a checker in mode ``CHECK_ALL`` wrote.

    Args:
        path: the CSV file of one run, or the ``output_dir`` with all of them.

    Returns:
        The records, by step and in the order of execution.

    Raises:
        ArgumentError: there is no dump, or a file was not written by onnxamp.

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> config = debugging.TensorCheckerConfig(True, debugging.DebugMode.CHECK_ALL, output_dir="dump")
        >>> with debugging.tensor_checker(config):
        ...     outputs = debugging.InferenceSession("models/encoder.onnx").run(
        ...         None, random_samples("models/encoder.onnx")[0]
        ...     )
        >>> {record.dtype for record in debugging.read_dump("dump")}
        {'float32'}
    """
    path = as_path(path)
    files = [path]
    if path.is_dir():
        pattern = re.compile(r"step-\d{6,}\.csv")
        files = sorted(file for file in path.iterdir() if pattern.fullmatch(file.name))
        if not files:
            raise ArgumentError(
                f"The folder {str(path)!r} holds no dump: it has no files like step-000000.csv."
            )
    records = chain.from_iterable(map(_records, files))
    return tuple(sorted(records, key=lambda record: record.step))


def _records(path: Path) -> list[ValueRecord]:
    records = []
    for line, row in enumerate(read_csv(path, COLUMNS), 2):
        try:
            cells = {name: kind(row[name]) for name, kind in _KINDS.items()}
        except ValueError:
            raise ArgumentError(
                f"Line {line} of {str(path)!r} is not a record of a dump that onnxamp wrote."
            ) from None
        stats = TensorStats(**{name: cells[name] for name in _STATS})
        facts = {name: cells[name] for name in _FACTS}
        records.append(
            ValueRecord(
                **facts,
                stats=stats,
                fault=row["fault"] or None,
                inherited=row["inherited"] != "",
                fp16=row["fp16"] or None,
            )
        )
    return records


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
