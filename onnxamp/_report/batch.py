"""What became of a folder of models: a table, and below it what failed and why."""

from typing import Final

from onnxamp._job.folder import FolderReport
from onnxamp._job.folder import Row as Outcome
from onnxamp._report import parts
from onnxamp._report.text import count, number, size

STATUSES: Final = {
    "converted": parts.Status.PASSED,
    "up to date": parts.Status.PASSED,
    "failed": parts.Status.FAILED,
    "failed before": parts.Status.FAILED,
}


def status_of(row: Outcome) -> parts.Status:
    """What is known of a model; of one that was converted and not validated, nothing."""
    return parts.Status.UNKNOWN if row.message and not row.has_failed else STATUSES[row.outcome]


def batch_report(report: FolderReport) -> parts.Report:
    """One row per model, and then failures, and what was not validated."""
    failed = [row for row in report.rows if row.has_failed]
    unseen = [row for row in report.rows if not row.has_failed and row.message]
    warned = [(row, text) for row in report.rows for text in row.warnings]
    columns = ("model", "result", "nodes low", "new Casts", "error", "weights", "seconds")
    return parts.Report(
        "convert folder",
        _verdict(report),
        sections=(
            parts.section(
                "Models",
                [
                    parts.table(
                        columns, map(_row, report.rows), right=range(2, 7), drop=(6, 5, 3, 2)
                    )
                ],
            ),
            parts.section(
                "Failures", (parts.Item(row.message, parts.Level.ERROR, row.name) for row in failed)
            ),
            parts.section(
                "Tracebacks", (_trace(row) for row in failed if row.trace), is_detail=True
            ),
            parts.section(
                "Kept in float32 to pass validation",
                (
                    parts.Item(row.healed, parts.Level.WARNING, row.name, row.kept)
                    for row in report.rows
                    if row.healed
                ),
            ),
            parts.section(
                "Not validated",
                (parts.Item(row.message, parts.Level.NOTE, row.name) for row in unseen),
            ),
            parts.section(
                "Notes", (parts.Item(text, parts.Level.NOTE, row.name) for row, text in warned)
            ),
        ),
    )


def row_line(row: Outcome) -> str:
    """One model in one line."""
    if row.has_failed:
        return f"{row.name}  {row.outcome}: {row.message}"
    error = (
        ", not validated"
        if row.message
        else f", error {number(row.error)}"
        if row.error is not None
        else ""
    )
    facts = f"{row.low} of {count(row.nodes, 'node')} low, +{count(row.casts, 'Cast')}{error}, {row.seconds:.2f} s"
    return f"{row.name}  {row.outcome}: {facts}"


def _row(row: Outcome) -> parts.Row:
    error = "" if row.error is None else number(row.error)
    seconds = f"{row.seconds:.2f}" if row.seconds else ""
    known = (f"{row.low} of {row.nodes}", f"+{row.casts}", error, size(row.bytes_after))
    is_known = not row.has_failed or row.nodes
    return parts.Row(
        (row.name, row.outcome, *(known if is_known else ("",) * 4), seconds), status_of(row)
    )


def _trace(row: Outcome) -> parts.Item:
    return parts.Item("", parts.Level.NONE, row.name, tuple(row.trace.splitlines()))


def _verdict(report: FolderReport) -> parts.Verdict:
    outcomes = ", ".join(
        f"{report.count(outcome)} {outcome}" for outcome in STATUSES if report.count(outcome)
    )
    unseen = sum(status_of(row) is parts.Status.UNKNOWN for row in report.rows)
    outcomes += f"; {unseen} not validated" if unseen else ""
    before, after = (
        sum(getattr(row, name) for row in report.rows) for name in ("bytes_before", "bytes_after")
    )
    processes = f"{report.jobs} process" + ("" if report.jobs == 1 else "es")
    effort = f"Weights {size(before)} → {size(after)}; {report.seconds:.1f} s in {processes}."
    status = (
        parts.Status.FAILED if any(row.has_failed for row in report.rows) else parts.Status.PASSED
    )
    why = "Nothing changed since these models failed, so nothing was tried; --retry tries again."
    again = (why,) if report.count("failed before") else ()
    sentence = f"{count(len(report.rows), 'model')}: {outcomes or 'nothing to do'}."
    return parts.Verdict(status, sentence, (effort, *again))
