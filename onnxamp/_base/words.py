"""Numbers and lists of names in sentences."""

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``1,200 nodes``, ``2 boxes``."""
    ending = "es" if noun.endswith(("x", "ss")) else "s"
    return f"{number:,} {noun}" + ("" if number == 1 else ending)


def enumerated(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def shortened(words: Sequence[str], most: int | None, noun: str = "") -> str:
    """Return the first of some words, and the number of the others: ``a, b and 3 more``, ``a, b and 3 more nodes``."""
    shown = ", ".join(words[:most])
    left = len(words[most:]) if most is not None else 0
    if not left:
        return shown
    return f"{shown} and {count(left, f'more {noun}') if noun else f'{left:,} more'}"
