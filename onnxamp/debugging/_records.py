"""Records of checked values, in memory and as CSV files."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Final

from onnxamp._base.errors import ArgumentError, printable
from onnxamp._base.paths import as_path
from onnxamp._options.doors import door
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
        origin = f"{self.op} {self.node!r}" if self.op else "given"
        return printable(f"{self.tensor!r} ({origin}, {self.dtype}): {self.stats}")


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
