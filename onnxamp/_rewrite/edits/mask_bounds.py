"""Masks among the inputs, on their way from float32 into low precision.

Beside a number as large as a mask, scores lose digits: all of them beside -3.4e38, in float32 as well, but few beside
-10,000, where the steps of float32 are 0.001 and those of float16 are 8. This matters only in a row that is masked as a
whole. Softmax does not change if a number is added to a row, so the largest number of each row becomes 0. Where it was
large, it becomes the number beside which scores lose as much in low precision as they lost in float32::

    G = Max(ReduceMax(mask), lowest)               # the lowest finite number: infinities have no difference
    M = (mask - G) - Max(G * factor, -largest)
    low = Cast(Max(M, floor))

What is subtracted from scores is the mirror image.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import Final, NamedTuple

import numpy as np
from onnx import NodeProto

from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT32_MAX, Format
from onnxamp._graph.editor import GraphEditor

_FLOAT32_MANTISSA: Final = 23
"""Bits of the mantissa of a float32 number that are stored."""
_NEARLY_LOWEST: Final = -3.4e38
"""A number so near the lowest one that masks hold none between, and far enough from it for any narrow type."""
_AXES_ARE_INPUT: Final = 18
"""First opset at which the axes of ReduceMax and ReduceMin are an input (onnx/defs/reduction/defs.cc)."""
_CLIP_IS_LOW: Final = 12
"""First opset at which providers clip float16 (onnxruntime/core/providers/cuda/math/clip.cc)."""


@record
class MaskBound:
    """How a mask is bounded before its Cast to low precision.

    Attributes:
        result: the name of the bounded mask.
        names: names of the values before it.
        is_capped: whether it is bounded from above, because it is subtracted.
        axis: the axis of its rows, counted from the end; None if they stay as they are.
        is_emptying: whether a row of nothing but float32's lowest number becomes minus infinity.
    """

    result: str
    names: Sequence[str] = ()
    is_capped: bool = False
    axis: int | None = None
    is_emptying: bool = False


STEPS: Final = ("largest", "guarded", "shifted", "scaled", "bump", "moved")
"""The values between a mask and the bounded one."""


class _Mirror(NamedTuple):
    """The ops and the sign of a mask that is added, or of one that is subtracted."""

    reduction: str
    bound: str
    sign: int


_ADDED: Final = _Mirror("ReduceMax", "Max", 1)
_SUBTRACTED: Final = _Mirror("ReduceMin", "Min", -1)


def bounding_nodes(
    editor: GraphEditor, source: str, bound: MaskBound, low: Format
) -> list[NodeProto]:
    """Return the nodes that bound a mask.

    Args:
        editor: takes the constants.
        source: the name of the mask.
        bound: how it is bounded.
        low: the type to which the result is cast.
    """
    mirror = _SUBTRACTED if bound.is_capped else _ADDED
    # Numbers below the range of a narrow type become minus infinity.
    is_floored = not (bound.is_emptying and low.is_narrow)
    nodes = list[NodeProto]()
    if bound.axis is not None:
        moved = bound.names[-1] if is_floored else bound.result
        nodes += _shifting_nodes(editor, source, moved, bound, low)
        source = moved
    if is_floored:
        floor = editor.constant(
            np.float32(-mirror.sign * _end(low)),
            "mask_ceiling" if bound.is_capped else "mask_floor",
        )
        nodes.append(editor.make(mirror.bound, [source, floor], [bound.result]))
    return nodes


def _shifting_nodes(
    editor: GraphEditor, source: str, moved: str, bound: MaskBound, low: Format
) -> list[NodeProto]:
    """Return the nodes that move the largest number of each row to 0, or to one that loses as many digits of scores."""
    mirror = _SUBTRACTED if bound.is_capped else _ADDED
    assert bound.axis is not None
    largest, guarded, shifted, scaled, bump, _ = bound.names
    least = _NEARLY_LOWEST if bound.is_emptying and low.is_narrow else -FLOAT32_MAX
    lowest = editor.constant(np.float32(mirror.sign * least), "mask_lowest")
    # A low-precision number has the same steps as a float32 number that is larger by this factor.
    factor = editor.constant(
        np.float32(2.0 ** (low.mantissa - _FLOAT32_MANTISSA)), "mask_factor"
    )
    most = editor.constant(np.float32(-mirror.sign * _end(low)), "mask_most")
    return [
        _reduced(editor, mirror.reduction, source, largest, bound.axis),
        editor.make(mirror.bound, [largest, lowest], [guarded]),
        editor.make("Sub", [source, guarded], [shifted]),
        editor.make("Mul", [guarded, factor], [scaled]),
        editor.make(mirror.bound, [scaled, most], [bump]),
        editor.make("Sub", [shifted, bump], [moved]),
    ]


def _end(low: Format) -> float:
    """Return the largest magnitude of a mask in low precision.

    Half of the largest number of a wide type takes any score. In a narrow one, the sum is bounded by half of that
    number. Three quarters stay beyond it with any score up to 16,000, and do not overflow.
    """
    if not low.is_narrow:
        return low.max_finite / 2
    return 0.75 * 2.0 ** ceil(log2(low.max_finite))


def _reduced(
    editor: GraphEditor, op: str, source: str, result: str, axis: int
) -> NodeProto:
    """Return the node that finds the largest or smallest number of each row."""
    if editor.view.book.opsets[""] >= _AXES_ARE_INPUT:
        axes = editor.ints([axis], "mask_axis")
        return editor.make(op, [source, axes], [result], keepdims=1)
    return editor.make(op, [source], [result], axes=[axis], keepdims=1)


def bounded_sum(
    editor: GraphEditor, source: str, result: str, between: str, low: Format
) -> list[NodeProto]:
    """Return the nodes that bound a sum of scores and a mask in a narrow type.

    A score leaves traces beside any number of the type. Bounded, it does not.

    Args:
        editor: takes the constants.
        source: the name of the sum.
        result: the name of the bounded sum.
        between: a name for a value between the two.
        low: the type of the sum.
    """
    end = low.max_finite / 2
    ends = [
        editor.constant(np.float64(number), name, low.elem)
        for number, name in ((-end, "sum_floor"), (end, "sum_ceiling"))
    ]
    if editor.view.book.opsets[""] >= _CLIP_IS_LOW:
        return [editor.make("Clip", [source, *ends], [result], f"{result}/Clip")]
    return [
        editor.make("Max", [source, ends[0]], [between], f"{result}/Max"),
        editor.make("Min", [between, ends[1]], [result], f"{result}/Min"),
    ]
