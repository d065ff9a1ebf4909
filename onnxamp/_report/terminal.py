"""Reports on a terminal. Names come from the model: markup and control characters in them are shown, not obeyed.

Verdict, files and key figures come first. A long report ends with the verdict in one line, and the next steps. Numbers
are never broken, and keep their units; names lose their middle, and prose is folded. Where a column would be too narrow
to read it, the prose of a table stands below its rows. If that is not enough, columns are left out, and named below the
table.
"""

from collections.abc import Iterator
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
from onnxamp._base.records import record
from onnxamp._report.body import Body
from onnxamp._report.console import asked_columns, is_screen, make_console
from onnxamp._report.layout import (
    ENDLESS,
    GAP,
    SHOWN,
    SIGNS,
    hanging,
    mark_of,
    plain_text,
    text_of,
)
from onnxamp._report.parts import NextStep, Report, Status, problems
from onnxamp._report.short import is_short, short_lines

_SCREEN: Final = 20
"""Lines after which the verdict is repeated."""
_FINE: Final = (Status.PASSED, Status.NO_GAIN)
"""Verdicts that one line says in full."""


def print_report(
    report: Report, *, verbose: bool = False, brief: bool = False
) -> None:
    """Print a report on standard output; with ``brief`` its verdict, and problems if there are any.

    Commands stand on lines of their own, unbroken, so that they can be copied. If standard output is no terminal and
    COLUMNS is not set, names are not folded, and no column is left out.
    """
    console = make_console()
    whole = not is_screen(console) and not asked_columns()
    if brief and whole:
        console.width = ENDLESS
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


@record
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
    def body(self) -> Body:
        """What renders the parts of the report."""
        more = " (-v shows all)" if self.is_printed else ""
        return Body(self.verbose, self.whole, more)

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
        is_cut = self.is_printed and not self.brief and not self.verbose
        if is_cut and is_short(report):
            return short_lines(report, console, options, whole=self.whole)
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

    def _all(self, width: int) -> Iterator[RenderableType]:
        report = self.report
        yield from _head(report, width)
        if report.figures:
            yield Text()
            yield from self.body.parts(report.figures, width)
        for section in report.sections:
            if section.parts and (self.verbose or not section.is_detail):
                yield from (Text(), text_of(section.title, "bold"))
                yield from self.body.parts(section.parts, width)


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
        yield hanging(SIGNS[item.level], text_of(plain_text(item)))


def _steps(steps: tuple[NextStep, ...]) -> Iterator[RenderableType]:
    for step in steps:
        yield Text()
        sign = ("→", "bold cyan") if step.confirmed else ("!", "yellow")
        yield hanging(sign, text_of(step.text), " ")
        if step.command:
            command = f"   {printable(step.command)}"
            yield Text(command, "bold", no_wrap=True, overflow="ignore")
