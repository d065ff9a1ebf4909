"""Bounds of normalizations and reductions.

K numbers with mean 0 and variance 1 have the norm sqrt(K), and none of them exceeds sqrt(K - 1), whatever they were
before. Without centering, none exceeds sqrt(K). This is where bounds begin anew in every layer.
"""

from collections.abc import Callable, Sequence
from math import inf, log, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._graph.bounds.bound import UNKNOWN, Bound, between, hull, times
from onnxamp._graph.bounds.call import Call, Rules
from onnxamp._graph.bounds.rounding import Rounding
from onnxamp._graph.match import reduced_axes
from onnxamp._graph.shapes import elements_along


def unit(elements: float, *, row: float = inf) -> Bound:
    """Return the bound of numbers that were divided by the root of the mean of their squares.

    Args:
        elements: how many numbers were normalized together.
        row: the norm of a vector along the last axis, if these are such vectors or their parts.
    """
    largest = sqrt(elements)
    return Bound(low=-largest, high=largest, row=row)


def _layer(call: Call) -> Sequence[Bound]:
    """Return the bounds of a normalization of the last axes, its mean and its inverse deviation."""
    shape = call.shape(0)
    if shape is None:
        return [UNKNOWN]
    first = call.attribute("axis", -1) % max(len(shape), 1)
    elements = elements_along(shape, range(first, len(shape)))
    normalized = unit(elements, row=sqrt(elements)).sized(call.width())
    result = normalized * call[1]
    if call.has(2):
        result = call.term(result) + call[2]
    epsilon = call.attribute("epsilon", 1e-5)
    deviation = between(0.0, epsilon**-0.5 if epsilon > 0.0 else inf)
    return [result, call[0].unstepped, deviation]


def _root_mean_square(call: Call) -> Sequence[Bound]:
    result, *_ = _layer(call)
    return [result]


def _skip(call: Call) -> Sequence[Bound]:
    """Return the bounds of the normalization of a sum, which is the fourth output."""
    is_centered = call.node.key == "com.microsoft::SkipLayerNormalization"
    total = call.term(call[0]) + call.term(call[1])
    bias = 4 if is_centered else 3
    if call.has(bias):
        total += call.term(call[bias])
    # Shape inference may not know the op, but its result has the shape of its input.
    shape = call.shape(0)
    width = shape[-1] if shape else None
    elements = inf if width is None else width
    result = unit(elements, row=sqrt(elements)).sized(width) * call[2]
    if is_centered and call.has(3):
        result = call.term(result) + call[3]
    return [result, UNKNOWN, UNKNOWN, total]


def _instance(call: Call) -> Bound:
    """Return the bound of a normalization of each channel."""
    shape = call.shape(0)
    elements = inf if shape is None else elements_along(shape, range(2, len(shape)))
    return _by_channel(call, unit(elements, row=sqrt(elements)))


def _group(call: Call) -> Bound:
    """Return the bound of a normalization of groups of channels."""
    shape = call.shape(0)
    whole = inf if shape is None else elements_along(shape, range(1, len(shape)))
    elements = whole / call.attribute("num_groups", 1)
    # Without places, a row goes through all groups.
    is_within_group = shape is not None and len(shape) > _CHANNELS
    row = sqrt(elements if is_within_group else whole)
    return _by_channel(call, unit(elements, row=row))


_CHANNELS: Final = 2
"""The rank of a batch of channels without places."""


def _by_channel(call: Call, x: Bound) -> Bound:
    """Return the bound of channels that are scaled and shifted, each by its own numbers."""
    limit = call[1].magnitude
    scaled = Bound(
        low=times(x.low, limit),
        high=times(x.high, limit),
        row=times(x.row, limit),
    ).sized(call.width())
    return call.term(scaled) + call[2].bare


def _batch(call: Call) -> Sequence[Bound]:
    """Return the bound of a normalization with stored statistics: each channel is scaled and shifted."""
    stored = [call.numbers(port) for port in range(1, 5)]
    is_known = all(array is not None for array in stored)
    if call.attribute("training_mode", 0) or not is_known:
        return [UNKNOWN]
    if any(call[port].is_unbounded for port in range(1, 5)):
        return [UNKNOWN]
    (scale, bias, mean, variance), off = _with_rounding(call.rounding, stored)
    x = call[0]
    ends = np.array([x.low, x.high])[:, None]
    with np.errstate(all="ignore"):  # what is not finite is found below
        least, most = variance - off[3], variance + off[3]
        roots = np.sqrt(np.array([least, most]) + call.attribute("epsilon", 1e-5))
        factors = np.array([scale - off[0], scale + off[0]])[:, None] / roots
        # Both terms are rounded before they cancel.
        apart = np.abs(ends) * call.rounding.error + off[2]
        distances = ends - mean + np.array([[-1.0], [1.0]]) * apart
        # A number of no size times infinity is zero: an infinite bound stands for finite numbers.
        products = np.where(factors == 0.0, 0.0, factors * distances[:, None, None])
    if not np.isfinite(factors).all() or np.isnan(products).any():
        return [UNKNOWN]
    if not products.size:
        return [between(0.0, 0.0)]
    low = products.min((0, 1, 2)) + bias - off[1]
    high = products.max((0, 1, 2)) + bias + off[1]
    return [Bound(low=float(low.min()), high=float(high.max()))]


def _with_rounding(
    by: Rounding, stored: Sequence[NDArray[np.float32] | None]
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Return numbers in float64, and how far rounding may move each: zeros stay."""
    arrays = [np.asarray(array, np.float64) for array in stored]
    sizes = [np.abs(array) for array in arrays]
    off = [
        np.where(size > 0.0, np.maximum(size * by.error, by.least), 0.0)
        for size in sizes
    ]
    return arrays, off


def _softmax(call: Call) -> Bound:
    """Return the bound of numbers that sum up to 1 along an axis."""
    shape = call.output_shape()
    is_last = call.attribute("axis", -1) in (-1, len(shape or ()) - 1)
    norm = 1.0 if is_last else inf
    return Bound(low=0.0, high=1.0, row=norm, total=norm)


def _log_softmax(call: Call) -> Bound:
    """Return the bound of logarithms of numbers that sum up to 1: the least belongs to the lowest logit."""
    shape = call.shape(0)
    axis = call.attribute("axis", -1)
    axes = range(axis % len(shape), len(shape)) if shape else ()
    signature = call.node.signature
    if signature is not None and signature.since >= _ONE_AXIS:
        axes = axes[:1]
    elements = elements_along(shape, axes)
    x = call[0]
    return between(x.low - x.high - log(elements), 0.0) if elements else UNKNOWN


_ONE_AXIS: Final = 13
"""Opset from which on LogSoftmax takes one axis; before, it took all from that one on."""


def _unit_norm(call: Call) -> Bound:
    """Return the bound of vectors that are divided by their norm."""
    is_last = call.attribute("axis", -1) == -1
    return Bound(low=-1.0, high=1.0, row=1.0 if is_last else inf)


Reduction = Callable[[Bound, float, bool], Bound]
"""Returns the bound of a reduction from the bound of its input, how many elements it combines, and whether these are
vectors along the last axis."""


def _reduction(rule: Reduction) -> Callable[[Call], Bound]:
    """Return the rule of a reduction along axes that an attribute or an input names."""

    def bound(call: Call) -> Bound:
        shape = call.shape(0)
        if shape is None:
            return rule(call[0], inf, False)
        axes = reduced_axes(call.graph, call.node, max(len(shape), 1))
        if not shape or axes is None:
            return rule(call[0], 1.0 if not shape else inf, False)
        return rule(call[0], elements_along(shape, axes), axes == [len(shape) - 1])

    return bound


def _sum(x: Bound, elements: float, is_last: bool) -> Bound:
    limit = x.total if is_last else inf
    low, high = times(elements, x.low), times(elements, x.high)
    if elements == inf:  # an unknown number of elements, or none, whose sum is zero
        low = 0.0 if x.low >= 0.0 else -inf
        high = 0.0 if x.high <= 0.0 else inf
    return Bound(low=max(low, -limit), high=min(high, limit), step=x.step)


def _magnitudes(x: Bound, elements: float, is_last: bool) -> Bound:
    total = times(elements, x.magnitude)
    return Bound(low=0.0, high=min(total, x.total) if is_last else total, step=x.step)


def _norm(x: Bound, elements: float, is_last: bool) -> Bound:
    norm = times(sqrt(elements), x.magnitude)
    return between(0.0, min(norm, x.row) if is_last else norm)


def _square_sum(x: Bound, elements: float, is_last: bool) -> Bound:
    norm = _norm(x, elements, is_last).high
    return Bound(low=0.0, high=times(norm, norm), step=x.step * x.step)


def _most(x: Bound, elements: float, _is_last: bool) -> Bound:
    """Return the bound of the largest element; that of none is infinite."""
    is_there = 0 < elements < inf
    return Bound(low=x.low if is_there else -inf, high=x.high, step=x.step)


def _least(x: Bound, elements: float, _is_last: bool) -> Bound:
    """Return the bound of the least element; that of none is infinite."""
    is_there = 0 < elements < inf
    return Bound(low=x.low, high=x.high if is_there else inf, step=x.step)


def _mean(x: Bound, elements: float, _is_last: bool) -> Bound:
    return x.unstepped if elements else UNKNOWN


def _log_sum(x: Bound, elements: float, is_last: bool) -> Bound:
    total = _sum(x, elements, is_last)
    return between(max(total.low, 0.0), total.high).through(np.log)


def _log_sum_exp(x: Bound, elements: float, _is_last: bool) -> Bound:
    is_there = 0 < elements < inf  # of no elements, it is the logarithm of zero
    high = x.high + log(max(elements, 1.0))
    return between(x.low if is_there else -inf, high)


def _largest(call: Call) -> Bound:
    return call[0].bare


def _overall_mean(call: Call) -> Bound:
    return call[0].unstepped


def _average_pool(call: Call) -> Bound:
    """Return the bound of means of windows. They may take in zeros of the padding."""
    return hull([call[0], between(0.0, 0.0)]).unstepped


def _cumulative(call: Call) -> Bound:
    """Return the bound of running sums: of no elements up to all."""
    axis = call.integers(1)
    elements = elements_along(call.shape(0), axis) if axis else inf
    total = _sum(call[0], elements, False)
    return hull([total, between(0.0, 0.0)])


RULES: Final[Rules] = {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch,
    "CumSum": _cumulative,
    "GlobalAveragePool": _overall_mean,
    "GlobalMaxPool": _largest,
    "GroupNormalization": _group,
    "InstanceNormalization": _instance,
    "LayerNormalization": _layer,
    "LogSoftmax": _log_softmax,
    "LpNormalization": _unit_norm,
    "MaxPool": _largest,
    "RMSNormalization": _root_mean_square,
    "ReduceL1": _reduction(_magnitudes),
    "ReduceL2": _reduction(_norm),
    "ReduceLogSum": _reduction(_log_sum),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceMax": _reduction(_most),
    "ReduceMean": _reduction(_mean),
    "ReduceMin": _reduction(_least),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(_square_sum),
    "SimplifiedLayerNormalization": _root_mean_square,
    "Softmax": _softmax,
    "com.microsoft::SkipLayerNormalization": _skip,
    "com.microsoft::SkipSimplifiedLayerNormalization": _skip,
}
"""Op -> the rule of its bound."""
