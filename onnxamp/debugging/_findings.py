"""What becomes of a checked run: its records, in memory and on disk, and an error or a warning."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from onnxamp._errors import NumericsError
from onnxamp.debugging._checker import StepCheck, TensorChecker
from onnxamp.debugging._modes import DebugMode, TensorCheckerConfig
from onnxamp.debugging._records import ValueRecord, counted, dump_path, write_dump
from onnxamp.debugging._tensors import NumericsWarning
from onnxamp.debugging._watch import RunRecords


def conclude(checker: TensorChecker, run: RunRecords) -> None:
    """Keep what the mode of a checker records of a run, and tell of NaN and Inf as the mode says.

    Raises:
        NumericsError: the mode aborts, and there is NaN or an unintended Inf.
        OutputError: the records cannot be written.
    """
    config = checker.config
    records = _recorded(run, config)
    file = None
    if config.folder is not None:
        file = dump_path(config.folder, run.step)
        write_dump(file, records)
    checker.steps.append(StepCheck(run.step, records, file))
    bad = run.first_bad(config.ops) if config.aborts else None
    if bad is not None:
        story = run.story(bad, config.stack_height_limit)
        text = f"Run {run.step}: there is NaN or Inf in {bad}. {story}".rstrip()
        raise NumericsError(text, bad.tensor, bad.node, bad.op)
    _warn(config, run.step, records, file)


def _recorded(run: RunRecords, config: TensorCheckerConfig) -> tuple[ValueRecord, ...]:
    """What the mode records of a run."""
    if config.aborts:
        bad = run.first_bad(config.ops)
        return () if bad is None else (bad,)
    rows = run.records.values()
    return tuple(row for row in rows if config.ops.takes(row.op) and row.concerns(config.debug_mode))


def _warn(config: TensorCheckerConfig, step: int, records: Sequence[ValueRecord], file: Path | None) -> None:
    """Warn of what was found in a run that continues."""
    where = "" if file is None else f" All are in {str(file)!r}."
    bad = [row for row in records if row.is_bad]
    if bad:
        text = f"Run {step}: there is NaN or Inf in {counted(bad)}; the first is {bad[0]}.{where}"
        warnings.warn(text, NumericsWarning, stacklevel=_caller())
    wide = [row for row in records if row.fp16] if config.debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW else []
    if wide:
        text = f"Run {step}: {counted(wide)} beyond float16; the first ({wide[0].fp16}) is {wide[0]}.{where}"
        warnings.warn(text, NumericsWarning, stacklevel=_caller())


def _caller() -> int:
    """Stack level, seen from the caller of this function, of the code that called onnxamp."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("onnxamp."):
        frame, level = frame.f_back, level + 1
    return level
