"""Broadcasting undone: gradients summed and reshaped to the shape of what they belong to.

Axes come from static shapes where these tell; otherwise they are found while the graph runs.
"""

from onnxamp._graph.shapes import Dims
from onnxamp.train._gradients.writer import Tensor


def sum_to(dy: Tensor, y: Dims | None, x: Tensor) -> Tensor:
    """``dy``, which has shape ``y``, summed over the axes along which broadcasting repeated ``x``."""
    axes = repeated_axes(x.dims, y)
    if axes is None:
        return _sum_to_dynamic(dy, x)
    lead = len(y or ()) - len(x.dims or ())
    if not axes:
        return dy
    if axes == list(range(lead)):
        return dy.sum(axes, keepdims=False)
    summed = dy.sum(axes)
    return summed.op("Squeeze", list(range(lead))) if lead else summed


def repeated_axes(x: Dims | None, y: Dims | None) -> list[int] | None:
    """Axes of shape ``y`` along which a value of shape ``x`` is repeated; None where the shapes do not tell."""
    if x is None or y is None:
        return None
    lead = len(y) - len(x)
    axes = list(range(lead))
    for position, small in enumerate(x):
        large = y[lead + position]
        if large == 1 or (isinstance(small, int) and small != 1) or (small is not None and small == large):
            continue
        if small != 1:
            return None
        axes.append(lead + position)
    return axes


def _sum_to_dynamic(dy: Tensor, x: Tensor) -> Tensor:
    """As :func:`sum_to`; the axes are those where the shape of ``x``, filled with ones from the left, is 1."""
    shape = x.op("Shape")
    missing = dy.op("Shape").op("Size") - shape.op("Size")
    ones = dy.writer.ints([1]).op("Expand", missing.op("Reshape", [1]))
    filled = ones.op("Concat", shape, axis=0)
    axes = filled.equals(1).op("NonZero").op("Reshape", [-1])
    return dy.op("ReduceSum", axes, keepdims=1, noop_with_empty_axes=1).op("Reshape", shape)


def reshape_like(dy: Tensor, x: Tensor) -> Tensor:
    """``dy`` with the shape of ``x``, which has as many elements."""
    if x.dims is not None and all(x.dims):
        known = [dim if isinstance(dim, int) else -1 for dim in x.dims]
        if known.count(-1) <= 1:
            return dy.op("Reshape", known)
    return dy.op("Reshape", x.op("Shape"))


def per_channel(x: Tensor, rank: int) -> Tensor:
    """A vector as it stands along axis 1 of a tensor of this rank."""
    return x.op("Reshape", [1, -1, *[1] * (rank - 2)])


def dim(x: Tensor, axis: int) -> Tensor:
    """One size of ``x`` as an int64 vector of one element."""
    if x.dims is not None and isinstance(size := x.dims[axis], int):
        return x.writer.ints([size])
    end = axis + 1
    return x.writer.op("Shape", x, start=axis, end=end or None)


def static(x: Tensor, axis: int) -> int | None:
    """One size of ``x`` where it is a known number."""
    size = None if x.dims is None else x.dims[axis]
    return size if isinstance(size, int) else None
