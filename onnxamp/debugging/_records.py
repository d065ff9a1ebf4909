"""The records of a checked run, one per value, in memory and as CSV files."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final

from onnxamp._errors import ArgumentError, printable
from onnxamp.debugging._modes import DebugMode
from onnxamp.debugging._tables import Cell, read_csv, write_table
from onnxamp.debugging._tensors import TensorStats


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One float value in one run.

    Attributes:
        step: number of the run, from 0.
        position: index of the node in the order of execution, from 0; -1 for inputs and weights.
        op: op type of the node that produces the value; "" for inputs and weights.
        node: name of the node, or of the value if it has none; "" for inputs and weights.
        tensor: name of the value.
        dtype: such as "float16".
        stats: statistics of its elements.
        fault: what goes wrong in this node although its inputs are fine: "NaN", "Inf", "saturated", "flushed",
            "vanished" or "all zero".
        inherited: whether the value only passes on an earlier fault.

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

    @classmethod
    def given(cls, step: int, tensor: str, dtype: str, stats: TensorStats) -> "ValueRecord":
        """The record of an input or weight. NaN is a fault there; infinities may be intended, as in masks."""
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
        )

    @property
    def is_bad(self) -> bool:
        """Whether it holds NaN or an unintended Inf; infinities of masks are fine."""
        return not self.stats.finite and (self.inherited or self.fault in ("NaN", "Inf"))

    @property
    def fp16(self) -> str | None:
        """How a float32 or float64 value would leave the range of float16: "overflow", "underflow", or None."""
        return self.stats.fp16 if self.dtype in ("float32", "float64") else None

    def concerns(self, mode: DebugMode) -> bool:
        """Whether a checker in this mode records the value."""
        if mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
            return self.fp16 is not None
        return mode is DebugMode.CHECK_ALL or self.is_bad

    def __str__(self) -> str:
        made = f"{self.op} {self.node!r}" if self.op else "given"
        return printable(f"{self.tensor!r} ({made}, {self.dtype}): {self.stats}")


def counted(records: Sequence[ValueRecord]) -> str:
    """The number of values, in words."""
    return "1 value" if len(records) == 1 else f"{len(records)} values"


_FACTS: Final = ("step", "position", "op", "node", "tensor", "dtype")
_STATS: Final = tuple(field.name for field in fields(TensorStats))
COLUMNS: Final = (*_FACTS, *_STATS, "fp16", "fault", "inherited")
"""Columns of a dump."""

_KINDS: Final[Mapping[str, Any]] = {
    "step": int,
    "position": int,
    "op": str,
    "node": str,
    "tensor": str,
    "dtype": str,
    **{field.name: field.type for field in fields(TensorStats)},
}


def dump_path(folder: Path, step: int) -> Path:
    """The file of a checked run; file names sort by number."""
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
    return [*facts, *stats, record.fp16, record.fault, "yes" if record.inherited else None]


def read_dump(path: str | PathLike[str]) -> tuple[ValueRecord, ...]:
    """Read what a checker in mode ``CHECK_ALL`` wrote.

    Args:
        path: the CSV file of one run, or the ``output_dir`` with all of them.

    Returns:
        Records by step, and in the order of execution.

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
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if re.fullmatch(r"step-\d{6,}\.csv", file.name)
        )
        if not files:
            raise ArgumentError(
                f"The folder {str(path)!r} holds no dump: it has no files like step-000000.csv."
            )
    return tuple(
        sorted((record for file in files for record in _records(file)), key=lambda row: row.step)
    )


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
                **facts, stats=stats, fault=row["fault"] or None, inherited=row["inherited"] != ""
            )
        )
    return records
