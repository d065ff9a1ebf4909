"""Gradients of ops that move elements: pieces, choices by index, and Resize. Others are formulas."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp._facts.ops import op_facts
from onnxamp._gradients.writer import Call, Grads, Rule, Tensor, inverse
from onnxamp._model.protos import small_model
from onnxamp._runtime.sessions.session import make_session, run

_SAMPLE: Final = 5
"""Stands for an unknown size of an axis, to find out how an integer scale copies its elements."""
_Places = Tensor | NDArray[np.int64]
_Size = int | Tensor
"""A number, or an int64 vector of one element."""
_Ends = Mapping[int, Sequence[int]]
"""The elements that a Pad adds before and after those of its input, by axis."""


def _reshaped(call: Call) -> Grads:
    return call.dy.reshape_like(call.x)


def _concat(call: Call) -> Grads:
    axis = call.attribute("axis")
    sizes = [tensor.size(axis) for tensor in call.inputs if tensor is not None]
    return call.dy.split(sizes, axis)


def _split(call: Call) -> Grads:
    pieces = [
        dy if dy is not None else y.zeros_like()
        for y, dy in zip(call.outputs, call.dys, strict=True)
        if y is not None
    ]
    return pieces[0].op("Concat", *pieces[1:], axis=call.attribute("axis"))


def _slice(call: Call) -> Grads:
    """Return the padded gradient of a Slice; with steps other than 1, scatter each axis to its elements' origins."""
    dy = call.dy
    rank = call.rank()
    axes, steps = _slice_axes(call, rank)
    pads: dict[int, tuple[_Size, _Size]] = {}
    for position, (axis, step) in enumerate(zip(axes, steps, strict=True)):
        size = call.x.size(axis)
        places = _places(call, position, axis, step)
        if step != 1:
            dy = scatter(dy, places, axis, size, rank)
        elif isinstance(places, Tensor):
            # A slice of nothing has no first place: any does, since the gradient is all padding.
            before = call.writer.vector(places, 0).op("Slice", [0], [1])
            pads[axis] = (before, size - before - places.op("Shape"))
        else:
            start = int(places[0]) if places.size else 0
            pads[axis] = (start, size - start - places.size)
    if pads:  # pads for all axes: ONNX Runtime's transpose optimizer ignores the input that names axes
        sides = [pads.get(axis, (0, 0)) for axis in range(rank)]
        before_all = [before for before, _ in sides]
        after_all = [after for _, after in sides]
        dy = dy.op("Pad", call.writer.vector(*before_all, *after_all))
    return dy


def _places(call: Call, position: int, axis: int, step: int) -> _Places:
    """Return the indices that the slice took along the axis: an array if they are constant."""
    size = call.x.known_size(axis)
    starts = call.constant(1)
    ends = call.constant(2)
    if size is not None and starts is not None and ends is not None:
        return np.arange(size, dtype=np.int64)[
            int(starts[position]) : int(ends[position]) : step
        ]
    bounds = [
        call[port].op("Gather", [position], axis=0).cast(TensorProto.INT64)
        for port in (1, 2)
    ]
    every = call.writer.count(call.x.size(axis))
    return every.op("Slice", *bounds, [0], [step])


def _slice_axes(call: Call, rank: int) -> tuple[list[int], list[int]]:
    """Return the axes (from 0) and steps of a Slice.

    Raises:
        GradientError: they are computed, or their number is unknown.
    """
    axes = call.constant(3)
    steps = call.constant(4)
    for port, name, known in ((3, "axes", axes), (4, "steps", steps)):
        if call.has(port) and known is None:
            raise call.error(
                f"computes its {name}; only constant {name} have a gradient rule"
            )
    count = call[1].known_size(0)
    if count is None:
        raise call.error("slices an unknown number of axes")
    places = [*range(count)] if axes is None else [int(axis) % rank for axis in axes]
    strides = [1] * count if steps is None else [int(step) for step in steps]
    return places, strides


def scatter(dy: Tensor, places: _Places, axis: int, size: _Size, rank: int) -> Tensor:
    """Add the slices of ``dy`` along an axis into zeros, each at its index.

    Args:
        dy: gradient of the result that was gathered along ``axis``.
        places: int vector: the index of each slice; negative indices count from the end.
        axis: the axis, from 0.
        size: the size of the axis in the result.
        rank: the rank of ``dy``; only needed for axes other than 0.
    """
    perm = [axis, *(i for i in range(rank) if i != axis)]
    front = dy if axis == 0 else dy.transpose(perm)
    zeros = dy.writer.vector(size, front.op("Shape", start=1)).zeros(dy.elem)
    total = zeros.op("ScatterND", places.reshape(-1, 1), front, reduction="add")
    return total if axis == 0 else total.transpose(inverse(perm))


def _pad(call: Call) -> Grads:
    """Return the gradients of a Pad: crop additions, fill cropped parts with zeros, add copied edges to their source.

    The value that additions hold gets the sum of what is cropped.
    """
    mode = call.attribute("mode")
    rank = call.rank()
    pads = call.constant(1)
    given = call.constant(3)
    if pads is None or (call.has(3) and given is None):
        raise call.error(
            "computes its pads or axes; only constant ones have a gradient rule"
        )
    axes = list(range(rank)) if given is None else [int(axis) % rank for axis in given]
    by_axis = np.reshape(pads, (2, -1)).T.tolist()
    ends = dict(zip(axes, by_axis, strict=True))
    dx = call.dy
    if mode == "constant":
        dx = _cropped(dx, ends, rank)
        return [dx, None, partial(_padding, call, dx, ends)]
    for axis, (before, after) in ends.items():
        size = call.x.known_size(axis)
        if (before, after) != (0, 0):
            if size is None:
                raise call.error(
                    f"pads axis {axis}, whose size is unknown, in mode {mode!r}"
                )
            # Negative pads crop first.
            kept = np.arange(size, dtype=np.int64)
            kept = kept[max(-before, 0) : size - max(-after, 0)]
            added = max(before, 0), max(after, 0)
            places = np.pad(kept, added, mode=mode)
            dx = scatter(dx, places, axis, size, rank)
    return dx


def _cropped(dy: Tensor, ends: _Ends, rank: int) -> Tensor:
    """Return ``dy`` cropped by positive amounts and padded by negative ones; ``ends`` has (before, after) by axis."""
    added = {
        axis: before
        for axis, (before, after) in ends.items()
        if max(before, after) > 0
    }
    if added:
        starts = [max(before, 0) for before in added.values()]
        afters = [ends[axis][1] for axis in added]
        # Slice cuts an end beyond the axis off at it.
        stops = [-after if after > 0 else 2**62 for after in afters]
        dy = dy.op("Slice", starts, stops, list(added))
    amounts = [max(amount, 0) for amount in _amounts(ends, rank, -1)]
    return dy.op("Pad", amounts) if any(amounts) else dy


def _padding(call: Call, dx: Tensor, ends: _Ends) -> Tensor:
    """Return the gradient of the value of a Pad: the sum of the gradients of additions, where those of ``x`` are not.

    Without them, their large sums do not round its own away.
    """
    added = call.dy - dx.op("Pad", _amounts(ends, call.rank(), 1))
    return added.op("ReduceSum", keepdims=0).reshape_like(call[2])


def _amounts(ends: _Ends, rank: int, sign: int) -> list[int]:
    """Return the pads of all axes, times a sign; ``ends`` has (before, after) by axis."""
    sides = [ends.get(axis, (0, 0)) for axis in range(rank)]
    return [sign * side[end] for end in (0, 1) for side in sides]


def _gather(call: Call) -> Grads:
    """Return the rows, added up at their indices. The axes of the indices become one, in place of the gathered axis."""
    data = call[0]
    indices = call[1]
    dy = call.dy
    axis = call.attribute("axis")
    axis = axis if axis == 0 else axis % call.rank(0)
    if indices.dims is None or len(indices.dims) != 1:
        head = [data.op("Shape", start=0, end=axis)] if axis else []
        dy = dy.reshape(*head, -1, data.op("Shape", start=axis + 1))
    size = data.size(axis)
    rank = call.rank(0) if axis else 1
    return scatter(dy, indices.cast(TensorProto.INT64), axis, size, rank)


def _resize(call: Call) -> Grads:
    """Return the gradient, axis by axis, as Resize works. For nearest by an integer scale, sum the copies.

    Otherwise, measure the matrix of the axis by resizing the identity, and multiply the gradient by it.
    """
    dy = call.dy
    rank = call.rank()
    for axis, scale in _resized(call).items():
        before = call.x.known_size(axis)
        after = call.y.known_size(axis)
        is_known = before is not None and after is not None
        if not is_known and (scale is None or scale != int(scale)):
            raise call.error(f"resizes axis {axis}, whose size is unknown")
        sizes = (before, after) if is_known else (_SAMPLE, _SAMPLE * int(scale or 0))
        matrix = _matrix(call, scale, *sizes)
        factor, rest = divmod(matrix.shape[1], matrix.shape[0])
        copies = rest == 0 and call.attribute("mode") == "nearest"
        sources = matrix.argmax(0)
        if copies and (sources == np.arange(matrix.shape[1]) // factor).all():
            dy = _summed(dy, axis, before or -1, factor, rank)
        elif is_known:
            dy = _along(dy, matrix, axis, rank)
        else:
            raise call.error(f"resizes axis {axis}, whose size is unknown")
    return dy.reshape_like(call.x)


def _resized(call: Call) -> dict[int, float | None]:
    """Return the resized axes, with their scales if these are constant."""
    rank = call.rank()
    scales = call.constant(2)
    axes = [int(axis) % rank for axis in call.attribute("axes") or range(rank)]
    if scales is not None and scales.size:
        pairs = zip(axes, scales.tolist(), strict=True)
        return {axis: scale for axis, scale in pairs if scale != 1}
    x = call.x.dims or ()
    y = call.y.dims or (None,) * rank
    # Computed sizes repeat those of batch and channels, even if shape inference cannot show it.
    unclear = [
        axis
        for axis in axes
        if axis > 1 or (isinstance(x[axis], int) and isinstance(y[axis], int))
    ]
    return {axis: None for axis in unclear if x[axis] != y[axis] or x[axis] is None}


def _matrix(
    call: Call, scale: float | None, before: Any, after: Any
) -> NDArray[np.float32]:
    """Return [size before, size after]: the weight of each element of an axis in each element of the resized axis."""
    attributes = {
        item.name: helper.get_attribute_value(item)
        for item in call.node.proto.attribute
        if item.name not in ("axes", "keep_aspect_ratio_policy")
    }
    # Only the second axis of the identity is resized: column j shows what element j of the result is made of.
    given: NDArray[Any]
    if scale:
        given = np.asarray([1, scale], np.float32)
        reads = ["x", "", "given"]
    else:
        given = np.asarray([before, after], np.int64)
        reads = ["x", "", "", "given"]
    kind = helper.np_dtype_to_tensor_dtype(given.dtype)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    inputs = [x, helper.make_tensor_value_info("given", kind, [2])]
    node = helper.make_node("Resize", reads, ["y"], **attributes)
    model = small_model([node], inputs, [y])
    feeds = {"x": np.eye(before, dtype=np.float32), "given": given}
    weights: NDArray[np.float32] = run(make_session(model), feeds)["y"]
    return weights


def _summed(dy: Tensor, axis: int, small: int, factor: int, rank: int) -> Tensor:
    """Return the sums of neighboring copies along an axis."""
    rest = [dy.op("Shape", start=axis + 1)] if axis + 1 < rank else []
    return dy.reshape(*[0] * axis, small, factor, *rest).sum(
        [axis + 1], keepdims=False
    )


def _along(dy: Tensor, matrix: NDArray[np.float32], axis: int, rank: int) -> Tensor:
    """Return ``dy``, multiplied along an axis by the transpose of the matrix."""
    weights = dy.like(np.ascontiguousarray(matrix.T))
    if axis == rank - 1:
        return dy.op("MatMul", weights)
    perm = [*(i for i in range(rank) if i != axis), axis]
    return dy.transpose(perm).op("MatMul", weights).transpose(inverse(perm))


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(op_facts().views, _reshaped),
    "Concat": _concat,
    "Gather": _gather,
    "Identity": lambda call: call.dy,
    "Pad": _pad,
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
}
