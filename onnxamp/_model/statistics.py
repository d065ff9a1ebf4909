"""Statistics of float constants."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp._dtypes import Format
from onnxamp._model.external_data import data_location, scaled_tensor
from onnxamp._model.protos import record
from onnxamp._model.weights import MAPPED, read_array, times_power

SENTINEL: Final = 1e30
"""Magnitudes from here on mean infinity, as in attention masks; a conversion saturates them."""

_BLOCK: Final = 1 << 20
"""Elements that are looked at together."""


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
        return self.largest_number if abs(self.largest_number) >= low.overflow else None

    def has_sentinel(self, low: Format) -> bool:
        """Return whether an element means infinity and does not fit the low-precision type."""
        return self.largest >= max(SENTINEL, low.overflow)

    def scaled(self, exponent: int) -> "ConstantStats | None":
        """Those of the numbers multiplied by ``2**-exponent``; None where other elements are sentinels then."""
        largest, uniform, number = (
            None
            if old is None
            else float(times_power(np.array([old], np.float32), exponent)[0])
            for old in (self.largest, self.uniform, self.largest_number)
        )
        if (
            largest is None
            or number is None
            or self.largest != abs(self.largest_number)
            or largest >= SENTINEL
        ):
            return None
        return ConstantStats(largest, uniform, number, self.has_infinite)


def tensor_stats(tensor: TensorProto, base_dir: Path | None) -> ConstantStats:
    """Return statistics of a float tensor, without a copy if it is a multiple of the data in a file.

    Raises:
        As :func:`read_array`.
    """
    place = data_location(tensor, base_dir)
    if place is not None and place.exponent:
        plain = scaled_tensor(tensor, base_dir, -place.exponent)
        if (
            plain is not None
            and (found := tensor_stats(plain, base_dir).scaled(place.exponent))
            is not None
        ):
            return found
    return constant_stats(read_array(tensor, base_dir))


def constant_stats(array: NDArray[Any]) -> ConstantStats:
    """Statistics of a float constant. Two passes over the data; more only if elements are infinite, NaN or sentinels.

    Low-precision arrays are converted to float32 block by block, never as a whole.
    """
    if array.size == 0:
        return ConstantStats(0.0, None, 0.0)
    if array.dtype == np.float32:
        return _block_stats(array)
    parts = [_block_stats(block.astype(np.float32)) for block in blocks_of(array)]
    numbers = {part.uniform for part in parts}
    return ConstantStats(
        max(part.largest for part in parts),
        numbers.pop() if len(numbers) == 1 else None,
        max((part.largest_number for part in parts), key=abs),
        any(part.has_infinite for part in parts),
    )


def blocks_of(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Return the elements of an array in flat blocks that fit into the processor's cache."""
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))


def _block_stats(array: NDArray[np.float32]) -> ConstantStats:
    few = (
        array.size < MAPPED
    )  # there, argmax is faster than max; but it copies what is read-only, as mapped files are
    top = array.item(array.argmax()) if few else float(array.max())
    bottom = array.item(array.argmin()) if few else float(array.min())
    uniform, extreme = top if top == bottom else None, top if top >= -bottom else bottom
    if abs(extreme) < SENTINEL:  # false for NaN
        return ConstantStats(abs(extreme), uniform, extreme)
    magnitudes = np.abs(array[np.isfinite(array)])
    numbers = array[np.abs(array) < SENTINEL]
    extreme = float(numbers[np.abs(numbers).argmax()]) if numbers.size else 0.0
    infinite = bool(np.isinf(array).any())
    return ConstantStats(float(magnitudes.max(initial=0.0)), uniform, extreme, infinite)
