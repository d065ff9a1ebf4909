"""ONNX nodes written as arithmetic on values: the language of the gradient rules.

``x * (1 - y)`` writes a Sub and a Mul, and is the output of the Mul. Every op is written in the form it has since
opset 18 (:data:`MIN_OPSET`).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._graph.editor import NewNames
from onnxamp._graph.shapes import Dims

MIN_OPSET: Final = 18
"""The first opset whose reductions take axes as an input and whose ScatterElements and ScatterND can add."""

_BOOL: Final = frozenset({"And", "Equal", "Greater", "IsInf", "IsNaN", "Less", "Not", "Or"})
_INT64: Final = frozenset({"NonZero", "Shape", "Size"})
"""Ops whose output type differs from their input type."""

Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph being written, with operators that write nodes.

    Numbers take the element type of the tensor they are combined with.

    Attributes:
        name: name of the value in the graph.
        elem: element type, a ``TensorProto.DataType``.
        dims: shape where it is known (int, symbolic name or None per axis); None where even the rank is unknown.
    """

    writer: "Writer"
    name: str
    elem: int
    dims: Dims | None = None

    def __add__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Add", self, other)

    __radd__ = __add__

    def __sub__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Sub", self, other)

    def __rsub__(self, other: Number) -> "Tensor":
        return self._write("Sub", other, self)

    def __mul__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Div", self, other)

    def __rtruediv__(self, other: Number) -> "Tensor":
        return self._write("Div", other, self)

    def __pow__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Pow", self, other)

    def __neg__(self) -> "Tensor":
        return self.op("Neg")

    def __lt__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Less", self, other)

    def __gt__(self, other: "Tensor | Number") -> "Tensor":
        return self._write("Greater", self, other)

    def equals(self, other: "Tensor | Number") -> "Tensor":
        """Elementwise equality (``==`` compares the handles)."""
        return self._write("Equal", self, other)

    def op(self, op_type: str, *others: Any, **attributes: Any) -> "Tensor":
        """Write an ai.onnx op with one output and this value as its first input.

        Args:
            op_type: of ai.onnx.
            others: further inputs: tensors, None for absent ones, lists of ints or arrays for constants.
            attributes: of the node; None leaves one out.
        """
        return self.writer.op(op_type, self, *others, **attributes)

    def where(self, yes: "Tensor | Number", no: "Tensor | Number") -> "Tensor":
        """``yes`` where this bool tensor is True, ``no`` elsewhere; at least one of them is a tensor."""
        elem = next(side.elem for side in (yes, no) if isinstance(side, Tensor))
        sides = (
            side if isinstance(side, Tensor) else self.writer.number(side, elem)
            for side in (yes, no)
        )
        return self.writer.op("Where", self, *sides, elem=elem)

    def cast(self, elem: int) -> "Tensor":
        """The value in another element type."""
        return self if elem == self.elem else self.writer.op("Cast", self, elem=elem, to=elem)

    def shape(self) -> "Tensor":
        """The shape as an int64 vector: a constant where it is fully known."""
        if self.dims is not None and all(isinstance(dim, int) for dim in self.dims):
            return self.writer.ints([dim for dim in self.dims if isinstance(dim, int)])
        return self.op("Shape")

    def known_size(self, axis: int) -> int | None:
        """The size of an axis where it is a known number."""
        size = None if self.dims is None else self.dims[axis]
        return size if isinstance(size, int) else None

    def size(self, axis: int) -> "Tensor":
        """The size of an axis as an int64 vector of one element."""
        size = self.known_size(axis)
        return (
            self.op("Shape", start=axis, end=axis + 1 or None)
            if size is None
            else self.writer.ints([size])
        )

    def reshape(self, *sizes: "int | Tensor") -> "Tensor":
        """The value in another shape, made of numbers and int64 vectors."""
        return self.op("Reshape", self.writer.vector(*sizes))

    def transpose(self, perm: Sequence[int]) -> "Tensor":
        """The value with its axes permuted."""
        return self.op("Transpose", perm=list(perm))

    def sum(self, axes: Sequence[int], *, keepdims: bool = True) -> "Tensor":
        """The sum over some axes; the value itself if there are none."""
        return self.op("ReduceSum", list(axes), keepdims=int(keepdims)) if axes else self

    def mean(self, axes: Sequence[int]) -> "Tensor":
        """The mean over some axes, which remain with size 1."""
        return self.op("ReduceMean", list(axes), keepdims=1)

    def zeros_like(self) -> "Tensor":
        """Zeros of the same shape and type."""
        return self.writer.zeros(self.shape(), self.elem)

    def _write(self, op_type: str, *sides: "Tensor | Number") -> "Tensor":
        return self.writer.op(
            op_type,
            *(s if isinstance(s, Tensor) else self.writer.number(s, self.elem) for s in sides),
        )


@dataclass(slots=True)
class Writer:
    """The nodes and constants written so far. Equal constants are stored once."""

    names: NewNames
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[tuple[int, tuple[int, ...], bytes], TensorProto] = field(default_factory=dict)
    lacks: Container[str] = ()
    """What the engine that is meant cannot run, as in the ``engine.toml`` of a target."""
    prefix: str = "grad"
    """Start of the names of new values: the node or value whose gradient is being written."""

    def op(
        self, op_type: str, *inputs: Any, elem: int | None = None, into: str = "", **attributes: Any
    ) -> Tensor:
        """Write a node with one output.

        Args:
            op_type: of ai.onnx.
            inputs: tensors, None for absent ones, lists of ints or arrays for constants.
            elem: element type of the output; by default that of the first tensor, or the one the op always has.
            into: name of the output; by default a new one.
            attributes: of the node; None leaves one out.
        """
        return self.ops(op_type, *inputs, elem=elem, into=(into,), **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: Any,
        elem: int | None = None,
        into: Sequence[str] = ("",),
        **attributes: Any,
    ) -> list[Tensor]:
        """Write a node with one output per name in ``into``; "" asks for a new name."""
        tensors = [self.lift(item) for item in inputs]
        names = [name or self.names.fresh(f"{self.prefix}/{op_type}") for name in into]
        kept = {key: value for key, value in attributes.items() if value is not None}
        node = helper.make_node(
            op_type, ["" if t is None else t.name for t in tensors], names, **kept
        )
        node.name = self.names.fresh(f"{names[0]}/node")
        self.nodes.append(node)
        if elem is None and op_type in _BOOL:
            elem = TensorProto.BOOL
        elif elem is None:
            elem = (
                TensorProto.INT64
                if op_type in _INT64
                else next(t.elem for t in tensors if t is not None)
            )
        return [Tensor(self, name, elem) for name in names]

    def add_to(self, graph: GraphProto) -> None:
        """Append all that was written to a graph."""
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.constants.values())

    def lift(self, item: Any) -> Tensor | None:
        """An item as an input of a node."""
        if item is None or isinstance(item, Tensor):
            return item
        return self.constant(
            np.asarray(item, np.int64) if isinstance(item, (list, tuple)) else item
        )

    def number(self, value: Number, elem: int) -> Tensor:
        """A scalar constant."""
        return self.constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(elem)))

    def ints(self, values: Sequence[int]) -> Tensor:
        """A constant int64 vector."""
        return self.constant(np.asarray(values, np.int64))

    def vector(self, *parts: "int | Tensor") -> Tensor:
        """An int64 vector of numbers and other int64 vectors."""
        pieces: list[Tensor | list[int]] = []
        for part in parts:
            if isinstance(part, Tensor):
                pieces.append(part)
            elif pieces and isinstance(pieces[-1], list):
                pieces[-1].append(part)
            else:
                pieces.append([part])
        return self.concat(
            [self.ints(piece) if isinstance(piece, list) else piece for piece in pieces], 0
        )

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """The parts joined along an axis; a single part is returned as it is."""
        return parts[0].op("Concat", *parts[1:], axis=axis) if len(parts) > 1 else parts[0]

    def constant(self, array: NDArray[Any]) -> Tensor:
        """An initializer with the values of the array."""
        elem = helper.np_dtype_to_tensor_dtype(array.dtype)
        key = (elem, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, self.names.fresh("grad/constant"))
        return Tensor(self, self.constants[key].name, elem, array.shape)

    def zeros(self, shape: Tensor, elem: int) -> Tensor:
        """Zeros; the shape is an int64 vector."""
        value = helper.make_tensor("value", elem, [1], [0.0])
        return self.op("ConstantOfShape", shape, elem=elem, value=value)
