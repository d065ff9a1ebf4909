"""Comparing two runs value by value, in a table on disk."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from os import PathLike
from typing import Final

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, RuntimeFailure
from onnxamp._base.numbers import checked_number
from onnxamp._facts.dtypes import FORMATS
from onnxamp._model.model import ModelSource
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.diff_models import diff_models
from onnxamp._numerics.differences.metrics import LOWNESS, TOLERANCES
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.results import DiffReport, FirstBad, LayerDiff
from onnxamp._options.doors import door
from onnxamp._runtime.engines import Progress
from onnxamp._runtime.inputs.samples import SamplesLike
from onnxamp._runtime.sessions.session import Provider
from onnxamp.debugging._records import ValueRecord, read_dump
from onnxamp.debugging._tables import Cell, table_path, write_table


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """One value in two runs.

    Attributes:
        step: the number of the run, from 0.
        tensor: the name of the value.
        reference, result: the records of the value in the two runs; None for a run without it.
        flags: the problems of the result, worst first:

    ==============  ================================================================================================
    NaN             the result has more NaNs than the reference
    overflow        it has more infinities
    underflow       it is all zero but the reference is not, or an op flushed too much of it to zero
    saturated       an op saturated at the largest number of its type
    size            it has a different number of elements
    out of range    the reference exceeds the largest number of the result's type
    differs         maximum, minimum or mean differ by more than the precision explains
    ==============  ================================================================================================

    Example:
        >>> from onnxamp.debugging import AccuracyRow
        >>> AccuracyRow(step=0, tensor="y", reference=None, result=None, flags=()).ratio("max") is None
        True
    """

    step: int
    tensor: str
    reference: ValueRecord | None
    result: ValueRecord | None
    flags: tuple[str, ...]

    @property
    def op(self) -> str:
        """The op type of the node that produces the value."""
        record = self.reference or self.result
        return record.op if record is not None else ""

    def ratio(self, name: str) -> float | None:
        """Return the ratio of the "max", "min" or "mean" of the result to the reference's; None if one is missing, or
        the reference is zero.
        """
        if self.reference is None or self.result is None:
            return None
        reference: float = getattr(self.reference.stats, name)
        result: float = getattr(self.result.stats, name)
        return result / reference if reference else None


_SIDES: Final = (
    "dtype",
    "numel",
    "max",
    "min",
    "mean",
    "num_nan",
    "num_inf",
    "num_zero",
)
_RATIOS: Final = ("max", "min", "mean")
_HEADS: Final = (
    "step",
    "op",
    "node",
    "tensor",
    "flags",
    *(f"reference {name}" for name in _SIDES),
    *(f"result {name}" for name in _SIDES),
    *(f"ratio of {name}" for name in _RATIOS),
)


_Key = tuple[int, str]
"""The number of a run and the name of a value."""


@door
def compare_accuracy(
    dump_path: str | PathLike[str],
    another_dump_path: str | PathLike[str],
    output_filename: str | PathLike[str],
    loss_scale: float = 1,
    dump_all_tensors: bool = False,
) -> tuple[AccuracyRow, ...]:
    """Compare two dumps value by value, in a table.

    The counterpart of ``paddle.amp.debugging.compare_accuracy``. Values are paired by run number and by name;
    conversion does not change names.

    Args:
        dump_path: the dump of the reference, usually the float32 model, written by a checker in mode ``CHECK_ALL``: its
            ``output_dir``, or the file of one run.
        another_dump_path: the dump of the result.
        output_filename: the table, ``.xlsx`` or ``.csv`` (Paddle always writes a spreadsheet).
        loss_scale: the factor by which the result may exceed the reference, as scaled gradients do; 1 for inference.
        dump_all_tensors: also list values that only one dump has, such as the Casts of a conversion (Paddle does not
            support True).

    Returns:
        The rows of the table, in the order of execution (Paddle returns nothing).

    Raises:
        ArgumentError: a dump cannot be read, the suffix of the table is unknown, or the dumps share no value.
        OutputError: the table cannot be written.

    Example:
        >>> import onnxamp
        >>> from onnxamp.debugging import DebugMode, InferenceSession, TensorCheckerConfig, tensor_checker
        >>> feeds = onnxamp.random_samples("models/encoder.onnx")[0]
        >>> for folder, level in (("exact", "O0"), ("low", "O2")):
        ...     session = InferenceSession(onnxamp.convert_model("models/encoder.onnx", level))
        ...     with tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_ALL, output_dir=folder)):
        ...         outputs = session.run(None, feeds)
        >>> rows = onnxamp.debugging.compare_accuracy("exact", "low", "table.csv")
        >>> [row.tensor for row in rows if "NaN" in row.flags]
        []
    """
    path = table_path(output_filename)
    checked_number("loss_scale", loss_scale, "greater than 0", lambda n: n > 0)
    one = {(row.step, row.tensor): row for row in read_dump(dump_path)}
    other = {(row.step, row.tensor): row for row in read_dump(another_dump_path)}
    if not one.keys() & other.keys():
        raise ArgumentError(
            "The dumps have no value in common: are they of the same model, and in mode CHECK_ALL?"
        )
    both = (*one.values(), *other.values())
    kinds = {row.dtype for row in both} & LOWNESS.keys()
    lowest = min(kinds, key=LOWNESS.__getitem__, default="float32")
    keys = [key for key in one if key in other]
    if dump_all_tensors:
        keys = _merged(one, other)
    rows = []
    for key in sorted(keys, key=lambda key: key[0]):
        a = one.get(key)
        b = other.get(key)
        flags = _flags(a, b, TOLERANCES[lowest], loss_scale) if a and b else ()
        rows.append(AccuracyRow(*key, a, b, tuple(flags)))
    write_table(path, _HEADS, map(_cells, rows))
    return tuple(rows)


def _merged(one: Iterable[_Key], other: Iterable[_Key]) -> list[_Key]:
    """Return the keys of two dumps in the order of execution.

    Those that only the second one has follow the last common one before them.
    """
    first = list[_Key]()
    following: dict[_Key, list[_Key]] = {key: [key] for key in one}
    place = first
    for key in other:
        place = following.get(key, place)
        if key not in following:
            place.append(key)
    return [*first, *chain.from_iterable(following.values())]


def _flags(
    one: ValueRecord, other: ValueRecord, tolerance: float, scale: float
) -> list[str]:
    """Return the problems of a result, worst first; see :class:`AccuracyRow`."""
    a = one.stats
    b = other.stats
    low = FORMATS.get(other.dtype)
    ends = (abs(x) for x in (a.max, a.min))
    reach = max((x for x in ends if isfinite(x) and x < SENTINEL), default=0.0)
    is_flushed = other.fault in ("vanished", "flushed", "all zero")
    is_zero = b.numel > 1 and b.num_zero == b.numel and a.num_zero < a.numel
    # Only gradients are scaled, and nothing tells which values are gradients.
    is_alike = any(_alike(one, other, tolerance, factor) for factor in (1, scale))
    applies = {
        "NaN": b.num_nan > a.num_nan,
        "overflow": b.num_inf > a.num_inf,
        "underflow": is_flushed or is_zero,
        "saturated": other.fault == "saturated",
        "size": a.numel != b.numel,
        "out of range": low is not None and reach >= low.overflow,
        "differs": not is_alike,
    }
    return [flag for flag, does in applies.items() if does]


def _alike(
    one: ValueRecord, other: ValueRecord, tolerance: float, factor: float
) -> bool:
    """Return whether maximum, minimum and mean are close, relative to the largest of the three in the reference."""
    pairs = [
        (factor * getattr(one.stats, name), getattr(other.stats, name))
        for name in _RATIOS
    ]
    known = [(a, b) for a, b in pairs if isfinite(a) and abs(a) < factor * SENTINEL]
    scale = max((abs(a) for a, _ in known), default=0.0)
    return all(isfinite(b) and abs(a - b) <= tolerance * scale for a, b in known)


def _cells(row: AccuracyRow) -> list[Cell]:
    record = row.reference or row.result
    node = record.node if record is not None else ""
    cells: list[Cell] = [
        row.step,
        row.op,
        node,
        row.tensor,
        ", ".join(row.flags) or None,
    ]
    for side in (row.reference, row.result):
        if side is None:
            cells += [None] * len(_SIDES)
        else:
            cells += [side.dtype, *(getattr(side.stats, name) for name in _SIDES[1:])]
    return [*cells, *(row.ratio(name) for name in _RATIOS)]


_LAYER_COLUMNS: Final = {
    "position": "position",
    "op": "op",
    "node": "node",
    "tensor": "value",
    "dtype": "dtype",
    "flags": "alarm",
    "local rel L2": "local.rel_l2",
    "accumulated rel L2": "accumulated.rel_l2",
    "accumulated SNR dB": "accumulated.snr_db",
    "accumulated cosine": "accumulated.cosine",
    "largest error": "accumulated.error_max",
    "reference max |x|": "accumulated.reference_max",
    "result max |x|": "accumulated.found_max",
    "numel": "accumulated.elements",
    "reference num_nan": "accumulated.reference_nan",
    "reference num_inf": "accumulated.reference_inf",
    "reference num_zero": "accumulated.reference_zero",
    "result num_nan": "accumulated.found_nan",
    "result num_inf": "accumulated.found_inf",
    "result num_zero": "accumulated.found_zero",
    "note": "note",
}
"""Columns of a layer table: attributes of a :class:`LayerDiff`, and of its measurements."""


@door
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
    """Run two models on the same inputs, and write a table of all values that they share.

    Unlike :func:`compare_accuracy`, this function needs no dumps, and it computes real errors: ``accumulated`` errors,
    and the ``local`` error of each op on the inputs of the reference.

    Args:
        reference, result: ModelProtos with their weights loaded, paths, or onnx-graphsurgeon Graphs.
        output_filename: the table, ``.xlsx`` or ``.csv``.
        samples: inputs of the models: a dict of arrays, an iterable of dicts, a path (.npz, .json or a folder), or
            :class:`onnxamp.Samples`; None for random ones.
        limits, provider, progress: as for :func:`onnxamp.diff_models`.
        seed, count, dims: the seed, number and named sizes of random samples.

    Returns:
        The comparison: ``passed`` is whether the outputs are within the limits, and ``first_bad`` is where errors
        start.

    Raises:
        ArgumentError: the samples do not fit the models, or the suffix of the table is unknown.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: a model cannot be read.
        RuntimeFailure: a model does not run.
        OutputError: the table cannot be written.

    Example:
        >>> import onnxamp
        >>> model16 = onnxamp.convert_model("models/encoder.onnx", "O2")
        >>> onnxamp.debugging.compare_models("models/encoder.onnx", model16, "table.xlsx").passed
        True
    """
    path = table_path(output_filename)
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(
            f"progress must be a function, not {type(progress).__name__}."
        )
    if limits is not None and not isinstance(limits, Limits):
        raise ArgumentTypeError(
            f"limits must be onnxamp.Limits, not {type(limits).__name__}."
        )
    report = diff_models(
        reference,
        result,
        samples,
        layers=True,
        limits=limits,
        provider=provider,
        seed=seed,
        count=count,
        dims=dims,
        progress=progress,
    )
    if not report.outputs and (report.skipped or report.failure):
        raise RuntimeFailure(report.skipped or report.failure or "")
    rows = (_layer_cells(row, report.first_bad) for row in report.layers)
    write_table(path, tuple(_LAYER_COLUMNS), rows)
    return report


def _layer_cells(row: LayerDiff, first: FirstBad | None) -> list[Cell]:
    sides = filter(None, (row.local, row.accumulated))
    alarm = next(filter(None, (side.alarm for side in sides)), None)
    if first is not None and row.value == first.value:
        alarm = f"starts here: {first.alarm}"
    cells: list[Cell] = []
    for path in _LAYER_COLUMNS.values():
        owner, _, name = path.rpartition(".")
        source = getattr(row, owner) if owner else row
        cells.append(alarm if name == "alarm" else getattr(source, name, None))
    return cells
