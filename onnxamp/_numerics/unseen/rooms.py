"""The headroom of values: what is proven of each, and what was measured of it."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from onnxamp._graph.bounds.bounds import Bounds
from onnxamp._graph.view import Origin
from onnxamp._numerics.unseen.stressed import Room

_MOST: Final = 64
"""Values that are listed: those with the least headroom."""


def rooms_of(
    bounds: Bounds,
    values: Iterable[int],
    seen: Mapping[str, float] | None = None,
    stressed: Mapping[str, float] | None = None,
) -> tuple[Room, ...]:
    """Return the values with the least headroom, the least first: those that are not proven, by what they reached.

    Args:
        bounds: the bounds of the model's values.
        values: those that are, or may become, low precision.
        seen: names in the original -> the largest magnitude on samples.
        stressed: the same, on inputs that were made to be hard.
    """
    seen, stressed = seen or {}, stressed or {}
    rooms = list[tuple[bool, Room]]()
    ending = f"_{bounds.low.suffix}"
    for value in values:
        held = bounds.graph.values[value]
        if held.origin is not Origin.NODE:
            continue
        name = held.name
        if name not in seen:
            name = name.removesuffix(ending)
        is_low = bounds.graph.types[value] == bounds.low.tensor
        if is_low and seen.get(name, 0.0) >= bounds.low.overflow:
            continue  # a mask, which the result saturates
        most = bounds.reach(value)
        room = Room(
            value=name,
            proven=None if most == inf else most,
            seen=seen.get(name),
            stressed=stressed.get(name),
        )
        rooms.append((bounds.is_safe(value), room))
    rooms.sort(key=_scarcity)
    return tuple(room for _, room in rooms[:_MOST])


def _scarcity(item: tuple[bool, Room]) -> tuple[bool, float, float]:
    """Return the key by which values with little headroom come first."""
    is_safe, room = item
    proven = inf if room.proven is None else room.proven
    return is_safe, -room.found, -proven
