"""Views of results in a shell, in a notebook, and as a pandas DataFrame.

Each kind of result loads only its own report.
"""

import io
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from onnxamp._base.errors import ArgumentError, MissingPackageError
from onnxamp._base.extensions import Extension, extensions
from onnxamp._report.parts import Report
from onnxamp._report.terminal import as_text

if TYPE_CHECKING:
    import pandas as pd

_WIDTH: Final = 100
_LINES: Final = 30
"""The size of a screen, to which interactive shells shorten a report."""


_VIEWS: Final[Mapping[str, Extension]] = {
    "Plan": Extension(
        module="onnxamp._report.inspect",
        function="plan_report",
        tables=("rows", "hazards", "quantized", "units"),
    ),
    "Conversion": Extension(
        module="onnxamp._report.conversion",
        function="conversion_report",
        tables=("weights",),
    ),
    "DiffReport": Extension(
        module="onnxamp._report.comparison",
        function="diff_report",
        tables=("outputs", "layers", "judgements", "detections"),
    ),
    "RunCheck": Extension(
        module="onnxamp._report.check", function="run_report", tables=("values",)
    ),
    "Audit": Extension(
        module="onnxamp._report.check",
        function="check_report",
        tables=("nodes", "findings", "scales"),
    ),
    "Tuned": Extension(
        module="onnxamp._report.tuning",
        function="outcome_report",
        tables=("candidates", "kept"),
    ),
    "BenchReport": Extension(
        module="onnxamp._report.bench",
        function="bench_report",
        tables=("timings", "models", "causes"),
    ),
    "OpView": Extension(
        module="onnxamp._report.ops", function="op_report", tables=("facts",)
    ),
}
"""By the kind of a result: the report, and the fields with records, the usual one first. They have the form in which
rooms apart offer those of their own results.
"""


def _view(result: Any) -> Extension:
    """Return the view of a result, which may be one that a room apart offers."""
    name = type(result).__name__
    return extensions("views").get(name) or _VIEWS[name]


def _report(result: Any) -> Report:
    view = _view(result)
    report: Report = getattr(view.load(), view.function)(result)
    return report


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
        console.print(as_text(_report(result)))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], "…"]
    return "\n".join(lines)


def as_html(result: Any) -> str:
    """Return the report as HTML for a notebook: the parts of the page, without a script, with styles of its own."""
    from onnxamp._report.html.render import render_part  # noqa: PLC0415 - only notebooks need jinja2

    return render_part(
        _report(result),
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
