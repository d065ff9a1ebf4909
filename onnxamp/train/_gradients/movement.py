"""Gradients of ops that move elements without choosing among them: shapes, axes, pieces and copies."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp.train._gradients.calls import Call, Grads, Rule, reshape_like, sum_to
from onnxamp.train._gradients.writer import Tensor


def _reshaped(call: Call) -> Grads:
    return [reshape_like(call.dy, call.x)]


def _transpose(call: Call) -> Grads:
    perm = call.attribute("perm")
    return [call.dy.op("Transpose", perm=None if perm is None else inverse(perm))]


def inverse(perm: Sequence[int]) -> list[int]:
    """The permutation that undoes another one."""
    return [int(axis) for axis in np.argsort(perm)]


def _concat(call: Call) -> Grads:
    axis, count = int(call.attribute("axis")), len(call.inputs)
    if count == 1:
        return call.dys
    sizes = [call[i].known_size(axis) for i in range(count)]
    known = [size for size in sizes if size is not None]
    split = (
        known
        if len(known) == count
        else call.writer.vector(*(call[i].size(axis) for i in range(count)))
    )
    return call.writer.ops("Split", call.dy, split, into=[""] * count, axis=axis)


def _split(call: Call) -> Grads:
    pieces = [
        dy if dy is not None else call.writer.zeros(y.shape(), y.elem)
        for y, dy in zip(call.outputs, call.dys, strict=True)
        if y is not None
    ]
    return [pieces[0].op("Concat", *pieces[1:], axis=int(call.attribute("axis", 0))), None]


def _expand(call: Call) -> Grads:
    return [sum_to(call.dy, call.y.dims, call.x), None]


def _tile(call: Call) -> Grads:
    """Split every axis into (copies, size), and sum the copies."""
    rank = call.rank()
    if rank == 0:
        return [call.dy, None]
    rows = call.writer.concat([call[1].reshape(1, rank), call.x.shape().reshape(1, rank)], 0)
    pairs = rows.transpose([1, 0]).reshape(-1)
    return [call.dy.reshape(pairs).sum(range(0, 2 * rank, 2), keepdims=False), None]


def _slice(call: Call) -> Grads:
    """Pad the slice with zeros; with steps other than 1, scatter each axis back to where its elements came from."""
    dy, rank = call.dy, call.rank()
    axes, steps = _slice_axes(call, rank)
    pads: dict[int, tuple[Tensor, Tensor]] = {}
    for position, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        size = call.x.size(axis)
        places = _places(call, position, axis, step)
        if step != 1:
            dy = scatter(
                dy,
                places if isinstance(places, Tensor) else call.writer.constant(places),
                axis,
                size,
                rank,
            )
        elif isinstance(places, Tensor):
            before = places.op("Slice", [0], [1])
            pads[axis] = (before, size - before - places.op("Shape"))
        else:
            start, whole = int(places[0]) if places.size else 0, call.x.known_size(axis) or 0
            pads[axis] = (
                call.writer.ints([start]),
                call.writer.ints([whole - start - places.size]),
            )
    return [_padded(dy, pads, rank) if pads else dy, *[None] * 4]


def _places(call: Call, position: int, axis: int, step: int) -> Tensor | NDArray[np.int64]:
    """Indices along the axis that the slice took: an array where they are constant."""
    size, starts, ends = call.x.known_size(axis), call.constant(1), call.constant(2)
    if size is not None and starts is not None and ends is not None:
        return np.arange(size, dtype=np.int64)[int(starts[position]) : int(ends[position]) : step]
    zero, one = (call.writer.number(number, TensorProto.INT64) for number in (0, 1))
    every = zero.op("Range", call.x.size(axis).op("Squeeze"), one)
    bounds = [
        call[port].op("Gather", [position], axis=0).cast(TensorProto.INT64) for port in (1, 2)
    ]
    return every.op("Slice", *bounds, [0], [step])


def _slice_axes(call: Call, rank: int) -> tuple[list[int], list[int]]:
    """Axes (from 0) and steps of a Slice.

    Raises:
        GradientError: they are computed, or even their number is unknown.
    """
    known: list[Any] = [call.constant(3), call.constant(4)]
    for port, name in ((3, "axes"), (4, "steps")):
        if call.has(port) and known[port - 3] is None:
            raise call.error(f"computes its {name}; only constant {name} have a gradient rule")
    count = call[1].known_size(0)
    if count is None:
        raise call.error("slices an unknown number of axes")
    axes = list(range(count)) if known[0] is None else [int(axis) % rank for axis in known[0]]
    steps = [1] * count if known[1] is None else [int(step) for step in known[1]]
    return axes, steps


def _padded(dy: Tensor, pads: Mapping[int, tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """``dy`` with zeros before and after it along some axes.

    All axes get an amount: ONNX Runtime's transpose optimizer ignores the input that names axes.
    """
    none = dy.writer.ints([0])
    return dy.op(
        "Pad",
        dy.writer.vector(
            *(pads.get(axis, (none, none))[end] for end in (0, 1) for axis in range(rank))
        ),
    )


def scatter(dy: Tensor, places: Tensor, axis: int, size: Tensor, rank: int) -> Tensor:
    """Add the slices of ``dy`` along an axis into zeros, each at its index.

    Args:
        dy: gradient of what was gathered along ``axis``.
        places: int vector: the index of each slice; negative ones count from the end.
        axis: from 0.
        size: int64 vector of one element: the size of the axis in the result.
        rank: of ``dy``; only needed for axes other than 0.
    """
    perm = [axis, *(i for i in range(rank) if i != axis)]
    front = dy if axis == 0 else dy.transpose(perm)
    shape = dy.writer.vector(size, front.op("Shape", start=1))
    rows = places.reshape(-1, 1)
    total = dy.writer.zeros(shape, dy.elem).op("ScatterND", rows, front, reduction="add")
    return total if axis == 0 else total.transpose(inverse(perm))


def _pad(call: Call) -> Grads:
    """Crop what was added, fill what was cropped with zeros; reflected and repeated edges add up at their source."""
    mode = call.attribute("mode", "constant")
    rank, pads, given = call.rank(), call.constant(1), call.constant(3)
    if pads is None or (call.has(3) and given is None):
        raise call.error("computes its pads or axes; only constant ones have a gradient rule")
    axes = list(range(rank)) if given is None else [int(axis) % rank for axis in given]
    ends = dict(zip(axes, np.reshape(pads, (2, -1)).T.tolist(), strict=True))
    dx = call.dy
    if mode == "constant":
        return [_cropped(dx, ends, rank), None]
    for axis, (before, after) in ends.items():
        size = call.x.known_size(axis)
        if (before, after) != (0, 0):
            if size is None:
                raise call.error(f"pads axis {axis}, whose size is unknown, in mode {mode!r}")
            places = np.pad(np.arange(size, dtype=np.int64), (before, after), mode=mode)
            dx = scatter(dx, call.writer.constant(places), axis, call.x.size(axis), rank)
    return [dx, None]


def _cropped(dy: Tensor, ends: Mapping[int, Sequence[int]], rank: int) -> Tensor:
    """``dy`` cropped by positive amounts and padded by negative ones; ``ends`` has (before, after) by axis."""
    added = {axis: before for axis, (before, after) in ends.items() if max(before, after) > 0}
    if added:
        starts = [max(before, 0) for before in added.values()]
        stops = [2**62 if ends[axis][1] <= 0 else -ends[axis][1] for axis in added]
        dy = dy.op("Slice", starts, stops, list(added))
    amounts = [
        max(-ends[axis][end], 0) if axis in ends else 0 for end in (0, 1) for axis in range(rank)
    ]
    return dy.op("Pad", amounts) if any(amounts) else dy


def _trilu(call: Call) -> Grads:
    return [
        call.dy.op("Trilu", call[1] if call.has(1) else None, upper=call.attribute("upper", 1)),
        None,
    ]


def _depth_to_space(call: Call) -> Grads:
    """Written as a Transpose: SpaceToDepth has only one of the orders that DepthToSpace has."""
    block, x = int(call.attribute("blocksize")), call.x
    n, c, h, w = (x.size(axis) for axis in range(4))
    split = call.writer.vector(n, c.op("Div", [block * block]), h, block, w, block)
    perm = [0, 3, 5, 1, 2, 4] if call.attribute("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    return [reshape_like(call.dy.reshape(split).transpose(perm), x)]


def _space_to_depth(call: Call) -> Grads:
    return [call.dy.op("DepthToSpace", blocksize=int(call.attribute("blocksize")), mode="DCR")]


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
