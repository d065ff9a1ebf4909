"""What became of a folder of models, as a table and, below it, what failed and why."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from onnxamp._batch.folder import FolderReport
from onnxamp._batch.state import Row
from onnxamp._report.parts import heading, line, make_table, plain, printable, size

_STYLES = {"converted": "green", "up to date": "dim", "failed": "red"}


def zoo_report(report: FolderReport, *, verbose: bool) -> RenderableType:
    """The table, the failures, and a line of totals."""
    table = make_table("model", "result", "nodes low", "Casts", "error", "weights", "seconds", right=(2, 3, 4, 5, 6))
    for row in report.rows:
        known = row.outcome != "failed" or row.nodes
        numbers = (
            (f"{row.low} of {row.nodes}", f"+{row.casts}", _error(row), size(row.bytes_after)) if known else ("",) * 4
        )
        seconds = f"{row.seconds:.2f}" if row.seconds else ""
        table.add_row(plain(row.name), Text(row.outcome, style=_STYLES[row.outcome]), *numbers, seconds)
    return Group(table, *_failures(report, verbose=verbose), *_unseen(report), Text(f"\n{_totals(report)}"))


def row_line(row: Row) -> str:
    """One model in one line."""
    if row.outcome == "failed":
        return printable(f"{row.name}  failed: {row.message}")
    error = f", error {_error(row)}" if row.error is not None else ""
    facts = f"{row.low} of {row.nodes} nodes low, +{row.casts} Casts{error}, {row.seconds:.2f} s"
    return printable(f"{row.name}  {row.outcome}: {facts}")


def _error(row: Row) -> str:
    return "" if row.error is None else f"{row.error:.1e}"


def _failures(report: FolderReport, *, verbose: bool) -> list[RenderableType]:
    failed = [row for row in report.rows if row.outcome == "failed"]
    parts: list[RenderableType] = [heading("Failures")] if failed else []
    for row in failed:
        parts.append(line(Text("✘", style="red"), plain(f"{row.name}: {row.message}")))
        if verbose and row.trace:
            parts.append(Padding(Text("\n").join(map(plain, row.trace.splitlines())), (0, 0, 0, 6)))
    return parts


def _unseen(report: FolderReport) -> list[RenderableType]:
    """Models whose results were not compared although that was wanted."""
    unseen = [row for row in report.rows if row.outcome != "failed" and row.message]
    return (
        [heading("Not validated"), *(line("•", plain(f"{row.name}: {row.message}")) for row in unseen)]
        if unseen
        else []
    )


def _totals(report: FolderReport) -> str:
    counts = ", ".join(f"{report.count(outcome)} {outcome}" for outcome in _STYLES if report.count(outcome))
    before, after = (sum(getattr(row, name) for row in report.rows) for name in ("bytes_before", "bytes_after"))
    processes = "1 process" if report.jobs == 1 else f"{report.jobs} processes"
    weights = f"weights {size(before)} → {size(after)}"
    return f"{len(report.rows)} models: {counts}; {weights}; {report.seconds:.1f} s, {processes}"
