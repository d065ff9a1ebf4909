"""Flat tensors in float64, a block at a time."""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

PART: Final = 1 << 20
"""Elements of outputs that are compared at once."""


def dot_product(x: Array, y: Array) -> float:
    """Return the dot product of two tensors, without BLAS, whose threads compete with those of ONNX Runtime."""
    return float(np.einsum("i,i->", x, y))


def blocks(one: Array, other: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Yield both flat tensors in float64, that many elements at a time."""
    for start in range(0, one.size, size):
        part = slice(start, start + size)
        r = one[part].astype(np.float64)
        yield r, (r if other is one else other[part].astype(np.float64))
