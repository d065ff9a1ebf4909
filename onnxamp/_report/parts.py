"""Parts of terminal reports. Names come from the model: markup and escapes in them are shown, not obeyed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_WIDTH: Final = 140
"""Columns of a report that goes to no terminal, where COLUMNS does not say otherwise."""


def plain(name: str) -> Text:
    """A name from the model as harmless text: control characters are written as escapes."""
    return Text(printable(name))


def printable(text: str) -> str:
    """Text with control characters (terminal escapes in names, say) written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def size(count: int) -> str:
    """Bytes for people: 12.3 MB (10^6 bytes)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def make_console(*, stderr: bool = False) -> Console:
    """A console. Without a terminal it is as wide as COLUMNS says, or wide enough, and pads no line with blanks."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    wide = int(columns) if columns.isdecimal() and int(columns) > 0 else _WIDTH
    console = Console(stderr=stderr, highlight=False, width=wide)
    console.push_render_hook(_WithoutPadding())
    return console


class _WithoutPadding(RenderHook):
    """What is printed, without the blanks that fill lines up to the width of a table."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Trimmed(item) for item in renderables]


@dataclass(frozen=True, slots=True)
class _Trimmed:
    item: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segments in Segment.split_lines(console.render(self.item, options)):
            kept = list(segments)
            while kept and not kept[-1].text.rstrip(" "):
                kept.pop()
            if kept:
                last = kept.pop()
                kept.append(Segment(last.text.rstrip(" "), last.style, last.control))
            yield from kept
            yield Segment.line()


def make_table(*columns: str, right: tuple[int, ...] | None = None) -> Table:
    """A table without lines; all columns but the first are right-aligned unless ``right`` names those that are.

    Where it is too narrow the widest columns are broken first: names before ops, and those before numbers. Nothing is
    cut off, as rich does with columns that may be broken where others may not.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        is_right = position > 0 if right is None else position in right
        made.add_column(
            Text(column),
            justify="right" if is_right else "left",
            overflow="fold",
            min_width=1,  # of a column of nothing rich measures 0, takes 1, and cuts that off another one
        )
    return made


def heading(text: str) -> Text:
    """The heading of a section, with a blank line above."""
    return Text(f"\n{text}", style="bold")


def line(mark: str | Text, text: Text) -> RenderableType:
    """An indented line behind a mark; what wraps stays behind it."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("", mark, text)
    return grid
