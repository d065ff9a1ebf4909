"""Reports as data, and their views: terminal, JSON, Markdown and HTML. Here: how they write numbers and names."""

import re
from collections import Counter
from collections.abc import Iterable
from math import isfinite, isnan
from typing import Any, Final

from onnxamp._base.errors import printable
from onnxamp._base.words import shortened

_LONGEST_NAME: Final = 400
"""Characters of a name that the page shows; longer ones lose their middle."""
_LONGEST_SENTENCE: Final = 2000
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[kMG]?B|dB|[mµ]?s)\b|%)")
"""The space between a number and its unit."""


def glued(text: str) -> str:
    """Return text whose lines never end between a number and its unit."""
    return _UNIT.sub("\xa0", text)


def named(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return :func:`printable` text of bounded length."""
    # Escapes only lengthen a text, so the ends of a very long one suffice.
    bounded = text if len(text) <= 4 * longest else text[:longest] + text[-longest:]
    safe = printable(bounded)
    if len(safe) <= longest:
        return safe
    half = longest // 2
    return f"{safe[:half]} … {safe[-half:]}"


def said(text: str) -> str:
    """Return a :func:`printable` sentence of bounded length, which may contain several names."""
    return named(text, _LONGEST_SENTENCE)


def number(x: float | None, digits: int = 3) -> str:
    """Return a number for people: 0.0123, 1.23e-5, ∞, NaN; a dash if there is none."""
    if x is None:
        return "–"
    if isnan(x):
        return "NaN"
    if not isfinite(x):
        return "∞" if x > 0 else "−∞"
    x += 0.0  # no negative zero
    # The format g alone would write exponents only below 1e-4.
    text = f"{x:.{digits - 1}e}" if 0 < abs(x) < 1e-3 else f"{x:.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def magnitude(x: float, zeros: int) -> str:
    """Return a largest magnitude; a dash if it is 0 although no element is zero, because then none is finite."""
    return number(x) if x or zeros else "–"


def percent(part: float, whole: float) -> str:
    """Return ``part`` of ``whole`` in whole percents, and 0 or 100 only if exact."""
    if not whole:
        return "–"
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1 %"
    if 99 < share < 100:
        return ">99 %"
    return ">100 %" if 100 < share < 100.5 else f"{share:.0f} %"


def as_sentence(clause: str) -> str:
    """Return a clause with a capital letter and a full stop; the rest of it stays as it is."""
    return f"{clause[:1].upper()}{clause[1:]}."


def change(before: int, after: int) -> str:
    """Return the counts of both sides, or one count if they agree."""
    return f"{after:,}" if before == after else f"{before:,} → {after:,}"


def shape(dims: tuple[int, ...]) -> str:
    """Return the dimensions, or ``scalar``."""
    return "×".join(map(str, dims)) or "scalar"


def size(bytes_: int) -> str:
    """Return bytes for people: 12.3 MB (10^6 bytes)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        # What rounds to 1000.0 is one of the next unit.
        if bytes_ >= 0.99995 * factor:
            return f"{bytes_ / factor:.1f} {unit}"
    return f"{bytes_} B"


def time_text(microseconds: float) -> str:
    """Return a time for people: 3.2 µs, 1.25 ms, 1.23 s."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * factor:
            return f"{microseconds / factor:.2f} {unit}"
    return f"{microseconds:.3g} µs"


def tally(names: Iterable[str], longest: int | None = None) -> str:
    """Return names with how often they occur, most frequent first."""
    counts = Counter(names).most_common()
    texts = [f"{name} ×{times}" if times > 1 else name for name, times in counts]
    return shortened(texts, longest, "op type")


def detailed(rows: Iterable[Any]) -> tuple[str, ...]:
    """Return nodes, each with the detail that there is. A detail of several nodes is named once, before them."""
    nodes = dict[str, list[str]]()
    for row in rows:
        nodes.setdefault(row.detail, []).append(row.node)
    lines = nodes.pop("", [])
    for detail, names in nodes.items():
        ends = (names[0], detail) if len(names) == 1 else (detail, ", ".join(names))
        lines.append(": ".join(ends))
    return tuple(lines)


def opset_text(opsets: Iterable[tuple[str, int]]) -> str:
    """Return opset imports as text: ``ai.onnx 17, com.microsoft 1``."""
    return ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in opsets)
