"""The name that a misspelt one is likely meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from typing import Final

_LIKELY: Final = 20
"""Names that are compared letter by letter."""


def nearest(names: Iterable[str], text: str) -> str | None:
    """The name that a text is likely meant to be; None if there is none. Linear in names."""
    wanted = _triples(text)
    likely = nlargest(_LIKELY, names, key=lambda name: len(wanted & _triples(name)))
    return next(iter(get_close_matches(text, likely, 1)), None)


def suggestion(names: Iterable[str], text: str) -> str:
    """Return a question after the nearest name, to follow a sentence; "" if none is near."""
    near = nearest(names, text)
    return "" if near is None else f" Did you mean {near!r}?"


def _triples(text: str) -> frozenset[str]:
    """All runs of three letters."""
    small = text.lower()
    return frozenset(small[at : at + 3] for at in range(len(small) - 2))
