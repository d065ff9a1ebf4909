"""Broadcasting undone: gradients summed and reshaped to the shape of the value they belong to.

Axes come from static shapes where these are known; otherwise the graph computes them.
"""

from onnxamp._graph.shapes import Dims
from onnxamp.train._gradients.writer import Tensor


def sum_to(dy: Tensor, y: Dims | None, x: Tensor) -> Tensor:
    """``dy``, of shape ``y``, summed over the axes along which ``x`` was broadcast."""
    axes = repeated_axes(x.dims, y)
    if axes is None:
        return _sum_to_dynamic(dy, x)
    lead = len(y or ()) - len(x.dims or ())
    if axes == list(range(lead)):
        return dy.sum(axes, keepdims=False)
    summed = dy.sum(axes)
    return summed.op("Squeeze", list(range(lead))) if lead else summed


def repeated_axes(x: Dims | None, y: Dims | None) -> list[int] | None:
    """Axes of shape ``y`` along which shape ``x`` is broadcast; None where the shapes do not tell."""
    if x is None or y is None:
        return None
    lead = len(y) - len(x)
    axes = list(range(lead))
    for axis, (small, large) in enumerate(zip(x, y[lead:], strict=True), lead):
        if (
            large == 1
            or (isinstance(small, int) and small != 1)
            or (small is not None and small == large)
        ):
            continue
        if small != 1:
            return None
        axes.append(axis)
    return axes


def _sum_to_dynamic(dy: Tensor, x: Tensor) -> Tensor:
    """As :func:`sum_to`, over the axes where the shape of ``x``, padded with ones on the left, is 1 at run time."""
    shape = x.op("Shape")
    missing = dy.op("Shape").op("Size") - shape.op("Size")
    padded = dy.writer.vector(dy.writer.ints([1]).op("Expand", missing.reshape(1)), shape)
    axes = padded.equals(1).op("NonZero").reshape(-1)
    return dy.op("ReduceSum", axes, keepdims=1, noop_with_empty_axes=1).reshape(shape)


def reshape_like(dy: Tensor, x: Tensor) -> Tensor:
    """``dy`` in the shape of ``x``, which has the same number of elements."""
    if x.dims is not None and all(x.dims):
        sizes = [dim if isinstance(dim, int) else -1 for dim in x.dims]
        if sizes.count(-1) <= 1:
            return dy.op("Reshape", sizes)
    return dy.reshape(x.op("Shape"))


def per_channel(x: Tensor, rank: int) -> Tensor:
    """A vector shaped so that it lies along axis 1 of a tensor of this rank."""
    return x.reshape(1, -1, *[1] * (rank - 2))
