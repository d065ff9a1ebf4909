"""Reports on a terminal. Names come from the model: markup and control characters in them are shown, not obeyed."""

import os
from typing import Final

import rich.table
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from onnxamp._report.parts import Bars, Figure, Item, Level, Part, Report, Row, Section, Status, Step, Table
from onnxamp._report.text import printable

_WIDTH: Final = 140
"""Columns of a report that goes to no terminal, where COLUMNS does not say otherwise."""
_MEMBERS: Final = 3
"""Members of an item that are shown without -v."""
_MARKS: Final = {
    Status.PASSED: ("✔", "green"), Status.INEXACT: ("≈", "yellow"),
    Status.FAILED: ("✘", "red"), Status.UNKNOWN: ("?", "yellow"),
}  # fmt: skip
_SIGNS: Final = {
    Level.NONE: ("", ""), Level.NOTE: ("•", ""), Level.WARNING: ("!", "yellow"), Level.ERROR: ("✘", "red"),
}  # fmt: skip


def print_report(report: Report, *, verbose: bool = False) -> None:
    """Print a report on standard output. Commands stand on lines of their own, unbroken, so that they can be copied."""
    console = make_console()
    with console.capture() as capture:
        console.print(as_text(report, verbose=verbose))
        for step in report.steps:
            console.print("", _step(step))
            if step.command:
                console.print(Text(f"   {printable(step.command)}", style="bold"), soft_wrap=True)
    lines = capture.get().splitlines()
    if not console.is_terminal:
        lines = [line.rstrip() for line in lines]  # rich fills them up to the width of a table
    console.file.write("\n".join([*lines, ""]))
    console.file.flush()  # errors follow on standard error


def as_text(report: Report, *, verbose: bool = False) -> RenderableType:
    """A report without its steps, as what rich prints."""
    parts = _head(report)
    if report.figures:
        parts += [Text(), *_parts(report.figures, verbose=verbose)]
    for section in report.sections:
        if section.parts and (verbose or not section.is_detail):
            parts += _section(section, verbose=verbose)
    return Group(*parts)


def make_console(*, stderr: bool = False) -> Console:
    """A console. Without a terminal it is as wide as COLUMNS says, or wide enough."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else _WIDTH
    return Console(stderr=stderr, highlight=False, width=width)


def _head(report: Report) -> list[RenderableType]:
    models = Text(" → ").join(Text(printable(model)) for model in report.models)
    if report.verdict is None:
        parts: list[RenderableType] = [models] if report.models else []
        return parts + [Text(printable(line), style="dim") for line in report.ran]
    verdict = report.verdict
    parts = [_line(_mark(verdict.status), Text(printable(verdict.sentence), style="bold"), indent=False)]
    if report.models:
        parts.append(Padding(Text.assemble(models, (f"   {report.task}", "dim")), (0, 0, 0, 2)))
    if report.ran:
        parts.append(Padding(Text(printable(", ".join(report.ran)), style="dim"), (0, 0, 0, 2)))
    return parts + [Padding(Text(printable(detail)), (0, 0, 0, 2)) for detail in verdict.details]


def _section(section: Section, *, verbose: bool) -> list[RenderableType]:
    return [Text(f"\n{printable(section.title)}", style="bold"), *_parts(section.parts, verbose=verbose)]


def _parts(parts: tuple[Part, ...], *, verbose: bool) -> list[RenderableType]:
    """The parts, one below the other; neighbouring figures and bars share a table."""
    shown: list[RenderableType] = []
    figures = [part for part in parts if isinstance(part, Figure)]
    if figures:
        grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
        for figure in figures:
            remark = [Text(printable(figure.remark), style="dim")] if figure.remark else []
            grid.add_row(Text(printable(figure.label)), Text(printable(figure.value)), *remark)
        shown.append(_indented(grid))
    for part in parts:
        if isinstance(part, Item):
            shown.append(_item(part, verbose=verbose))
        elif isinstance(part, Table):
            shown += _table(part, verbose=verbose)
        elif isinstance(part, Bars):
            shown.append(_indented(_bars(part)))
    return shown


def _item(item: Item, *, verbose: bool) -> RenderableType:
    text = Text.assemble((f"{item.label}: " if item.label else "", "bold"), printable(item.text))
    for member in item.members if verbose else item.members[:_MEMBERS]:
        text.append(f"\n{printable(member)}", style="dim")
    if len(item.members) > _MEMBERS and not verbose:
        text.append(f"\n… and {len(item.members) - _MEMBERS:,} more (-v shows all)", style="dim")
    if item.action:
        text.append(f"\n→ {printable(item.action)}")
    return _line(Text(*_SIGNS[item.level]), text)


def _table(table: Table, *, verbose: bool) -> list[RenderableType]:
    """A table, its first rows without -v; nothing is cut off where it is too wide, the widest columns are broken."""
    has_status = any(row.status for row in table.rows)
    made = empty_table(*([""] if has_status else []), *table.columns, right=[at + has_status for at in table.right])
    limited = not verbose and table.shown is not None and len(table.rows) > table.shown
    for row in table.rows[: table.shown] if limited else table.rows:
        made.add_row(*_cells(row, has_status=has_status), style="bold" if row.is_strong else "")
    parts: list[RenderableType] = [_indented(made)]
    parts += [_line("", Text(printable(row.remark), style="dim")) for row in table.rows if row.remark and verbose]
    if limited:
        more = len(table.rows) - (table.shown or 0)
        parts.append(_line("", Text(f"… and {more:,} more (-v shows all)", style="dim")))
    return parts


def empty_table(*columns: str, right: list[int]) -> rich.table.Table:
    """A table of rich's without lines; in ``right`` stand the columns with numbers.

    Where it is too narrow the widest columns are broken first: names before ops, and those before numbers. Nothing is
    cut off, as rich does with columns that may be broken where others may not.
    """
    made = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        made.add_column(
            Text(printable(column)),
            justify="right" if position in right else "left",
            overflow="fold",
            min_width=1,  # of a column of nothing rich measures 0, takes 1, and cuts that off another one
        )
    return made


def _cells(row: Row, *, has_status: bool) -> list[Text]:
    mark = [_mark(row.status) if row.status else Text()] if has_status else []
    return [*mark, *(Text(printable(cell)) for cell in row.cells)]


def _bars(bars: Bars) -> rich.table.Table:
    made = empty_table(bars.title, *(bar.label for bar in bars.bars), right=list(range(1, 1 + len(bars.bars))))
    kinds = dict.fromkeys(share.kind for bar in bars.bars for share in bar.shares)
    for kind in kinds:
        texts = ({share.kind: share.text for share in bar.shares}.get(kind, "") for bar in bars.bars)
        made.add_row(kind, *texts)
    made.add_row("in all", *(bar.total for bar in bars.bars), style="bold")
    return made


def _step(step: Step) -> RenderableType:
    mark = Text("→", style="bold cyan") if step.confirmed else Text("!", style="yellow")
    return _line(mark, Text(printable(step.text)))


def _mark(status: Status) -> Text:
    return Text(*_MARKS[status])


def _indented(item: RenderableType) -> Padding:
    return Padding(item, (0, 0, 0, 2), expand=False)


def _line(mark: str | Text, text: Text, *, indent: bool = True) -> RenderableType:
    """A line behind a mark; what wraps stays behind it."""
    grid = rich.table.Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(*([""] if indent else []), mark, text)
    return grid
