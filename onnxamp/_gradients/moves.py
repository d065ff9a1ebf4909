"""Gradients of nodes without a rule: the effect of moving each input, spread over that input."""

from functools import partial
from math import prod
from typing import Final

from onnx import TensorProto

from onnxamp._gradients.walk import finite
from onnxamp._gradients.writer import Call, Grads, Tensor
from onnxamp._model.protos import copied
from onnxamp._model.weights import SENTINEL

_STEP: Final = 2.0**-8
"""The relative change of the inputs of a node without a rule."""

_MOVES: Final = 4
"""How often an input is moved where outputs have few rows."""

_ROWS: Final = 16
"""Rows from which on one move is enough."""

_SCATTER: Final = 12.9898
"""A factor for positions, with which the signs of their sines look random."""


def by_moving(call: Call) -> Grads:
    """Return the gradients of the float inputs of a node."""
    return [
        None
        if x is None or x.elem != TensorProto.FLOAT
        else partial(_moved, call, position, x)
        for position, x in enumerate(call.inputs)
    ]


def _moved(call: Call, position: int, x: Tensor) -> Tensor:
    """Return a gradient of an input with the energy of the effect that a small change of that input has on the
    outputs.

    Effects on different rows of an output add up as squares, because rows depend on different elements or meet
    independent gradients; with few rows, several moves are averaged. Sentinels, such as those of masks, do not move,
    and undefined elements of an output do not count.
    """
    writer = call.writer
    places = writer.count(x.op("Size")).cast(TensorProto.FLOAT) * _SCATTER
    step = (x.op("Abs") < SENTINEL).where(x * _STEP, 0.0)
    signs = x
    energy = x.like(0.0)
    seen = [
        (port, y, dy)
        for port, (y, dy) in enumerate(zip(call.outputs, call.dys, strict=True))
        if y is not None and dy is not None
    ]
    rows = max(_rows_of(y) for _, y, _ in seen)
    moves = 1 if rows >= _ROWS else _MOVES
    for number in range(moves):
        # Signs are computed from positions, because the size of the input may be unknown here.
        signs = (places + (number + 0.5)).op("Sin").op("Sign").reshape_like(x)
        names = _run_again(call, position, x + step * signs)
        for port, y, dy in seen:
            again = Tensor(writer, names[port], y.elem).cast(TensorProto.FLOAT)
            change = finite((again - y.cast(TensorProto.FLOAT)) * dy)
            row = [writer.ints([-1])] if y.dims else []
            change = change.op("ReduceSum", *row, keepdims=0)
            energy += change.op("ReduceSumSquare", keepdims=0)
    size = step.op("ReduceL2", keepdims=0).op("Max", x.like(1e-30))
    return signs * ((energy * (1 / moves)).op("Sqrt") / size)


def _rows_of(y: Tensor) -> int:
    """Return the number of rows of a tensor; unknown sizes count as 1."""
    sizes = (y.dims or ())[:-1]
    return prod(size for size in sizes if isinstance(size, int))


def _run_again(call: Call, position: int, x: Tensor) -> list[str]:
    """Write a node with another input, and return the names of its outputs."""
    writer = call.writer
    node = copied(call.node.proto)
    node.input[position] = x.name
    names = [
        writer.editor.names.fresh(f"{writer.prefix}/moved") if name else ""
        for name in node.output
    ]
    node.output[:] = names
    node.name = writer.editor.names.fresh(f"{call.node.label}/moved")
    writer.nodes.append(node)
    return names
