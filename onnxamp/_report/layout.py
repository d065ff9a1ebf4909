"""Text and tables on a terminal: what is folded, what loses its middle, and how wide columns are."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import JustifyMethod
from rich.table import Table as Grid
from rich.text import Text

from onnxamp._base.errors import printable
from onnxamp._report import glued
from onnxamp._report.parts import (
    MARKS,
    Figure,
    Severity,
    Statement,
    Status,
    Table,
    TableRow,
)

GAP: Final = 2
"""Columns of the terminal between those of a table, and before the first."""
FOLDED: Final = 20
"""Width that names and prose keep while there is a column to leave out."""
READABLE: Final = 30
"""The narrowest column of prose; narrower prose stands below its row."""
_WORD: Final = 12
"""The same for a word in the title of a column of numbers, and for a name in a sentence."""
ENDLESS: Final = 1 << 16
"""Columns of a line that is never folded."""
FOLDS: Final = 2
"""Lines of a sentence in a short report, and of a remark in any."""
SIGNS: Final = {
    Severity.NONE: (" ", ""),
    Severity.NOTE: ("•", ""),
    Severity.WARNING: ("!", "yellow"),
    Severity.ERROR: ("✘", "red"),
}
_GLUE: Final = "\ue000"
"""Replaces the space between a number and its unit while lines are folded, because rich also folds at
no-break spaces.
"""
_JOINT: Final = "\x1f"
"""Marks where a name may be folded: for rich, it is a space of no width."""
_JOINTS: Final = re.compile(r"(?<=/)(?=\w)")
SHOWN: Final = str.maketrans({_GLUE: " ", _JOINT: None})


def mark_of(status: Status | None) -> tuple[str, str]:
    """Return the sign of a verdict and its color; empty texts if there is none."""
    if status is None:
        return "", ""
    return MARKS[status].terminal, MARKS[status].color


def grid_of(
    part: Table,
    rows: Sequence[TableRow],
    columns: Sequence[Sequence[Text]],
    widths: Mapping[int, int],
    *,
    has_titles: bool = True,
) -> Grid:
    """Return a table whose columns have these widths, which all but prose fits already: prose is folded."""
    grid = Grid(
        box=None,
        # On the left, because versions of rich differ in whether they count what is right of the last column.
        padding=(0, 0, 0, GAP),
        show_header=has_titles and any(part.columns),
        header_style="dim",
    )
    has_marks = any(row.status for row in part.rows)
    if has_marks:
        grid.add_column(no_wrap=True)
    for at, width in widths.items():
        justify: JustifyMethod = "right" if at in part.right else "left"
        title = columns[at][0]
        grid.add_column(title, justify=justify, overflow="fold", width=width)
    for number, row in enumerate(rows, 1):
        cells = list[Text]()
        if has_marks:
            cells.append(Text.assemble(mark_of(row.status)))
        cells += [columns[at][number] for at in widths]
        grid.add_row(*cells, style="bold" if row.is_strong else "")
    return grid


def unaligned(part: Table, rows: Sequence[TableRow]) -> Iterator[Text]:
    """Yield the lines of a table that is too wide to be read in columns: padding would be most of it."""
    titles = [("", part.columns)] if any(part.columns) else []
    marks = (mark_of(row.status)[0] for row in rows)
    lines = [*titles, *zip(marks, (row.cells for row in rows), strict=True)]
    has_marks = any(row.status for row in part.rows)
    for mark, cells in lines:
        lead = [mark or " "] if has_marks else []
        joined = (" " * GAP).join([*lead, *(cell for cell in cells if cell)])
        yield Text(" " * GAP + printable(joined), no_wrap=True, overflow="ignore")


def prose_below(
    part: Table, columns: Sequence[Sequence[Text]], widths: Mapping[int, int]
) -> list[int]:
    """Return the columns of prose if one of them would be too narrow to read: all then stand below their rows."""
    is_narrow = any(
        widths.get(at, READABLE) < min(READABLE, natural_width(columns[at]))
        for at in part.prose
    )
    return list(part.prose) if is_narrow else []


def column_widths(
    part: Table,
    columns: Sequence[Sequence[Text]],
    room: int,
    below: Collection[int] = (),
) -> Mapping[int, int]:
    """Return the columns to show, each with its width, but for those that stand below the rows.

    Numbers and drawings are never cut; what is left is shared by the others.
    """
    every = range(len(columns))
    uncut = {*part.right, *part.drawn}
    least = [_least(columns[at], is_whole=at in uncut) + GAP for at in every]
    natural = [natural_width(column) + GAP for column in columns]
    shown = [at for at in every if at not in below]
    for at in _leaving(part, columns):
        if at in shown and sum(least[position] for position in shown) > room:
            shown.remove(at)
    widths = {at: natural[at] for at in shown}
    if sum(widths.values()) > room:
        widths |= {at: least[at] for at in shown if at in uncut}
        flexible = sorted(set(shown) - uncut, key=natural.__getitem__)
        rest = room - sum(widths[at] for at in shown if at in uncut)
        # Columns that need less than their share leave the rest of it to wider ones.
        for number, at in enumerate(flexible):
            share = max(rest // (len(flexible) - number), GAP + 1)
            widths[at] = min(natural[at], share)
            rest -= widths[at]
    return {at: width - GAP for at, width in widths.items()}


def fitting(
    part: Table, columns: Sequence[Sequence[Text]], widths: Mapping[int, int]
) -> list[Sequence[Text]]:
    """Return columns whose names fit; prose is folded instead."""
    fits = list(columns)
    for at, width in widths.items():
        if at not in part.prose:
            title, *names = columns[at]
            fits[at] = [title, *_apart(names, width)]
    return fits


def _apart(names: Sequence[Text], width: int) -> list[Text]:
    """Return names that fit. Those that would look alike lose the path that they share before they are cut."""
    shown = [cut(name, width) for name in names]
    alike = defaultdict[str, set[str]](set)
    for name, short in zip(names, shown, strict=True):
        alike[short.plain].add(name.plain.translate(SHOWN))
    paths = {short: _shared_path(same) for short, same in alike.items()}
    for at, short in enumerate(shown):
        path = paths[short.plain] if len(alike[short.plain]) > 1 else 0
        if path:
            own = names[at].plain.translate(SHOWN)[path:]
            shown[at] = text_of(middle_cut(f"…{own}", width))
    return shown


def _shared_path(names: Collection[str]) -> int:
    """Return the length of the path at which all names begin, whose parts end with slashes or else with dots."""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    end = next((at for at, (one, other) in pairs if one != other), len(first))
    separator = "/" if "/" in first[:end] else "."
    return first.rfind(separator, 0, end) + 1


def cut(text: Text, width: int) -> Text:
    """Return a name that fits, without its middle if it is too long."""
    if text.cell_len <= width:
        return text
    return text_of(middle_cut(text.plain.translate(SHOWN), width))


def middle_cut(text: str, width: int) -> str:
    """Return a name in at most so many columns; a longer one loses its middle, because its ends tell names apart."""
    if cell_len(text) <= width:
        return text
    head = set_cell_size(text, (width - 1) // 2).rstrip()
    room = width - 1 - cell_len(head)
    tail = text[len(text) - room :] if room > 0 else ""
    while cell_len(tail) > room:
        tail = tail[1:]
    return f"{head}…{tail}"


def clauses_cut(sentence: str, room: int) -> str:
    """Return a sentence that fits, without its last clauses if it is too long; clauses end with commas."""
    safe = printable(sentence)
    if cell_len(safe) <= room:
        return safe
    end = set_cell_size(safe, max(room - 1, 0)).rfind(", ")
    # A first clause that is too long is left to be cut where it ends.
    return f"{safe[: end + 2]}…" if end > 0 else safe


def name_cut(sentence: str, room: int) -> str:
    """Return a sentence whose longest name loses its middle if that is too long for so many columns."""
    safe = printable(sentence)
    excess = cell_len(safe) - room
    longest = max(safe.split(" "), key=cell_len)
    length = max(cell_len(longest) - excess, _WORD)
    if excess <= 0 or cell_len(longest) <= FOLDED:
        return safe
    return safe.replace(longest, middle_cut(longest, length), 1)


def text_of(text: str, style: str = "") -> Text:
    """Return printable text in which numbers stay with their units, and names fold between their parts."""
    inert = glued(printable(text)).replace("\xa0", _GLUE)
    return Text(_JOINTS.sub(_JOINT, inert), style)


def natural_width(column: Sequence[Text]) -> int:
    """Return the width of a column that is not folded."""
    return max(text.cell_len for text in column)


def _least(column: Sequence[Text], *, is_whole: bool) -> int:
    """Return the width that a column needs for unfolded cells, and for the longest word of its title."""
    title, *cells = column
    natural = max((text.cell_len for text in cells), default=0)
    if not is_whole:
        return min(max(natural, title.cell_len), FOLDED)
    words = [min(cell_len(word), _WORD) for word in title.plain.split(" ")]
    return max(natural, *words)


def _leaving(part: Table, columns: Sequence[Sequence[Text]]) -> Iterator[int]:
    """Yield the columns to leave out, in this order: empty ones, and those that the table names."""
    for at, (_, *cells) in enumerate(columns):
        if at and not any(cells):
            yield at
    last_to_second = range(len(columns) - 1, 0, -1)
    yield from last_to_second if part.drop is None else part.drop


def hanging(sign: str | tuple[str, str], text: Text, indent: str = "") -> Grid:
    """Return text after a sign; folded lines are indented."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text.assemble(indent, sign), text)
    return grid


def remark_room(figures: Sequence[Figure], width: int) -> int:
    """Return the columns that labels and values leave to remarks."""
    labels = max((cell_len(figure.label) for figure in figures), default=0)
    values = max((cell_len(figure.value) for figure in figures), default=0)
    return max(width - labels - values - 3 * GAP, 1)


def plain_text(item: Statement) -> str:
    """Return what a statement says, after its subject."""
    return f"{item.label}: {item.text}" if item.label else item.text
