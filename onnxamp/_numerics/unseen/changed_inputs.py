"""Changes of inputs at random: of their last digits, or within their ranges; most of these leave little contrast."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.dtypes import Range
from onnxamp._runtime.sessions.values import Feed, Feeds

_NUDGE: Final = 2.0**-22
"""Share of an input by which its last two digits in float32 may be off."""

_FLATTEST: Final = 1 / 256
"""The least spread of an input, as a share of its range: that of an image of 8 bits with two shades of gray. What is
flatter has no digits left once the input itself is rounded, and occurs in no data.
"""

_FLAT: Final = (1.5, 2.5)
"""Least and largest power of ten by which contrast is lowered."""

_SMALL: Final = (0.5, 2.5)
"""The same for the size of other changes."""

_Array: TypeAlias = NDArray[np.float64]

_Change: TypeAlias = Callable[[_Array, Range, np.random.Generator], _Array]


def nudged(feeds: Feeds, seed: int) -> dict[str, Feed]:
    """Return inputs with other last digits. An output that these change is noise in float32 itself."""
    rng = np.random.default_rng(seed)
    moved = dict(feeds)
    for name, feed in feeds.items():
        if isinstance(feed, np.ndarray) and feed.dtype == np.float32:
            signs = rng.choice([-_NUDGE, _NUDGE], feed.shape)
            moved[name] = np.asarray(feed * (1 + signs), np.float32)
    return moved


def changed(
    inputs: Feeds,
    ranges: Mapping[str, Range],
    draw: np.random.Generator,
    changes: Sequence[_Change],
) -> Feeds:
    """Return inputs after a change at random, within their ranges."""
    change = changes[int(draw.integers(len(changes)))]
    moved = dict(inputs)
    for name, ends in ranges.items():
        array = np.asarray(inputs[name], np.float64)
        further = _spread(change(array, ends, draw), ends, draw)
        moved[name] = np.clip(further, *ends).astype(np.float32)
    return moved


def _spread(moved: _Array, ends: Range, draw: np.random.Generator) -> _Array:
    """Return numbers that are spread a little at least; equal ones get noise."""
    least = _FLATTEST * (ends[1] - ends[0])
    spread = float(np.ptp(moved))
    if spread >= least:
        return moved
    middle = moved.mean()
    rest = moved - middle if spread else draw.uniform(-0.5, 0.5, moved.shape)
    return np.asarray(middle + rest * (least / float(np.ptp(rest))))


def _leveled(array: _Array, ends: Range, draw: np.random.Generator) -> _Array:
    """Lower the contrast around a number: an end of the range, its middle, or any."""
    low, high = ends
    nil = min(max(0.0, low), high)
    middle = draw.choice([low, high, (low + high) / 2, nil, draw.uniform(low, high)])
    return np.asarray(middle + (array - array.mean()) * _share(draw, _FLAT))


def _evened(array: _Array, _ends: Range, draw: np.random.Generator) -> _Array:
    """Make the slices along an axis nearly equal."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    middle = array.mean(axis=int(draw.choice(axes)), keepdims=True)
    return np.asarray(middle + (array - middle) * _share(draw, _FLAT))


def _scaled(array: _Array, _ends: Range, draw: np.random.Generator) -> _Array:
    """Scale all numbers, mostly down."""
    return np.asarray(array * 10.0 ** draw.uniform(-_SMALL[1], _SMALL[0]))


def _jittered(array: _Array, ends: Range, draw: np.random.Generator) -> _Array:
    """Add a little noise."""
    noise = draw.standard_normal(array.shape) * (ends[1] - ends[0])
    return np.asarray(array + noise * _share(draw, _SMALL))


def _struck(array: _Array, ends: Range, draw: np.random.Generator) -> _Array:
    """Put a few numbers at the ends of the range."""
    is_struck = draw.random(array.shape) < _share(draw, _SMALL)
    return np.where(is_struck, draw.choice(ends, array.shape), array)


def _blended(array: _Array, ends: Range, draw: np.random.Generator) -> _Array:
    """Add a part of random numbers."""
    other = draw.uniform(*ends, array.shape)
    return np.asarray(array + (other - array) * 10.0 ** -draw.uniform(0.0, 2.0))


def _share(draw: np.random.Generator, powers: Range) -> float:
    return float(10.0 ** -draw.uniform(*powers))


FLATTENING: Final[Sequence[_Change]] = (_leveled, _evened, _scaled)
"""Changes that leave little contrast."""

CHANGES: Final[Sequence[_Change]] = (*FLATTENING, _jittered, _struck, _blended)
