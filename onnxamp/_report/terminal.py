"""Reports on a terminal. Names come from the model: markup and control characters in them are shown, not obeyed.

Verdict, files and key figures come first. A long report ends with the verdict in one line, and the next steps. Numbers
are never broken, and keep their units; names lose their middle, and prose is folded. Where a column would be too narrow
to read it, the prose of a table stands below its rows. If that is not enough, columns are left out, and named below the
table.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from onnxamp._base.errors import printable
from onnxamp._report.layout import (
    FOLDED,
    GAP,
    SHOWN,
    clauses_cut,
    column_widths,
    fitting,
    grid_of,
    hanging,
    mark_of,
    middle_cut,
    name_cut,
    natural_width,
    prose_below,
    text_of,
    unaligned,
)
from onnxamp._report.parts import (
    LINES,
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
    TableRow,
    bars_table,
    gauges_table,
    hint,
    listed_parts,
    problems,
    shown_rows,
)

_WIDTH: Final = 140
"""Columns of a report without a terminal, unless COLUMNS says otherwise."""
_ENDLESS: Final = 1 << 16
"""Columns of a line that is never folded."""
_SCREEN: Final = 20
"""Lines after which the verdict is repeated."""
_MEMBERS: Final = 3
"""The number of members of a statement that are shown without -v."""
_NAME: Final = 12
"""The width that a model's name keeps beside that of the result."""
_MORE: Final = " …"
"""The end of a sentence that is not shown whole."""
_FOLDS: Final = 2
"""Lines of a sentence in a short report."""
_FIGURES: Final = 3
"""Key figures that a short report keeps although there are problems."""
_FINE: Final = (Status.PASSED, Status.NO_GAIN)
"""Verdicts that one line says in full."""
_SIGNS: Final = {
    Severity.NONE: (" ", ""),
    Severity.NOTE: ("•", ""),
    Severity.WARNING: ("!", "yellow"),
    Severity.ERROR: ("✘", "red"),
}


def print_report(
    report: Report, *, verbose: bool = False, brief: bool = False
) -> None:
    """Print a report on standard output; with ``brief`` its verdict, and problems if there are any.

    Commands stand on lines of their own, unbroken, so that they can be copied. If standard output is no terminal and
    COLUMNS is not set, names are not folded, and no column is left out.
    """
    console = make_console()
    whole = not is_screen(console) and not _columns()
    if brief and whole:
        console.width = _ENDLESS
    with console.capture() as capture:
        console.print(
            _Rendering(report, verbose, whole, brief, is_printed=True), crop=False
        )
    # Rich would not raise an error for a closed pipe.
    console.file.write(capture.get())
    console.file.flush()  # errors follow on standard error


def as_text(report: Report, *, verbose: bool = False) -> "_Rendering":
    """Return a report without its steps, as a renderable for rich."""
    return _Rendering(report, verbose)


def fitted(text: str, prefix: str = "") -> str:
    """Return text for standard error, folded if that is a terminal, to follow a prefix."""
    console = make_console(stderr=True)
    if not is_screen(console):
        return text
    lines = text_of(text).wrap(console, console.width - len(prefix))
    return "\n".join(line.plain.rstrip() for line in lines).translate(SHOWN)


def _columns() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def make_console(*, stderr: bool = False) -> Console:
    """Return a console. Without a terminal it is as wide as COLUMNS says, or wide enough."""
    console = Console(stderr=stderr, highlight=False)
    if not is_screen(console):
        console.width = _columns() or _WIDTH
    return console


def is_screen(console: Console) -> bool:
    """Return whether a console writes to a terminal.

    FORCE_COLOR, which jobs on CI set, makes rich believe so. It asks for colors in a log, not for a bar that moves or
    for lines of 80 columns.
    """
    return console.is_terminal and console.file.isatty()


@dataclass(frozen=True, slots=True)
class _Rendering:
    """The form of a report: complete, with unshortened names (``whole``), or only the verdict (``brief``).

    If a command prints it (``is_printed``), next steps follow, and hints name the option -v.
    """

    report: Report
    verbose: bool
    whole: bool = False
    brief: bool = False
    is_printed: bool = False

    @property
    def more(self) -> str:
        """How to see the rows and names that are left out."""
        return " (-v shows all)" if self.is_printed else ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        for line in self._lines(console, options):
            # Rich pads lines to the width of the console, which would spoil copied text and diffs.
            while line and not line[-1].text.strip():
                line.pop()
            for number, (text, style, control) in enumerate(line, 1):
                shown = text.translate(SHOWN)
                if number == len(line):
                    shown = shown.rstrip()
                yield Segment(shown, style, control)
            yield Segment.line()

    def _lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        """Return the lines of the report in its form."""
        report = self.report
        width = options.max_width
        if (
            self.is_printed
            and not self.brief
            and not self.verbose
            and _is_short(report)
        ):
            return self._short(_Printer(console, options))
        body = Group(*(_brief(report, width) if self.brief else self._all(width)))
        lines = list(Segment.split_lines(console.render(body, options)))
        last: list[RenderableType] = []
        if report.verdict is not None and len(lines) > _SCREEN and not self.brief:
            last = [Text(), _summary(report, width)]
        is_fine = report.verdict is None or report.verdict.status in _FINE
        if self.is_printed and not (self.brief and is_fine):
            last += _steps(report.steps)
        lines += Segment.split_lines(console.render(Group(*last), options))
        return lines

    def _short(self, printer: "_Printer") -> list[list[Segment]]:
        """Return the head, problems and key figures, in as many lines as the report may take, and what -v shows."""
        report = self.report
        limit = report.lines or LINES
        shown = [
            _title(section)
            for section in report.sections
            if section.parts and not section.is_detail
        ]
        is_bare = limit < LINES
        more = [_more(shown, printer.width)] if shown and not is_bare else []
        last = printer.lines(*more)
        head = _short_head(report, printer, whole=self.whole, is_bare=is_bare)
        lines = printer.lines(*head)
        if len(lines) > limit - len(last):  # what to do matters more than the files
            head = _short_head(
                report._replace(models=()), printer, whole=self.whole, is_bare=is_bare
            )
            lines = printer.lines(*head)[: limit - len(last)]
        room = limit - len(lines) - len(last)
        warned = printer.lines(*(printer.first(item) for item in problems(report)))
        kept = min(len(report.figures), _FIGURES) + 1
        lines += warned[: max(room - kept, 0)]
        room = limit - len(lines) - len(last)
        if report.figures and room > 1:
            figures = report.figures[: room - 1]
            width = _ENDLESS if self.whole else printer.width
            lines += printer.lines(Text(), *_figure_lines(figures, width))
        return lines + last

    def _all(self, width: int) -> Iterator[RenderableType]:
        report = self.report
        yield from _head(report, width)
        if report.figures:
            yield Text()
            yield from self._parts(report.figures, width)
        for section in report.sections:
            if section.parts and (self.verbose or not section.is_detail):
                yield from (Text(), text_of(section.title, "bold"))
                yield from self._parts(section.parts, width)

    def _parts(self, parts: tuple[Part, ...], width: int) -> Iterator[RenderableType]:
        """Yield the parts, one below the other; neighboring figures share a table."""
        figures = Grid.grid(padding=(0, GAP, 0, 0))
        for is_number in (False, False, True, False):
            figures.add_column(no_wrap=is_number, overflow="fold")
        shown = [part for part in parts if isinstance(part, Figure)]
        room = _ENDLESS if self.whole else _FOLDS * _remark_room(shown, width)
        for figure in shown:
            told = (figure.label, figure.value, name_cut(figure.remark, room))
            figures.add_row("", *map(text_of, told))
        if figures.row_count:
            yield figures
        for part in listed_parts(parts):
            if isinstance(part, Statement):
                yield from self._item(part)
            elif isinstance(part, Table):
                yield from self._table(part, width)
            elif isinstance(part, Bars):
                yield from self._table(bars_table(part), width)
            elif isinstance(part, Gauges):
                yield from self._item(hint(part.legend))
                yield from self._table(gauges_table(part), width)

    def _item(self, item: Statement) -> Iterator[RenderableType]:
        """Yield a statement after its sign, and its subject."""
        below = " " if item.level is Severity.NONE else "  "
        label = f"{item.label}: " if item.label else ""
        text = Text.assemble(text_of(label, "bold"), text_of(item.text))
        yield hanging(_SIGNS[item.level], text, below[1:])
        for member in item.members if self.verbose else item.members[:_MEMBERS]:
            yield hanging(below, text_of(member, "dim"))
        left = len(item.members) - _MEMBERS
        if left > 0 and not self.verbose:
            yield hanging(below, Text(f"… and {left:,} more{self.more}", "dim"))
        if item.action:
            yield hanging(below, text_of(f"→ {item.action}"))

    def _table(self, part: Table, width: int) -> Iterator[RenderableType]:
        """Yield a table, its first rows without -v. Columns that do not fit are named below it."""
        rows = shown_rows(part, verbose=self.verbose)
        lead = GAP + (1 + GAP if any(row.status for row in part.rows) else 0)
        lines = [part.columns, *(row.cells for row in rows)]
        columns = [list(map(text_of, column)) for column in zip(*lines, strict=True)]
        natural = sum(natural_width(column) + GAP for column in columns) + lead - GAP
        if self.whole and natural > width:
            yield from unaligned(part, rows)
        else:
            room = width - lead + GAP
            widths = column_widths(part, columns, room)
            below = prose_below(part, columns, widths)
            if below:
                widths = column_widths(part, columns, room, below)
                shown = fitting(part, columns, widths)
                yield from _with_prose_below(part, rows, shown, widths, below)
            else:
                shown = fitting(part, columns, widths)
                yield grid_of(part, rows, shown, widths)
            apart = {*widths, *below}
            hidden = (
                part.columns[at] for at in range(len(columns)) if at not in apart
            )
            if left := ", ".join(filter(None, hidden)):
                text = f"Left out for lack of space: {left}."
                yield hanging(" ", text_of(text, "dim"))
        remarks = [row.remark for row in rows if self.verbose and row.remark]
        if len(rows) < len(part.rows):
            remarks.append(f"… and {len(part.rows) - len(rows):,} more{self.more}")
        yield from (hanging(" ", text_of(text, "dim")) for text in remarks)


@dataclass(frozen=True, slots=True)
class _Printer:
    """Renders the parts of a short report."""

    console: Console
    options: ConsoleOptions

    @property
    def width(self) -> int:
        """Columns of a line."""
        return self.options.max_width

    def lines(self, *parts: RenderableType) -> list[list[Segment]]:
        """Return the lines of some parts."""
        rendered = self.console.render(Group(*parts), self.options)
        return list(Segment.split_lines(rendered)) if parts else []

    def start(self, text: Text, indent: int) -> Text:
        """Return the first lines of a long text."""
        width = self.width - indent
        lines = text.wrap(self.console, width)
        if len(lines) <= _FOLDS:
            return text
        *whole, last = lines[:_FOLDS]
        last.rstrip()
        # The mark stands on the last line, so words at its end make room for it.
        while last.cell_len > width - len(_MORE) and " " in last.plain:
            last.right_crop(last.cell_len - last.plain.rstrip().rfind(" "))
        first = Text(" ").join([*whole, last])
        return first.append(_MORE)

    def first(self, item: Statement) -> Grid:
        """Return the first lines of a message."""
        label = f"{item.label}: " if item.label else ""
        text = self.start(text_of(label + item.text), 2 * GAP)
        return hanging(_SIGNS[item.level], text, " ")


def _is_short(report: Report) -> bool:
    """Return whether a report is shortened: one that names a fault is not."""
    verdict = report.verdict
    return report.lines is not None and (
        verdict is None or verdict.status is not Status.FAILED
    )


def _title(section: Section) -> str:
    """Return the title of a section within a sentence."""
    title = section.title.partition(":")[0]
    return title[:1].lower() + title[1:]


def _more(titles: Sequence[str], width: int) -> Grid:
    """Return the line that says what -v shows."""
    text = f"-v shows more: {', '.join(titles)}."
    return hanging(" ", text_of(clauses_cut(text, width - 2 * GAP), "dim"))


def _figure_lines(figures: Sequence[Figure], width: int) -> Iterator[Text]:
    """Yield key figures, each in a line of its own."""
    room = _remark_room(figures, width)
    rows = list[list[Text]]()
    for one in figures:
        shortened = clauses_cut(name_cut(one.remark, room), room)
        rows.append(list(map(text_of, (one.label, one.value, shortened))))
    labels, values, _ = zip(*rows, strict=True)
    widths = natural_width(labels), natural_width(values)
    for label, value, remark in rows:
        remark.truncate(room, overflow="ellipsis")
        line = Text(" " * GAP, no_wrap=True, overflow="ignore")
        for text, size in zip((label, value), widths, strict=True):
            line.append_text(text).append(" " * (size - text.cell_len + GAP))
        yield line.append_text(remark)


def _remark_room(figures: Sequence[Figure], width: int) -> int:
    """Return the columns that labels and values leave to remarks."""
    labels = max((cell_len(one.label) for one in figures), default=0)
    values = max((cell_len(one.value) for one in figures), default=0)
    return max(width - labels - values - 3 * GAP, 1)


def _fitting(names: Sequence[str], room: int) -> str:
    """Return names with arrows between them, without their middles where they do not fit.

    The last one is cut last: it is the file that was written, which the user may not have named.
    """
    room -= 3 * (len(names) - 1)
    *others, last = range(len(names))
    least = sum(min(cell_len(names[at]), _NAME) for at in others)
    shown = {last: middle_cut(names[last], max(room - least, FOLDED))}
    room -= cell_len(shown[last])
    # Names that need less than their share leave the rest of it to longer ones.
    others.sort(key=lambda at: cell_len(names[at]))
    for number, at in enumerate(others):
        share = max(room // (len(others) - number), _NAME)
        shown[at] = middle_cut(names[at], share)
        room -= cell_len(shown[at])
    return " → ".join(shown[at] for at in range(len(names)))


def _short_head(
    report: Report, printer: _Printer, *, whole: bool, is_bare: bool
) -> Iterator[RenderableType]:
    """Yield the verdict, the files, and where they ran unless the head is bare; names are cut unless they are whole."""
    verdict = report.verdict
    room = printer.width - 2 * GAP
    if verdict is not None:
        sentence = printer.start(text_of(verdict.sentence, "bold"), GAP)
        yield hanging(mark_of(verdict.status), sentence)
    task = f"   {report.task}" if verdict is not None else ""
    if report.models:
        models = [*map(printable, report.models)]
        least = _ENDLESS if whole else room - cell_len(task)
        names = _fitting(models, least)
        if cell_len(names) > least:  # the verdict names the command and the type
            names, task = _fitting(models, room), ""
        line = Text.assemble("  ", text_of(names), text_of(task, "dim"))
        line.no_wrap = True
        line.overflow = "ignore"
        yield line
    if report.ran and not is_bare:
        ran = text_of(", ".join(report.ran), "dim")
        if not whole:
            ran.truncate(room, overflow="ellipsis")
        yield hanging(" ", ran)
    if verdict is not None:
        for detail in verdict.details:
            yield hanging(" ", printer.start(text_of(detail), GAP))


def _head(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the verdict and the files."""
    models = " → ".join(report.models)
    ran = ", ".join(report.ran)
    verdict = report.verdict
    if verdict is None:
        if models:
            yield text_of(models)
        yield from (text_of(text, "dim") for text in report.ran)
        return
    yield hanging(mark_of(verdict.status), text_of(verdict.sentence, "bold"))
    if models:
        both = Text.assemble(text_of(models), "   ", text_of(report.task, "dim"))
        is_one = both.cell_len + GAP <= width
        lines = [both] if is_one else [text_of(models), text_of(report.task, "dim")]
        yield from (hanging(" ", line) for line in lines)
    if ran:
        yield hanging(" ", text_of(ran, "dim"))
    yield from (hanging(" ", text_of(detail)) for detail in verdict.details)


def _summary(report: Report, width: int) -> Grid:
    """Return the verdict in one line: the file, the sentence, and as many key figures as fit."""
    assert report.verdict is not None
    name = f"{report.models[-1]}: " if report.models else ""
    parts = [name + report.verdict.sentence.removesuffix("."), *_briefly(report)]
    while len(parts) > 1 and cell_len(printable(", ".join(parts))) + GAP > width:
        parts.pop()
    return hanging(mark_of(report.verdict.status), text_of(", ".join(parts), "bold"))


def _briefly(report: Report) -> list[str]:
    return [figure.brief for figure in report.figures if figure.brief]


def _brief(report: Report, width: int) -> Iterator[RenderableType]:
    """Return one line if all is well, with faults below it otherwise."""
    if report.verdict is None:
        facts = ", ".join(_briefly(report))
        name = " → ".join(report.models) or report.task
        yield text_of(f"{name}: {facts}" if facts else name)
        return
    yield _summary(report, width)
    if report.verdict.status not in _FINE:
        yield from (hanging(" ", text_of(detail)) for detail in report.verdict.details)
    for item in problems(report):
        label = f"{item.label}: " if item.label else ""
        yield hanging(_SIGNS[item.level], text_of(label + item.text))


def _with_prose_below(
    part: Table,
    rows: Sequence[TableRow],
    columns: Sequence[Sequence[Text]],
    widths: Mapping[int, int],
    below: Sequence[int],
) -> Iterator[RenderableType]:
    """Yield the rows of a table, each followed by the prose for which its columns have no room."""
    yield grid_of(part, (), columns, widths)
    for number, row in enumerate(rows, 1):
        own = [(column[0], column[number]) for column in columns]
        yield grid_of(part, (row,), own, widths, has_titles=False)
        for at in below:
            # One column needs no title: the reason of a decision explains itself.
            title = f"{part.columns[at]}: " if len(below) > 1 else ""
            if row.cells[at]:
                yield hanging("  ", text_of(title + row.cells[at], "dim"), "  ")


def _steps(steps: tuple[NextStep, ...]) -> Iterator[RenderableType]:
    for step in steps:
        yield Text()
        sign = ("→", "bold cyan") if step.confirmed else ("!", "yellow")
        yield hanging(sign, text_of(step.text), " ")
        if step.command:
            command = f"   {printable(step.command)}"
            yield Text(command, "bold", no_wrap=True, overflow="ignore")
