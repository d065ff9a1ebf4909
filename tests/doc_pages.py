"""Pages of the documentation: their code blocks, the commands in their text, and the reasons not to run a block.

A block of ``sh`` holds commands, one of ``python`` a program, and one of ``text`` the first lines that the command or
program above it prints. A comment above a block says why it does not run everywhere:

    <!-- needs: torch -->            it runs where this module is installed
    <!-- not run: a diagram -->      it never runs, or is no output
"""

import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from repository import ROOT

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("[A-Z]*.md")])
COMMANDS = ("", "sh")
"""Kinds of blocks that hold commands."""

_BLOCK = re.compile(
    r"^( *)(?:<!-- (needs|not run): (.+?) -->\n+\1)?```([^`\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL
)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_CONTINUED = re.compile(r"\s*\\\n\s*")


class Block(NamedTuple):
    kind: str
    text: str
    obstacle: str
    """Why it does not run here, or empty."""
    start: int
    """Where the text starts in the page."""

    @property
    def commands(self) -> list[str]:
        """The commands of the block; a backslash continues a line."""
        return [line.strip() for line in _CONTINUED.sub(" ", self.text).splitlines()] if self.kind in COMMANDS else []


def blocks(page: Path) -> list[Block]:
    """All blocks but the directives of Sphinx."""
    matches = list(_BLOCK.finditer(page.read_text(encoding="utf-8")))
    return [_block(*match.groups(), match.start(5)) for match in matches if not match[4].startswith("{")]


def _block(_: str, word: str | None, reason: str | None, kind: str, text: str, start: int) -> Block:
    installed = word == "needs" and find_spec(str(reason)) is not None
    return Block(kind, textwrap.dedent(text), "" if word is None or installed else f"{word}: {reason}", start)


def spans(page: Path) -> list[str]:
    """The code in running text, each on one line."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in _SPAN.findall(text)]
