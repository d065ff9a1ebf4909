"""How many products the elements of matrix products and convolutions sum up."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

from onnxamp._graph.shapes import DEFAULT_DIMENSION, Shape
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import attribute


def terms_of(node: Node, shapes: Sequence[Shape | None]) -> int | None:
    """How many products each element of the output sums up; None for other ops, and where sizes are unknown."""
    factor = shapes[node.input(1)] if node.key in _TERMS and node.input(1) != ABSENT else None
    return None if factor is None or None in factor else expected_terms(node, shapes)


def expected_terms(node: Node, shapes: Sequence[Shape | None]) -> int | None:
    """As :func:`terms_of`, with a guess for sizes that are unknown."""
    terms = _TERMS.get(node.key)
    return None if terms is None else terms(node, shapes)


def summed_terms(node: Node, shapes: Sequence[Shape | None]) -> int | None:
    """Elements that make one element of a reduction or a pooling; None if sizes are unknown.

    Sizes that are unknown before and after it, as those of batches, are not summed up.
    """
    if ABSENT in (node.input(0), node.outputs[0]):
        return None
    before, after = shapes[node.inputs[0]], shapes[node.outputs[0]]
    if node.key == "AveragePool":
        return prod(attribute(node.proto, "kernel_shape") or ())
    if before is None or after is None:
        return None
    sizes, left = ([size for size in shape if size is not None] for shape in (before, after))
    if node.key == "CumSum":
        return max(sizes, default=None)
    same = len(before) - len(sizes) == len(after) - len(left)
    return prod(sizes) // max(prod(left), 1) if same else None


def _inner(node: Node, shapes: Sequence[Shape | None]) -> int:
    first, second = shapes[node.input(0)], shapes[node.input(1)]
    if first and first[-1] is not None:
        return first[-1]
    return _axis(
        second, -1 if attribute(node.proto, "transB") or (second and len(second) == 1) else -2
    )


def _gemm(node: Node, shapes: Sequence[Shape | None]) -> int:
    return _axis(shapes[node.input(0)], 0 if attribute(node.proto, "transA") else -1)


def _conv(node: Node, shapes: Sequence[Shape | None]) -> int:
    """The elements of a filter."""
    weight = shapes[node.input(1)]
    return prod(_axis(weight, axis) for axis in range(1, len(weight))) if weight else 1


def _transposed(node: Node, shapes: Sequence[Shape | None]) -> int:
    """The input channels of a group, times the elements of a filter that meet one element of the output."""
    weight = shapes[node.input(1)]
    if not weight:
        return 1
    kernel = prod(_axis(weight, axis) for axis in range(2, len(weight)))
    skipped = prod(attribute(node.proto, "strides") or ()) * (attribute(node.proto, "group") or 1)
    return max(1, _axis(weight, 0) * kernel // skipped)


def _einsum(node: Node, shapes: Sequence[Shape | None]) -> int:
    """The sizes of all letters that the result lacks."""
    equation = attribute(node.proto, "equation")
    inputs, arrow, result = equation.decode().replace(" ", "").partition("->")
    letters = inputs.replace(",", "").replace("...", "")
    kept = result if arrow else [letter for letter in letters if letters.count(letter) == 1]
    sizes: dict[str, int] = {}
    for value, axes in zip(node.inputs, inputs.split(","), strict=False):
        leading, dots, trailing = axes.partition("...")
        sizes |= {letter: _axis(shapes[value], axis) for axis, letter in enumerate(leading)}
        sizes |= {
            letter: _axis(shapes[value], -axis)
            for axis, letter in enumerate(reversed(trailing), 1)
            if dots
        }
    return prod(size for letter, size in sizes.items() if letter not in kept)


def _axis(shape: Shape | None, axis: int) -> int:
    size = shape[axis] if shape and len(shape) > max(axis, 0) else None
    return DEFAULT_DIMENSION if size is None else size


_TERMS: Final[Mapping[str, Callable[[Node, Sequence[Shape | None]], int]]] = {
    "MatMul": _inner,
    "com.microsoft::FusedMatMul": _inner,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _transposed,
    "Einsum": _einsum,
}
