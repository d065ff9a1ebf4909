"""Statistics of a tensor, and the reactions to them."""

from dataclasses import dataclass
from enum import Enum
from math import inf, nan, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, NumericsError, warn
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._model.weights import SENTINEL
from onnxamp._options.doors import door
from onnxamp._options.values import checked_array
from onnxamp._runtime.sessions.values import from_value
from onnxamp.debugging._tables import escaped

LOST_ABOVE: Final = 0.1
"""The relative L2 error above which elements that float16 flushes to zero count as underflow."""

_BLOCK: Final = 1 << 20
"""The number of elements per block, in float64."""
_FP16_ZERO: Final = FLOAT16.smallest_subnormal / 2
"""The largest number that float16 rounds to zero."""


class DebugMode(Enum):
    """The records of a checker, and whether a fault aborts the run.

    Names and values are those of ``paddle.amp.debugging.DebugMode``. In the first two modes, intended infinities are
    ignored: an op that passes on the infinities of a mask is not recorded (Paddle counts every infinity).

    Example:
        >>> from onnxamp.debugging import DebugMode
        >>> DebugMode(0)
        <DebugMode.CHECK_NAN_INF_AND_ABORT: 0>
    """

    CHECK_NAN_INF_AND_ABORT = 0
    """Record the first value with NaN or Inf, and end the run there with an error."""
    CHECK_NAN_INF = 1
    """Record all values with NaN or Inf; the run continues."""
    CHECK_ALL_FOR_OVERFLOW = 2
    """Record all values with NaN or Inf, and float32 and float64 values that would overflow or underflow in float16
    (Paddle: only overflow). Elements that are infinite or beyond 1e30 are excused in constants, and in masks on their
    way to a Softmax."""
    CHECK_ALL = 3
    """Record every float value."""


def checked_mode(debug_mode: DebugMode) -> DebugMode:
    """Return a mode.

    Raises:
        ArgumentError: it is none, such as a number of Paddle's.
    """
    if not isinstance(debug_mode, DebugMode):
        raise ArgumentError(f"debug_mode must be a DebugMode, not {debug_mode!r}.")
    return debug_mode


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
        numel, num_nan, num_inf, num_zero: the numbers of all, NaN, infinite and zero elements.
        max, min: the largest and the smallest element, ignoring NaN; NaN if there are no other elements.
        mean: the mean; NaN if any element is NaN.
        fp16_over: the number of elements beyond the largest number of float16, except those that may stand for
            infinity: 65504 < abs(x) < 1e30.
        fp16_under: the number of elements that become zero in float16: 0 < abs(x) <= 2^-25.
        fp16_loss: the relative L2 error, from 0 to 1, of flushing the latter to zero.

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
        """How the tensor exceeds the range of float16: "overflow", "underflow", or None."""
        if self.fp16_over or self.has_sentinel:
            return "overflow"
        return "underflow" if self.fp16_loss > LOST_ABOVE else None

    @property
    def has_sentinel(self) -> bool:
        """Whether an element is infinite, or so large that it may stand for infinity."""
        return self.max >= SENTINEL or self.min <= -SENTINEL

    def __str__(self) -> str:
        return (
            f"numel={self.numel}, num_nan={self.num_nan}, num_inf={self.num_inf}, num_zero={self.num_zero}, "
            f"max={self.max:.6e}, min={self.min:.6e}, mean={self.mean:.6e}"
        )


def tensor_stats(array: npt.NDArray[Any]) -> TensorStats:
    """Compute the statistics of an array of booleans, integers or floats of any width, including those of
    ``ml_dtypes``.

    Complexity: linear in the number of elements, with temporaries of constant size.
    """
    flat = array.reshape(-1)
    counts = np.zeros(5, np.int64)
    top = -inf
    bottom = inf
    total = 0.0
    energy = 0.0
    lost = 0.0
    for start in range(0, flat.size, _BLOCK):
        x = flat[start : start + _BLOCK].astype(np.float64)
        size = np.abs(x)
        is_nan = np.isnan(x)
        is_inf = np.isinf(x)
        under = (size > 0) & (size <= _FP16_ZERO)
        over = (size > FLOAT16.max_finite) & (size < SENTINEL)
        masks = (is_nan, is_inf, size == 0, over, under)
        counts += [np.count_nonzero(mask) for mask in masks]
        top = max(top, float(np.max(x, initial=-inf, where=~is_nan)))
        bottom = min(bottom, float(np.min(x, initial=inf, where=~is_nan)))
        # The sum of infinities of both signs is NaN, as the mean should be.
        with np.errstate(invalid="ignore", over="ignore"):
            total += float(x.sum())
        squares = np.square(x, where=size < SENTINEL, out=np.zeros_like(x))
        energy += float(squares.sum())
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


@door
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
        tensor: real numbers of any shape: an array or anything ``numpy.asarray`` accepts (torch tensors on the CPU,
            numbers, lists), an ``OrtValue``, or a ``TensorProto`` with its data.
        op_type, var_name: the op that produced it and its name, for messages.
        debug_mode: the reaction to a problem.

    Returns:
        ``(stats, values)``: int64[3] with the numbers of NaN, infinities and zeros, and float32[3] with maximum,
        minimum and mean. Maximum and minimum ignore NaN, and are NaN if there are no other elements.

    Raises:
        NumericsError: the tensor contains NaN or Inf, and the mode aborts. Like Paddle's error, it is a RuntimeError.
        ArgumentError: ``debug_mode`` is not a DebugMode.
        ArgumentTypeError: the tensor does not contain real numbers, or a name is not a string.

    Example:
        >>> import numpy as np
        >>> from onnxamp.debugging import check_numerics
        >>> stats, values = check_numerics(np.array([[1, 0], [-2, 4]], np.float32), "Add", "sum")
        >>> stats.tolist(), values.tolist()
        ([0, 0, 1], [4.0, -2.0, 0.75])
    """
    checked_mode(debug_mode)
    for what, name in (("op_type", op_type), ("var_name", var_name)):
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"{what} must be a string, not {type(name).__name__}."
            )
    array = _as_array(tensor)
    stats = tensor_stats(array)
    is_wide = array.dtype in (np.float32, np.float64)
    where = f"[op={escaped(op_type)}, tensor={escaped(var_name)}, dtype={array.dtype}], {stats}"
    if not stats.finite:
        text = f"There is NaN or Inf in {where}."
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
            raise NumericsError(text, var_name, op=op_type)
        if debug_mode is not DebugMode.CHECK_ALL:
            warn([text], NumericsWarning)
    elif debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW and stats.fp16 and is_wide:
        text = f"In float16 there would be {stats.fp16} in {where}."
        warn([text], NumericsWarning)
    with np.errstate(over="ignore"):  # float64 beyond float32 is infinite there
        values = np.array([stats.max, stats.min, stats.mean]).astype(np.float32)
    return np.array([stats.num_nan, stats.num_inf, stats.num_zero], np.int64), values


def _as_array(tensor: Any) -> npt.NDArray[Any]:
    if isinstance(tensor, TensorProto):
        array = numpy_helper.to_array(tensor)
    elif hasattr(tensor, "data_type") and hasattr(tensor, "numpy"):  # an OrtValue
        array = np.asarray(from_value(tensor))
    else:
        array = checked_array("tensor", tensor)
    # NumPy marks types that packages register, such as those of ml_dtypes, by a 2.
    if array.dtype.kind not in "biuf" and array.dtype.isbuiltin != 2:
        raise ArgumentTypeError(
            f"Only tensors of real numbers have statistics, but this one is of type {array.dtype}."
        )
    return array
