"""Random masks: which elements of an input count, and the numbers that say so."""

from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import helper

from onnxamp._facts.dtypes import FLOAT32_MAX, FORMATS
from onnxamp._runtime.inputs.roles import Role, Use

MASKS: Final = frozenset({Role.MASK, Role.PADDING, Role.ADDED, Role.SUBTRACTED})
"""Roles of inputs that tell which elements count."""

_ROWS: Final = 3
"""Rows from which a mask holds one of each kind: some elements, all, and none."""


def random_mask(
    generator: np.random.Generator, shape: tuple[int, ...], use: Use
) -> npt.NDArray[Any]:
    """Return the elements that count, by row: some of each, but all of the second of three or more, and none of the
    third, unless rows are those of sequences.
    """
    if use.past is not None:
        return np.ones(shape, np.bool_)
    elements = np.arange(shape[-1]) if shape else np.zeros((), np.int64)
    width = max(elements.size, 1)
    ones = generator.integers(1, width + 1, (*shape[:-1], 1))
    if ones.size >= _ROWS and use.may_be_empty:
        some = min(int(ones.flat[0]), max(width - 1, 1))
        least = 1 if tells_padding(shape, use) else 0
        ones.reshape(-1)[:_ROWS] = some, width, least
    return (elements < ones).reshape(shape)


def tells_padding(shape: tuple[int, ...], use: Use) -> bool:
    """Return whether a mask tells the tokens of sequences from padding.

    It has a row for each sequence, none of which is empty. A mask with a row for each query may leave nothing to some.
    """
    is_mask = use.role in (Role.MASK, Role.PADDING)
    return is_mask and len(shape) == 2 and shape[0] != shape[1]


def lacks_rows(shape: tuple[int, ...], use: Use, *, keeps: bool) -> bool:
    """Return whether random masks of a shape have no row that keeps all elements, or none."""
    return prod(shape[:-1]) < _ROWS or (tells_padding(shape, use) and not keeps)


def mask_numbers(
    kept: npt.NDArray[Any], dtype: "np.dtype[Any]", use: Use
) -> npt.NDArray[Any]:
    """Return the numbers of a mask that tells which elements count."""
    if use.role is Role.MASK:
        return kept.astype(dtype)
    if use.role is Role.PADDING:
        return ~kept.astype(np.bool_)
    sign = 1 if use.role is Role.ADDED else -1
    return np.where(kept, 0.0, sign * _lowest(dtype)).astype(dtype)


def _lowest(dtype: "np.dtype[Any]") -> float:
    """Return the number by which exporters mask: the lowest of a low-precision type, otherwise that of float32."""
    for low in FORMATS.values():
        if helper.tensor_dtype_to_np_dtype(low.elem) == dtype:
            return -low.max_finite
    return -FLOAT32_MAX
