"""Gradients of ops that slide a window over spatial axes: convolutions and pooling, in one to three dimensions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp.train._gradients.calls import Call, Forward, Grads, Rule, first
from onnxamp.train._gradients.shapes import dim, reshape_like, static
from onnxamp.train._gradients.writer import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """How a window slides; one entry for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    """Padding at both ends."""

    @property
    def pads(self) -> list[int]:
        """As attributes write them."""
        return [*self.before, *self.after]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    def extent(self, axis: int) -> int:
        """Elements from the first to the last that one window touches."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1


def _window(call: Call, kernel: Sequence[int] | None = None) -> Window:
    """The window of a node; ``kernel`` where its attribute may be missing.

    Raises:
        GradientError: padding depends on sizes that are not known.
    """
    found = tuple(int(k) for k in call.attribute("kernel_shape") or kernel or ())
    rank = len(found)
    strides = tuple(int(s) for s in call.attribute("strides") or (1,) * rank)
    dilations = tuple(int(d) for d in call.attribute("dilations") or (1,) * rank)
    pads = [int(p) for p in call.attribute("pads") or (0,) * (2 * rank)]
    plain = Window(found, strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]))
    auto = call.attribute("auto_pad", "NOTSET")
    if not auto.startswith("SAME"):
        return plain
    totals = []
    for axis in range(rank):
        size = static(call.x(), axis + 2)
        if size is None:
            raise call.refusal(f"pads by {auto}, which needs the sizes of its input")
        out = -(-size // strides[axis])
        totals.append(max((out - 1) * strides[axis] + plain.extent(axis) - size, 0))
    less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    ends = (less, more) if auto == "SAME_UPPER" else (more, less)
    return Window(found, strides, dilations, *ends)


def _kernel_of(call: Call) -> list[int]:
    """Spatial sizes of a convolution's weight.

    Raises:
        GradientError: they are not known.
    """
    sizes = [static(call.x(1), axis) for axis in range(2, call.rank(1))]
    if None in sizes:
        raise call.refusal("needs the sizes of its weight")
    return [size for size in sizes if size is not None]


def _conv(call: Call, dys: Grads) -> Grads:
    dy, x, weight = first(dys), call.x(0), call.x(1)
    window, group = _window(call, _kernel_of(call)), int(call.attribute("group", 1))
    return [
        _spread(dy, weight, window, group, x) if call.wants[0] else None,
        _weight_gradient(x, dy, window, group) if call.wants[1] else None,
        _bias_gradient(dy, window) if call.wants_input(2) else None,
    ]


def _bias_gradient(dy: Tensor, window: Window) -> Tensor:
    return dy.sum([0, *range(2, window.rank + 2)], keepdims=False)


def _spread(dy: Tensor, weight: Tensor, window: Window, group: int, x: Tensor) -> Tensor:
    """The gradient of a convolution's input: ConvTranspose without padding, then cut to where the input was.

    Padding that is not the same at both ends would send ConvTranspose to the CPU; and without padding, the result is
    right for sizes that no attribute could tell. What strides left over at the end is filled with zeros.
    """
    dx = dy.op(
        "ConvTranspose", weight, strides=window.strides, dilations=window.dilations, group=group,
        kernel_shape=window.kernel,
    )  # fmt: skip
    left_over = [max(s - 1 - after, 0) for s, after in zip(window.strides, window.after, strict=True)]
    axes = list(range(2, window.rank + 2))
    if any(left_over):
        dx = dx.op("Pad", [*[0] * (window.rank + 4), *left_over])
    if not any((*window.before, *window.after)) and max(window.strides) == 1:
        return dx
    ends = [_end(x, axis, window.before[axis - 2]) for axis in axes]
    return dx.op("Slice", list(window.before), ends[0].op("Concat", *ends[1:], axis=0), axes)


def _end(x: Tensor, axis: int, before: int) -> Tensor:
    size = static(x, axis)
    return x.writer.ints([size + before]) if size is not None else dim(x, axis) + before


def _weight_gradient(x: Tensor, dy: Tensor, window: Window, group: int) -> Tensor:
    """The gradient of a convolution's weight is a convolution of the input with the output's gradient.

    Channels and batch change places: x becomes [C/g, g*N, ...], dy the kernel [O, N, ...]; strides and dilations
    change places, too. Where strides leave input over, the result is too large and cut.
    """
    spatial = list(range(2, window.rank + 2))
    kernel = dy.op("Transpose", perm=[1, 0, *spatial])
    if group == 1:
        swapped = x.op("Transpose", perm=[1, 0, *spatial])
    else:
        sizes = [x.op("Shape", start=axis) if axis else dim(x, 0) for axis in (0, 2)]
        split = x.op("Reshape", sizes[0].op("Concat", x.writer.ints([group, -1]), sizes[1], axis=0))
        moved = split.op("Transpose", perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
        merged = x.writer.ints([0, -1]).op("Concat", sizes[1], axis=0)
        swapped = moved.op("Reshape", merged)
    found = swapped.op(
        "Conv", kernel, group=group, strides=window.dilations, dilations=window.strides, pads=window.pads
    )
    cut = found.op("Slice", [0] * window.rank, list(window.kernel), spatial) if max(window.strides) > 1 else found
    return cut.op("Transpose", perm=[1, 0, *spatial])


def _conv_transpose(call: Call, dys: Grads) -> Grads:
    """The transposed convolution's gradients are those of the convolution that it transposes, with sides changed."""
    dy, x, weight = first(dys), call.x(0), call.x(1)
    group, rank = int(call.attribute("group", 1)), call.rank() - 2
    extra = [int(n) for n in call.attribute("output_padding") or (0,) * rank]
    if call.attribute("output_shape") or str(call.attribute("auto_pad", "NOTSET")).startswith("SAME"):
        raise call.refusal("is padded to a size that it asks for; explicit pads have a rule")
    window = _window(call, _kernel_of(call))
    if any(n >= s for n, s in zip(extra, window.strides, strict=True)):
        raise call.refusal("has an output_padding that is not smaller than its strides")
    dx = dw = None
    if call.wants[0]:
        dx = dy.op(
            "Conv", weight, group=group, strides=window.strides, dilations=window.dilations, pads=window.pads,
            kernel_shape=window.kernel,
        )  # fmt: skip
    if call.wants[1]:
        dw = _weight_gradient(dy, x, window, group)
    return [dx, dw, _bias_gradient(dy, window) if call.wants_input(2) else None]


def _max_pool_forward(call: Call) -> tuple[Tensor, ...]:
    """The node itself, asked for its indices."""
    if call.attribute("storage_order", 0):
        raise call.refusal("numbers its elements column by column (storage_order), for which there is no rule")
    call.writer.nodes.append(call.proto)
    if len(call.proto.output) < 2 or not call.proto.output[1]:
        del call.proto.output[1:]
        call.proto.output.append(call.writer.names.fresh(f"{call.y.name}/indices"))
    return (Tensor(call.writer, call.proto.output[1], TensorProto.INT64),)


def _max_pool(call: Call, dys: Grads) -> Grads:
    """Every gradient goes to where its maximum stood; windows that overlap add up."""
    x, places = call.x(), call.saved[0].op("Reshape", [-1])
    zeros = call.writer.zeros(x.op("Size").op("Reshape", [1]), x.elem)
    flat = zeros.op("ScatterElements", places, first(dys).op("Reshape", [-1]), axis=0, reduction="add")
    return [reshape_like(flat, x)]


def _average_pool(call: Call, dys: Grads) -> Grads:
    """The gradient, divided by how many elements each window counts, spread evenly over them.

    Channels become batch, so that one kernel of ones serves any number of them.
    """
    x, window = call.x(), _window(call)
    dy = first(dys)
    ones = call.writer.constant(np.ones((1, 1, *window.kernel), helper.tensor_dtype_to_np_dtype(dy.elem)))
    shape = dy.writer.ints([-1, 1]).op("Concat", dy.op("Shape", start=2), axis=0)
    share = (dy / _counts(call, window, dy)).op("Reshape", shape)
    return [reshape_like(_spread(share, ones, window, 1, x), x)]


def _counts(call: Call, window: Window, dy: Tensor) -> Tensor:
    """How many elements each window counts.

    Raises:
        GradientError: it differs from window to window and depends on sizes that are not known.
    """
    with_pads, ceil = bool(call.attribute("count_include_pad", 0)), bool(call.attribute("ceil_mode", 0))
    if not ceil and (with_pads or not any(window.pads)):
        return dy.writer.number(prod(window.kernel), dy.elem)
    rows: list[NDArray[np.float64]] = []
    for axis in range(window.rank):
        size, out = static(call.x(), axis + 2), static(call.y, axis + 2)
        if size is None or out is None:
            raise call.refusal(f"averages over the edge of axis {axis + 2}, whose size is not known")
        starts = np.arange(out)[:, None] * window.strides[axis] - window.before[axis]
        places = starts + np.arange(window.kernel[axis]) * window.dilations[axis]
        low, high = (-window.before[axis], size + window.after[axis]) if with_pads else (0, size)
        rows.append(((places >= low) & (places < high)).sum(1).astype(np.float64))
    counts = rows[0]
    for row in rows[1:]:
        counts = np.multiply.outer(counts, row)
    return dy.writer.constant(counts.astype(helper.tensor_dtype_to_np_dtype(dy.elem)))


def _global_average(call: Call, dys: Grads) -> Grads:
    x, dy = call.x(), first(dys)
    count = x.op("Size").op("Div", call.y.op("Size")).cast(dy.elem)
    return [(dy / count).op("Expand", x.shape())]


def _global_max(call: Call, dys: Grads) -> Grads:
    x, dy = call.x(), first(dys)
    hit = x.equals(call.y).cast(dy.elem)
    return [dy / hit.sum(range(2, call.rank())) * hit]


RULES: Final[Mapping[str, Rule]] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "MaxPool": _max_pool,
}
FORWARD: Final[Mapping[str, Forward]] = {"MaxPool": _max_pool_forward}
