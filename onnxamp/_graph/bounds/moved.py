"""Bounds of ops that move elements, choose among them, or mix them: no element leaves the range of the inputs."""

from collections.abc import Container, Sequence
from dataclasses import replace
from math import ceil, hypot, inf, sqrt
from typing import Final

import numpy as np

from onnxamp._graph.bounds.bound import UNKNOWN, Bound, between, hull, times, within
from onnxamp._graph.bounds.call import Call, Rules
from onnxamp._graph.bounds.weights import sums_over


def moved(call: Call, ports: Container[int]) -> Bound:
    """Return the bound of elements that are moved from some inputs. Vectors may be taken apart and put together."""
    return hull([call.bounds(value).bare for value in call.node.inputs_at(ports)])


def _reshaped(call: Call) -> Bound:
    """Return the bound after a change of shape, which keeps the order of elements.

    A vector along the last axis is a run of elements. It lies in as many of the old vectors as it may touch.
    """
    x = call[0]
    old, new = x.width, call.width()
    row = total = inf
    if old and new:
        touched = 1 if old % new == 0 else ceil(new / old)
        if old % new and new % old:
            touched += 1
        row, total = times(sqrt(touched), x.row), times(touched, x.total)
    is_same = call.shape(0) is not None and _tail(call.shape(0)) == _tail(
        call.output_shape()
    )
    return Bound(
        low=x.low,
        high=x.high,
        row=row,
        column=x.column if is_same else inf,
        total=total,
        is_single=x.is_single,
        step=x.step,
    )


def _tail(shape: Sequence[int | None] | None) -> tuple[int, ...] | None:
    """Return the sizes of the last two axes; None if any is unknown."""
    if shape is None or len(shape) < 2:
        return None
    first, second = shape[-2:]
    return None if first is None or second is None else (first, second)


def _transposed(call: Call) -> Bound:
    """Return the bound of a transposed tensor: norms follow the axes that they belong to."""
    x = call[0]
    shape = call.shape(0)
    perm = call.attribute("perm")
    if perm is None:
        if shape is None:
            return x.bare
        perm = list(reversed(range(len(shape))))
    norms = {len(perm) - 1: x.row, len(perm) - 2: x.column}
    last = perm[-1] if perm else 0
    return Bound(
        low=x.low,
        high=x.high,
        row=norms.get(last, inf),
        column=norms.get(perm[-2], inf) if len(perm) > 1 else inf,
        total=x.total if last == len(perm) - 1 else inf,
        is_single=x.is_single,
        step=x.step,
    )


def _concatenated(call: Call) -> Bound:
    """Return the bound of joined tensors; vectors along the last axis grow only where that is the axis."""
    parts = call.present
    shape = call.output_shape()
    axis = call.attribute("axis")
    joined = hull(parts)
    if shape is None or axis is None or not shape:
        return joined.bare
    from_end = axis % len(shape) - len(shape)
    row, column, total = joined.row, joined.column, joined.total
    if from_end == -1:
        row = hypot(*(part.row for part in parts))
        total = sum(part.total for part in parts)
    if from_end == -2:
        column = hypot(*(part.column for part in parts))
    return replace(joined.bare, row=row, column=column, total=total)


def _cut(call: Call) -> Bound:
    """Return the bound of a part of a tensor: no vector gets longer."""
    x = call[0]
    return replace(x.bare, row=x.row, column=x.column, total=x.total)


def _split(call: Call) -> Sequence[Bound]:
    return [_cut(call)] * len(call.node.outputs)


def _gathered(call: Call) -> Bound:
    """Return the bound of rows that indices select. Along the last axis, they may select one element often."""
    x = call[0]
    shape = call.shape(0)
    axis = call.attribute("axis", 0)
    if shape is None or axis % max(len(shape), 1) == len(shape) - 1:
        return x.bare
    is_table = call.graph.constants.is_constant(call.node.inputs[0])
    sums = call.graph.ask(sums_over, call.node.inputs[0], (-1,)) if is_table else None
    if sums is None or x.is_unbounded:
        return replace(x.bare, row=x.row, total=x.total)
    # Of a table, every row is known.
    norm = float(np.sqrt(sums.squares.max(initial=0.0)))
    row = call.rounding.length(norm, sums.terms)
    return replace(x.bare, row=min(row, x.row), total=x.total)


def _repeated(call: Call) -> Bound:
    """Return the bound of a tensor that is repeated along axes, the last of which may be among them."""
    x = call[0]
    bare = x.bare
    if x.width is None or x.width != call.width():
        return bare.sized(call.width())
    return replace(bare, row=x.row, total=x.total)


def _chosen(call: Call) -> Bound:
    """Return the bound of a choice by element: of a row, some elements come from one input and some from the other."""
    one, two = (call[port].spread(call.width()) for port in (1, 2))
    either = hull([one, two]).bare
    return replace(either, row=hypot(one.row, two.row), total=one.total + two.total)


def _padded(call: Call) -> Bound:
    """Return the bound after padding, with zeros unless a number is given."""
    x = call[0]
    if call.attribute("mode", "constant") != "constant":
        return x.bare
    pad = call[2] if call.has(2) else _number(call.attribute("value", 0.0))
    joined = hull([x, pad])
    is_zero = pad.low == pad.high == 0.0
    row, total = (x.row, x.total) if is_zero else (inf, inf)
    return replace(joined.bare, row=row, total=total)


def _number(number: float) -> Bound:
    return between(number, number)


def _interpolated(call: Call) -> Bound:
    """Return the bound of an interpolation: a mean of neighbors, unless a cubic overshoots."""
    x = call[0]
    if call.attribute("mode", "nearest") == "cubic":
        return UNKNOWN
    outside = _number(call.attribute("extrapolation_value", 0.0))
    return hull([x, outside]).unstepped


def _sampled(call: Call) -> Bound:
    """Return the bound of an interpolation on a grid, with zeros outside of the image."""
    if call.attribute("mode", "linear") in ("cubic", "bicubic"):
        return UNKNOWN
    return hull([call[0], _number(0.0)]).unstepped


def _scattered(call: Call) -> Bound:
    """Return the bound of a tensor in which some elements are replaced."""
    if call.attribute("reduction", "none") not in ("none", "min", "max"):
        return UNKNOWN
    return moved(call, (0, 2))


def _one_hot(call: Call) -> Bound:
    return call[2].bare


def _top(call: Call) -> Bound:
    """Return the bound of the largest elements along an axis: others in each vector along it."""
    x = call[0]
    bare = x.bare
    is_last = call.attribute("axis", -1) == -1
    return replace(bare, row=x.row, total=x.total) if is_last else bare


def _extreme(call: Call) -> Bound:
    """Return the bound of the least or the largest of the inputs, element by element."""
    choose = max if call.node.key == "Max" else min
    width = call.width()
    parts = call.present
    return Bound(
        low=choose(x.low for x in parts),
        high=choose(x.high for x in parts),
        step=min(x.step for x in parts),
    ).sized(width)


def _clip(call: Call) -> Bound:
    """Return the bound of elements that are brought into a range, whose ends may be computed."""
    x = call[0]
    lows, highs = _number(-inf), _number(inf)
    if call.has(1):
        lows = call[1]
    elif (least := call.attribute("min")) is not None:
        lows = _number(least)
    if call.has(2):
        highs = call[2]
    elif (most := call.attribute("max")) is not None:
        highs = _number(most)
    result = Bound(
        low=min(max(x.low, lows.low), highs.low),
        high=min(max(x.high, lows.high), highs.high),
        step=min(x.step, lows.step, highs.step),
    )
    return within(x, result) if lows.high <= 0.0 <= highs.low else result


def _sum(call: Call) -> Bound:
    """Return the bound of the sum of all inputs."""
    if len(call.present) == 1:
        return call.present[0]
    total, *others = map(call.term, call.present)
    for other in others:
        total += other
    return total


def _mean(call: Call) -> Bound:
    return _sum(call) * (1.0 / len(call.present))


def _dropped(call: Call) -> Bound:
    """Return the bound after a Dropout, which does nothing outside of training."""
    training = call.node.input(2)
    return call[0] if training < 0 else UNKNOWN


RULES: Final[Rules] = {
    "Clip": _clip,
    "Concat": _concatenated,
    "Dropout": _dropped,
    "Expand": _repeated,
    "Flatten": _reshaped,
    "Gather": _gathered,
    "GridSample": _sampled,
    "Max": _extreme,
    "Mean": _mean,
    "Min": _extreme,
    "OneHot": _one_hot,
    "Pad": _padded,
    "Reshape": _reshaped,
    "Resize": _interpolated,
    "ScatterElements": _scattered,
    "ScatterND": _scattered,
    "Slice": _cut,
    "Split": _split,
    "Squeeze": _reshaped,
    "Sum": _sum,
    "Tile": _repeated,
    "TopK": _top,
    "Transpose": _transposed,
    "Unsqueeze": _reshaped,
    "Upsample": _interpolated,
    "Where": _chosen,
}
"""Op -> the rule of its bound."""
