"""Reports as JSON: everything that was measured, under stable names. Comparisons can be read back."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from onnxamp._errors import ArgumentError
from onnxamp._numerics.metrics import LOWNESS
from onnxamp._numerics.results import DiffReport
from onnxamp._report.comparison import status_of

_FORMAT: Final = 1
"""Version of the JSON forms."""


def diff_json(report: DiffReport) -> str:
    """A comparison, for :func:`load_diff`."""
    return document("diff", {"passed": report.passed, "verdict": status_of(report), **as_data(report)})


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
