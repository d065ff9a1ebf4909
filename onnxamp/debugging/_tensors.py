"""Statistics of a tensor, and the reactions to them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from math import inf, nan, sqrt
from os import PathLike
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, NumericsError, warn
from onnxamp._base.public import active_within
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import PRECISIONS, infer_types, operator_counts
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.weights import SENTINEL
from onnxamp._options.doors import door
from onnxamp._options.values import checked_array
from onnxamp._runtime.sessions.values import from_value
from onnxamp.debugging._tables import escaped, write_table

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


_HEADS: Final = ("op", "FP16 calls", "BF16 calls", "FP32 calls", "other calls")


@dataclass(slots=True)
class OperatorStats:
    """Calls by op type and precision; ``str()`` returns the table that Paddle prints.

    A node counts for the lowest precision among its inputs and outputs, so that a Cast from or to low precision is a
    low-precision call. Nodes in subgraphs count once per run, however often they run. Model-local functions count as
    the nodes in their bodies.

    Attributes:
        calls: the number of calls, by (op type, "float16", "bfloat16", "float32" or "other").
        runs: the number of runs and training steps counted; 1 for a model that was counted without running it.

    Example:
        >>> import onnxamp
        >>> stats = onnxamp.debugging.collect_operator_stats("models/encoder.onnx")
        >>> stats.calls["MatMul", "float32"], stats.runs
        (16, 1)
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: int = 0

    def add(self, other: "OperatorStats") -> None:
        """Add the calls of another object."""
        self.calls.update(other.calls)
        self.runs += other.runs

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """Return the calls in float16, bfloat16, float32, and others, per op type in alphabetical order."""
        ops = sorted({op for op, _ in self.calls})
        first, second, third, fourth = PRECISIONS
        return [
            (
                op,
                self.calls[op, first],
                self.calls[op, second],
                self.calls[op, third],
                self.calls[op, fourth],
            )
            for op in ops
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table as ``.csv`` or ``.xlsx``.

        Raises:
            ArgumentError: the path has another suffix.
            OutputError: the file cannot be written.
        """
        write_table(path, _HEADS, self.rows())

    def __str__(self) -> str:
        rows = [tuple(map(str, row)) for row in self.rows()]
        width = max((len(escaped(row[0])) for row in rows), default=2)
        lines = list[str]()
        for op, *cells in (_HEADS, *rows):
            columns = "".join(f"  {cell:>11}" for cell in cells)
            lines.append(f"{escaped(op):<{width}}{columns}")
        return "\n".join([*lines, f"op count: {len(rows)}"])


_ACTIVE: Final[ContextVar[OperatorStats | None]] = ContextVar(
    "onnxamp operator stats", default=None
)


@door
def enable_operator_stats_collection() -> OperatorStats:
    """Count the nodes of every model that an :class:`InferenceSession` runs, and of every training step, from now on.

    The counterpart of ``paddle.amp.debugging.enable_operator_stats_collection``, for the current thread or asyncio task
    only. Counts start from zero.

    Returns:
        The counts, updated by each run (Paddle returns nothing).

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> stats = debugging.enable_operator_stats_collection()
        >>> session = debugging.InferenceSession("models/encoder.onnx")
        >>> outputs = session.run(None, random_samples("models/encoder.onnx")[0])
        >>> debugging.disable_operator_stats_collection() is stats, stats.runs
        (True, 1)
    """
    stats = OperatorStats()
    _ACTIVE.set(stats)
    return stats


@door
def disable_operator_stats_collection() -> OperatorStats | None:
    """Stop counting.

    Returns:
        The counts (Paddle prints them); None if nothing was being counted.

    Example:
        >>> from onnxamp import debugging
        >>> stats = debugging.enable_operator_stats_collection()
        >>> debugging.disable_operator_stats_collection().runs
        0
    """
    stats = _ACTIVE.get()
    _ACTIVE.set(None)
    return stats


def active_stats() -> OperatorStats | None:
    """Return the counts that runs update; None if nothing is being counted."""
    return _ACTIVE.get()


@overload
def collect_operator_stats(
    model: None = None,
) -> AbstractContextManager[OperatorStats]: ...


@overload
def collect_operator_stats(model: ModelSource) -> OperatorStats: ...


@door
def collect_operator_stats(
    model: ModelSource | None = None,
) -> AbstractContextManager[OperatorStats] | OperatorStats:
    """Count nodes by op type and precision, in the runs of a ``with`` block or in a model without running it.

    ``with collect_operator_stats() as stats:`` is the counterpart of ``paddle.amp.debugging.collect_operator_stats``;
    ``print(stats)`` prints the table that Paddle prints by itself.

    Args:
        model: a ModelProto, a path or an onnx-graphsurgeon Graph, whose weights are not needed; None for a context
            manager that counts the runs of :class:`InferenceSession` and training steps.

    Raises:
        ArgumentTypeError: the model has the wrong type.
        ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> print(onnxamp.debugging.collect_operator_stats("models/classifier.onnx"))
        op                   FP16 calls   BF16 calls   FP32 calls  other calls
        Add                           0            0            1            0
        BatchNormalization            0            0            5            0
        Conv                          0            0            5            0
        Flatten                       0            0            1            0
        Gemm                          0            0            1            0
        GlobalAveragePool             0            0            1            0
        MaxPool                       0            0            1            0
        Relu                          0            0            5            0
        op count: 8
    """
    return _collecting() if model is None else count_operators(model)


@contextmanager
def _collecting() -> Iterator[OperatorStats]:
    stats = OperatorStats()
    with active_within(_ACTIVE, stats):
        yield stats


def count_operators(model: ModelSource) -> OperatorStats:
    """Count the calls in one run of a model."""
    view = Graph.of(inline_functions(Model.of(model).proto))
    return OperatorStats(operator_counts(view, infer_types(view)), 1)
