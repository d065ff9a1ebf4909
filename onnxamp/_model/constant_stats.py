"""Statistics of weights, for hazard rules: of one by one, or of many small ones together."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp._base.records import record
from onnxamp._facts.dtypes import Format
from onnxamp._model.sources import data_location, scaled_tensor
from onnxamp._model.weights import (
    MAPPED,
    SENTINEL,
    blocks_of,
    raw_floats,
    read_array,
    times_power,
)

_SMALL: Final = 1 << 13
"""Elements up to which a tensor is measured together with others."""
_TOGETHER: Final = 1 << 18
"""Elements measured together: few enough to stay in the processor's cache."""


@record
class ConstantStats:
    """Statistics of a float constant, for hazard rules."""

    largest: float
    """Largest finite magnitude."""
    uniform: float | None
    """The value of all elements, if they are equal."""
    largest_number: float
    """The element of the largest magnitude below :data:`SENTINEL`."""
    has_infinite: bool = False
    """Whether any element is infinite."""

    def out_of_range(self, low: Format) -> float | None:
        """Return an element that rounds to infinity in the low-precision type and is no sentinel."""
        number = self.largest_number
        return number if abs(number) >= low.overflow else None

    def has_sentinel(self, low: Format) -> bool:
        """Return whether an element means infinity and does not fit the low-precision type."""
        return self.largest >= max(SENTINEL, low.overflow)

    def scaled(self, exponent: int) -> "ConstantStats | None":
        """Return those of the numbers multiplied by ``2**-exponent``; None where other elements are sentinels then."""

        def times(number: float) -> float:
            return float(times_power(np.array([number], np.float32), exponent)[0])

        largest = times(self.largest)
        has_sentinels = self.largest != abs(self.largest_number)
        if has_sentinels or largest >= SENTINEL:
            return None
        uniform = None if self.uniform is None else times(self.uniform)
        number = times(self.largest_number)
        return ConstantStats(largest, uniform, number, self.has_infinite)


def tensor_stats(tensor: TensorProto, base_dir: Path | None) -> ConstantStats:
    """Return statistics of a float tensor, without a copy if it is a multiple of the data in a file.

    Raises:
        As :func:`read_array`.
    """
    place = data_location(tensor, base_dir)
    if place is not None and place.exponent:
        plain = scaled_tensor(tensor, base_dir, -place.exponent)
        if plain is not None:
            stats = tensor_stats(plain, base_dir).scaled(place.exponent)
            if stats is not None:
                return stats
    return constant_stats(read_array(tensor, base_dir))


def stats_of_all(
    tensors: Sequence[TensorProto], base_dir: Path | None
) -> Iterator[ConstantStats]:
    """Yield the statistics of float tensors, as :func:`tensor_stats` does; of small ones, many are measured at once.

    Raises:
        As :func:`read_array`.
    """
    joined = list[NDArray[np.float32]]()
    room = _TOGETHER
    for tensor in tensors:
        numbers = raw_floats(tensor)
        is_small = numbers is not None and numbers.size <= _SMALL
        if not is_small or room < 0:
            yield from _joined_stats(joined)
            joined = []
            room = _TOGETHER
        if numbers is not None and is_small:
            joined.append(numbers)
            room -= numbers.size
        elif numbers is not None:
            yield _block_stats(numbers)
        else:
            yield tensor_stats(tensor, base_dir)
    yield from _joined_stats(joined)


def _joined_stats(arrays: Sequence[NDArray[np.float32]]) -> Iterator[ConstantStats]:
    """Yield the statistics of small arrays, none of which is empty."""
    if not arrays:
        return
    flat = np.concatenate(arrays)
    ends = accumulate(array.size for array in arrays)
    starts = [0, *ends][:-1]
    tops = np.maximum.reduceat(flat, starts)
    bottoms = np.minimum.reduceat(flat, starts)
    extremes = np.where(tops >= -bottoms, tops, bottoms)
    are_plain = np.abs(extremes) < SENTINEL  # false for NaN
    columns = (column.tolist() for column in (tops, bottoms, extremes, are_plain))
    for array, top, bottom, extreme, is_plain in zip(arrays, *columns, strict=True):
        if is_plain:
            uniform = top if top == bottom else None
            yield ConstantStats(abs(extreme), uniform, extreme)
        else:
            yield _block_stats(array)


def constant_stats(array: NDArray[Any]) -> ConstantStats:
    """Return statistics of a float constant, in two passes unless elements are infinite, NaN or sentinels.

    Low-precision arrays are converted to float32 block by block, never as a whole.
    """
    if array.size == 0:
        return ConstantStats(0.0, None, 0.0)
    if array.dtype == np.float32:
        return _block_stats(array)
    parts = [_block_stats(block.astype(np.float32)) for block in blocks_of(array)]
    uniform = {part.uniform for part in parts}
    numbers = (part.largest_number for part in parts)
    return ConstantStats(
        largest=max(part.largest for part in parts),
        uniform=uniform.pop() if len(uniform) == 1 else None,
        largest_number=max(numbers, key=abs),
        has_infinite=any(part.has_infinite for part in parts),
    )


def _block_stats(array: NDArray[np.float32]) -> ConstantStats:
    """Return the statistics of an array that is not empty."""
    # On few elements, argmax is faster than max; but it copies what is read-only, as mapped files are.
    if array.size < MAPPED:
        top = array.item(array.argmax())
        bottom = array.item(array.argmin())
    else:
        top = float(array.max())
        bottom = float(array.min())
    uniform = top if top == bottom else None
    extreme = top if top >= -bottom else bottom
    if abs(extreme) < SENTINEL:  # false for NaN
        return ConstantStats(abs(extreme), uniform, extreme)
    magnitudes = np.abs(array[np.isfinite(array)])
    numbers = array[np.abs(array) < SENTINEL]
    extreme = float(numbers[np.abs(numbers).argmax()]) if numbers.size else 0.0
    infinite = bool(np.isinf(array).any())
    return ConstantStats(
        float(magnitudes.max(initial=0.0)), uniform, extreme, infinite
    )
