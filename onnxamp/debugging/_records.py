"""What a checked run gives: one record per value, and their form on disk."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final

from onnxamp._errors import ArgumentError
from onnxamp.debugging._modes import DebugMode
from onnxamp.debugging._tables import Cell, read_csv, write_table
from onnxamp.debugging._tensors import TensorStats


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One float value in one run."""

    step: int
    """Number of the run."""
    position: int
    """Rank of the node in the order of execution, from 0; -1 for inputs and weights."""
    op: str
    """Op type of the node that makes the value; "" for inputs and weights of the model."""
    node: str
    """The node's name, or the value's where it has none; "" for inputs and weights."""
    tensor: str
    dtype: str
    stats: TensorStats
    fault: str | None
    """What goes wrong here although the node's inputs are fine: see :mod:`onnxamp._numerics.watch`."""
    inherited: bool
    """Whether the value only passes on what went wrong before."""

    @property
    def is_bad(self) -> bool:
        """Whether NaN or Inf is in it that is no intention: infinities of masks are fine."""
        return not self.stats.finite and (self.inherited or self.fault in ("NaN", "Inf"))

    @property
    def fp16(self) -> str | None:
        """How a value of float32 or float64 would leave the range of float16: "overflow", "underflow" or not."""
        return self.stats.fp16 if self.dtype in ("float32", "float64") else None

    def concerns(self, mode: DebugMode) -> bool:
        """Whether a check in that mode records it."""
        if mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
            return self.fp16 is not None
        return mode is DebugMode.CHECK_ALL or self.is_bad

    def __str__(self) -> str:
        made = f"{self.op} {self.node!r}" if self.op else "given"
        return f"{self.tensor!r} ({made}, {self.dtype}): {self.stats}"


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One checked run: what its mode records, in the order of execution, and the file that holds it, if any."""

    step: int
    records: tuple[ValueRecord, ...]
    file: Path | None = None


def counted(records: Sequence[ValueRecord]) -> str:
    """How many values these are, in words."""
    return "1 value" if len(records) == 1 else f"{len(records)} values"


_FACTS: Final = ("step", "position", "op", "node", "tensor", "dtype")
_STATS: Final = tuple(field.name for field in fields(TensorStats))
COLUMNS: Final = (*_FACTS, *_STATS, "fp16", "fault", "inherited")
"""Columns of a dump."""

_KINDS: Final[Mapping[str, Any]] = {
    "step": int, "position": int, "op": str, "node": str, "tensor": str, "dtype": str,
    **{field.name: field.type for field in fields(TensorStats)},
}  # fmt: skip


def dump_path(folder: Path, step: int) -> Path:
    """The file of a checked run; names sort by number."""
    return folder / f"step-{step:06}.csv"


def write_dump(path: Path, records: Iterable[ValueRecord]) -> None:
    """Write records as a table.

    Raises:
        OutputError: the file cannot be written.
    """
    write_table(path, COLUMNS, map(_cells, records))


def _cells(record: ValueRecord) -> list[Cell]:
    facts = [getattr(record, name) for name in _FACTS]
    stats = [getattr(record.stats, name) for name in _STATS]
    return [*facts, *stats, record.fp16, record.fault, "yes" if record.inherited else None]


def read_dump(path: str | PathLike[str]) -> tuple[ValueRecord, ...]:
    """Records of one checked run (its file), or of all (their folder), by step and in the order of execution.

    Raises:
        ArgumentError: there is no such dump, or the file is none.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if re.fullmatch(r"step-\d{6,}\.csv", file.name))
        if not files:
            raise ArgumentError(f"The folder {str(path)!r} holds no dump: no file there is called step-000000.csv.")
    return tuple(sorted((record for file in files for record in _records(file)), key=lambda row: row.step))


def _records(path: Path) -> list[ValueRecord]:
    found = []
    for number, row in enumerate(read_csv(path, COLUMNS), 2):
        try:
            made = {name: kind(row[name]) for name, kind in _KINDS.items()}
            stats = TensorStats(**{name: made[name] for name in _STATS})
            facts = {name: made[name] for name in _FACTS}
            found.append(
                ValueRecord(**facts, stats=stats, fault=row["fault"] or None, inherited=row["inherited"] != "")
            )
        except ValueError:
            raise ArgumentError(f"Line {number} of {str(path)!r} is no record of a dump that onnxamp wrote.") from None
    return found
