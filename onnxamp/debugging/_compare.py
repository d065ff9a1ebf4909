"""Comparing two runs value by value, as a table on disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from os import PathLike
from typing import Final

from onnxamp._dtypes import LOW_TYPES
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import ModelSource
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.diff import diff_models
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.metrics import LOWNESS, TOLERANCES
from onnxamp._numerics.results import DiffReport, FirstBad, LayerDiff
from onnxamp._runtime.engines import Progress
from onnxamp._runtime.samples import SamplesLike
from onnxamp._runtime.session import Provider
from onnxamp.debugging._records import ValueRecord, read_dump
from onnxamp.debugging._tables import Cell, table_path, write_table


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """One value in both runs, or in one.

    ``flags`` say what is wrong with the result, worst first:

    ==============  ==================================================================================================
    NaN             it has more NaN than the reference
    overflow        it has more infinities
    underflow       it is all zero and the reference is not, or its record says that an op made too much of it zero
    saturated       its record says that an op stopped at the largest number of its type
    size            it has another number of elements
    out of range    the reference reaches beyond the largest number of the result's type
    differs         maximum, minimum or mean are further off than the precision explains
    ==============  ==================================================================================================
    """

    step: int
    tensor: str
    reference: ValueRecord | None
    result: ValueRecord | None
    flags: tuple[str, ...]

    @property
    def op(self) -> str:
        """Op type of its node."""
        record = self.reference or self.result
        return record.op if record is not None else ""

    def ratio(self, name: str) -> float | None:
        """Result by reference of "max", "min" or "mean"; None where either is missing, or the reference is zero."""
        if self.reference is None or self.result is None:
            return None
        below: float = getattr(self.reference.stats, name)
        above: float = getattr(self.result.stats, name)
        return above / below if below else None


_SIDES: Final = ("dtype", "numel", "max", "min", "mean", "num_nan", "num_inf", "num_zero")
_RATIOS: Final = ("max", "min", "mean")
_HEADS: Final = (
    "step", "op", "node", "tensor", "flags", *(f"reference {name}" for name in _SIDES),
    *(f"result {name}" for name in _SIDES), *(f"ratio of {name}" for name in _RATIOS),
)  # fmt: skip


def compare_accuracy(
    dump_path: str | PathLike[str],
    another_dump_path: str | PathLike[str],
    output_filename: str | PathLike[str],
    loss_scale: float = 1,
    dump_all_tensors: bool = False,
) -> tuple[AccuracyRow, ...]:
    """Compare two dumps value by value and write a table.

    As ``paddle.amp.debugging.compare_accuracy``. Values are paired by the number of the run and the name of the tensor,
    which conversion keeps.

    Args:
        dump_path: what :class:`TensorCheckerConfig` with ``CHECK_ALL`` wrote into its ``output_dir`` for the reference,
            usually the float32 model: the folder, or the file of one run.
        another_dump_path: the same for the result.
        output_filename: the table; ``.xlsx`` or ``.csv`` (Paddle always writes a spreadsheet).
        loss_scale: the result may be this many times the reference, as scaled gradients are; 1 for inference.
        dump_all_tensors: list what only one of the dumps has, too, as the Casts of a conversion (Paddle refuses True).

    Returns:
        The rows of the table, in the order of execution (Paddle returns nothing).

    Raises:
        ArgumentError: a dump cannot be read, the ending of the table is unknown, or nothing can be paired.
        OutputError: the table cannot be written.
    """
    path = table_path(output_filename)
    if not loss_scale > 0:
        raise ArgumentError(f"loss_scale must be above 0, not {loss_scale!r}.")
    one, other = ({(row.step, row.tensor): row for row in read_dump(dump)} for dump in (dump_path, another_dump_path))
    if not one.keys() & other.keys():
        raise ArgumentError("The two dumps have no value in common: are they of the same model, and of CHECK_ALL?")
    kinds = {row.dtype for row in (*one.values(), *other.values())} & LOWNESS.keys()
    lowest = min(kinds, key=LOWNESS.__getitem__, default="float32")
    keys = dict.fromkeys((*one, *other)) if dump_all_tensors else [key for key in one if key in other]
    made = [_row(key, one.get(key), other.get(key), TOLERANCES[lowest], loss_scale) for key in keys]
    rows = tuple(sorted(made, key=lambda row: row.step))
    write_table(path, _HEADS, map(_cells, rows), alarming=lambda cells: bool(cells[_HEADS.index("flags")]))
    return rows


def _row(
    key: tuple[int, str], one: ValueRecord | None, other: ValueRecord | None, tolerance: float, scale: float
) -> AccuracyRow:
    flags = () if one is None or other is None else tuple(_flags(one, other, tolerance, scale))
    return AccuracyRow(*key, one, other, flags)


def _flags(one: ValueRecord, other: ValueRecord, tolerance: float, scale: float) -> list[str]:
    a, b = one.stats, other.stats
    low = LOW_TYPES.get(other.dtype)
    reach = max((abs(x) for x in (a.max, a.min) if isfinite(x) and abs(x) < SENTINEL), default=0.0)
    applies = {
        "NaN": b.num_nan > a.num_nan,
        "overflow": b.num_inf > a.num_inf,
        "underflow": other.fault in ("vanished", "flushed", "all zero")
        or (b.numel > 1 and b.num_zero == b.numel and a.num_zero < a.numel),
        "saturated": other.fault == "saturated",
        "size": a.numel != b.numel,
        "out of range": low is not None and reach >= low.overflow,
        "differs": not any(_alike(one, other, tolerance, factor) for factor in (1, scale)),
    }
    return [flag for flag, does in applies.items() if does]


def _alike(one: ValueRecord, other: ValueRecord, tolerance: float, factor: float) -> bool:
    """Whether maximum, minimum and mean are close, measured by the largest magnitude of the reference."""
    pairs = [(factor * getattr(one.stats, name), getattr(other.stats, name)) for name in _RATIOS]
    known = [(a, b) for a, b in pairs if isfinite(a) and abs(a) < factor * SENTINEL]
    scale = max((abs(a) for a, _ in known), default=0.0)
    return all(isfinite(b) and abs(a - b) <= tolerance * scale for a, b in known)


def _cells(row: AccuracyRow) -> list[Cell]:
    record = row.reference or row.result
    node = record.node if record is not None else ""
    cells: list[Cell] = [row.step, row.op, node, row.tensor, ", ".join(row.flags) or None]
    for side in (row.reference, row.result):
        if side is None:
            cells += [None] * len(_SIDES)
        else:
            cells += [side.dtype, *(getattr(side.stats, name) for name in _SIDES[1:])]
    return [*cells, *(row.ratio(name) for name in _RATIOS)]


_LAYER_COLUMNS: Final[Mapping[str, Callable[[LayerDiff], Cell]]] = {
    "position": lambda row: row.position,
    "op": lambda row: row.op,
    "node": lambda row: row.node,
    "tensor": lambda row: row.value,
    "dtype": lambda row: row.dtype,
    "flags": lambda row: next((m.alarm for m in (row.local, row.accumulated) if m and m.alarm), None),
    "local rel L2": lambda row: _of(row.local, "rel_l2"),
    "accumulated rel L2": lambda row: _of(row.accumulated, "rel_l2"),
    "accumulated SNR dB": lambda row: _of(row.accumulated, "snr_db"),
    "accumulated cosine": lambda row: _of(row.accumulated, "cosine"),
    "largest error": lambda row: _of(row.accumulated, "error_max"),
    "reference max |x|": lambda row: _of(row.accumulated, "reference_max"),
    "result max |x|": lambda row: _of(row.accumulated, "found_max"),
    "numel": lambda row: _of(row.accumulated, "elements"),
    "reference num_nan": lambda row: _of(row.accumulated, "reference_nan"),
    "reference num_inf": lambda row: _of(row.accumulated, "reference_inf"),
    "reference num_zero": lambda row: _of(row.accumulated, "reference_zero"),
    "result num_nan": lambda row: _of(row.accumulated, "found_nan"),
    "result num_inf": lambda row: _of(row.accumulated, "found_inf"),
    "result num_zero": lambda row: _of(row.accumulated, "found_zero"),
    "note": lambda row: row.note,
}


def _of(measured: Measurement | None, name: str) -> Cell:
    found: float | None = None if measured is None else getattr(measured, name)
    return found


def compare_models(
    reference: ModelSource,
    result: ModelSource,
    output_filename: str | PathLike[str],
    samples: SamplesLike | None = None,
    *,
    limits: Limits | None = None,
    provider: Provider | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Run two models on the same inputs and write a table of every value that they share.

    The short way to what :func:`compare_accuracy` tells, and more: real errors instead of differing statistics, and
    ``local``, the error that the op itself makes of the reference's inputs.

    Args:
        output_filename: the table; ``.xlsx`` or ``.csv``.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts; made up where None.

    The others are those of :func:`onnxamp._numerics.diff.diff_models`.

    Returns:
        The comparison; ``passed`` says whether the outputs are within the limits, ``first_bad`` where it goes wrong.

    Raises:
        ArgumentError: the samples do not fit, or the ending of the table is unknown. ModelError: a model cannot be
            read. RuntimeFailure: one does not run. OutputError: the table cannot be written.
    """
    path = table_path(output_filename)
    found = diff_models(
        reference, result, samples, layers=True, limits=limits, provider=provider, seed=seed, count=count, dims=dims,
        progress=progress,
    )  # fmt: skip
    if not found.outputs and (found.skipped or found.failure):
        raise RuntimeFailure(found.skipped or found.failure or "")
    _write_layers(path, found.layers, found.first_bad)
    return found


def _write_layers(path: "PathLike[str]", layers: Sequence[LayerDiff], first: FirstBad | None) -> None:
    flags, tensor = list(_LAYER_COLUMNS).index("flags"), list(_LAYER_COLUMNS).index("tensor")
    rows = [[cell(row) for cell in _LAYER_COLUMNS.values()] for row in layers]
    for row in rows:
        if first is not None and row[tensor] == first.value:
            row[flags] = f"starts here: {first.alarm}"
    write_table(table_path(path), tuple(_LAYER_COLUMNS), rows, alarming=lambda cells: bool(cells[flags]))
