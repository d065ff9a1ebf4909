"""Reports on a terminal. Names come from the model: markup and control characters in them are shown, not obeyed.

First stand verdict, files and key figures, and last, behind a long report, the verdict in one line, and the next steps.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onnxamp._errors import printable
from onnxamp._report.fitting import GAP, PROSE, Column, elided, fit, folded
from onnxamp._report.parts import (
    Bars,
    Figure,
    Item,
    Level,
    Part,
    Report,
    Section,
    Status,
    Step,
    Table,
    Verdict,
    problems,
    shown_rows,
    table,
)

_WIDTH: Final = 140
"""Columns of a report that goes to no terminal, where COLUMNS does not say otherwise."""
_ENDLESS: Final = 1 << 16
"""Columns of a line that nobody folds."""
_NAME: Final = 12
"""Width that the name of a file keeps in one line."""
_SCREEN: Final = 20
"""Lines behind which the verdict is repeated."""
_MEMBERS: Final = 3
"""Members of an item that are shown without -v."""
_INDENT: Final = "  "
_MARKS: Final = {
    Status.PASSED: ("✔", "green"),
    Status.INEXACT: ("≈", "yellow"),
    Status.FAILED: ("✘", "red"),
    Status.UNKNOWN: ("?", "yellow"),
}
_SIGNS: Final = {
    Level.NONE: (" ", ""),
    Level.NOTE: ("•", ""),
    Level.WARNING: ("!", "yellow"),
    Level.ERROR: ("✘", "red"),
}


def print_report(report: Report, *, verbose: bool = False, brief: bool = False) -> None:
    """Print a report on standard output; with ``brief`` its verdict, and problems if there are any.

    Commands stand on lines of their own, unbroken, so that they can be copied. Where standard output is no terminal,
    and COLUMNS is not set, names are not cut, and no column is left out.
    """
    console = make_console()
    whole = not console.is_terminal and not _columns()
    with console.capture() as capture:
        shown = _Shown(report, verbose, whole, brief)
        console.print(shown, soft_wrap=whole)
        if not brief or (report.verdict is not None and report.verdict.status is not Status.PASSED):
            console.print(_Lines(list(_steps(report.steps, console.width))), soft_wrap=True, end="")
    lines = capture.get().splitlines()
    if not console.is_terminal:
        lines = [line.rstrip() for line in lines]
    console.file.write("\n".join([*lines, ""]))
    console.file.flush()  # errors follow on standard error


@dataclass(frozen=True, slots=True)
class _Lines:
    """Lines that are as wide as they are."""

    lines: list[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        yield from self.lines


@dataclass(frozen=True, slots=True)
class _Shown:
    """A report in the width of the console."""

    report: Report
    verbose: bool
    whole: bool
    brief: bool
    more: str = " (-v shows all)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        if self.brief:
            yield from _brief(self.report, _ENDLESS if self.whole else options.max_width)
        else:
            yield from _View(options.max_width, self.verbose, self.whole, self.more).report(
                self.report
            )


def as_text(report: Report, *, verbose: bool = False, more: str = " (-v shows all)") -> _Shown:
    """A report without its steps, as what rich prints; ``more`` says how to see what it leaves out."""
    return _Shown(report, verbose, whole=False, brief=False, more=more)


def fitted(text: str, behind: str = "") -> str:
    """Text for standard error, folded if that is a terminal; ``behind`` stands in front of it."""
    console = make_console(stderr=True)
    return "\n".join(folded(text, console.width - len(behind))) if console.is_terminal else text


def _columns() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def make_console(*, stderr: bool = False) -> Console:
    """A console. Without a terminal it is as wide as COLUMNS says, or wide enough."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=_columns() or _WIDTH)


@dataclass(frozen=True, slots=True)
class _View:
    """How a report is shown: its width, and whether all of it is."""

    width: int
    verbose: bool
    whole: bool
    more: str

    def report(self, report: Report) -> Iterator[Text]:
        """All lines."""
        lines = list(_head(report, self.width))
        if report.figures:
            lines += [Text(), *self.parts(report.figures)]
        for section in report.sections:
            if section.parts and (self.verbose or not section.is_detail):
                lines += self.section(section)
        yield from lines
        if report.verdict is not None and len(lines) > _SCREEN:
            yield Text()
            yield from _summary(report, report.verdict, self.width)

    def section(self, section: Section) -> list[Text]:
        """The title, and what is below it."""
        title = [Text(line, style="bold") for line in folded(printable(section.title), self.width)]
        return [Text(), *title, *self.parts(section.parts)]

    def parts(self, parts: tuple[Part, ...]) -> Iterator[Text]:
        """The parts, one below the other; neighbouring figures share a table."""
        figures = [part for part in parts if isinstance(part, Figure)]
        if figures:
            rows = [(figure.label, figure.value, figure.remark) for figure in figures]
            yield from self.table(table(("", "", ""), rows, prose=(0, 2), drop=()), fixed=(1,))
        for part in parts:
            if isinstance(part, Item):
                yield from self.item(part)
            elif isinstance(part, Table):
                yield from self.table(part)
            elif isinstance(part, Bars):
                yield from self.table(_bars(part))

    def item(self, item: Item) -> Iterator[Text]:
        """A statement behind its sign, and what it is about."""
        label = printable(f"{item.label}: " if item.label else "")
        below = "" if item.level is Level.NONE else " "
        yield from _hanging(
            _SIGNS[item.level],
            label + printable(item.text),
            self.width,
            bold=len(label),
            indent=below,
        )
        for member in item.members if self.verbose else item.members[:_MEMBERS]:
            yield from _plain(printable(member), self.width, "dim", below)
        if len(item.members) > _MEMBERS and not self.verbose:
            yield from _plain(
                f"… and {len(item.members) - _MEMBERS:,} more{self.more}", self.width, "dim", below
            )
        if item.action:
            yield from _plain(f"→ {printable(item.action)}", self.width, "", below)

    def table(self, table: Table, fixed: tuple[int, ...] = ()) -> Iterator[Text]:
        """A table, its first rows without -v. What is left out for want of room is named below it."""
        rows = shown_rows(table, verbose=self.verbose)
        has_status = any(row.status for row in table.rows)
        columns = [
            Column(
                printable(title),
                [printable(row.cells[at]) for row in rows],
                "number"
                if at in (*table.right, *fixed)
                else "prose"
                if at in table.prose
                else "name",
            )
            for at, title in enumerate(table.columns)
        ]
        room = self.width - len(_INDENT) - (3 if has_status else 0)
        widths = fit(columns, None if self.whole and not table.prose else room, self.order(table))
        if (
            self.whole and table.prose
        ):  # beside whole names, prose stays readable, however wide the lines are
            kept = [_uncut(column) for column in columns]
            widths = {
                at: max(width, kept[at].least(0, PROSE)) for at, width in fit(kept, room).items()
            }
        lead = Text(_INDENT + ("   " if has_status else ""))
        if any(table.columns):
            titles = {at: columns[at].heading(width) for at, width in widths.items()}
            yield from _lines(titles, widths, table, lead, "dim")
        cells = {at: columns[at].lines(width) for at, width in widths.items()}
        for number, row in enumerate(rows):
            mark = Text.assemble(_INDENT, _MARKS[row.status], "  ") if row.status else lead
            own = {at: lines[number] for at, lines in cells.items()}
            yield from _lines(
                cells=own,
                widths=widths,
                table=table,
                first=mark,
                style="bold" if row.is_strong else "",
                rest=lead,
            )
        for row in rows if self.verbose else ():
            yield from _plain(printable(row.remark), self.width, "dim") if row.remark else ()
        if len(rows) < len(table.rows):
            yield from _plain(
                f"… and {len(table.rows) - len(rows):,} more{self.more}", self.width, "dim"
            )
        if left := [
            printable(title) for at, title in enumerate(table.columns) if at not in widths and title
        ]:
            yield from _plain(f"Left out for want of room: {', '.join(left)}.", self.width, "dim")

    def order(self, table: Table) -> tuple[int, ...]:
        """The columns to leave out: those that the table names, or all but the first from the right."""
        return range(len(table.columns) - 1, 0, -1) if table.drop is None else table.drop  # type: ignore[return-value]


def _uncut(column: Column) -> Column:
    """A column whose names keep their width."""
    return column if column.kind == "prose" else Column(column.title, column.cells, "number")


def _lines(
    cells: dict[int, list[str]],
    widths: dict[int, int],
    table: Table,
    first: Text,
    style: str,
    rest: Text | None = None,
) -> Iterator[Text]:
    """A row as lines; cells of several lines begin in the first of them."""
    for number in range(max(map(len, cells.values()), default=0)):
        line = Text()
        for at, texts in cells.items():
            text = texts[number] if number < len(texts) else ""
            fill = " " * (widths[at] - cell_len(text))
            line.append(fill + text if at in table.right else text + fill)
            line.append(" " * GAP)
        line.rstrip()
        line.stylize(style)
        yield Text.assemble(first if number == 0 or rest is None else rest, line)


def _hanging(
    sign: tuple[str, str],
    text: str,
    width: int,
    *,
    bold: int = 0,
    style: str = "",
    indent: str = " ",
) -> Iterator[Text]:
    """Text behind a sign; what is folded stays behind it. ``bold`` is the length of its label."""
    behind = f"{indent}  "
    for number, line in enumerate(folded(text, width - len(behind))):
        shown = Text(line, style=style)
        shown.stylize("bold", 0, min(bold, len(line)))
        bold -= min(bold, len(line) + 1)
        yield (
            Text.assemble(indent, sign, " ", shown) if number == 0 else Text.assemble(behind, shown)
        )


def _plain(text: str, width: int, style: str = "", indent: str = "") -> Iterator[Text]:
    """Text without a sign, below what is behind one."""
    return _hanging((" ", ""), text, width, style=style, indent=indent)


def _head(report: Report, width: int) -> Iterator[Text]:
    """Verdict and files."""
    models = " → ".join(map(printable, report.models))
    if report.verdict is None:
        yield from (Text(line) for line in folded(models, width) if models)
        yield from (
            Text(line, style="dim")
            for text in report.ran
            for line in folded(printable(text), width)
        )
        return
    verdict, room = report.verdict, width - len(_INDENT)
    yield from _hanging(
        _MARKS[verdict.status], printable(verdict.sentence), width, style="bold", indent=""
    )
    if models and cell_len(f"{models}   {report.task}") <= room:
        yield Text.assemble(_INDENT, models, (f"   {report.task}", "dim"))
    elif models:
        yield from (Text(_INDENT + line) for line in folded(models, room))
        yield from (Text(_INDENT + line, style="dim") for line in folded(report.task, room))
    ran = printable(", ".join(report.ran))
    yield from (Text(_INDENT + line, style="dim") for line in folded(ran, room) if ran)
    yield from (
        Text(_INDENT + line)
        for detail in verdict.details
        for line in folded(printable(detail), room)
    )


def _summary(report: Report, verdict: Verdict, width: int) -> Iterator[Text]:
    """The verdict in one line: the file that was made or judged, the sentence, and key figures as far as they fit."""
    mark, sentence = _MARKS[verdict.status], printable(verdict.sentence).removesuffix(".")
    facts = [printable(figure.brief) for figure in report.figures if figure.brief]
    named = printable(report.models[-1]) if report.models else ""
    room = width - 2
    while len(facts) > 1 and cell_len(", ".join([sentence, *facts])) + cell_len(named) + 2 > room:
        facts.pop()
    while (
        facts and cell_len(", ".join([sentence, *facts])) + min(cell_len(named), _NAME) + 2 > room
    ):
        facts.pop()
    told = ", ".join([sentence, *facts])
    name = elided(named, max(_NAME, room - cell_len(told) - 2)) if named else ""
    yield from _hanging(mark, f"{name}: {told}" if name else told, width, style="bold", indent="")


def _brief(report: Report, width: int) -> Iterator[Text]:
    """One line if all is well; what is not is said below it."""
    if report.verdict is None:
        facts = ", ".join(printable(figure.brief) for figure in report.figures if figure.brief)
        name = " → ".join(map(printable, report.models)) or printable(report.task)
        yield from map(Text, folded(f"{name}: {facts}" if facts else name, width))
        return
    yield from _summary(report, report.verdict, width)
    if report.verdict.status is not Status.PASSED:
        for detail in report.verdict.details:
            yield from _plain(printable(detail), width)
    for item in problems(report):
        label = f"{item.label}: " if item.label else ""
        yield from _hanging(_SIGNS[item.level], printable(label + item.text), width, indent="")


def _steps(steps: tuple[Step, ...], width: int) -> Iterator[Text]:
    for step in steps:
        yield Text()
        sign = ("→", "bold cyan") if step.confirmed else ("!", "yellow")
        yield from _hanging(sign, printable(step.text), width)
        if step.command:
            yield Text(f"   {printable(step.command)}", style="bold")


def _bars(bars: Bars) -> Table:
    """Bars as columns."""
    kinds = dict.fromkeys(share.kind for bar in bars.bars for share in bar.shares)
    rows = [
        (
            kind,
            *({share.kind: share.text for share in bar.shares}.get(kind, "") for bar in bars.bars),
        )
        for kind in kinds
    ]
    titles = (bars.title, *(bar.label for bar in bars.bars))
    total = ("in all", *(bar.total for bar in bars.bars))
    return table(titles, [*rows, total], right=range(1, 1 + len(bars.bars)))
