"""Report of a folder of models: a table, followed by failures and their reasons; also as pages, one per model, and an
index with a table of them that sorts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, get_args

from onnxamp._base.words import count
from onnxamp._decide.verdicts import title_of
from onnxamp._fleet.outcome import FolderReport, ModelOutcome, OutcomeName, Shipped
from onnxamp._report import number, size
from onnxamp._report.comparison import partings, text_figures
from onnxamp._report.parts import (
    Headline,
    Report,
    Severity,
    Statement,
    Status,
    TableRow,
    section,
    table,
)

_UNLOWERED: Final = "nothing lowered"
"""The outcome of a model whose result is all float32."""


def status_of(row: ModelOutcome) -> Status:
    """Return the verdict on a model, as its own report has it; it is unknown if the model was not validated."""
    if row.has_failed:
        return Status.FAILED
    if row.message:
        return Status.UNKNOWN
    if row.drawback or row.gains_nothing:
        return Status.NO_GAIN
    return Status.PASSED


def batch_report(report: FolderReport) -> Report:
    """Return one row per model, followed by failures and models that were not validated."""
    return Report(
        "convert folder",
        _verdict(report),
        sections=(
            section("Models", table("folder", map(_row, report.rows))),
            section("Failures", _failures(report.rows)),
            section("Tracebacks", _traces(report.rows), is_detail=True),
            section("Kept in float32 to pass validation", _healed(report.rows)),
            section("Would break in low precision", _hazards(report.rows)),
            section(
                "Logits against the original", _of_each(report.rows, _next_tokens)
            ),
            section("Not validated", _unvalidated(report.rows)),
            section("Folders", _folders(report.shipped)),
            section(
                "Notes",
                _of_each(report.rows, attrgetter("warnings")),
                _shared(report.rows),
            ),
        ),
    )


def _failures(rows: Iterable[ModelOutcome]) -> Iterator[Statement]:
    """Yield why models failed."""
    for row in rows:
        if row.has_failed:
            yield Statement(row.message, Severity.ERROR, row.name)


def _traces(rows: Iterable[ModelOutcome]) -> Iterator[Statement]:
    """Yield the tracebacks of unexpected errors."""
    for row in rows:
        if row.has_failed and row.trace:
            lines = tuple(row.trace.splitlines())
            yield Statement("", Severity.NONE, row.name, lines)


def _healed(rows: Iterable[ModelOutcome]) -> Iterator[Statement]:
    """Yield the nodes that stay in float32 because a first result failed."""
    for row in rows:
        if row.healed:
            yield Statement(row.healed, Severity.WARNING, row.name, row.kept)


def _unvalidated(rows: Iterable[ModelOutcome]) -> Iterator[Statement]:
    """Yield why results were not validated."""
    for row in rows:
        if row.message and not row.has_failed:
            yield Statement(row.message, label=row.name)


def _folders(shipped: Iterable[Shipped]) -> Iterator[Statement]:
    """Yield what happened to folders of a known kind."""
    for folder in shipped:
        label = "" if folder.name == "." else folder.name
        for text in _shipping(folder):
            yield Statement(text, label=label)


def _of_each(
    rows: Iterable[ModelOutcome], texts: Callable[[ModelOutcome], Iterable[str]]
) -> Iterator[Statement]:
    """Yield some sentences about each model."""
    for row in rows:
        for text in texts(row):
            yield Statement(text, label=row.name)


def _shared(rows: Iterable[ModelOutcome]) -> Iterator[Statement]:
    """Yield notes, each once, with the models that it is about."""
    named = dict[str, list[str]]()
    for row in rows:
        for text in (*_drawbacks(row), *row.notes):
            named.setdefault(text, []).append(row.name)
    for text, names in named.items():
        if len(names) == 1:
            yield Statement(text, label=names[0])
        else:
            yield Statement(text, label=count(len(names), "model"), members=(*names,))


def _drawbacks(row: ModelOutcome) -> Iterator[str]:
    """Yield what is worse than in the original, in a sentence."""
    if row.drawback:
        yield f"Converted, {row.drawback}: onnxamp convert on this model alone proposes options."


def result_of(row: ModelOutcome) -> str:
    """Return the outcome of a model as the table says it: a result that is all float32 was not converted."""
    is_new = row.outcome == "converted"
    return _UNLOWERED if is_new and row.gains_nothing else row.outcome


def _next_tokens(row: ModelOutcome) -> Iterator[str]:
    """Yield sentences about the comparison of a language model."""
    figures = list(text_figures(row))
    if figures:
        yield f"{', '.join(f'{one.label} {one.value}' for one in figures)}."
    yield from partings(row)


def _hazards(rows: Sequence[ModelOutcome]) -> Iterator[Statement]:
    """Yield why nodes stay in float32 that would break in low precision."""
    nodes = Counter[str]()
    models = Counter[str]()
    for row in rows:
        nodes.update(row.hazards)
        models.update(row.hazards.keys())
    for reason, times in nodes.most_common():
        where = f"{count(times, 'node')} in {count(models[reason], 'model')}"
        yield Statement(f"{title_of(reason)}.", label=where)


def _shipping(shipped: Shipped) -> Iterator[str]:
    """Yield sentences about a folder of a known kind."""
    if shipped.failed:
        names = ", ".join(shipped.failed)
        yield (
            f"The folder for {shipped.kind} is unchanged, because these models have no result: {names}."
            " Other results wait for the next run."
        )
        return
    copied = count(len(shipped.copied), "other file")
    usual = "its models have the types that are usual there"
    yield f"A folder for {shipped.kind}: {usual}, beside {copied} of the original."
    if shipped.left:
        names = ", ".join(shipped.left)
        yield f"Skipped, because by their names they are the same network in other types: {names}."
    if shipped.kept:
        names = ", ".join(shipped.kept)
        yield f"These files already exist with other contents and stay as they are: {names}."
    if shipped.linked:
        names = ", ".join(shipped.linked)
        yield f"Not copied, because they are links to files outside the folder: {names}. Copy the files that you need."


def row_line(row: ModelOutcome) -> str:
    """Return the outcome of one model in one line."""
    if row.has_failed:
        return f"{row.name}  {row.outcome}: {row.message}"
    error = "" if row.error is None else f", error {number(row.error)}"
    error = ", not validated" if row.message else error
    facts = f"{row.low} of {count(row.nodes, 'float node')} low, +{count(row.casts, 'Cast')}{error}, {row.seconds:.2f} s"
    return f"{row.name}  {result_of(row)}: {facts}"


def _row(row: ModelOutcome) -> TableRow:
    error = "" if row.error is None else number(row.error)
    seconds = f"{row.seconds:.2f}" if row.seconds else ""
    known = ("",) * 4
    if row.has_result:
        low = f"{row.low} of {row.nodes}"
        known = (low, f"+{row.casts}", error, size(row.bytes_after))
    return TableRow((row.name, result_of(row), *known, seconds), status_of(row))


def _status(report: FolderReport) -> Status:
    """Return the verdict on a folder: that of the worst model, but no gain only where no model gains."""
    statuses = {status_of(row) for row in report.rows}
    worst = [one for one in (Status.FAILED, Status.UNKNOWN) if one in statuses]
    if worst:
        return worst[0]
    return Status.NO_GAIN if statuses == {Status.NO_GAIN} else Status.PASSED


def _verdict(report: FolderReport) -> Headline:
    times = Counter(map(result_of, report.rows))
    converted, *others = get_args(OutcomeName)
    names = (converted, _UNLOWERED, *others)
    outcomes = ", ".join(f"{times[name]} {name}" for name in names if times[name])
    unseen = sum(status_of(row) is Status.UNKNOWN for row in report.rows)
    outcomes += f"; {unseen} not validated" if unseen else ""
    before = sum(row.bytes_before for row in report.rows) - report.read_again
    after = sum(row.bytes_after for row in report.rows)
    processes = count(report.jobs, "process")
    effort = f"Weights {size(before)} → {size(after)}; {report.seconds:.1f} s in {processes}."
    failed = ""
    if report.count("failed before"):
        failed = "These models failed before, and nothing has changed since: --retry tries them again."
    worse = ""
    if losing := sum(bool(row.drawback) for row in report.rows):
        worse = f"Larger than the original, or slower by the estimate: {count(losing, 'result')}, which the notes name."
    return Headline(
        _status(report),
        f"{count(len(report.rows), 'model')}: {outcomes or 'nothing to do'}.",
        tuple(filter(None, (effort, worse, failed))),
    )
