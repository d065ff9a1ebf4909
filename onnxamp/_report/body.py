"""The body of a report on a terminal: its key figures, statements and tables, one below the other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from onnxamp._base.records import record
from onnxamp._report.layout import (
    ENDLESS,
    FOLDS,
    GAP,
    SIGNS,
    column_widths,
    fitting,
    grid_of,
    hanging,
    name_cut,
    natural_width,
    prose_below,
    remark_room,
    text_of,
    unaligned,
)
from onnxamp._report.parts import (
    Bars,
    Figure,
    Gauges,
    Part,
    Severity,
    Statement,
    Table,
    TableRow,
    bars_table,
    gauges_table,
    hint,
    listed_parts,
    shown_rows,
)

_MEMBERS: Final = 3
"""The number of members of a statement that are shown without -v."""


@record
class Body:
    """Renders parts.

    Attributes:
        verbose: with all rows and members.
        whole: with names that are not shortened.
        more: how to see the rows and names that are left out, if there is a way.
    """

    verbose: bool
    whole: bool
    more: str

    def parts(self, parts: tuple[Part, ...], width: int) -> Iterator[RenderableType]:
        """Yield the parts, one below the other; neighboring figures share a table."""
        figures = Grid.grid(padding=(0, GAP, 0, 0))
        for is_number in (False, False, True, False):
            figures.add_column(no_wrap=is_number, overflow="fold")
        shown = [part for part in parts if isinstance(part, Figure)]
        room = ENDLESS if self.whole else FOLDS * remark_room(shown, width)
        for figure in shown:
            cells = (figure.label, figure.value, name_cut(figure.remark, room))
            figures.add_row("", *map(text_of, cells))
        if figures.row_count:
            yield figures
        for part in listed_parts(parts):
            if isinstance(part, Statement):
                yield from self.statement(part)
            elif isinstance(part, Table):
                yield from self.table(part, width)
            elif isinstance(part, Bars):
                yield from self.table(bars_table(part), width)
            elif isinstance(part, Gauges):
                yield from self.statement(hint(part.legend))
                yield from self.table(gauges_table(part), width)

    def statement(self, item: Statement) -> Iterator[RenderableType]:
        """Yield a statement after its sign, and its subject."""
        below = " " if item.level is Severity.NONE else "  "
        label = f"{item.label}: " if item.label else ""
        text = Text.assemble(text_of(label, "bold"), text_of(item.text))
        yield hanging(SIGNS[item.level], text, below[1:])
        for member in item.members if self.verbose else item.members[:_MEMBERS]:
            yield hanging(below, text_of(member, "dim"))
        left = len(item.members) - _MEMBERS
        if left > 0 and not self.verbose:
            yield hanging(below, Text(f"… and {left:,} more{self.more}", "dim"))
        if item.action:
            yield hanging(below, text_of(f"→ {item.action}"))

    def table(self, part: Table, width: int) -> Iterator[RenderableType]:
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
