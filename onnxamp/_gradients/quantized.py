"""Gradients through quantized numbers: straight through the rounding, and none for saturated numbers.

Integers have gradients in float32, as if they were not rounded: the effect of a step of the grid.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isinf
from typing import Final

from onnx import TensorProto

from onnxamp._facts.dtypes import ELEM_NAMES, ends
from onnxamp._facts.ops import attribute_of, op_facts
from onnxamp._gradients import linear
from onnxamp._gradients.writer import Call, Grads, Rule, Tensor
from onnxamp._graph.view import Origin

_SCALE: Final = 1
_ZERO: Final = 2
"""Input positions of nodes that quantize or dequantize."""
_MATRIX: Final = 2
_ZEROS: Final = 3
"""The input position of the zero points of MatMulNBits."""
_BYTE: Final = 8
_UNPACKED: Final = (4, _BYTE)
"""The bits of its numbers that have a rule."""


def _quantize(call: Call) -> Grads:
    """Return the gradients of a quantizer: a number moves its integer by a step of the grid, except at the grid's ends.

    The effect of the scale here is undone where the integers are dequantized.
    """
    return _inside(call.y, call.dy) / _along(call)


def _dequantize(call: Call) -> Grads:
    """Return the gradients of a dequantizer: an integer moves its number by the scale.

    The scale of a stored weight moves all numbers by their integers.
    """
    view = call.writer.editor.view
    integers = call.node.inputs[0]
    is_stored = view.values[integers].origin is Origin.INITIALIZER
    return [
        lambda: call.dy * _along(call),
        (lambda: _of_scale(call)) if is_stored else None,
    ]


def _inside(y: Tensor, dy: Tensor) -> Tensor:
    """Return ``dy`` with zeros where an integer is the first or the last one of its grid."""
    first, last = ends(ELEM_NAMES[y.elem])
    if isinf(last):
        return dy
    number = y.cast(TensorProto.FLOAT)
    return (number > first).op("And", number < last).where(dy, 0)


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
    after = call.rank() - 1 - _axis(call)
    return scale.reshape(-1, *[1] * after)


def _axis(call: Call) -> int:
    axis: int = attribute_of(call.node.proto, "axis", 1)
    return axis % call.rank()


def _of_scale(call: Call) -> Tensor:
    """Return the summed gradient of each scale."""
    scale = call[_SCALE]
    terms = call.dy * call.y / _along(call)
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
    """Return the gradients of a product with a matrix in blocks of few bits, and of the blocks' scales."""
    rows, columns, block = (call.attribute(name) for name in ("N", "K", "block_size"))
    bits = call.attribute("bits", 4)
    blocks = -(-columns // block)
    if bits not in _UNPACKED:
        raise call.error("has a matrix in a form without a gradient rule")
    zeros: Tensor | float = 2.0 ** (bits - 1)
    if call.has(_ZEROS):
        given = call[_ZEROS].reshape(rows, -1)
        if given.elem == TensorProto.UINT8:
            given = _unpacked(given, bits).op("Slice", [0], [blocks], [1])
        zeros = given.reshape(rows, blocks, 1)
    numbers = _unpacked(call[1], bits).reshape(rows, blocks, block) - zeros
    dy = call.dy

    def of_input() -> Tensor:
        weight = (numbers * call[2].reshape(rows, blocks, 1)).reshape(rows, -1)
        return dy.op("MatMul", weight.op("Slice", [0], [columns], [1]))

    def by_block() -> Tensor:
        turned = dy.reshape(-1, rows).transpose([1, 0])
        change = turned.op("MatMul", call.x.reshape(-1, columns))
        change = change.op("Pad", [0, 0, 0, blocks * block - columns])
        return change.reshape(rows, blocks, block)

    def of_scales() -> Tensor:
        terms = by_block() * numbers
        return terms.sum([-1], keepdims=False).reshape_like(call[2])

    def of_zeros() -> Tensor:
        terms = -by_block() * call[2].reshape(rows, blocks, 1)
        return terms.sum([-1], keepdims=False).reshape_like(call[_ZEROS])

    def of_bias() -> Tensor:
        return dy.reshape(-1, rows).sum([0], keepdims=False)

    return [of_input, None, of_scales, of_zeros, None, of_bias]


def _unpacked(x: Tensor, bits: int) -> Tensor:
    """Return the numbers in bytes as floats; of two in a byte, the low one comes first."""
    if bits == _BYTE:
        return x.cast(TensorProto.FLOAT)
    pair = (
        x.op("BitwiseAnd", x.like(15)),
        x.op("BitShift", x.like(4), direction="RIGHT"),
    )
    both = x.writer.concat([one.op("Unsqueeze", [-1]) for one in pair], -1)
    return both.cast(TensorProto.FLOAT).reshape(x.size(0), -1)


def _gather_blocks(call: Call) -> Grads:
    """Return the gradients of the scales of rows that are looked up."""
    gathered = call.attribute("gather_axis", 0)
    quantized = call.attribute("quantize_axis", 1)
    rank = call.rank()
    places = call[1]
    if gathered % rank or quantized % rank != rank - 1:
        raise call.error("looks up or quantizes along an axis without a gradient rule")
    used = call[2].op("Gather", places)
    lead = [0] * (call.rank(1) + rank - 2)
    terms = call.dy * call.y
    block = call.attribute("block_size", 128)
    packs = 1
    if call.x.elem == TensorProto.UINT8:
        packs = _BYTE // call.attribute("bits", 4)
    # The last block of a row may be shorter.
    if over := -packs * (call.x.known_size(-1) or 0) % block:
        terms = terms.op("Pad", [*lead, 0, *lead, over])
    sums = terms.reshape(*lead, -1, block).sum([-1], keepdims=False)
    change = used.equals(0).where(0, sums / used)
    rows = places.cast(TensorProto.INT64).op("Unsqueeze", [-1])
    zeros = call[2].zeros_like()
    return [None, None, zeros.op("ScatterND", rows, change, reduction="add")]


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(op_facts().quantize, _quantize),
    **dict.fromkeys(op_facts().dequantize, _dequantize),
    "ConvInteger": _product(linear.RULES["Conv"]),
    "DynamicQuantizeLinear": _dynamically,
    "com.microsoft::GatherBlockQuantized": _gather_blocks,
    "com.microsoft::MatMulNBits": _matmul_n_bits,
    "MatMulInteger": _product(linear.RULES["MatMul"]),
}
QUANTIZE: Final = op_facts().quantize | {"DynamicQuantizeLinear"}
"""Nodes where integers with gradients begin."""
