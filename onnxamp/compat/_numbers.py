"""Float16 numbers as other converters make them: magnitudes are limited to a range, and signs stay."""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, numpy_helper

from onnxamp._errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True, slots=True)
class Range:
    """Magnitudes that numbers other than 0, infinities and NaN are limited to.

    Raises:
        ArgumentError: the range is empty, or not positive.
    """

    least: float
    most: float

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise ArgumentError(
                f"min_positive_val must be positive and at most max_finite_val, not {self.least!r} and {self.most!r}."
            )

    def changes(self, numbers: NDArray[Any]) -> bool:
        """Whether any number is outside."""
        return numbers.dtype == np.float32 and bool(self.outside(np.abs(numbers)).any())

    def outside(self, magnitudes: NDArray[Any]) -> NDArray[np.bool_]:
        """Which magnitudes are outside."""
        small = (magnitudes > 0) & (magnitudes < self.least)
        found: NDArray[np.bool_] = small | ((magnitudes > self.most) & (magnitudes < inf))
        return found

    def limited(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The numbers with those outside moved to the nearer end, in their own type."""
        magnitudes = np.abs(numbers)
        ends = np.copysign(np.clip(magnitudes, self.least, self.most), numbers)
        found: NDArray[Any] = np.where(self.outside(magnitudes), ends, numbers).astype(numbers.dtype)
        return found


def to_float16(np_array: ArrayLike, within: Range) -> NDArray[np.float16]:
    """The numbers in float16, limited to a range; the rest rounds as NumPy rounds."""
    with np.errstate(over="ignore"):  # infinities that stay, and what is beyond float16
        found: NDArray[np.float16] = within.limited(np.asarray(np_array, np.float64)).astype(np.float16)
    return found


def tensor_to_float16(tensor: TensorProto, within: Range) -> TensorProto:
    """Convert a float32 tensor in place, and return it; a tensor of another type is left alone.

    Raises:
        ArgumentTypeError: it is no tensor. ArgumentError: its data lie in another file.
    """
    if not isinstance(tensor, TensorProto):
        raise ArgumentTypeError(f"tensor must be an onnx.TensorProto, not {type(tensor).__name__}.")
    if tensor.data_type == TensorProto.FLOAT:
        made = numpy_helper.from_array(to_float16(_numbers(tensor), within), tensor.name)
        made.doc_string = tensor.doc_string
        tensor.CopyFrom(made)
    return tensor


def largest_change(tensor: TensorProto, within: Range) -> float:
    """The largest difference that float16 makes to a float32 tensor; 0 if it is empty.

    Raises:
        ArgumentTypeError: it is no tensor. ArgumentError: it is not float32, or its data lie in another file.
    """
    if not isinstance(tensor, TensorProto):
        raise ArgumentTypeError(f"tensor must be an onnx.TensorProto, not {type(tensor).__name__}.")
    if tensor.data_type != TensorProto.FLOAT:
        raise ArgumentError(f"The tensor {tensor.name!r} is not float32.")
    numbers = _numbers(tensor)
    changed = np.abs(numbers - to_float16(numbers, within).astype(np.float32))
    return float(changed.max(initial=0.0))


def _numbers(tensor: TensorProto) -> NDArray[Any]:
    if tensor.data_location == TensorProto.EXTERNAL:
        raise ArgumentError(f"The data of the tensor {tensor.name!r} lie in another file: load them first.")
    return numpy_helper.to_array(tensor)
