"""Reports as files: as JSON for programs, and as Markdown for a pull request or the summary of a job on GitHub.

JSON has everything that was measured, under stable names, and comparisons can be read back. Names in Markdown come from
the model: markup, mentions and links in them are shown, not obeyed.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from onnxamp._base.errors import ArgumentError, printable
from onnxamp._base.paths import cannot_read
from onnxamp._base.state import as_data, from_data
from onnxamp._numerics.differences.metrics import LOWNESS
from onnxamp._numerics.results import DiffReport
from onnxamp._report import glued, said
from onnxamp._report.comparison import status_of
from onnxamp._report.parts import (
    MARKS,
    Bars,
    Figure,
    Gauges,
    NextStep,
    Part,
    Report,
    Section,
    Severity,
    Statement,
    Status,
    Table,
    bars_table,
    gauges_table,
    shown_rows,
)

_FORMAT: Final = 1
"""Version of the JSON forms."""
_SIGNS: Final = {
    Severity.NONE: "",
    Severity.NOTE: "",
    Severity.WARNING: "⚠️",
    Severity.ERROR: "❌",
}
_MEMBERS: Final = 5
"""The number of members of a statement that are shown without -v."""
_ROWS: Final = 12
"""The number of rows of a detail of which the terminal shows none without -v."""
_ACTIVE: Final = re.compile(r"[\\`*\[\]<>|~$&#]|(?<!\w)_|_(?!\w)")
"""Characters with a meaning in Markdown, except for underscores within words."""
_LINKED: Final = re.compile(r"@|https?:|www", re.IGNORECASE)
"""Text that GitHub turns into links, unless a comment follows."""


def diff_json(report: DiffReport) -> str:
    """Return a comparison, for :func:`load_diff`."""
    return document("diff", diff_facts(report))


def diff_facts(report: DiffReport) -> dict[str, Any]:
    """Return a comparison in JSON's types, after the verdict on it."""
    return {
        "passed": report.passed,
        "verdict": status_of(report),
        **as_data(report),
    }


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
        report: DiffReport = from_data(DiffReport, data)
        _check(report)
    except OSError as error:
        raise cannot_read(f"the comparison {str(path)!r}", error) from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{str(path)!r} is not a comparison: save one with onnxamp diff --save."
        ) from None
    return report


def _check(report: DiffReport) -> None:
    """Check constraints that types do not express.

    Raises:
        ValueError: the numbers cannot come from a comparison.
    """
    is_known = report.lowest in LOWNESS
    for row in report.layers:
        for side in (row.local, row.accumulated):
            if side is not None and min(side.error_energy, side.reference_energy) < 0:
                is_known = False
    if not is_known:
        raise ValueError(report.lowest)


def document(kind: str, facts: Mapping[str, Any]) -> str:
    """Return facts as one JSON object, after the command that made them (``kind``) and the version of the format."""
    return json.dumps(
        {"onnxamp": kind, "format": _FORMAT, **as_data(facts)},
        indent=1,
        allow_nan=False,
    )


def as_markdown(report: Report, *, verbose: bool = False) -> str:
    """Return a report as Markdown: the verdict, key figures, tables, and next steps.

    Parts that the terminal shows only with -v are folded; ``verbose`` leaves out no row of a table.
    """
    blocks = [*_head(report), *_figures(report.figures)]
    for section in report.sections:
        if section.parts:
            blocks += _section(section, verbose=verbose)
    if report.steps:
        blocks += ["#### What to do", *map(_step, report.steps)]
    return "\n\n".join(blocks)


def error_markdown(sentence: str) -> str:
    """Return the error if there is no report."""
    return f"### {MARKS[Status.FAILED].markdown} {_text(sentence)}"


def _text(text: str) -> str:
    """Return text without effects in Markdown."""
    inert = _ACTIVE.sub(r"\\\g<0>", glued(said(text)))
    return _LINKED.sub(r"\g<0><!-- -->", inert)


def _head(report: Report) -> Iterator[str]:
    """Yield the verdict, files, where they ran, and the fault."""
    models = _text(" → ".join(report.models))
    facts = [f"**{models}**"] if models else []
    facts += map(_text, (report.task, *report.ran))
    verdict = report.verdict
    if verdict is not None:
        yield f"### {MARKS[verdict.status].markdown} {_text(verdict.sentence)}"
    yield " · ".join(facts)
    if verdict is not None and verdict.details:
        yield "\n".join(f"- {_text(detail)}" for detail in verdict.details)


def _figures(figures: Iterable[Figure]) -> Iterator[str]:
    """Yield key figures side by side."""
    titles = list[str]()
    cells = list[str]()
    for figure in figures:
        remark = _text(figure.remark)
        titles.append(_text(figure.label))
        cells.append(
            f"**{_text(figure.value)}**" + (f"<br>{remark}" if remark else "")
        )
    if cells:
        yield _grid(titles, [cells])


def _grid(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """Return a table of cells that are Markdown already, without its empty columns."""
    rule = ["---:" if at in right else "---" for at in range(len(titles))]
    columns = zip(titles, rule, *rows, strict=True)
    filled = [column for column in columns if any(column[2:])]
    lines = zip(*filled, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(section: Section, *, verbose: bool) -> Iterator[str]:
    """Yield the parts under their heading, folded if they are details."""
    is_folded = section.is_detail or not section.on_page
    title = _text(section.title)
    yield f"<details><summary>{title}</summary>" if is_folded else f"#### {title}"
    for is_item, parts in groupby(
        section.parts, lambda part: isinstance(part, Statement)
    ):
        if is_item:
            items = [part for part in parts if isinstance(part, Statement)]
            yield _items(items, verbose=verbose)
        else:
            yield from _parts(parts, verbose=verbose)
    if is_folded:
        yield "</details>"


def _parts(parts: Iterable[Part], *, verbose: bool) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Table):
            yield from _table(part, verbose=verbose)
        elif isinstance(part, Bars):
            yield from _table(bars_table(part), verbose=verbose)
        elif isinstance(part, Gauges):
            yield _text(part.legend)
            yield from _table(gauges_table(part), verbose=verbose)
        elif isinstance(part, Figure):
            yield from _figures([part])


def _table(part: Table, *, verbose: bool) -> Iterator[str]:
    # The terminal may show no row of a detail, which is folded here and costs no space.
    rows = shown_rows(part, verbose=verbose) or part.rows[:_ROWS]
    cells = []
    for row in rows:
        texts = [*map(_text, row.cells)]
        if row.is_strong:
            texts = [f"**{text}**" if text else text for text in texts]
        cells.append([MARKS[row.status].markdown if row.status else "", *texts])
    titles = ["", *map(_text, part.columns)]
    yield _grid(titles, cells, [at + 1 for at in part.right])
    if verbose and any(row.remark for row in rows):
        yield "\n".join(f"- {_text(row.remark)}" for row in rows if row.remark)
    left = len(part.rows) - len(rows)
    if left:
        yield f"… and {left:,} more (-v shows all)"


def _items(items: Sequence[Statement], *, verbose: bool) -> str:
    """Yield statements: a table if they have subjects, otherwise a list."""
    if not any(item.label or item.members or item.action for item in items):
        lines = (f"{_SIGNS[item.level]} {_text(item.text)}" for item in items)
        return "\n\n".join(map(str.strip, lines))
    rows = []
    for item in items:
        members = item.members if verbose else item.members[:_MEMBERS]
        names = [*map(_text, members)]
        if len(members) < len(item.members):
            names.append(f"… and {len(item.members) - len(members):,} more")
        kind, what, action = map(_text, (item.label, item.text, item.action))
        rows.append((_SIGNS[item.level], kind, what, "<br>".join(names), action))
    return _grid(("", "", "what", "where", "what to do"), rows)


def _step(step: NextStep) -> str:
    """Return a next step with a command to copy, or an attempt that failed."""
    text = f"{'' if step.confirmed else '⚠️ '}{_text(step.text)}"
    if not step.command:
        return text
    return f"{text}\n\n```sh\n{printable(step.command)}\n```"
