"""Gradients of ops that move elements without choosing among them: shapes, axes, pieces and copies."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp.train._gradients.calls import Call, Grads, Rule, first
from onnxamp.train._gradients.shapes import dim, reshape_like, static, sum_to
from onnxamp.train._gradients.writer import Tensor


def _reshaped(call: Call, dys: Grads) -> Grads:
    return [reshape_like(first(dys), call.x())]


def _transpose(call: Call, dys: Grads) -> Grads:
    perm = call.attribute("perm")
    inverse = None if perm is None else [int(i) for i in np.argsort(perm)]
    return [first(dys).op("Transpose", perm=inverse)]


def _concat(call: Call, dys: Grads) -> Grads:
    axis = int(call.attribute("axis"))
    if len(call.inputs) == 1:
        return dys
    sizes = [static(call.x(i), axis) for i in range(len(call.inputs))]
    if None not in sizes:
        split = call.writer.ints([size for size in sizes if size is not None])
    else:
        found = [dim(call.x(i), axis) for i in range(len(call.inputs))]
        split = found[0].op("Concat", *found[1:], axis=0)
    return call.writer.ops("Split", first(dys), split, into=[""] * len(sizes), axis=axis)


def _split(call: Call, dys: Grads) -> Grads:
    pieces = [
        dy if dy is not None else call.writer.zeros(y.shape(), y.elem)
        for y, dy in zip(call.outputs, dys, strict=True)
        if y is not None
    ]
    return [pieces[0].op("Concat", *pieces[1:], axis=int(call.attribute("axis", 0))), None]


def _expand(call: Call, dys: Grads) -> Grads:
    return [sum_to(first(dys), call.y.dims, call.x()), None]


def _tile(call: Call, dys: Grads) -> Grads:
    """Every axis becomes a pair, the copies and the size; the copies are summed."""
    rank = call.rank()
    if rank == 0:
        return [first(dys), None]
    rows = [call.x(1).op("Reshape", [1, rank]), call.x().shape().op("Reshape", [1, rank])]
    pairs = rows[0].op("Concat", rows[1], axis=0).op("Transpose", perm=[1, 0]).op("Reshape", [-1])
    copies = first(dys).op("Reshape", pairs).sum(range(0, 2 * rank, 2), keepdims=False)
    return [copies, None]


def _slice(call: Call, dys: Grads) -> Grads:
    """Zeros around the slice; with steps other than 1, each axis is scattered to the places that it came from."""
    dy, rank = first(dys), call.rank()
    axes, steps = _slice_axes(call, rank)
    pads: dict[int, tuple[Tensor, Tensor]] = {}
    for position, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        size = dim(call.x(), axis)
        places = _places(call, position, axis, step)
        if step != 1:
            found = places if isinstance(places, Tensor) else call.writer.constant(places)
            dy = scatter(dy, found, axis, size, rank)
        elif isinstance(places, Tensor):
            before = places.op("Slice", [0], [1])
            pads[axis] = (before, size - before - places.op("Shape"))
        else:
            start, whole = int(places[0]) if places.size else 0, static(call.x(), axis) or 0
            pads[axis] = (call.writer.ints([start]), call.writer.ints([whole - start - places.size]))
    return [_padded(dy, pads, rank) if pads else dy, *[None] * 4]


def _places(call: Call, position: int, axis: int, step: int) -> Tensor | NDArray[np.int64]:
    """Where along the axis the sliced elements stood: an array where that is known before the graph runs."""
    size, starts, ends = static(call.x(), axis), call.constant(1), call.constant(2)
    if size is not None and starts is not None and ends is not None:
        return np.arange(size, dtype=np.int64)[int(starts[position]) : int(ends[position]) : step]
    zero, one = (call.writer.constant(np.asarray(number, np.int64)) for number in (0, 1))
    every = zero.op("Range", dim(call.x(), axis).op("Squeeze"), one)
    bounds = [call.x(port).op("Gather", [position], axis=0).cast(TensorProto.INT64) for port in (1, 2)]
    return every.op("Slice", *bounds, [0], [step])


def _slice_axes(call: Call, rank: int) -> tuple[list[int], list[int]]:
    """Axes (from 0) and steps of a Slice.

    Raises:
        GradientError: they are computed, or not even their number is known.
    """
    known: list[Any] = [call.constant(3), call.constant(4)]
    for port, name in ((3, "axes"), (4, "steps")):
        if call.has(port) and known[port - 3] is None:
            raise call.refusal(f"computes its {name}; constant ones have a rule")
    count = static(call.x(1), 0)
    if count is None:
        raise call.refusal("does not tell how many axes it slices")
    axes = list(range(count)) if known[0] is None else [int(axis) % rank for axis in known[0]]
    steps = [1] * count if known[1] is None else [int(step) for step in known[1]]
    return axes, steps


def _padded(dy: Tensor, pads: Mapping[int, tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """``dy`` with zeros before and after it along some axes.

    Amounts are written for all axes: ONNX Runtime's transpose optimizer does not heed the input that names some.
    """
    none = dy.writer.ints([0])
    amounts = [pads.get(axis, (none, none))[end] for end in (0, 1) for axis in range(rank)]
    return dy.op("Pad", amounts[0].op("Concat", *amounts[1:], axis=0))


def scatter(dy: Tensor, places: Tensor, axis: int, size: Tensor, rank: int) -> Tensor:
    """``dy`` added into zeros that have ``size`` along an axis, each slice at its place there.

    Args:
        dy: gradient of what was gathered along ``axis``; its rank is ``rank``, which counts for other axes than 0.
        places: int vector: where each index of ``dy`` along the axis came from; negative ones count from the end.
        axis: from 0.
        size: int64 vector of one element.
    """
    perm = [axis, *(i for i in range(rank) if i != axis)]
    front = dy if axis == 0 else dy.op("Transpose", perm=perm)
    shape = size.op("Concat", front.op("Shape", start=1), axis=0)
    rows = places.op("Reshape", [-1, 1])
    found = dy.writer.zeros(shape, dy.elem).op("ScatterND", rows, front, reduction="add")
    back = [int(i) for i in np.argsort(perm)]
    return found if axis == 0 else found.op("Transpose", perm=back)


def _pad(call: Call, dys: Grads) -> Grads:
    """What was added is cut off, what was cut off gets zeros; reflected and repeated edges add up at their source."""
    mode = call.attribute("mode", "constant")
    rank, pads = call.rank(), call.constant(1)
    given = call.constant(3)
    if pads is None or (call.has(3) and given is None):
        raise call.refusal("computes its pads or axes; constant ones have a rule")
    axes = list(range(rank)) if given is None else [int(a) % rank for a in given]
    ranges = dict(zip(axes, zip(pads[: len(axes)].tolist(), pads[len(axes) :].tolist(), strict=True), strict=True))
    dx = first(dys)
    if mode == "constant":
        return [_cropped(dx, ranges, rank), None]
    for axis, (before, after) in ranges.items():
        size = static(call.x(), axis)
        if (before, after) != (0, 0):
            if size is None:
                raise call.refusal(f"pads axis {axis}, whose size is not known, by mode {mode!r}")
            places = np.pad(np.arange(size, dtype=np.int64), (before, after), mode=mode)
            dx = scatter(dx, call.writer.constant(places), axis, dim(call.x(), axis), rank)
    return [dx, None]


def _cropped(dy: Tensor, ranges: Mapping[int, Sequence[int]], rank: int) -> Tensor:
    added = {axis: before for axis, (before, after) in ranges.items() if max(before, after) > 0}
    if added:
        starts = [max(before, 0) for before in added.values()]
        ends = [2**62 if ranges[axis][1] <= 0 else -ranges[axis][1] for axis in added]
        dy = dy.op("Slice", starts, ends, list(added))
    amounts = [max(-ranges[axis][end], 0) if axis in ranges else 0 for end in (0, 1) for axis in range(rank)]
    return dy.op("Pad", amounts) if any(amounts) else dy


def _trilu(call: Call, dys: Grads) -> Grads:
    return [first(dys).op("Trilu", call.x(1) if call.has(1) else None, upper=call.attribute("upper", 1)), None]


def _depth_to_space(call: Call, dys: Grads) -> Grads:
    """SpaceToDepth knows one order of the three that DepthToSpace knows, so both are written as Transposes."""
    block = int(call.attribute("blocksize"))
    n, c, h, w = (dim(call.x(), axis) for axis in range(4))
    b = call.writer.ints([block])
    squares = call.writer.ints([block * block])
    split = n.op("Concat", c.op("Div", squares), h, b, w, b, axis=0)
    perm = [0, 3, 5, 1, 2, 4] if call.attribute("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    return [reshape_like(first(dys).op("Reshape", split).op("Transpose", perm=perm), call.x())]


def _space_to_depth(call: Call, dys: Grads) -> Grads:
    return [first(dys).op("DepthToSpace", blocksize=int(call.attribute("blocksize")), mode="DCR")]


RULES: Final[Mapping[str, Rule]] = {
    "Concat": _concat,
    "DepthToSpace": _depth_to_space,
    "Expand": _expand,
    "Flatten": _reshaped,
    "Pad": _pad,
    "Reshape": _reshaped,
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _reshaped,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _reshaped,
}
