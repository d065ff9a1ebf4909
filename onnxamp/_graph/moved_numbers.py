"""What data movement makes of the numbers of a constant."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.ops import attribute, attribute_of
from onnxamp._graph.view import Node

Array: TypeAlias = NDArray[Any]
Given: TypeAlias = Sequence[Array | None]
"""The integers in each input of a node but the first; None if they are no constants."""


def moved(node: Node, array: Array, given: Given, port: int) -> Array | None:
    """Return numbers as an output of a node has them, or in a shape that broadcasts to that; None if it is not known.

    Args:
        node: moves its first input.
        array: the numbers of that.
        given: the integers in the other inputs.
        port: which output.

    Raises:
        ValueError, TypeError, IndexError: the array cannot be moved so.
    """
    rule = _RULES.get(node.key)
    return None if rule is None else rule(node, array, given, port)


def _same(_node: Node, array: Array, _given: Given, _port: int) -> Array:
    return array.astype(np.float32, copy=False)


def _transposed(node: Node, array: Array, _given: Given, _port: int) -> Array:
    return array.transpose(attribute(node.proto, "perm"))


def _flat(node: Node, array: Array, _given: Given, _port: int) -> Array:
    axis = attribute_of(node.proto, "axis", 1) % (array.ndim + 1)
    return array.reshape(prod(array.shape[:axis]), -1)


def _reshaped(node: Node, array: Array, given: Given, _port: int) -> Array | None:
    sizes = _listed(node, given, 0, "shape")
    if sizes is None or attribute(node.proto, "allowzero"):
        return None
    return array.reshape(
        [array.shape[at] if size == 0 else size for at, size in enumerate(sizes)]
    )


def _squeezed(node: Node, array: Array, given: Given, _port: int) -> Array | None:
    axes = _listed(node, given, 0, "axes")
    return None if axes is None else np.squeeze(array, tuple(axes))


def _unsqueezed(node: Node, array: Array, given: Given, _port: int) -> Array | None:
    axes = _listed(node, given, 0, "axes")
    return None if axes is None else np.expand_dims(array, tuple(axes))


def _gathered(node: Node, array: Array, given: Given, _port: int) -> Array | None:
    places = given[0]
    axis = attribute_of(node.proto, "axis", 0)
    return None if places is None else np.take(array, places, axis)


def _sliced(node: Node, array: Array, given: Given, _port: int) -> Array | None:
    """Return a slice, whose limits are attributes before opset 10."""
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (
        _listed(node, given, at, name) for at, name in enumerate(names)
    )
    if starts is None or ends is None:
        return None
    axes = [*range(len(starts))] if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if min(steps) < 1:
        return None
    places = [slice(None)] * array.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        places[axis] = slice(start, end, step)
    return array[tuple(places)]


def _part(node: Node, array: Array, given: Given, port: int) -> Array:
    """Return one of the parts that an axis is split into."""
    axis = attribute_of(node.proto, "axis", 0)
    size = array.shape[axis]
    sizes = _listed(node, given, 0, "split")
    if sizes is None:
        sizes = [-(-size // len(node.outputs))] * len(node.outputs)
    start = sum(sizes[:port])
    return np.take(array, range(start, min(start + sizes[port], size)), axis)


def _listed(node: Node, given: Given, at: int, name: str) -> list[int] | None:
    """Return the integers in an input, or in the attribute that held them before; None if neither is there."""
    if at < len(given):
        numbers = given[at]
        return None if numbers is None else numbers.ravel().tolist()
    listed: list[int] | None = attribute(node.proto, name)
    return listed


_Rule: TypeAlias = Callable[[Node, Array, Given, int], "Array | None"]

_RULES: Final[Mapping[str, _Rule]] = {
    "Cast": _same,
    "Expand": _same,
    "Flatten": _flat,
    "Gather": _gathered,
    "Identity": _same,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Split": _part,
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}
"""Op -> what it makes of numbers. Others repeat or select some, or exchange them."""
