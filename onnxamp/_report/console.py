"""Consoles for reports and messages, as wide as the terminal or as COLUMNS says."""

import os
from typing import Final

from rich.console import Console

from onnxamp._report.layout import SHOWN, text_of

_WIDTH: Final = 140
"""Columns of a report without a terminal, unless COLUMNS says otherwise."""


def make_console(*, stderr: bool = False) -> Console:
    """Return a console. Without a terminal it is as wide as COLUMNS says, or wide enough."""
    console = Console(stderr=stderr, highlight=False)
    if not is_screen(console):
        console.width = asked_columns() or _WIDTH
    return console


def is_screen(console: Console) -> bool:
    """Return whether a console writes to a terminal.

    FORCE_COLOR, which jobs on CI set, makes rich believe so. It asks for colors in a log, not for a bar that moves or
    for lines of 80 columns.
    """
    return console.is_terminal and console.file.isatty()


def fitted(text: str, prefix: str = "") -> str:
    """Return text for standard error, folded if that is a terminal, to follow a prefix."""
    console = make_console(stderr=True)
    if not is_screen(console):
        return text
    lines = text_of(text).wrap(console, console.width - len(prefix))
    return "\n".join(line.plain.rstrip() for line in lines).translate(SHOWN)


def asked_columns() -> int:
    """Return the width that COLUMNS asks for; 0 if it asks for none."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0
