"""Reports as JSON: everything that was measured, under stable names. Comparisons can be read back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from onnxamp._audit import Audit
from onnxamp._bench.records import BenchReport
from onnxamp._convert.convert import Conversion
from onnxamp._errors import ArgumentError
from onnxamp._extract import Region
from onnxamp._model.storage import weight_bytes
from onnxamp._numerics.metrics import LOWNESS
from onnxamp._numerics.results import DiffReport, RunCheck
from onnxamp._ops.facts import op_key
from onnxamp._report.check import check_status
from onnxamp._report.comparison import status_of
from onnxamp._report.extract import value_facts
from onnxamp._report.tuning import tuning_status
from onnxamp._tuning.results import Tuned

_FORMAT: Final = 1
"""Version of the JSON forms."""


def conversion_json(made: Conversion, validation: DiffReport | None) -> str:
    """A conversion without its decisions (``--save-plan`` writes those), and the validation."""
    return document("convert", _conversion(made) | {"verdict": status_of(validation), "validation": validation})


def tuning_json(made: Conversion, tuned: Tuned) -> str:
    """A conversion likewise, and the tuning under "tuning"."""
    facts = as_data(tuned)
    del facts["plan"]
    for row, candidate in zip(facts["candidates"], tuned.candidates, strict=True):
        row["low"] = sorted(candidate.low)
    return document("tune", _conversion(made) | {"verdict": tuning_status(tuned), "tuning": facts})


def diff_json(report: DiffReport) -> str:
    """A comparison, for :func:`load_diff`."""
    return document("diff", {"passed": report.passed, "verdict": status_of(report), **as_data(report)})


def check_json(audit: Audit | None, run: RunCheck | None) -> str:
    """What a check found."""
    return document("check", {"verdict": check_status(audit, run), "static": audit, "run": run})


def bench_json(report: BenchReport) -> str:
    """A benchmark; times in seconds, memory in bytes."""
    return document("bench", {"report": report})


def region_json(region: Region, files: Sequence[Path]) -> str:
    """What was cut, what was recorded, and where it was written."""
    nodes = zip(region.nodes, region.model.graph.node, strict=True)
    facts = {
        "source": region.source,
        "around": region.around,
        "nodes": [{"node": name, "op": op_key(node)} for name, node in nodes],
        "total": region.total,
        "weight_bytes": weight_bytes(region.model),
        "ran_on": region.ran_on,
        "sample": region.sample,
        "inputs": [value_facts(name, array) for name, array in region.inputs.items()],
        "expected": [value_facts(name, array) for name, array in region.expected.items()],
        "differing": region.differing,
        "notes": region.notes,
        "files": dict(zip(("model", "inputs", "expected"), files, strict=True)),
    }
    return document("extract", facts)


def _conversion(made: Conversion) -> dict[str, Any]:
    facts: dict[str, Any] = as_data(replace(made, plan=replace(made.plan, rows=())))
    del facts["plan"]["rows"]
    return facts


def load_diff(path: Path) -> DiffReport:
    """Read a comparison that :func:`diff_json` wrote.

    Raises:
        ArgumentError: the file is missing, or no comparison.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["onnxamp"] != "diff" or data["format"] != _FORMAT:
            raise ArgumentError(
                f"{str(path)!r} is not a comparison that this version of onnxamp reads; save one with --save."
            )
        found: DiffReport = _from_data(DiffReport, data)
        _check(found)
    except OSError as error:
        raise ArgumentError(f"Cannot read the comparison {str(path)!r}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{str(path)!r} is no comparison; save one with onnxamp diff --save.") from None
    return found


def _check(found: DiffReport) -> None:
    """What types do not say.

    Raises:
        ValueError: the numbers cannot come from a comparison.
    """
    measured = (m for row in found.layers for m in (row.local, row.accumulated) if m is not None)
    if found.lowest not in LOWNESS or any(m.error_energy < 0 or m.reference_energy < 0 for m in measured):
        raise ValueError(found.lowest)


def document(kind: str, facts: Mapping[str, Any]) -> str:
    """One JSON object: ``kind`` is the command that made it, and stands in it before the facts, with the version."""
    return json.dumps({"onnxamp": kind, "format": _FORMAT, **as_data(facts)}, indent=1, allow_nan=False)


def as_data(item: Any) -> Any:
    """Dataclasses, mappings and tuples as what JSON knows; infinities and NaN as strings."""
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: as_data(getattr(item, field.name)) for field in fields(item)}
    if isinstance(item, Mapping):
        return {" ".join(key) if isinstance(key, tuple) else str(key): as_data(value) for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        return [as_data(value) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return str(item) if isinstance(item, Path) else item


def _from_data(kind: Any, data: Any) -> Any:
    """The inverse of :func:`as_data` for the records of a comparison.

    Raises:
        TypeError, KeyError, ValueError: the data are no such record.
    """
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if data is None and type(None) in options:
        return None
    # Where a string is possible beside a number it stays one: worst elements may be either.
    kind = str if isinstance(data, str) and str in options else options[0]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{field.name: _from_data(hints[field.name], data[field.name]) for field in fields(kind)})
    if get_origin(kind) is tuple:
        return tuple(_from_data(get_args(kind)[0], item) for item in data)
    if kind is float and isinstance(data, (str, int, float)):
        return float(data)
    if not isinstance(data, kind):
        raise TypeError(kind)
    return data
