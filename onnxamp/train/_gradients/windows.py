"""Gradients of ops that slide a window over spatial axes: convolution and pooling in one to three dimensions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp.train._gradients.calls import Call, Forward, Grads, Rule, reshape_like
from onnxamp.train._gradients.writer import Tensor

_INDICES: Final = "MaxPool.Indices"
"""How the ``engine.toml`` of a target calls what an engine may lack."""


@dataclass(frozen=True, slots=True)
class Window:
    """How a window slides, per spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    """Padding, like ``before``."""

    @property
    def pads(self) -> list[int]:
        """Padding as in the attribute."""
        return [*self.before, *self.after]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    def extent(self, axis: int) -> int:
        """Elements that one window spans, gaps included."""
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1


def _window(call: Call, kernel: Sequence[int] | None = None) -> Window:
    """The window of a node; ``kernel`` where the attribute may be missing.

    Raises:
        GradientError: padding depends on unknown sizes.
    """
    sizes = tuple(int(k) for k in call.attribute("kernel_shape") or kernel or ())
    rank = len(sizes)
    strides = tuple(int(s) for s in call.attribute("strides") or (1,) * rank)
    dilations = tuple(int(d) for d in call.attribute("dilations") or (1,) * rank)
    pads = [int(p) for p in call.attribute("pads") or (0,) * (2 * rank)]
    plain = Window(sizes, strides, dilations, tuple(pads[:rank]), tuple(pads[rank:]))
    auto = call.attribute("auto_pad", "NOTSET")
    if not auto.startswith("SAME"):
        return plain
    totals = []
    for axis in range(rank):
        size = call.x.known_size(axis + 2)
        if size is None:
            raise call.error(f"pads by {auto}, which needs input sizes that are unknown")
        out = -(-size // strides[axis])
        totals.append(max((out - 1) * strides[axis] + plain.extent(axis) - size, 0))
    less, more = (
        tuple(total // 2 for total in totals),
        tuple(total - total // 2 for total in totals),
    )
    ends = (less, more) if auto == "SAME_UPPER" else (more, less)
    return Window(sizes, strides, dilations, *ends)


def _kernel_of(call: Call) -> list[int]:
    """Spatial sizes of a convolution's weight.

    Raises:
        GradientError: they are unknown.
    """
    sizes = [call[1].known_size(axis) for axis in range(2, call.rank(1))]
    if None in sizes:
        raise call.error("has a weight of unknown size")
    return [size for size in sizes if size is not None]


def _conv(call: Call) -> Grads:
    dy, x, weight = call.dy, call[0], call[1]
    window, group = _window(call, _kernel_of(call)), int(call.attribute("group", 1))
    return [
        _spread(dy, weight, window, group, x) if call.wants[0] else None,
        _weight_gradient(x, dy, window, group) if call.wants[1] else None,
        _bias_gradient(dy, window) if call.wants_input(2) else None,
    ]


def _bias_gradient(dy: Tensor, window: Window) -> Tensor:
    return dy.sum([0, *range(2, window.rank + 2)], keepdims=False)


def _spread(dy: Tensor, weight: Tensor, window: Window, group: int, x: Tensor) -> Tensor:
    """The gradient of a convolution's input: ConvTranspose without padding, cropped to the input.

    Asymmetric padding would move ConvTranspose to the CPU, and without padding the result is correct for all input
    sizes. Elements at the end that the strides skipped become zeros.
    """
    dx = dy.op(
        "ConvTranspose",
        weight,
        strides=window.strides,
        dilations=window.dilations,
        group=group,
        kernel_shape=window.kernel,
    )
    skipped = [max(s - 1 - after, 0) for s, after in zip(window.strides, window.after, strict=True)]
    axes = list(range(2, window.rank + 2))
    if any(skipped):
        dx = dx.op("Pad", [*[0] * (window.rank + 4), *skipped])
    if not any((*window.before, *window.after)) and max(window.strides) == 1:
        return dx
    ends = [_end(x, axis, window.before[axis - 2]) for axis in axes]
    return dx.op("Slice", list(window.before), x.writer.concat(ends, 0), axes)


def _end(x: Tensor, axis: int, before: int) -> Tensor:
    size = x.known_size(axis)
    return x.size(axis) + before if size is None else x.writer.ints([size + before])


def _weight_gradient(x: Tensor, dy: Tensor, window: Window, group: int) -> Tensor:
    """The gradient of a convolution's weight: the input convolved with the output gradient.

    Channels and batch are swapped: x becomes [C/g, g*N, ...], dy becomes the kernel [O, N, ...]. So are strides and
    dilations. Where the strides skip elements at the end, the result is too large and is cropped.
    """
    spatial = list(range(2, window.rank + 2))
    kernel = dy.transpose([1, 0, *spatial])
    if group == 1:
        swapped = x.transpose([1, 0, *spatial])
    else:
        batch, sizes = x.size(0), x.op("Shape", start=2)
        split = x.reshape(batch, group, -1, sizes).transpose(
            [2, 1, 0, *(axis + 1 for axis in spatial)]
        )
        swapped = split.reshape(0, -1, sizes)
    dw = swapped.op(
        "Conv",
        kernel,
        group=group,
        strides=window.dilations,
        dilations=window.strides,
        pads=window.pads,
    )
    if max(window.strides) > 1:
        dw = dw.op("Slice", [0] * window.rank, list(window.kernel), spatial)
    return dw.transpose([1, 0, *spatial])


def _conv_transpose(call: Call) -> Grads:
    """The gradients of the convolution that this one transposes, with input and output swapped."""
    dy, x, weight = call.dy, call[0], call[1]
    group, rank = int(call.attribute("group", 1)), call.rank() - 2
    extra = [int(n) for n in call.attribute("output_padding") or (0,) * rank]
    if call.attribute("output_shape") or str(call.attribute("auto_pad", "NOTSET")).startswith(
        "SAME"
    ):
        raise call.error(
            "derives its padding from an output size; only explicit pads have a gradient rule"
        )
    window = _window(call, _kernel_of(call))
    if any(n >= s for n, s in zip(extra, window.strides, strict=True)):
        raise call.error(
            "has an output_padding that is not smaller than its strides, for which there is no gradient rule"
        )
    dx = dw = None
    if call.wants[0]:
        dx = dy.op(
            "Conv",
            weight,
            group=group,
            strides=window.strides,
            dilations=window.dilations,
            pads=window.pads,
            kernel_shape=window.kernel,
        )
    if call.wants[1]:
        dw = _weight_gradient(dy, x, window, group)
    return [dx, dw, _bias_gradient(dy, window) if call.wants_input(2) else None]


def _max_pool_forward(call: Call) -> tuple[Tensor, ...]:
    """The node itself, with its indices as second output where the engine has them."""
    if call.attribute("storage_order", 0):
        raise call.error(
            "has column-major indices (storage_order), for which there is no gradient rule"
        )
    if _INDICES in call.writer.lacks:
        call.writer.nodes.append(call.proto)
        return ()
    return (call.with_second_output("indices", TensorProto.INT64),)


def _max_pool(call: Call) -> Grads:
    """Every gradient goes to the position of its maximum; overlapping windows add up."""
    if not call.saved:
        return [_to_first_maxima(call)]
    x, places = call.x, call.saved[0].reshape(-1)
    zeros = call.writer.zeros(x.op("Size").reshape(1), x.elem)
    flat = zeros.op("ScatterElements", places, call.dy.reshape(-1), axis=0, reduction="add")
    return [reshape_like(flat, x)]


def _to_first_maxima(call: Call) -> Tensor:
    """The gradient of a MaxPool without indices: each window's goes to its first maximum.

    Channels join the batch, and the places of a window become the channels; a ConvTranspose moves each to its place.
    """
    x, y, dy, window = call.x, call.y, call.dy, _window(call)
    axes, count = list(range(2, window.rank + 2)), prod(window.kernel)
    more = [
        a + bool(call.attribute("ceil_mode", 0)) * (s - 1)
        for a, s in zip(window.after, window.strides, strict=True)
    ]
    padded = x
    if any((*window.before, *more)):
        least = call.writer.number(
            float(np.finfo(helper.tensor_dtype_to_np_dtype(x.elem)).min), x.elem
        )
        padded = x.op("Pad", [0, 0, *window.before, 0, 0, *more], least)
    inner, places = y.op("Shape", start=2), []
    for place in np.ndindex(*window.kernel):
        starts = [at * step for at, step in zip(place, window.dilations, strict=True)]
        ends = [_last(y, axis, window.strides[axis - 2], starts[axis - 2]) for axis in axes]
        taken = padded.op("Slice", starts, call.writer.concat(ends, 0), axes, list(window.strides))
        places.append(taken.reshape(-1, 1, inner))
    first = call.writer.concat(places, 1).op("ArgMax", axis=1, keepdims=1, elem=TensorProto.INT64)
    numbers = call.writer.ints(range(count)).reshape(1, count, *[1] * window.rank)
    each = first.equals(numbers).where(dy.reshape(-1, 1, inner), 0)
    shift = np.eye(count, dtype=helper.tensor_dtype_to_np_dtype(dy.elem)).reshape(
        count, 1, *window.kernel
    )
    return reshape_like(_spread(each, call.writer.constant(shift), window, 1, x), x)


def _last(y: Tensor, axis: int, stride: int, start: int) -> Tensor:
    """Where a slice ends that starts at ``start`` and has as many elements as ``y``."""
    size = y.known_size(axis)
    if size is not None:
        return y.writer.ints([start + (size - 1) * stride + 1])
    return y.size(axis) * stride + (start + 1 - stride)


def _average_pool(call: Call) -> Grads:
    """The gradient, spread evenly over the elements that each window averages.

    Channels join the batch, so that one kernel of ones serves all of them.
    """
    x, window = call.x, _window(call)
    dy = call.dy
    ones = call.writer.constant(
        np.ones((1, 1, *window.kernel), helper.tensor_dtype_to_np_dtype(dy.elem))
    )
    sizes = dy.writer.vector(-1, 1, dy.op("Shape", start=2))
    share = (dy / _counts(call, window, dy)).reshape(sizes)
    return [reshape_like(_spread(share, ones, window, 1, x), x)]


def _counts(call: Call, window: Window, dy: Tensor) -> Tensor:
    """The number of elements that each window averages.

    Raises:
        GradientError: it differs between windows and depends on unknown sizes.
    """
    with_pads, ceil = (
        bool(call.attribute("count_include_pad", 0)),
        bool(call.attribute("ceil_mode", 0)),
    )
    if not ceil and (with_pads or not any(window.pads)):
        return dy.writer.number(prod(window.kernel), dy.elem)
    rows: list[NDArray[np.float64]] = []
    for axis in range(window.rank):
        size, out = call.x.known_size(axis + 2), call.y.known_size(axis + 2)
        if size is None or out is None:
            raise call.error(f"averages beyond the edge of axis {axis + 2}, whose size is unknown")
        starts = np.arange(out)[:, None] * window.strides[axis] - window.before[axis]
        places = starts + np.arange(window.kernel[axis]) * window.dilations[axis]
        low, high = (-window.before[axis], size + window.after[axis]) if with_pads else (0, size)
        rows.append(((places >= low) & (places < high)).sum(1).astype(np.float64))
    counts = rows[0]
    for row in rows[1:]:
        counts = np.multiply.outer(counts, row)
    return dy.writer.constant(counts.astype(helper.tensor_dtype_to_np_dtype(dy.elem)))


def _global_average(call: Call) -> Grads:
    x, dy = call.x, call.dy
    count = x.op("Size").op("Div", call.y.op("Size")).cast(dy.elem)
    return [(dy / count).op("Expand", x.shape())]


def _global_max(call: Call) -> Grads:
    x, dy = call.x, call.dy
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
