"""Gradients of MatMul and Einsum, and of windows over one to three spatial axes: convolution and pooling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from string import ascii_letters
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp._gradients.writer import Call, Forward, Grads, Rule, Tensor, sum_to

_END: Final = int(np.iinfo(np.int64).max)
"""The end of an axis, whatever its size."""
_ELLIPSIS: Final = "..."
"""The axes of an equation of Einsum that have no letters."""


def _matmul(call: Call) -> Grads:
    """Return dA = dY B^T and dB = A^T dY, summed over broadcast axes.

    A vector counts as a matrix of one row or column.
    """
    rank_a = call.rank(0)
    rank_b = call.rank(1)
    a = call[0]
    b = call[1]
    dy = replace(call.dy, dims=call.y.dims)
    if rank_b == 1:
        b = _unsqueezed(b, -1)
        dy = _unsqueezed(dy, -1)
    if rank_a == 1:
        a = _unsqueezed(a, -2)
        dy = _unsqueezed(dy, -2)

    def left() -> Tensor:
        da = _left(dy, a, b)
        return da.reshape_like(call[0]) if rank_a == 1 else da

    def right() -> Tensor:
        db = _right(dy, a, b)
        return db.reshape_like(call[1]) if rank_b == 1 else db

    return [left, right]


def _unsqueezed(x: Tensor, axis: int) -> Tensor:
    """Return a tensor with a new axis of size 1, counted from the end."""
    dims = x.dims
    if dims is not None:
        at = len(dims) + 1 + axis
        dims = (*dims[:at], 1, *dims[at:])
    return replace(x.op("Unsqueeze", [axis]), dims=dims)


def _left(dy: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return dY B^T; operands have rank 2 or more."""
    assert a.dims is not None
    assert b.dims is not None
    if len(a.dims) == len(b.dims) == 2:
        return dy.op("Gemm", b, transB=1)
    product = dy.op("MatMul", _transposed(b))
    if len(b.dims) == 2:  # a was not broadcast
        return product
    dims = None if dy.dims is None else (*dy.dims[:-2], *a.dims[-2:])
    return sum_to(product, dims, a)


def _right(dy: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return A^T dY. If a batch shares the matrix (a weight), the batch becomes rows, so that one Gemm sums over it."""
    assert a.dims is not None
    assert b.dims is not None
    if len(b.dims) == 2:
        if len(a.dims) > 2:
            a = a.reshape(-1, a.size(-1))
            dy = dy.reshape(-1, b.size(-1))
        return a.op("Gemm", dy, transA=1)
    product = _transposed(a).op("MatMul", dy)
    dims = None if dy.dims is None else (*dy.dims[:-2], *b.dims[-2:])
    return sum_to(product, dims, b)


def _transposed(x: Tensor) -> Tensor:
    rank = len(x.dims or ())
    return x.transpose([*range(rank - 2), rank - 1, rank - 2])


def _einsum(call: Call) -> Grads:
    """Return the gradients of the operands: Einsums of the output gradient with the other operands.

    A letter may be broadcast: of size 1 in one operand, and of another size in others. Where that is the first operand
    with a letter of the result, onnx infers the wrong shape of the result, so no gradient is written.
    """
    equation = call.attribute("equation").replace(" ", "")
    terms, result = _lettered(call, equation)
    if any(len(set(term)) != len(term) for term in (*terms, result)):
        raise call.error(
            f"has the equation {equation!r}, which repeats a letter in one term"
        )
    broadcast = _broadcast_letters(call, terms)
    for axis, letter in enumerate(result):
        if letter in broadcast and call.y.known_size(axis) == 1:
            raise call.error(
                f"has the equation {equation!r}, whose first operand with {letter!r} is broadcast along it: swap operands"
            )
    grads = []
    for position, term in enumerate(terms):
        others = [terms[i] for i in range(len(terms)) if i != position]
        read = ",".join([result, *others])
        if not set(term).issubset(read):
            raise call.error(
                f"has the equation {equation!r}, which sums over a letter of one operand only"
            )
        grads.append(partial(_operand_gradient, call, position, read, term, broadcast))
    return grads


def _lettered(call: Call, equation: str) -> tuple[list[str], str]:
    """Return the terms of the operands and of the result, with letters in place of "...".

    Without an arrow, the result has the letters that appear once, in their order, after "...".
    """
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        result = "".join(letter for letter in letters if left.count(letter) == 1)
        result = _ELLIPSIS + result if _ELLIPSIS in left else result
    ranks = [
        call.rank(position) - len(term) + len(_ELLIPSIS)
        for position, term in enumerate(terms)
        if _ELLIPSIS in term
    ]
    # Runtimes demand that "..." stands for as many axes in each term.
    unused = [letter for letter in ascii_letters if letter not in equation]
    axes = "".join(unused[: max(ranks, default=0)])
    *terms, result = (term.replace(_ELLIPSIS, axes) for term in (*terms, result))
    return terms, result


def _broadcast_letters(call: Call, terms: Sequence[str]) -> set[str]:
    """Return the letters of size 1 in one operand of Einsum that may have another size in others."""
    ones = set[str]()
    others = set[str]()
    for position, term in enumerate(terms):
        for axis, letter in enumerate(term):
            is_one = call[position].known_size(axis) == 1
            (ones if is_one else others).add(letter)
    return ones & others


def _operand_gradient(
    call: Call, position: int, read: str, term: str, broadcast: set[str]
) -> Tensor:
    """Return the gradient of an operand of Einsum from the output gradient and the other operands.

    It is summed over letters along which the operand was broadcast, and repeated along those that the gradient lacks.

    Args:
        call: the node.
        position: that of the operand.
        read: the terms of the output gradient and of the other operands.
        term: the term of the operand.
        broadcast: the letters that are broadcast.
    """
    x = call[position]
    operands = [one for i, one in enumerate(call.inputs) if i != position]
    summed = [
        axis
        for axis, letter in enumerate(term)
        if letter in broadcast and x.known_size(axis) == 1
    ]
    kept = "".join(letter for axis, letter in enumerate(term) if axis not in summed)
    dx = call.dy.op("Einsum", *operands, equation=f"{read}->{kept}")
    if summed:
        dx = dx.op("Unsqueeze", summed)
    result, _, _ = read.partition(",")
    is_short = not broadcast.isdisjoint(set(kept) - set(result))
    return dx.op("Expand", x.shape()) if is_short else dx


_INDICES: Final = "MaxPool.Indices"
"""A feature that an engine may lack, as named in the target's ``engine.toml``."""


class KernelWindow(NamedTuple):
    """The movement of a kernel's window, per spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    """Padding, like ``before``."""

    @property
    def pads(self) -> list[int]:
        """Padding in the form of the attribute."""
        return [*self.before, *self.after]

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of a convolution that slides like this window."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
        }

    @property
    def is_pointwise(self) -> bool:
        """Whether the kernel has size 1 and there is no padding."""
        return set(self.kernel) == {1} and not any(self.pads)

    @property
    def axes(self) -> list[int]:
        """The spatial axes."""
        return list(range(2, len(self.kernel) + 2))


def _window(call: Call, kernel: Sequence[int] = ()) -> KernelWindow:
    """Return the window of a node; ``kernel`` is its size if the attribute may be missing.

    Raises:
        GradientError: padding depends on unknown sizes.
    """
    sizes = tuple(call.attribute("kernel_shape") or kernel)
    rank = len(sizes)
    strides = tuple(call.attribute("strides") or (1,) * rank)
    dilations = tuple(call.attribute("dilations") or (1,) * rank)
    pads = tuple(call.attribute("pads") or (0,) * (2 * rank))
    before = pads[:rank]
    after = pads[rank:]
    auto = call.attribute("auto_pad")
    if auto.startswith("SAME"):
        totals = []
        for axis, stride in enumerate(strides):
            size = call.x.known_size(axis + 2)
            if size is None:
                raise call.error(
                    f"pads by {auto}, which needs input sizes that are unknown"
                )
            # SAME asks for as many windows as strides begin in the input, and pads what they reach beyond it.
            windows = -(-size // stride)
            reach = (sizes[axis] - 1) * dilations[axis] + 1
            covered = (windows - 1) * stride + reach
            totals.append(max(covered - size, 0))
        before = tuple(total // 2 for total in totals)
        after = tuple(total - total // 2 for total in totals)
        if auto == "SAME_LOWER":
            before, after = after, before
    return KernelWindow(sizes, strides, dilations, before, after)


def _kernel_of(call: Call) -> list[int]:
    """Return the spatial sizes of a convolution's weight.

    Raises:
        GradientError: they are unknown.
    """
    sizes = [call[1].size(axis) for axis in range(2, call.rank(1))]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes):
        raise call.error("has a weight of unknown size")
    return known


def _conv(call: Call) -> Grads:
    dy = call.dy
    x = call[0]
    weight = call[1]
    window = _window(call, _kernel_of(call))
    group = call.attribute("group")
    return [
        lambda: _spread(dy, weight, window, group, x),
        lambda: _weight_gradient(x, dy, window, group),
        lambda: _bias_gradient(dy, window),
    ]


def _bias_gradient(dy: Tensor, window: KernelWindow) -> Tensor:
    return dy.sum([0, *window.axes], keepdims=False)


def _spread(
    dy: Tensor, weight: Tensor, window: KernelWindow, group: int, x: Tensor
) -> Tensor:
    """Return the gradient of a convolution's input: ConvTranspose without padding, cropped to the input.

    Asymmetric padding would move ConvTranspose to the CPU, and without padding the result is correct for all input
    sizes. Elements at the end that the strides skipped become zeros.
    """
    dx = dy.op("ConvTranspose", weight, group=group, **window.attributes)
    skipped = [
        max(s - 1 - after, 0)
        for s, after in zip(window.strides, window.after, strict=True)
    ]
    if any(skipped):
        dx = dx.op("Pad", [*[0] * (len(skipped) + 4), *skipped])
    if not any((*window.before, *window.after)) and max(window.strides) == 1:
        return dx
    ends = (x.size(axis) + before for axis, before in enumerate(window.before, 2))
    return dx.op("Slice", window.before, x.writer.vector(*ends), window.axes)


def _weight_gradient(
    x: Tensor, dy: Tensor, window: KernelWindow, group: int
) -> Tensor:
    """Return the gradient of a convolution's weight: the input convolved with the output gradient.

    Channels and batch are swapped: x becomes [C/g, g*N, ...], dy becomes the kernel [O, N, ...]. Strides and dilations
    are swapped as well. If the strides skip elements at the end, the result is too large and is cropped.
    """
    spatial = window.axes
    swap = [1, 0, *spatial]
    if group == 1 and window.is_pointwise:
        return _pointwise_gradient(x, dy, window)
    if group == 1:
        swapped = x.transpose(swap)
    else:
        sizes = x.op("Shape", start=2)
        split = x.reshape(x.size(0), group, -1, sizes)
        turned = split.transpose([2, 1, 0, *(axis + 1 for axis in spatial)])
        swapped = turned.reshape(0, -1, sizes)
    dw = swapped.op(
        "Conv",
        dy.transpose(swap),
        group=group,
        strides=window.dilations,
        dilations=window.strides,
        pads=window.pads,
    )
    if max(window.strides) > 1:
        dw = dw.op("Slice", [0] * len(spatial), window.kernel, spatial)
    return dw.transpose(swap)


def _pointwise_gradient(x: Tensor, dy: Tensor, window: KernelWindow) -> Tensor:
    """Return the gradient of the weight of a convolution that looks at one position at a time: a product of matrices,
    which engines compute much faster than a convolution with a kernel of one pixel per position.
    """
    spatial = window.axes
    swap = [1, 0, *spatial]
    if max(window.strides) > 1:
        starts = [0] * len(spatial)
        ends = [_END] * len(spatial)
        x = x.op("Slice", starts, ends, spatial, [*window.strides])
    rows = dy.transpose(swap).reshape(0, -1)
    dw = rows.op("Gemm", x.transpose(swap).reshape(0, -1), transB=1)
    return dw.reshape(0, 0, *window.kernel)


def _conv_transpose(call: Call) -> Grads:
    """Return the gradients of the convolution that this one transposes, with input and output swapped."""
    dy = call.dy
    x = call[0]
    weight = call[1]
    group = call.attribute("group")
    if call.attribute("output_shape") or call.attribute("auto_pad").startswith("SAME"):
        raise call.error(
            "derives its padding from an output size; only explicit pads have a gradient rule"
        )
    window = _window(call, _kernel_of(call))
    extra = call.attribute("output_padding") or ()
    if any(n >= s for n, s in zip(extra, window.strides, strict=False)):
        raise call.error(
            "has an output_padding that is not smaller than its strides, for which there is no gradient rule"
        )

    return [
        lambda: dy.op(
            "Conv", weight, group=group, pads=window.pads, **window.attributes
        ),
        lambda: _weight_gradient(dy, x, window, group),
        lambda: _bias_gradient(dy, window),
    ]


def _max_pool_forward(call: Call) -> tuple[Tensor, ...]:
    """Return the indices as second output if the engine supports them."""
    if _INDICES in call.writer.lacks:
        return ()
    return (call.second_output("indices", TensorProto.INT64),)


def _max_pool(call: Call) -> Grads:
    """Return the gradient of a MaxPool: each element goes to the position of its maximum; overlaps add up."""
    if not call.saved:
        return _to_first_maxima(call)
    x = call.x
    places = call.saved[0].reshape(-1)
    zeros = x.op("Size").reshape(1).zeros(call.dy.elem)
    flat = zeros.op(
        "ScatterElements", places, call.dy.reshape(-1), axis=0, reduction="add"
    )
    return flat.reshape_like(x)


def _to_first_maxima(call: Call) -> Tensor:
    """Return the gradient of a MaxPool without indices: each window's goes to its first maximum.

    Channels join the batch, and the positions in a window become the channels, which a ConvTranspose moves into place.
    """
    y = call.y
    dy = call.dy
    window = _window(call)
    x = call.x.cast(dy.elem)
    axes = window.axes
    count = prod(window.kernel)
    # Rounded up, the last window may reach beyond the end by less than a stride.
    more = [
        after + call.attribute("ceil_mode") * (stride - 1)
        for after, stride in zip(window.after, window.strides, strict=True)
    ]
    padded = x
    if any((*window.before, *more)):
        least = np.finfo(helper.tensor_dtype_to_np_dtype(x.elem)).min
        pads = [0, 0, *window.before, 0, 0, *more]
        padded = x.op("Pad", pads, x.like(least))
    inner = y.op("Shape", start=2)
    places = []
    for place in np.ndindex(*window.kernel):
        starts = [at * step for at, step in zip(place, window.dilations, strict=True)]
        spans = zip(axes, window.strides, starts, strict=True)
        ends = (
            y.size(axis) * stride + (start + 1 - stride)
            for axis, stride, start in spans
        )
        placed = padded.op(
            "Slice", starts, x.writer.vector(*ends), axes, window.strides
        )
        places.append(placed.reshape(-1, 1, inner))
    first = x.writer.concat(places, 1).op("ArgMax", axis=1, keepdims=1)
    ones = [1] * len(axes)
    numbers = x.writer.ints(range(count)).reshape(1, count, *ones)
    each = first.equals(numbers).where(dy.reshape(-1, 1, inner), 0)
    shift = dy.like(np.eye(count).reshape(count, 1, *window.kernel))
    return _spread(each, shift, window, 1, x).reshape_like(x)


def _average_pool(call: Call) -> Grads:
    """Return the gradient, spread evenly over the elements that each window averages.

    Channels join the batch, so that one kernel of ones serves all of them.
    """
    x = call.x
    dy = call.dy
    window = _window(call)
    ones = dy.like(np.ones((1, 1, *window.kernel)))
    sizes = call.writer.vector(-1, 1, dy.op("Shape", start=2))
    share = (dy / dy.like(_counts(call, window))).reshape(sizes)
    return _spread(share, ones, window, 1, x).reshape_like(x)


def _counts(call: Call, window: KernelWindow) -> NDArray[np.float64] | int:
    """Return the number of elements that each window averages.

    Raises:
        GradientError: the number differs between windows and depends on unknown sizes.
    """
    with_pads = call.attribute("count_include_pad")
    ceil = call.attribute("ceil_mode")
    if not ceil and (with_pads or not any(window.pads)):
        return prod(window.kernel)
    counts = np.ones(())
    for number, axis in enumerate(window.axes):
        size = call.x.known_size(axis)
        out = call.y.known_size(axis)
        if size is None or out is None:
            raise call.error(
                f"averages beyond the edge of axis {axis}, whose size is unknown"
            )
        before = window.before[number]
        after = window.after[number]
        starts = np.arange(out)[:, None] * window.strides[number] - before
        places = starts + np.arange(window.kernel[number]) * window.dilations[number]
        low, high = (-before, size + after) if with_pads else (0, size)
        counted = (places >= low) & (places < high)
        counts = np.multiply.outer(counts, counted.sum(1))
    return counts


RULES: Final[Mapping[str, Rule]] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "MatMul": _matmul,
    "MaxPool": _max_pool,
}
FORWARD: Final[Mapping[str, Forward]] = {"MaxPool": _max_pool_forward}
