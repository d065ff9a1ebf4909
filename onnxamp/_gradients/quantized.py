"""Gradients through quantized numbers: straight through the rounding, and none for saturated numbers.

Integers have gradients in float32, as if they were not rounded: the effect of a step of the grid.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxamp._decide.hazards.scales import grids
from onnxamp._dtypes import ELEM_NAMES
from onnxamp._gradients import linear
from onnxamp._gradients.writer import Call, Grads, Rule, Tensor
from onnxamp._graph.view import Origin
from onnxamp._model.protos import copied
from onnxamp._ops.facts import attribute_of, op_facts

_SCALE: Final = 1
_ZERO: Final = 2
"""Input positions of nodes that quantize or dequantize."""
_MATRIX: Final = 2
_BIAS: Final = 5
"""Input position of MatMulNBits."""
_MOST: Final = 2**36
"""Most products of numbers to compute for the weight of MatMulNBits."""


def _quantize(call: Call) -> Grads:
    """Return the gradients of a quantizer: a number moves its integer by a step of the grid, except at the grid's ends.

    The effect of the scale here is undone where the integers are dequantized.
    """
    return _inside(call.y, call.dy) / _along(call)


def _dequantize(call: Call) -> Grads:
    """Return the gradients of a dequantizer: an integer moves its number by the scale.

    The scale of a stored weight moves all numbers by their integers.
    """
    view, integers = call.writer.editor.view, call.node.inputs[0]
    is_stored = view.values[integers].origin is Origin.INITIALIZER
    return [
        lambda: call.dy * _along(call),
        (lambda: _of_scale(call)) if is_stored else None,
    ]


def _inside(y: Tensor, dy: Tensor) -> Tensor:
    """Return ``dy`` with zeros where an integer is the first or the last one of its grid."""
    name = ELEM_NAMES[y.elem]
    grid, number = grids().get(name), y.cast(TensorProto.FLOAT)
    if grid is None:
        return dy
    if name.startswith("uint"):
        return (number > 0).op("And", number < grid.end).where(dy, 0)
    last = grid.end - 1 if name.startswith("int") else grid.end
    return (number.op("Abs") < last).where(dy, 0)


def _along(call: Call) -> Tensor:
    """Return the scale in float32, in a shape that broadcasts to the numbers.

    Raises:
        GradientError: there is one scale for each block of numbers.
    """
    scale = call[_SCALE].cast(TensorProto.FLOAT)
    dims = call[_SCALE].dims
    if dims in ((), (1,)):
        return scale
    if dims is None or len(dims) != 1:
        raise call.error("has scales by block, or of unknown shape")
    return scale.reshape(-1, *[1] * (call.rank() - 1 - _axis(call)))


def _axis(call: Call) -> int:
    axis: int = attribute_of(call.node.proto, "axis", 1)
    return axis % call.rank()


def _of_scale(call: Call) -> Tensor:
    """Return the summed gradient of each scale."""
    scale, terms = call[_SCALE], call.dy * call.y / _along(call)
    if scale.dims in ((), (1,)):
        return terms.op("ReduceSum", keepdims=0).reshape_like(scale)
    axes = [axis for axis in range(call.rank()) if axis != _axis(call)]
    return terms.sum(axes, keepdims=False)


def _dynamically(call: Call) -> Grads:
    """Return the gradient of a dynamic quantizer, as if its scale were given; see :func:`_quantize`."""
    if call.dys[0] is None or call.outputs[1] is None:
        raise call.error("passes its integers only to nodes without a gradient")
    return call.dys[0] / call.outputs[1]


def _product(rule: Rule) -> Rule:
    """Return the rule of a product of integers: that of the same numbers as floats, less their zero points."""

    def written(call: Call) -> Grads:
        factors = []
        for position in (0, 1):
            x = call[position]
            number = replace(x.cast(TensorProto.FLOAT), dims=x.dims)
            if call.has(_ZERO + position):
                zero = call[_ZERO + position].cast(TensorProto.FLOAT)
                if call.rank(position) > _MATRIX:
                    zero = zero.reshape(-1, *[1] * (call.rank(position) - 1))
                number = replace(number - zero, dims=x.dims)
            factors.append(number)
        return rule(replace(call, inputs=tuple(factors)))

    return written


def _matmul_n_bits(call: Call) -> Grads:
    """Return dY B^T, where B is the result of the node for the identity."""
    size, columns = (attribute_of(call.node.proto, name, 0) for name in "KN")
    if size * size * columns > _MOST:
        raise call.error("has a matrix that is too large for its gradient rule")
    writer, node = call.writer, copied(call.node.proto)
    fresh = writer.editor.names.fresh
    node.input[0] = writer.constant(np.eye(size, dtype=np.float32)).name
    del node.input[_BIAS:]
    node.name, node.output[0] = (
        fresh(f"{call.node.label}/weight"),
        fresh(f"{call.y.name}/weight"),
    )
    writer.nodes.append(node)
    weight = Tensor(writer, node.output[0], TensorProto.FLOAT)
    return call.dy.op("MatMul", weight.transpose([1, 0]))


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(op_facts().quantize, _quantize),
    **dict.fromkeys(op_facts().dequantize, _dequantize),
    "ConvInteger": _product(linear.RULES["Conv"]),
    "DynamicQuantizeLinear": _dynamically,
    "com.microsoft::MatMulNBits": _matmul_n_bits,
    "MatMulInteger": _product(linear.RULES["MatMul"]),
}
QUANTIZE: Final = op_facts().quantize | {"DynamicQuantizeLinear"}
"""Nodes where integers with gradients begin."""
