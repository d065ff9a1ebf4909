"""Gradients of ops that choose elements by index: the gathering ones, and Resize."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp.train._gradients.calls import Call, Grads, Rule, first
from onnxamp.train._gradients.movement import scatter
from onnxamp.train._gradients.shapes import reshape_like, static
from onnxamp.train._gradients.writer import Tensor

_SAMPLE: Final = 5
"""Size of an axis whose size is not known, to see how a whole factor copies it."""


def _gather(call: Call, dys: Grads) -> Grads:
    """Rows added at their indices. The indices' axes become one, which takes the place of the gathered axis."""
    data, indices, dy = call.x(0), call.x(1), first(dys)
    axis = int(call.attribute("axis", 0))
    axis = axis if axis == 0 else axis % call.rank(0)
    if indices.dims is None or len(indices.dims) != 1:
        head = [data.op("Shape", start=0, end=axis)] if axis else []
        parts = [*head, call.writer.ints([-1]), data.op("Shape", start=axis + 1)]
        dy = dy.op("Reshape", parts[0].op("Concat", *parts[1:], axis=0))
    size = data.op("Shape", start=axis, end=axis + 1)
    return [scatter(dy, indices.cast(TensorProto.INT64), axis, size, call.rank(0) if axis else 1), None]


def _gather_elements(call: Call, dys: Grads) -> Grads:
    zeros = call.writer.zeros(call.x().shape(), call.x().elem)
    axis = int(call.attribute("axis", 0))
    return [zeros.op("ScatterElements", call.x(1), first(dys), axis=axis, reduction="add"), None]


def _gather_nd(call: Call, dys: Grads) -> Grads:
    if call.attribute("batch_dims", 0):
        raise call.refusal("has batch_dims; GatherND without them has a rule")
    zeros = call.writer.zeros(call.x().shape(), call.x().elem)
    return [zeros.op("ScatterND", call.x(1), first(dys), reduction="add"), None]


def _top_k(call: Call, dys: Grads) -> Grads:
    zeros = call.writer.zeros(call.x().shape(), call.x().elem)
    places = call.outputs[1]
    if places is None:
        raise call.refusal("does not give its indices away, which its gradient needs")
    return [zeros.op("ScatterElements", places, first(dys), axis=int(call.attribute("axis", -1))), None]


def _resize(call: Call, dys: Grads) -> Grads:
    """Axis by axis, since Resize works so. Nearest by a whole factor: the copies are summed.

    Otherwise the axis' matrix is read off the runtime (Resize of the identity), and the gradient multiplied by it.
    """
    dy, rank = first(dys), call.rank()
    for name in ("antialias", "exclude_outside"):
        if call.attribute(name, 0):
            raise call.refusal(f"has {name}, for which there is no rule")
    if call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise call.refusal("crops while it resizes, for which there is no rule")
    for axis, scale in _resized(call).items():
        before, after = static(call.x(), axis), static(call.y, axis)
        whole = int(scale) if scale is not None and scale == int(scale) else None
        if before is not None and after is not None:
            matrix = _matrix(call, scale, before, after)
        elif whole is not None:
            matrix = _matrix(call, scale, _SAMPLE, _SAMPLE * whole)
        else:
            raise call.refusal(f"resizes axis {axis}, whose size is not known")
        factor = matrix.shape[1] // matrix.shape[0]
        copies = call.attribute("mode", "nearest") == "nearest" and matrix.shape[1] == factor * matrix.shape[0]
        if copies and (matrix.argmax(0) == np.arange(matrix.shape[1]) // factor).all():
            dy = _summed(dy, axis, before or -1, factor, rank)
        elif before is not None and after is not None:
            dy = _along(dy, matrix, axis, rank)
        else:
            raise call.refusal(f"resizes axis {axis}, whose size is not known")
    return [reshape_like(dy, call.x()), None, None, None]


def _resized(call: Call) -> dict[int, float | None]:
    """Axes that are resized, with their scale where that is a constant."""
    rank, scales = call.rank(), call.constant(2)
    axes = [int(axis) % rank for axis in call.attribute("axes", range(rank))]
    if scales is not None and scales.size:
        return {axis: scale for axis, scale in zip(axes, scales.tolist(), strict=True) if scale != 1}
    x, y = call.x().dims or (), call.y.dims or (None,) * rank
    pairs = [(axis, x[axis], y[axis]) for axis in axes]
    # Sizes that are computed repeat those of batch and channels, even where shapes do not show it.
    unclear = [(axis, a, b) for axis, a, b in pairs if axis > 1 or (isinstance(a, int) and isinstance(b, int))]
    return {axis: None for axis, a, b in unclear if a != b or a is None}


def _matrix(call: Call, scale: float | None, before: int, after: int) -> NDArray[np.float32]:
    """[size before, size after]: how each element of an axis enters each element of the resized one."""
    from onnxamp._runtime.session import make_session, run  # noqa: PLC0415

    attributes = {a.name: helper.get_attribute_value(a) for a in call.proto.attribute if a.name != "axes"}
    attributes.pop("keep_aspect_ratio_policy", None)
    given: NDArray[Any] = np.asarray([1, scale], np.float32) if scale else np.asarray([before, after], np.int64)
    kind = helper.np_dtype_to_tensor_dtype(given.dtype)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    inputs = [x, helper.make_tensor_value_info("given", kind, [2])]
    node = helper.make_node("Resize", ["x", "", "given"] if scale else ["x", "", "", "given"], ["y"], **attributes)
    graph = helper.make_graph([node], "resize", inputs, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    found: NDArray[np.float32] = run(make_session(model), {"x": np.eye(before, dtype=np.float32), "given": given})["y"]
    return found


def _summed(dy: Tensor, axis: int, small: int, factor: int, rank: int) -> Tensor:
    """Neighbouring copies along an axis, summed."""
    shape = [*([0] * axis), small, factor]
    rest = dy.op("Shape", start=axis + 1) if axis + 1 < rank else None
    whole = dy.writer.ints(shape)
    return dy.op("Reshape", whole if rest is None else whole.op("Concat", rest, axis=0)).sum([axis + 1], keepdims=False)


def _along(dy: Tensor, matrix: NDArray[np.float32], axis: int, rank: int) -> Tensor:
    """``dy`` multiplied along an axis by the matrix's transpose."""
    weights = dy.writer.constant(np.ascontiguousarray(matrix.T).astype(helper.tensor_dtype_to_np_dtype(dy.elem)))
    if axis == rank - 1:
        return dy.op("MatMul", weights)
    perm = [i for i in range(rank) if i != axis] + [axis]
    back = [int(i) for i in np.argsort(perm)]
    return dy.op("Transpose", perm=perm).op("MatMul", weights).op("Transpose", perm=back)


def _scatter_elements(call: Call, dys: Grads) -> Grads:
    """What was written over gets nothing, what was written gets what stands there; added elements share it."""
    kind, axis, dy = call.attribute("reduction", "none"), int(call.attribute("axis", 0)), first(dys)
    if kind not in ("none", "add"):
        raise call.refusal(f"scatters by {kind}, for which there is no rule")
    data = dy
    if kind == "none":
        nothing = call.writer.zeros(call.x(1).shape(), dy.elem)
        data = dy.op("ScatterElements", call.x(1), nothing, axis=axis)
    return [data, None, dy.op("GatherElements", call.x(1), axis=axis)]


def _scatter_nd(call: Call, dys: Grads) -> Grads:
    kind, dy = call.attribute("reduction", "none"), first(dys)
    if kind not in ("none", "add"):
        raise call.refusal(f"scatters by {kind}, for which there is no rule")
    nothing = call.writer.zeros(call.x(2).op("Shape"), dy.elem)
    data = dy.op("ScatterND", call.x(1), nothing) if kind == "none" else dy
    return [data, None, dy.op("GatherND", call.x(1))]


RULES: Final[Mapping[str, Rule]] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Resize": _resize,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TopK": _top_k,
}
