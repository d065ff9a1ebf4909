"""The sums along the axes of weights that bounds need. Each weight is read once, block by block."""

from collections.abc import Sequence
from math import inf, isnan, prod, sqrt
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp._facts.dtypes import FLOAT_TENSORS, FORMATS
from onnxamp._facts.ops import attribute, attribute_of, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.weights import in_float32, read_array

READABLE: Final = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.FLOAT16,
        TensorProto.BFLOAT16,
        TensorProto.DOUBLE,
        TensorProto.BOOL,
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
    }
)
"""Elements that are numbers and fill whole bytes."""

_BLOCK: Final = 1 << 20
"""Elements that are summed up at a time: 4 MB in float32, which caches hold."""

_SLACK: Final = 1e-4
"""Relative error that sums of a block of float32 numbers may have. NumPy adds numbers that lie side by side in pairs,
which errs by far less, and rows one after another.
"""
_IN_TURN: Final = 512
"""Rows that are added one after another: each adds up to a rounding error, 6e-8."""


_VANISHING: Final = float(np.finfo(np.float32).tiny)
"""The largest error of a float32 number that is too small to have all digits."""


class WeightSums(NamedTuple):
    """Sums over some axes of a weight, one for each position on its other axes.

    Attributes:
        signed: the sums of its numbers.
        magnitudes: the sums of their magnitudes.
        squares: the sums of their squares.
        terms: how many numbers are in each sum.
    """

    signed: NDArray[np.float64]
    magnitudes: NDArray[np.float64]
    squares: NDArray[np.float64]
    terms: int


def weight_of(graph: Graph, value: int) -> NDArray[Any] | None:
    """Return the numbers of a float weight in its own shape, stored, transposed or dequantized; None if it has none.

    Numbers that a tensor stores are not copied: large external data are memory-mapped.
    """
    tensor = graph.constants.tensors.get(value)
    if tensor is not None:
        is_read = tensor.data_type in READABLE
        return read_array(tensor, graph.folder) if is_read else None
    maker = graph.producer(value)
    if maker is None or graph.types[value] not in FLOAT_TENSORS:
        return None
    if maker.key in op_facts().dequantize:
        return _dequantized(graph, value)
    source = maker.input(0)
    if maker.key == "Transpose":
        array = weight_of(graph, source)
        return (
            None if array is None else array.transpose(attribute(maker.proto, "perm"))
        )
    is_same = maker.index in graph.passing or maker.key == "Cast"
    return weight_of(graph, source) if is_same else None


def _dequantized(graph: Graph, value: int) -> NDArray[np.float32] | None:
    """Return the numbers of a weight that is stored as integers with scales."""
    maker = graph.producer(value)
    assert maker is not None
    tensors = graph.constants.tensors
    stored, scale = (tensors.get(maker.input(port)) for port in range(2))
    has_zero = maker.input(2) != ABSENT
    zero = tensors.get(maker.input(2)) if has_zero else None
    if stored is None or scale is None or (has_zero and zero is None):
        return None
    if stored.data_type not in READABLE:
        return None
    numbers = read_array(stored, graph.folder).astype(np.float32)
    scales = read_array(scale, graph.folder).astype(np.float32)
    if scales.ndim > 1:  # one scale for a block
        return None
    shape = [1] * numbers.ndim
    if scales.size > 1:
        shape[attribute_of(maker.proto, "axis", 1)] = scales.size
    if zero is not None:
        numbers -= (
            read_array(zero, graph.folder)
            .astype(np.float32)
            .reshape(shape if zero.dims else ())
        )
    return numbers * scales.reshape(shape if scales.size > 1 else ())


def range_of(array: NDArray[Any]) -> tuple[float, float]:
    """Return the least and the largest number of an array; infinite ones if it has a NaN.

    Complexity: linear in the elements; a block of them is copied at a time.
    """
    low, high = inf, -inf
    flat = array.reshape(-1)
    if flat.size and flat.dtype in _BY_BITS:
        return _range_by_bits(flat)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float32, copy=False)
        least, most = float(block.min()), float(block.max())
        if isnan(
            least
        ):  # NumPy passes a NaN on; Python's own min and max would drop it
            return -inf, inf
        low, high = min(low, least), max(high, most)
    return (low, high) if low <= high else (-inf, inf)


_BY_BITS: Final = frozenset(
    helper.tensor_dtype_to_np_dtype(low.elem) for low in FORMATS.values()
)
"""Floats of 16 bits. Comparing their bits takes a tenth of the time of converting them."""

_MINUS: Final = 1 << 15
"""The bit of the sign. The bits of numbers of one sign are in the order of their magnitudes."""


def _range_by_bits(flat: NDArray[Any]) -> tuple[float, float]:
    """Return the range of floats of 16 bits from their bits; infinite ends if there is a NaN."""
    bits = flat.view(np.uint16)
    least, most = int(bits.min()), int(bits.max())
    # With the sign as a sign, the largest of these integers is the largest of the positive numbers, if there is one.
    positive = int(flat.view(np.int16).max())
    low = most if most >= _MINUS else least
    high = positive if least < _MINUS else least
    infinity = int(np.array(inf, flat.dtype).view(np.uint16))
    if any(end & ~_MINUS > infinity for end in (low, high, most)):
        return -inf, inf
    ends = np.array([low, high], np.uint16).view(flat.dtype).astype(np.float32)
    return float(ends[0]), float(ends[1])


def _wide(block: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers in float32."""
    if block.dtype not in _BY_BITS:
        return block.astype(np.float32, copy=False)
    # NumPy converts them one by one.
    return in_float32(block, helper.np_dtype_to_tensor_dtype(block.dtype))


def range_over(graph: Graph, value: int) -> tuple[float, float]:
    """Return the range of a tensor that is stored; ``graph.ask(range_over, value)`` reads it once."""
    return range_of(read_array(graph.constants.tensors[value], graph.folder))


def sums_over(graph: Graph, value: int, axes: tuple[int, ...]) -> WeightSums | None:
    """Return the sums of a weight over some axes; None if its numbers are unknown or not finite.

    Args:
        graph: the graph. ``graph.ask(sums_over, value, axes)`` reads a weight once.
        value: the weight.
        axes: the axes to sum over, counted from the front or the back.
    """
    array = weight_of(graph, value)
    if array is None:
        return None
    return sums_of(array, [axis % array.ndim for axis in axes])


def sums_of(array: NDArray[Any], axes: Sequence[int]) -> WeightSums | None:
    """Return the sums of an array over some of its axes, none negative; None if it has numbers that are not finite.

    Complexity: linear in the elements; a block of them is copied at a time.
    """
    lengths = [size for axis, size in enumerate(array.shape) if axis not in axes]
    terms = prod(array.shape[axis] for axis in axes)
    signed, magnitudes, squares = (np.zeros(lengths) for _ in range(3))
    result = WeightSums(signed, magnitudes, squares, terms)
    rows = max(1, _BLOCK // max(prod(array.shape[1:]), 1))
    if 0 in axes:
        rows = min(rows, _IN_TURN)
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # what is not finite is found below
        for start in range(0, len(array), rows):
            block = _wide(array[start : start + rows])
            # A block covers a part of the first axis, which is either summed over or a part of the result.
            part = ... if 0 in axes else slice(start, start + rows)
            summed = tuple(axes)
            result.signed[part] += block.sum(summed)
            sizes = np.abs(block)
            result.magnitudes[part] += sizes.sum(summed)
            np.multiply(sizes, sizes, out=sizes)
            result.squares[part] += sizes.sum(summed)
    if not np.isfinite(result.squares).all():
        return None
    # Squares of the smallest numbers vanish.
    lost = np.where(result.magnitudes > 0.0, terms * _VANISHING, 0.0)
    return result._replace(
        magnitudes=result.magnitudes * (1.0 + _SLACK),
        squares=result.squares * (1.0 + _SLACK) + lost,
    )


def least_stretch(graph: Graph, value: int) -> float:
    """Return a number that the largest singular value of a matrix is no less than: the root of their mean square.

    Complexity: that of the sums over the weight, which bounds need anyway.
    """
    sums = graph.ask(sums_over, value, (-2,))
    array = weight_of(graph, value)
    if sums is None or array is None or not array.size:
        return 0.0
    squares = float(sums.squares.sum(-1).max())
    return sqrt(squares / min(array.shape[-2:]) / (1.0 + _SLACK))


def largest_stretch(graph: Graph, value: int) -> float:
    """Return a bound of how many times a matrix, or any of a stack of them, makes a vector longer.

    That is its largest singular value, whose square is the largest eigenvalue of the product of the matrix with itself
    transposed.

    Complexity: cubic in the sizes of the matrix, in float32.
    """
    array = weight_of(graph, value)
    if array is None:
        return inf
    largest = 0.0
    for matrix in array.reshape(-1, *array.shape[-2:]):
        numbers = matrix.astype(np.float32, copy=False)
        peak = float(np.abs(numbers).max(initial=0.0))
        if not peak < inf:
            return inf
        if not peak:
            continue
        # Neither do squares of large numbers overflow then, nor do those of small ones vanish.
        numbers = numbers / np.float32(peak)
        wide = numbers if numbers.shape[0] <= numbers.shape[1] else numbers.T
        product = wide @ wide.T
        scale = float(np.abs(product).max(initial=0.0))
        square = scale * _largest_eigenvalue(product / scale)
        largest = max(largest, peak * sqrt(square))
    return largest * (1.0 + _SLACK)


def _largest_eigenvalue(product: NDArray[np.float32]) -> float:
    """Return a bound of the eigenvalues of a symmetric matrix, none of which is negative.

    ``limit - product`` has a Cholesky factor if and only if ``limit`` is larger than all of them. Steps of the power
    method say where it is worth trying. No eigenvalue exceeds the largest sum of magnitudes along a row (Gershgorin's
    circle theorem), which has to do for large matrices.
    """
    most = float(np.abs(product).sum(-1).max())
    if len(product) > _WIDEST:
        return most
    vector = np.ones(len(product), np.float32)
    estimate = 0.0
    for _ in range(_STEPS):
        vector = product @ vector
        estimate = float(np.linalg.norm(vector))
        if not estimate:
            break
        vector /= np.float32(estimate)
    limit = max(estimate, float(product.diagonal().max())) * _FIRST
    while limit < most:
        left = -product.astype(np.float64)
        left.flat[:: len(left) + 1] += limit
        try:
            np.linalg.cholesky(left)
        except np.linalg.LinAlgError:
            limit *= _FURTHER
        else:
            return limit
    return most


_WIDEST: Final = 4096
"""Size of matrices up to which a Cholesky factor is computed: it takes 0.3 GB in float64."""
_STEPS: Final = 24
"""Steps of the power method. Each costs a thousandth of a Cholesky factor."""
_FIRST: Final = 1.05
"""Factor of the first limit that is tried: the power method comes as close to the largest eigenvalue."""
_FURTHER: Final = 1.15
"""Factor of the next ones."""
