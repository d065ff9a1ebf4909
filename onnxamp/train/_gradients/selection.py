"""Gradients of ops that choose elements by index: gathering, scattering, TopK and Resize."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp.train._gradients.calls import Call, Grads, Rule, reshape_like
from onnxamp.train._gradients.movement import inverse, scatter
from onnxamp.train._gradients.writer import Tensor

_SAMPLE: Final = 5
"""Stands for an unknown size of an axis, to see how an integer scale copies its elements."""


def _gather(call: Call) -> Grads:
    """Rows added at their indices. The axes of the indices become one, in the place of the gathered axis."""
    data, indices, dy = call[0], call[1], call.dy
    axis = int(call.attribute("axis", 0))
    axis = axis if axis == 0 else axis % call.rank(0)
    if indices.dims is None or len(indices.dims) != 1:
        head = [data.op("Shape", start=0, end=axis)] if axis else []
        dy = dy.reshape(*head, -1, data.op("Shape", start=axis + 1))
    size = data.op("Shape", start=axis, end=axis + 1)
    return [
        scatter(dy, indices.cast(TensorProto.INT64), axis, size, call.rank(0) if axis else 1),
        None,
    ]


def _gather_elements(call: Call) -> Grads:
    axis = int(call.attribute("axis", 0))
    return [
        call.x.zeros_like().op("ScatterElements", call[1], call.dy, axis=axis, reduction="add"),
        None,
    ]


def _gather_nd(call: Call) -> Grads:
    if call.attribute("batch_dims", 0):
        raise call.error("has batch_dims; only GatherND without them has a gradient rule")
    return [call.x.zeros_like().op("ScatterND", call[1], call.dy, reduction="add"), None]


def _top_k(call: Call) -> Grads:
    indices = call.outputs[1]
    if indices is None:
        raise call.error("leaves out its second output, the indices, which its gradient needs")
    axis = int(call.attribute("axis", -1))
    return [call.x.zeros_like().op("ScatterElements", indices, call.dy, axis=axis), None]


def _resize(call: Call) -> Grads:
    """Axis by axis, as Resize works. Nearest by an integer scale: the copies are summed.

    Otherwise the matrix of the axis is measured by resizing the identity, and the gradient is multiplied by it.
    """
    dy, rank = call.dy, call.rank()
    for name in ("antialias", "exclude_outside"):
        if call.attribute(name, 0):
            raise call.error(f"has {name}, for which there is no gradient rule")
    if call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise call.error("crops while it resizes, for which there is no gradient rule")
    for axis, scale in _resized(call).items():
        before, after = call.x.known_size(axis), call.y.known_size(axis)
        if before is not None and after is not None:
            matrix = _matrix(call, scale, before, after)
        elif scale is not None and scale == int(scale):
            matrix = _matrix(call, scale, _SAMPLE, _SAMPLE * int(scale))
        else:
            raise call.error(f"resizes axis {axis}, whose size is unknown")
        factor = matrix.shape[1] // matrix.shape[0]
        copies = (
            call.attribute("mode", "nearest") == "nearest"
            and matrix.shape[1] == factor * matrix.shape[0]
        )
        if copies and (matrix.argmax(0) == np.arange(matrix.shape[1]) // factor).all():
            dy = _summed(dy, axis, before or -1, factor, rank)
        elif before is not None and after is not None:
            dy = _along(dy, matrix, axis, rank)
        else:
            raise call.error(f"resizes axis {axis}, whose size is unknown")
    return [reshape_like(dy, call.x), None, None, None]


def _resized(call: Call) -> dict[int, float | None]:
    """The resized axes, with their scale where it is constant."""
    rank, scales = call.rank(), call.constant(2)
    axes = [int(axis) % rank for axis in call.attribute("axes", range(rank))]
    if scales is not None and scales.size:
        return {
            axis: scale for axis, scale in zip(axes, scales.tolist(), strict=True) if scale != 1
        }
    x, y = call.x.dims or (), call.y.dims or (None,) * rank
    pairs = [(axis, x[axis], y[axis]) for axis in axes]
    # Computed sizes repeat those of batch and channels, even where shape inference cannot show it.
    unclear = [
        (axis, a, b)
        for axis, a, b in pairs
        if axis > 1 or (isinstance(a, int) and isinstance(b, int))
    ]
    return {axis: None for axis, a, b in unclear if a != b or a is None}


def _matrix(call: Call, scale: float | None, before: int, after: int) -> NDArray[np.float32]:
    """[size before, size after]: the weight of each element of an axis in each element of the resized one."""
    from onnxamp._runtime.session import make_session, run  # noqa: PLC0415

    attributes = {
        a.name: helper.get_attribute_value(a) for a in call.proto.attribute if a.name != "axes"
    }
    attributes.pop("keep_aspect_ratio_policy", None)
    given: NDArray[Any] = (
        np.asarray([1, scale], np.float32) if scale else np.asarray([before, after], np.int64)
    )
    kind = helper.np_dtype_to_tensor_dtype(given.dtype)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    inputs = [x, helper.make_tensor_value_info("given", kind, [2])]
    node = helper.make_node(
        "Resize", ["x", "", "given"] if scale else ["x", "", "", "given"], ["y"], **attributes
    )
    graph = helper.make_graph([node], "resize", inputs, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    weights: NDArray[np.float32] = run(
        make_session(model), {"x": np.eye(before, dtype=np.float32), "given": given}
    )["y"]
    return weights


def _summed(dy: Tensor, axis: int, small: int, factor: int, rank: int) -> Tensor:
    """Neighbouring copies along an axis, summed."""
    rest = [dy.op("Shape", start=axis + 1)] if axis + 1 < rank else []
    return dy.reshape(*[0] * axis, small, factor, *rest).sum([axis + 1], keepdims=False)


def _along(dy: Tensor, matrix: NDArray[np.float32], axis: int, rank: int) -> Tensor:
    """``dy`` multiplied along an axis by the transpose of the matrix."""
    weights = dy.writer.constant(
        np.ascontiguousarray(matrix.T).astype(helper.tensor_dtype_to_np_dtype(dy.elem))
    )
    if axis == rank - 1:
        return dy.op("MatMul", weights)
    perm = [i for i in range(rank) if i != axis] + [axis]
    return dy.transpose(perm).op("MatMul", weights).transpose(inverse(perm))


def _scatter_elements(call: Call) -> Grads:
    axis, dy = int(call.attribute("axis", 0)), call.dy
    data = dy
    if _overwrites(call):
        data = dy.op(
            "ScatterElements", call[1], call.writer.zeros(call[1].shape(), dy.elem), axis=axis
        )
    return [data, None, dy.op("GatherElements", call[1], axis=axis)]


def _scatter_nd(call: Call) -> Grads:
    dy = call.dy
    data = dy
    if _overwrites(call):
        data = dy.op("ScatterND", call[1], call.writer.zeros(call[2].op("Shape"), dy.elem))
    return [data, None, dy.op("GatherND", call[1])]


def _overwrites(call: Call) -> bool:
    """Whether updates replace elements, which then have no gradient; otherwise they are added to them.

    Raises:
        GradientError: the node does neither.
    """
    reduction = call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.error(
            f"scatters with reduction {reduction!r}, for which there is no gradient rule"
        )
    return bool(reduction == "none")


RULES: Final[Mapping[str, Rule]] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Resize": _resize,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TopK": _top_k,
}
