"""Text in the columns of a terminal: no line is too wide, and no number is broken or cut.

Prose is folded at spaces, and names in it behind ``/``, ``.`` and the like. In tables, prose is folded, names lose
their middle, and numbers stay whole; where that is not enough, columns are left out.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from rich.cells import cell_len

from onnxamp._report.text import glued

GAP: Final = 2
"""Columns of the terminal between those of a table."""
_NAME: Final = 20
"""Width that names keep while there is a column to leave out."""
PROSE: Final = 20
"""The same of prose."""
_HEADS: Final = (0.4, 0.6, 0.2, 0.8, 0.0, 1.0)
"""Shares of what stays that may be of the beginning, best first."""
_LOOKED_AT: Final = 200
"""Names of a column that are told apart."""
_TITLE: Final = 12
"""Width from which on a word of a title is a name."""
_LEAST: Final = 5
"""Width that names and prose keep in any case."""
_NUMBER: Final = re.compile(r"[-+−<>±]*\d[\d.,:×]*(?:e-?\d+)?[%×]?")
_BREAKS: Final = re.compile(r"(?<=[/._:|,;=\\)\]}-])(?=.)|(?=[(\[{])")
"""Where a name may be broken."""


def folded(text: str, width: int) -> list[str]:
    """Lines of at most ``width``, broken at spaces; longer words are broken where names have their joints."""
    lines = [""]
    for word in glued(text).split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        pieces = _broken(word, width)
        lines += pieces if lines[-1] else []
        lines[-1:] = pieces if not lines[-1] else lines[-1:]
    return [line.replace("\xa0", " ") for line in lines]


def _broken(word: str, width: int) -> list[str]:
    """A word in pieces of at most ``width``."""
    pieces = []
    while cell_len(word) > width:
        most = _fitting(word, width)
        inside = {
            at
            for number in _NUMBER.finditer(word)
            for at in range(number.start() + 1, number.end())
        }
        joints = [
            found.start()
            for found in _BREAKS.finditer(word, 0, most + 1)
            if 0 < found.start() <= most
        ]
        free = [at for at in joints if at not in inside]
        whole = [at for at in range(1, most + 1) if at not in inside]
        end = max(free or whole or [most])
        pieces.append(word[:end])
        word = word[end:]
    return [*pieces, word]


def _fitting(text: str, width: int) -> int:
    """How many characters fit; at least one."""
    return max(1, bisect_right(list(accumulate(map(cell_len, text))), width))


def elided(text: str, width: int, head: float = 0.4) -> str:
    """The text without its middle if it is wider than ``width``; ``head`` is the share of what stays before that."""
    if cell_len(text) <= width:
        return text
    if width < 3:
        return "…"[:width]
    begin = text[: _fitting(text, int(head * (width - 1)))] if head * (width - 1) >= 1 else ""
    rest = width - 1 - cell_len(begin)
    return f"{begin}…{text[len(text) - _fitting(text[::-1], rest) :] if rest else ''}"


def elided_alike(texts: Sequence[str], width: int) -> list[str]:
    """Names of a column, each without the part that tells as few of them apart as possible.

    What all have in common at either end may go, or the middle. Looks at the first names only, if there are many.
    """
    some = list(dict.fromkeys(text for text in texts[:_LOOKED_AT] if text))
    if all(cell_len(text) <= width for text in texts):
        return list(texts)
    start, end = _shared(some), _shared([text[::-1] for text in some])
    best, most = (0, 0, _HEADS[0]), 0
    for head in _HEADS:
        for cut in ((0, 0), (start, 0), (0, end), (start, end)):
            found = len({_cut(text, width, *cut, head) for text in some})
            if found > most:
                best, most = (*cut, head), found
    return [_cut(text, width, *best) for text in texts]


def _shared(texts: Sequence[str]) -> int:
    """Length of the beginning that all have in common, up to a joint."""
    first, last = min(texts, default=""), max(texts, default="")
    length = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    joints = [found.start() for found in _BREAKS.finditer(first, 0, length)]
    return max((at for at in joints if first[at - 1] == "/"), default=max(joints, default=0))


def _cut(text: str, width: int, start: int, end: int, head: float) -> str:
    if cell_len(text) <= width:
        return text
    core = text[start : len(text) - end]
    return elided(f"{'…' if start else ''}{core}{'…' if end else ''}", width, head)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: what stands in it, and of what kind that is ("number", "name", "prose")."""

    title: str
    cells: Sequence[str]
    kind: str = "name"

    @property
    def natural(self) -> int:
        """The width that it would take."""
        return max(map(cell_len, (self.title, *self.cells)), default=0)

    def least(self, of_name: int, of_prose: int) -> int:
        """The width that it needs: of a number all, and of a title its longest word, unless that is a name."""
        if self.kind != "number":
            return min(self.natural, of_name if self.kind == "name" else of_prose)
        words = (min(cell_len(word), _TITLE) for word in self.title.split(" "))
        return max((*words, *map(cell_len, self.cells)))

    def heading(self, width: int) -> list[str]:
        """The title as lines; words that are too wide lose their middle."""
        return folded(" ".join(elided(word, width) for word in self.title.split(" ")), width)

    def lines(self, width: int) -> list[list[str]]:
        """The cells, each as lines."""
        if self.kind == "prose":
            return [folded(cell, width) for cell in self.cells]
        return [
            [cell]
            for cell in (self.cells if self.kind == "number" else elided_alike(self.cells, width))
        ]


def fit(columns: Sequence[Column], room: int | None, drop: Iterable[int] = ()) -> dict[int, int]:
    """Position -> width of the columns that are shown.

    Args:
        columns: all columns.
        room: width of the table; None where nothing may be cut or left out, however wide it is.
        drop: the columns to leave out where there is no room, in this order, behind those that hold nothing.
    """
    shown = dict.fromkeys(range(len(columns)))
    empty = [position for position in list(shown)[1:] if not any(columns[position].cells)]
    drop = (*empty, *(position for position in drop if position not in empty))
    if room is None:
        return {position: columns[position].natural for position in shown}
    waiting = [position for position in drop if position in shown]
    of_name, of_prose = _NAME, PROSE
    while True:
        least = {position: columns[position].least(of_name, of_prose) for position in shown}
        left = room - sum(least.values()) - GAP * (len(least) - 1)
        if left >= 0 or (not waiting and of_name == _LEAST):
            return _grown(columns, least, max(left, 0))
        if waiting:
            del shown[waiting.pop(0)]
        else:
            of_name = of_prose = _LEAST


def _grown(columns: Sequence[Column], least: dict[int, int], left: int) -> dict[int, int]:
    """What is left goes to the narrowest columns that are cut, one after the other."""
    widths = dict(least)
    while left > 0 and (cut := [at for at in widths if widths[at] < columns[at].natural]):
        at = min(cut, key=lambda position: (widths[position], position))
        widths[at] += 1
        left -= 1
    return widths
