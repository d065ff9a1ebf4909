"""Short reports: the verdict, problems and key figures, in as many lines as a report may take."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from onnxamp._base.errors import printable
from onnxamp._base.records import record
from onnxamp._report.layout import (
    ENDLESS,
    FOLDED,
    FOLDS,
    GAP,
    SIGNS,
    clauses_cut,
    hanging,
    mark_of,
    middle_cut,
    name_cut,
    natural_width,
    plain_text,
    remark_room,
    text_of,
)
from onnxamp._report.parts import (
    LINES,
    Figure,
    Report,
    Section,
    Statement,
    Status,
    problems,
)

_NAME: Final = 12
"""The width that a model's name keeps beside that of the result."""
_MORE: Final = " …"
"""The end of a sentence that is not shown whole."""
_FIGURES: Final = 3
"""Key figures that a short report keeps although there are problems."""


def is_short(report: Report) -> bool:
    """Return whether a report is shortened: one that names a fault is not."""
    verdict = report.verdict
    return report.lines is not None and (
        verdict is None or verdict.status is not Status.FAILED
    )


def short_lines(
    report: Report, console: Console, options: ConsoleOptions, *, whole: bool
) -> list[list[Segment]]:
    """Return the head, problems and key figures, in as many lines as the report may take, and what -v shows.

    Names are cut unless they are ``whole``.
    """
    printer = _Printer(console, options)
    limit = report.lines or LINES
    is_bare = limit < LINES
    last = [] if is_bare else _last_lines(report, printer)
    lines = _head_lines(report, printer, limit - len(last), whole=whole)
    room = limit - len(lines) - len(last)
    warned = printer.lines(*(printer.first(item) for item in problems(report)))
    kept = min(len(report.figures), _FIGURES) + 1
    lines += warned[: max(room - kept, 0)]
    room = limit - len(lines) - len(last)
    if report.figures and room > 1:
        figures = report.figures[: room - 1]
        width = ENDLESS if whole else printer.width
        lines += printer.lines(Text(), *_figure_lines(figures, width))
    return lines + last


def _last_lines(report: Report, printer: "_Printer") -> list[list[Segment]]:
    """Return the line that names the sections that -v shows; none if there are no such sections."""
    titles = list[str]()
    for section in report.sections:
        if section.parts and not section.is_detail:
            titles.append(_title(section))
    return printer.lines(_more(titles, printer.width)) if titles else []


def _head_lines(
    report: Report, printer: "_Printer", limit: int, *, whole: bool
) -> list[list[Segment]]:
    """Return the verdict and the files; without the files if both take more lines than the limit."""
    is_bare = (report.lines or LINES) < LINES
    head = _short_head(report, printer, whole=whole, is_bare=is_bare)
    lines = printer.lines(*head)
    if len(lines) <= limit:
        return lines
    # What to do matters more than the files.
    named = report._replace(models=())
    head = _short_head(named, printer, whole=whole, is_bare=is_bare)
    return printer.lines(*head)[:limit]


@record
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
        if len(lines) <= FOLDS:
            return text
        *whole, last = lines[:FOLDS]
        last.rstrip()
        # The mark stands on the last line, so words at its end make room for it.
        while last.cell_len > width - len(_MORE) and " " in last.plain:
            last.right_crop(last.cell_len - last.plain.rstrip().rfind(" "))
        first = Text(" ").join([*whole, last])
        return first.append(_MORE)

    def first(self, item: Statement) -> Grid:
        """Return the first lines of a message."""
        text = self.start(text_of(plain_text(item)), 2 * GAP)
        return hanging(SIGNS[item.level], text, " ")


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
    room = remark_room(figures, width)
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
        least = ENDLESS if whole else room - cell_len(task)
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
