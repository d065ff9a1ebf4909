"""Views of results in a shell, in a notebook, and as a pandas DataFrame.

Each kind of result loads only its own report.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console

from onnxamp._base.errors import ArgumentError, MissingPackageError
from onnxamp._base.extensions import extensions
from onnxamp._report.parts import Report
from onnxamp._report.terminal import as_text

if TYPE_CHECKING:
    import pandas as pd

_WIDTH: Final = 100
_LINES: Final = 30
"""The size of a screen, to which interactive shells shorten a report."""


class _View(NamedTuple):
    """The module and the function of the report, and the fields with records, the usual one first."""

    module: str
    function: str
    tables: Sequence[str]

    def report(self, result: Any) -> Report:
        module = import_module(self.module)
        report: Report = getattr(module, self.function)(result)
        return report


_VIEWS: Final[Mapping[str, _View]] = {
    "Plan": _View(
        "onnxamp._report.inspect",
        "plan_report",
        ("rows", "hazards", "quantized", "units"),
    ),
    "Conversion": _View(
        "onnxamp._report.conversion", "conversion_report", ("weights",)
    ),
    "DiffReport": _View(
        "onnxamp._report.comparison",
        "diff_report",
        ("outputs", "layers", "judgements", "detections"),
    ),
    "RunCheck": _View("onnxamp._report.check", "run_report", ("values",)),
    "Audit": _View(
        "onnxamp._report.check", "check_report", ("nodes", "findings", "scales")
    ),
    "Tuned": _View("onnxamp._report.tuning", "outcome_report", ("candidates", "kept")),
    "BenchReport": _View(
        "onnxamp._report.bench", "bench_report", ("timings", "models", "causes")
    ),
    "OpView": _View("onnxamp._report.ops", "op_report", ("facts",)),
}


def _view(result: Any) -> _View:
    """Return the view of a result, which may be one that a room apart offers."""
    name = type(result).__name__
    offer = extensions("views").get(name)
    if offer is not None:
        return _View(offer.module, offer.function, offer.tables)
    return _VIEWS[name]


def as_screen(result: Any) -> str:
    """Return the report in plain text, as much as fits on a screen."""
    console = Console(
        file=io.StringIO(),
        width=_WIDTH,
        color_system=None,
        highlight=False,
        force_jupyter=False,
    )
    with console.capture() as capture:
        console.print(as_text(_view(result).report(result), more=""))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], "…"]
    return "\n".join(lines)


def as_html(result: Any) -> str:
    """Return the report as HTML for a notebook: the parts of the page, without a script, with styles of its own."""
    from onnxamp._report.html.render import render_part  # noqa: PLC0415 - only notebooks need jinja2

    return render_part(
        _view(result).report(result),
        result if type(result).__name__ == "Tuned" else None,
    )


def as_frame(result: Any, table: str) -> "pd.DataFrame":
    """Return the records of a result, with a column for each field; fields of records within records follow a dot.

    Raises:
        ArgumentError: the result has no records of that name. MissingPackageError: pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - it is optional, and large
    except ImportError:
        raise MissingPackageError(
            "to_pandas needs pandas: install it with 'pip install pandas'."
        ) from None
    names = _view(result).tables
    name = table or names[0]
    if name not in names:
        raise ArgumentError(
            f"There is no table {table!r}: choose one of {', '.join(names)}."
        )
    records = getattr(result, name)
    if isinstance(records, Mapping):
        return pd.DataFrame(
            [{"name": key} | _flat(record) for key, record in records.items()]
        )
    return pd.DataFrame([_flat(record) for record in records])


def _flat(record: Any) -> dict[str, Any]:
    """Return the fields of a record, and the properties computed from them."""
    names = [item.name for item in fields(record)]
    members = vars(type(record)).items()
    names += [name for name, member in members if isinstance(member, property)]
    row: dict[str, Any] = {}
    for name in names:
        value = getattr(record, name)
        if is_dataclass(value):
            for inner, own in _flat(value).items():
                row[f"{name}.{inner}"] = own
        else:
            row[name] = value
    return row
