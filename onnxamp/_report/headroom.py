"""The headroom of values as gauges: what is proven, stressed and seen of each, against the range of its type."""

from collections.abc import Sequence
from math import log2
from typing import Final

from onnxamp._facts.dtypes import FORMATS
from onnxamp._numerics.unseen.stressed import Room
from onnxamp._report import number
from onnxamp._report.parts import Gauge, Gauges, Section, hint, section

_BELOW: Final = 22
"""Powers of two of the axis below the largest number of the type: down to 1/64 in float16."""
_ABOVE: Final = 4
"""Powers of two of the axis above it."""

_LEGEND: Final = "█ reached on samples, ▓ on inputs made to be hard, ░ at most, by proof. The line is the end of the type."
"""The parts of a gauge by their shades; the page, which has colors, has its own legend."""


def headroom_section(rooms: Sequence[Room], dtype: str) -> Section:
    """Return the values with the least headroom in a low-precision type."""
    low = FORMATS.get(dtype)
    if low is None or not rooms:
        return section("Headroom")
    limit = low.max_finite
    has_run = any(room.seen is not None or room.stressed is not None for room in rooms)
    # Without a run, a value without a bound is unknown, and a bar that leaves the axis would look like a fault.
    known = [room for room in rooms if has_run or room.proven is not None]
    if not known:
        return section("Headroom", hint(_UNKNOWN))
    gauges = tuple(_gauge(room, limit) for room in known)
    columns = ("value", "seen", "stressed", "proven", f"largest |x|, to {limit:g}")
    lead = f"Values closest to the end of {dtype}. Each step of a bar doubles the magnitude."
    if len(known) < len(rooms):
        lead += " Values without a proven bound are left out. --inputs shows how far samples come."
    elif all(room.seen is None for room in rooms):
        lead += " --inputs adds how far samples come."
    return section(
        "Headroom",
        hint(lead),
        Gauges(columns, gauges, _BELOW / (_BELOW + _ABOVE), _LEGEND),
    )


_UNKNOWN: Final = (
    "The values closest to the end of the type have no proven bound, because inputs may be any number. --inputs shows"
    " how far samples come."
)


def _gauge(room: Room, limit: float) -> Gauge:
    """Return the gauge of a value: hard inputs reach at least what was seen, and proofs what any input reached."""
    seen = _reach(room.seen or 0.0, limit)
    hard = max(seen, _reach(room.stressed or 0.0, limit))
    proven = 1.0 if room.proven is None else max(hard, _reach(room.proven, limit))
    proof = "unbounded" if room.proven is None else number(room.proven)
    texts = (_text(room.seen), _text(room.stressed), proof)
    return Gauge(room.value, texts, (seen, hard, proven))


def _text(magnitude: float | None) -> str:
    return "" if magnitude is None else number(magnitude)


def _reach(magnitude: float, limit: float) -> float:
    """Return the place of a magnitude on the axis, as a share of it."""
    if magnitude <= 0.0:
        return 0.0
    steps = log2(magnitude / limit) + _BELOW
    return min(max(steps / (_BELOW + _ABOVE), 0.0), 1.0)
