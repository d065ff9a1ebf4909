"""Bounds of sums of products: matrix products, convolutions, and attention, which is a mean of values."""

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS
from onnxamp._graph.bounds.bound import UNKNOWN, Bound, between, hull, times
from onnxamp._graph.bounds.call import Call, Rules
from onnxamp._graph.bounds.weights import (
    WeightSums,
    sums_of,
    sums_over,
    weight_of,
)
from onnxamp._graph.constants import terms_of


def weighted(
    x: Bound, sums: WeightSums, call: Call, *, uses_norms: bool = True
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least and the largest sum of the elements of ``x`` with the numbers of a weight, for each sum.

    Positive numbers of a weight meet one end of the interval and negative ones the other. Each is rounded before they
    cancel. By Cauchy and Schwarz, no sum exceeds the product of both norms.

    Args:
        x: the bound of what is weighted.
        sums: the sums over the weight.
        call: the op, for its rounding.
        uses_norms: whether each sum is over a vector along the last axis of ``x``, whose norm is known.
    """
    rounding = call.rounding
    if call.adds_low:  # a sum of some terms may be larger than that of all
        x = replace(x, low=-x.magnitude, high=x.magnitude)
    positive = (sums.magnitudes + sums.signed) / 2.0
    negative = (sums.magnitudes - sums.signed) / 2.0
    lost = sums.terms * rounding.least
    most_up, least_up = _off(positive, rounding.error, lost)
    most_down, least_down = _off(negative, rounding.error, lost)
    high = _times(most_up if x.high > 0.0 else least_up, x.high)
    high = high - _times(least_down if x.low > 0.0 else most_down, x.low)
    low = _times(least_up if x.low > 0.0 else most_up, x.low)
    low = low - _times(most_down if x.high > 0.0 else least_down, x.high)
    if uses_norms:
        norms = np.sqrt(sums.squares) * (1.0 + rounding.error)
        norms += np.where(norms > 0.0, np.sqrt(sums.terms) * rounding.least, 0.0)
        limit = _times(norms, x.row)
        high, low = np.minimum(high, limit), np.maximum(low, -limit)
    return low, high


def _off(
    sums: NDArray[np.float64], error: float, lost: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the most and the least that sums of magnitudes may be after rounding."""
    most = sums * (1.0 + error) + np.where(sums > 0.0, lost, 0.0)
    return most, np.maximum(sums * (1.0 - error) - lost, 0.0)


def _times(numbers: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Return products in which zero times infinity is zero, see :func:`times`."""
    with np.errstate(invalid="ignore"):
        return np.where(numbers == 0.0, 0.0, numbers * factor)


def _rows(low: NDArray[np.float64], high: NDArray[np.float64]) -> Bound:
    """Return the bound of rows with a range for each element along the last axis."""
    largest = np.maximum(np.abs(low), np.abs(high))
    return Bound(
        low=float(low.min(initial=inf)),
        high=float(high.max(initial=-inf)),
        row=float(np.sqrt((largest * largest).sum(-1)).max(initial=0.0)),
        total=float(largest.sum(-1).max(initial=0.0)),
        width=low.shape[-1],
    )


def _sums(call: Call, position: int, axes: tuple[int, ...]) -> WeightSums | None:
    """Return the sums of a weight; None if its numbers are unknown, or some may become infinite."""
    sums = call.graph.ask(sums_over, call.node.input(position), axes)
    return None if sums is None or _overflows(call, position, sums) else sums


def _overflows(call: Call, position: int, sums: WeightSums) -> bool:
    """Return whether a number of a weight may become infinite. It is looked at alone only if sums are as large."""
    is_large = float(sums.magnitudes.max(initial=0.0)) >= call.rounding.overflow
    return is_large and call[position].is_unbounded


def _matrix(call: Call) -> Bound:
    """Return the bound of a product of matrices."""
    sums = _sums(call, 1, (-2,))
    if sums is not None and sums.squares.ndim:
        return _stretched(call, _rows(*weighted(call[0], sums, call)), sums)
    sums = _sums(call, 0, (-1,))
    if sums is not None:
        return _columns(call, sums)
    return _product(call, call[0], call[1])


def _stretched(call: Call, product: Bound, sums: WeightSums) -> Bound:
    """Return the bound of rows times a weight, with the weight's largest singular value where it was asked for.

    Rounding its numbers changes that by no more than the Frobenius norm of the changes.
    """
    weight = call.node.input(1)
    if weight not in call.spectral:
        return product
    stretch = call.graph.ask(call.stretch, weight)
    rounding = call.rounding
    stretch += rounding.error * float(np.sqrt(sums.squares.sum()))
    stretch += rounding.least * float(np.sqrt(sums.terms * sums.squares.size))
    return replace(product, row=min(product.row, times(stretch, call[0].row)))


def _columns(call: Call, sums: WeightSums) -> Bound:
    """Return the bound of a constant matrix times a computed one, whose columns are what is summed."""
    x = call[1]
    turned = Bound(low=x.low, high=x.high, row=x.column)
    low, high = weighted(turned, sums, call)
    return _around(low, high).sized(call.width())


def _around(low: NDArray[np.float64], high: NDArray[np.float64]) -> Bound:
    """Return the bound of results with a range for each; any is one of a result without elements."""
    if not low.size:
        return between(0.0, 0.0)
    return Bound(low=float(low.min()), high=float(high.max()))


def _product(call: Call, one: Bound, two: Bound) -> Bound:
    """Return the bound of a product of computed matrices.

    An element is the product of a row and a column: limited by both norms, and by the sum of the magnitudes of the row
    times the largest element of the column, as attention averages rows of values. So is the norm of a row.
    """
    most = inf
    if one.width is not None:
        most = times(one.width, times(one.magnitude, two.magnitude))
    limit = min(times(one.row, two.column), times(one.total, two.magnitude), most)
    ends = (-limit, limit)
    if one.low >= 0.0:
        ends = (
            max(-limit, times(one.total, min(two.low, 0.0))),
            min(limit, times(one.total, max(two.high, 0.0))),
        )
    # Rows of a product with a vector lie along an axis of the first factor.
    shape = call.shape(1)
    is_matrix = shape is not None and len(shape) > 1
    row = times(one.total, two.row) if is_matrix else inf
    return Bound(low=ends[0], high=ends[1], row=row).sized(call.width())


def _gemm(call: Call) -> Bound:
    axis = -1 if call.attribute("transB") else -2
    sums = _sums(call, 1, (axis,))
    if sums is None or call.attribute("transA"):
        is_plain = not (call.attribute("transA") or call.attribute("transB"))
        product = _product(call, call[0], call[1]) if is_plain else _by_terms(call)
    else:
        product = _stretched(call, _rows(*weighted(call[0], sums, call)), sums)
    product = product * float(call.attribute("alpha", 1.0))
    if not call.has(2):
        return product
    bias = call[2] * float(call.attribute("beta", 1.0))
    return call.term(product) + call.term(bias)


def _fused_product(call: Call) -> Bound:
    """Return the bound of ONNX Runtime's product with transposed operands and a factor."""
    flags = ("transA", "transB", "transBatchA", "transBatchB")
    is_plain = not any(call.attribute(name, 0) for name in flags)
    product = _matrix(call) if is_plain else _by_terms(call)
    return product * float(call.attribute("alpha", 1.0))


def _by_terms(call: Call) -> Bound:
    """Return the bound of a sum of products of which only the number of terms is known."""
    terms = terms_of(call.node, call.shapes)
    if terms is None or len(call.node.inputs) > 2:
        return UNKNOWN
    limit = times(terms, times(call[0].magnitude, call[1].magnitude))
    return between(-limit, limit)


def _filtered(call: Call, sums: WeightSums | None) -> Bound:
    """Return the bound of a convolution from the sums over each filter. Padding adds zeros to what a filter meets."""
    if sums is None:
        return _by_terms(call)
    x = hull([call[0], between(0.0, 0.0)])
    low, high = weighted(x, sums, call, uses_norms=False)
    # A bias has a number for each channel, which stands along no axis of the result's rows.
    bias = call[2].bare if call.has(2) else between(0.0, 0.0)
    return call.term(_around(low, high)) + bias


def _conv(call: Call) -> Bound:
    shape = call.shape(1)
    if shape is None:
        return UNKNOWN
    axes = tuple(range(1, len(shape)))
    return _filtered(call, _sums(call, 1, axes))


def _conv_transpose(call: Call) -> Bound:
    """Return the bound of a transposed convolution, as if every element of a filter met each element of the result."""
    weight = weight_of(call.graph, call.node.input(1))
    if weight is None:
        return UNKNOWN
    group = call.attribute("group", 1)
    # [input channels, output channels of a group, kernel...]
    parts = weight.reshape(group, -1, *weight.shape[1:])
    sums = sums_of(parts, [1, *range(3, parts.ndim)])
    if sums is not None and _overflows(call, 1, sums):
        sums = None
    return _filtered(call, sums)


def _blocks(call: Call) -> Bound:
    """Return the bound of a product with a matrix of a few bits, from the scales of its blocks."""
    scales = weight_of(call.graph, call.node.input(2))
    columns, bits = call.attribute("N"), call.attribute("bits", 4)
    if scales is None or not columns:
        return UNKNOWN
    # Without zero points, integers lie symmetrically around one half of their range.
    largest = 2.0**bits - 1.0 if call.has(3) else 2.0 ** (bits - 1)
    if call.has(3) and call.graph.types[call.node.input(3)] in ANY_FLOAT_TENSORS:
        largest += call[3].magnitude
    sizes = np.abs(scales.astype(np.float64)).reshape(columns, -1) * largest
    elements = call.attribute("block_size")
    norms = np.sqrt(elements * (sizes * sizes).sum(-1))
    totals = elements * sizes.sum(-1)
    limit = np.minimum(_times(norms, call[0].row), _times(totals, call[0].magnitude))
    product = _rows(-limit, limit)
    return call.term(product) + call[5] if call.has(5) else product


def _attended(call: Call, values: Bound, *, row: float = inf) -> Bound:
    """Return the bound of attention: each row is a mean of rows of values, or zero where a mask leaves none.

    Args:
        call: the node.
        values: the values, with those of earlier tokens.
        row: the norm of a row of the result, if the heads do not lie side by side in it.
    """
    x = hull([values, between(0.0, 0.0)])
    return Bound(low=x.low, high=x.high, row=row).sized(call.width())


def _cached(call: Call, bound: Bound, past: int) -> Bound:
    """Return the bound of keys or values together with those of earlier tokens, an optional input."""
    if not call.has(past):
        return bound
    # Tokens are joined along the columns.
    column = hypot(bound.column, call[past].column)
    return replace(hull([bound, call[past]]), column=column)


def _attention(call: Call) -> Sequence[Bound]:
    """Return the bounds of ONNX's attention: its result, the present keys and the present values."""
    shape = call.shape(2)
    is_split = shape is not None and len(shape) == _SPLIT_RANK
    values = _cached(call, call[2], 5)
    row = values.row if is_split else inf
    return [_attended(call, values, row=row), _cached(call, call[1], 4), values]


_SPLIT_RANK: Final = 4
"""Rank of values whose heads have an axis of their own: batch, heads, rows, width."""


def _multi_head(call: Call) -> Sequence[Bound]:
    """Return the bounds of ONNX Runtime's attention; values may be packed beside keys, or beside queries and keys."""
    last = max(port for port in range(3) if call.has(port))
    values = call[last].bare
    if call.has(3):
        values += call[3].bare
    values = _cached(call, values, 7)
    return [_attended(call, values), UNKNOWN, values]


def _group_query(call: Call) -> Sequence[Bound]:
    """Return the bounds of ONNX Runtime's attention with caches; all may be packed into the first input."""
    values = call[2] if call.has(2) else call[0]
    values = _cached(call, values.bare, 4)
    return [_attended(call, values), UNKNOWN, values]


RULES: Final[Rules] = {
    "Attention": _attention,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _by_terms,
    "Gemm": _gemm,
    "MatMul": _matrix,
    "com.microsoft::FusedMatMul": _fused_product,
    "com.microsoft::GroupQueryAttention": _group_query,
    "com.microsoft::MatMulNBits": _blocks,
    "com.microsoft::MultiHeadAttention": _multi_head,
}
"""Op -> the rule of its bound."""
