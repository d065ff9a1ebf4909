"""Reports as JSON: everything that was measured, under stable names. Comparisons can be read back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from onnxamp._errors import ArgumentError
from onnxamp._numerics.metrics import LOWNESS
from onnxamp._numerics.results import DiffReport
from onnxamp._paths.paths import cannot_read
from onnxamp._report.comparison import status_of
from onnxamp._state import as_data, from_data

_FORMAT: Final = 1
"""Version of the JSON forms."""


def diff_json(report: DiffReport) -> str:
    """Return a comparison, for :func:`load_diff`."""
    return document(
        "diff",
        {"passed": report.passed, "verdict": status_of(report), **as_data(report)},
    )


def load_diff(path: Path) -> DiffReport:
    """Read a comparison that :func:`diff_json` wrote.

    Raises:
        ArgumentError: the file is missing, or no comparison.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["onnxamp"] != "diff" or data["format"] != _FORMAT:
            raise ArgumentError(
                f"{str(path)!r} is not a comparison that this version of onnxamp reads: save one with --save."
            )
        found: DiffReport = from_data(DiffReport, data)
        _check(found)
    except OSError as error:
        raise cannot_read(f"the comparison {str(path)!r}", error) from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{str(path)!r} is not a comparison: save one with onnxamp diff --save."
        ) from None
    return found


def _check(found: DiffReport) -> None:
    """Check constraints that types do not express.

    Raises:
        ValueError: the numbers cannot come from a comparison.
    """
    measured = (
        m for row in found.layers for m in (row.local, row.accumulated) if m is not None
    )
    if found.lowest not in LOWNESS or any(
        m.error_energy < 0 or m.reference_energy < 0 for m in measured
    ):
        raise ValueError(found.lowest)


def document(kind: str, facts: Mapping[str, Any]) -> str:
    """One JSON object: ``kind`` is the command that made it. It precedes the facts, with the version."""
    return json.dumps(
        {"onnxamp": kind, "format": _FORMAT, **as_data(facts)},
        indent=1,
        allow_nan=False,
    )
