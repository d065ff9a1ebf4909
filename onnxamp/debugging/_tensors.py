"""Statistics of a tensor, and warnings about it."""

import warnings
from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, ArgumentTypeError, NumericsError
from onnxamp._model.statistics import SENTINEL
from onnxamp.debugging._modes import DebugMode
from onnxamp.debugging._tables import escaped

LOST_ABOVE: Final = 0.1
"""Elements that float16 flushes to zero count as underflow above this relative L2 error."""

_BLOCK: Final = 1 << 20
"""Elements per block, in float64."""
_FP16_ZERO: Final = FLOAT16.smallest_subnormal / 2
"""Largest number that float16 rounds to zero."""


class NumericsWarning(UserWarning):
    """Values are not finite, or leave the range of float16; the run continues.

    Example:
        >>> import warnings
        >>> from onnxamp.debugging import NumericsWarning
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", NumericsWarning)  # raise them instead
    """


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of the elements of a tensor.

    Attributes:
        numel, num_nan, num_inf, num_zero: numbers of elements.
        max, min: ignore NaN; they are NaN if there are no other elements.
        mean: NaN if any element is.
        fp16_over: elements that become infinite in float16: 65520 <= abs(x) < 1e30.
        fp16_under: elements that become zero in float16: 0 < abs(x) <= 2^-25.
        fp16_loss: relative L2 error, from 0 to 1, if the latter become zero.

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> session = debugging.InferenceSession("models/encoder.onnx")
        >>> config = debugging.TensorCheckerConfig(True, debugging.DebugMode.CHECK_ALL)
        >>> with debugging.tensor_checker(config) as checker:
        ...     outputs = session.run(None, random_samples("models/encoder.onnx")[0])
        >>> stats = checker.steps[0].records[-1].stats
        >>> stats.finite, stats.numel, stats.max <= 1
        (True, 64, True)
    """

    numel: int
    num_nan: int
    num_inf: int
    num_zero: int
    max: float
    min: float
    mean: float
    fp16_over: int
    fp16_under: int
    fp16_loss: float

    @property
    def finite(self) -> bool:
        """Whether there is neither NaN nor Inf."""
        return not self.num_nan and not self.num_inf

    @property
    def fp16(self) -> str | None:
        """How the tensor would leave the range of float16: "overflow", "underflow", or None."""
        return (
            "overflow" if self.fp16_over else "underflow" if self.fp16_loss > LOST_ABOVE else None
        )

    def __str__(self) -> str:
        return (
            f"numel={self.numel}, num_nan={self.num_nan}, num_inf={self.num_inf}, num_zero={self.num_zero}, "
            f"max={self.max:.6e}, min={self.min:.6e}, mean={self.mean:.6e}"
        )


def tensor_stats(array: npt.NDArray[Any]) -> TensorStats:
    """Statistics of an array of booleans, integers or floats of any width, including those of ``ml_dtypes``.

    Complexity: linear in elements, with temporaries of constant size.
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
        numel=flat.size,
        num_nan=num_nan,
        num_inf=num_inf,
        num_zero=num_zero,
        max=nan if nothing else top,
        min=nan if nothing else bottom,
        mean=total / flat.size if flat.size else nan,
        fp16_over=over_all,
        fp16_under=under_all,
        fp16_loss=sqrt(lost / energy) if energy else 0.0,
    )


def check_numerics(
    tensor: Any,
    op_type: str,
    var_name: str,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Count NaN, infinities and zeros of a tensor, and find its maximum, minimum and mean.

    The counterpart of ``paddle.amp.debugging.check_numerics``. Paddle prints what it finds; here the mode decides:

    =======================  =====================================================================================
    CHECK_NAN_INF_AND_ABORT  raises on NaN or Inf
    CHECK_NAN_INF            warns (:class:`NumericsWarning`) on NaN or Inf
    CHECK_ALL_FOR_OVERFLOW   warns on NaN, Inf, and float32 or float64 values beyond the range of float16
    CHECK_ALL                only returns the numbers, as all modes do
    =======================  =====================================================================================

    Args:
        tensor: real numbers of any shape: an array or anything ``numpy.asarray`` takes (torch tensors on the CPU,
            numbers, lists), an ``OrtValue``, or a ``TensorProto`` with its data.
        op_type, var_name: the op that produced it and its name, for messages.
        debug_mode: what happens if something is found.

    Returns:
        ``(stats, values)``: int64[3] with the numbers of NaN, infinities and zeros, and float32[3] with maximum,
        minimum and mean. Maximum and minimum ignore NaN, and are NaN if there are no other elements.

    Raises:
        NumericsError: the tensor holds NaN or Inf, and the mode aborts. It is a RuntimeError, as Paddle raises.
        ArgumentError: ``debug_mode`` is not a DebugMode.
        ArgumentTypeError: the tensor does not hold real numbers.

    Example:
        >>> import numpy as np
        >>> from onnxamp.debugging import check_numerics
        >>> stats, values = check_numerics(np.array([[1, 0], [-2, 4]], np.float32), "Add", "sum")
        >>> stats.tolist(), values.tolist()
        ([0, 0, 1], [4.0, -2.0, 0.75])
    """
    if not isinstance(debug_mode, DebugMode):
        raise ArgumentError(f"debug_mode must be a DebugMode, not {debug_mode!r}.")
    array = _as_array(tensor)
    stats = tensor_stats(array)
    where = f"[op={escaped(op_type)}, tensor={escaped(var_name)}, dtype={array.dtype}], {stats}"
    if not stats.finite:
        text = f"There is NaN or Inf in {where}."
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
            raise NumericsError(text, var_name, op=op_type)
        if debug_mode is not DebugMode.CHECK_ALL:
            warnings.warn(text, NumericsWarning, stacklevel=2)
    elif (
        debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW and stats.fp16 and array.dtype.itemsize >= 4
    ):
        warnings.warn(
            f"In float16 there would be {stats.fp16} in {where}.", NumericsWarning, stacklevel=2
        )
    with np.errstate(over="ignore"):  # float64 beyond float32 is infinite there
        values = np.array([stats.max, stats.min, stats.mean]).astype(np.float32)
    return np.array([stats.num_nan, stats.num_inf, stats.num_zero], np.int64), values


def _as_array(tensor: Any) -> npt.NDArray[Any]:
    if isinstance(tensor, TensorProto):
        array = numpy_helper.to_array(tensor)
    elif hasattr(tensor, "data_type") and hasattr(tensor, "numpy"):  # an OrtValue
        from onnxamp._runtime.values import from_value  # noqa: PLC0415 - arrays need no ONNX Runtime

        array = np.asarray(from_value(tensor))
    else:
        array = np.asarray(tensor)
    if array.dtype.kind not in "biuf" and array.dtype.isbuiltin != 2:  # 2: a type of ml_dtypes
        raise ArgumentTypeError(
            f"Only tensors of real numbers have statistics, but this one is of type {array.dtype}."
        )
    return array
