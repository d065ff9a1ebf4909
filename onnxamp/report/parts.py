"""Parts of terminal reports. Names come from the model: markup and escapes in them are shown, not obeyed."""

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


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
    """A console; without a terminal the width is fixed, so that redirected reports do not wrap."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=140)


def make_table(*columns: str, right: tuple[int, ...] | None = None) -> Table:
    """A table without lines; all columns but the first are right-aligned unless ``right`` names those that are."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, column in enumerate(columns):
        is_right = position > 0 if right is None else position in right
        made.add_column(Text(column), justify="right" if is_right else "left", overflow="fold")
    return made


def heading(text: str) -> Text:
    """The heading of a section, with a blank line above."""
    return Text(f"\n{text}", style="bold")


def line(mark: str | Text, text: Text) -> RenderableType:
    """An indented line behind a mark; what wraps stays behind it."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("", mark, text)
    return grid
