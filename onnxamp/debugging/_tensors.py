"""Statistics of one tensor, and what is said of it."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, ArgumentTypeError, NumericsError
from onnxamp._model.weights import SENTINEL
from onnxamp.debugging._modes import DebugMode
from onnxamp.debugging._tables import escaped

LOST_ABOVE: Final = 0.1
"""Relative L2 error from which on what float16 makes zero counts as underflow."""

_BLOCK: Final = 1 << 20
"""Elements that are looked at at a time, in float64."""
_FP16_ZERO: Final = FLOAT16.smallest_subnormal / 2
"""Largest number that float16 rounds to zero."""


class NumericsWarning(UserWarning):
    """Values are not finite, or leave the range of float16; the run goes on."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What is in a tensor. Counts are of elements; NaN takes part in the mean alone, infinities in all three.

    ``stats, values = check_numerics(...)`` unpacks it as paddle's pair: int64[3] with the numbers of NaN, infinities
    and zeros, and float64[3] with maximum, minimum and mean.
    """

    numel: int
    num_nan: int
    num_inf: int
    num_zero: int
    max: float
    """NaN where there is nothing but NaN, or nothing at all; so is ``min``."""
    min: float
    mean: float
    fp16_over: int
    """Elements that float16 would make infinite: 65520 <= abs(x) < 1e30."""
    fp16_under: int
    """Elements that float16 would make zero: 0 < abs(x) <= 2^-25."""
    fp16_loss: float
    """Relative L2 error of a tensor without these: 0 to 1."""

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        yield np.array([self.num_nan, self.num_inf, self.num_zero], np.int64)
        yield np.array([self.max, self.min, self.mean], np.float64)

    @property
    def finite(self) -> bool:
        """Whether there is neither NaN nor Inf."""
        return not self.num_nan and not self.num_inf

    @property
    def fp16(self) -> str | None:
        """How the tensor leaves the range of float16: "overflow", "underflow" or not."""
        return "overflow" if self.fp16_over else "underflow" if self.fp16_loss > LOST_ABOVE else None

    def __str__(self) -> str:
        return (
            f"numel={self.numel}, num_nan={self.num_nan}, num_inf={self.num_inf}, num_zero={self.num_zero}, "
            f"max={self.max:.6e}, min={self.min:.6e}, mean={self.mean:.6e}"
        )


def tensor_stats(array: npt.NDArray[Any]) -> TensorStats:
    """Look at a tensor.

    Args:
        array: any shape; booleans, integers or floats of any width, those of ``ml_dtypes`` included.

    Complexity: linear in elements, with temporaries for a fixed number of them.
    """
    flat = array.reshape(-1)
    counts = np.zeros(5, np.int64)
    top, bottom, total, energy, lost = -inf, inf, 0.0, 0.0, 0.0
    for start in range(0, flat.size, _BLOCK):
        x = flat[start : start + _BLOCK].astype(np.float64)
        size = np.abs(x)
        is_nan, is_inf = np.isnan(x), np.isinf(x)
        under = (size > 0) & (size <= _FP16_ZERO)
        over = (size >= FLOAT16.overflow) & (size < SENTINEL)
        counts += [np.count_nonzero(mask) for mask in (is_nan, is_inf, size == 0, over, under)]
        top = max(top, float(np.max(x, initial=-inf, where=~is_nan)))
        bottom = min(bottom, float(np.min(x, initial=inf, where=~is_nan)))
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, as it should be
            total += float(x.sum())
        energy += float(np.square(x, where=size < SENTINEL, out=np.zeros_like(x)).sum())
        lost += float(np.square(x[under]).sum())
    nothing = flat.size == counts[0]
    num_nan, num_inf, num_zero, over_all, under_all = map(int, counts)
    return TensorStats(
        flat.size, num_nan, num_inf, num_zero, nan if nothing else top, nan if nothing else bottom,
        total / flat.size if flat.size else nan, over_all, under_all, sqrt(lost / energy) if energy else 0.0,
    )  # fmt: skip


def check_numerics(
    tensor: Any,
    op_type: str,
    var_name: str,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
) -> TensorStats:
    """Count NaN, infinities and zeros of one tensor, and find its maximum, minimum and mean.

    As ``paddle.amp.debugging.check_numerics``, whose two tensors the result unpacks to. Paddle prints what it finds;
    here it is raised, or is a :class:`NumericsWarning`, as the mode says:

    =======================  =====================================================================================
    CHECK_NAN_INF_AND_ABORT  NaN or Inf: raises
    CHECK_NAN_INF            NaN or Inf: warns
    CHECK_ALL_FOR_OVERFLOW   float32 or float64 that leaves the range of float16, NaN or Inf: warns
    CHECK_ALL                says nothing; the statistics are returned, as in all modes
    =======================  =====================================================================================

    Args:
        tensor: an array, whatever ``numpy.asarray`` makes one of (torch tensors on the CPU, numbers, lists), an
            ``OrtValue`` or a ``TensorProto`` with its data.
        op_type, var_name: what made it, and its name, for messages.

    Raises:
        NumericsError: the tensor holds NaN or Inf and the mode aborts.
        ArgumentTypeError: it holds no numbers.
    """
    if not isinstance(debug_mode, DebugMode):
        raise ArgumentError(f"debug_mode must be a DebugMode, not {debug_mode!r}.")
    array = _as_array(tensor)
    stats = tensor_stats(array)
    told = f"[op={escaped(op_type)}, tensor={escaped(var_name)}, dtype={array.dtype}], {stats}"
    if not stats.finite:
        text = f"There is NaN or Inf in {told}."
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
            raise NumericsError(text, var_name, op=op_type)
        if debug_mode is not DebugMode.CHECK_ALL:
            warnings.warn(text, NumericsWarning, stacklevel=2)
    elif debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW and stats.fp16 and array.dtype.itemsize >= 4:
        warnings.warn(f"In float16 there would be {stats.fp16} in {told}.", NumericsWarning, stacklevel=2)
    return stats


def _as_array(tensor: Any) -> npt.NDArray[Any]:
    if isinstance(tensor, TensorProto):
        array = numpy_helper.to_array(tensor)
    elif hasattr(tensor, "data_type") and hasattr(tensor, "numpy"):  # an OrtValue
        from onnxamp._runtime.values import from_value  # noqa: PLC0415 - arrays need no ONNX Runtime

        array = np.asarray(from_value(tensor))
    else:
        array = np.asarray(tensor)
    if array.dtype.kind not in "biuf" and array.dtype.isbuiltin != 2:  # 2: a type of ml_dtypes
        raise ArgumentTypeError(f"Statistics are of real numbers, but the tensor is of type {array.dtype}.")
    return array
