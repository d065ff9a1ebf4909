"""Writing ONNX nodes by arithmetic on values: what the gradient rules are written in.

``x * (1 - y)`` writes a Sub and a Mul and stands for the latter's output. Every op that is written here exists, as
written, from opset 18 (:data:`MIN_OPSET`) on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxamp._graph.names import NewNames
from onnxamp._graph.shapes import Dims

MIN_OPSET: Final = 18
"""Reductions take their axes as an input, ScatterElements and ScatterND add, and Pad has axes."""

FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""Element types that carry gradients."""

_BOOL: Final = frozenset({"And", "Equal", "Greater", "IsInf", "IsNaN", "Less", "Not", "Or"})
_INT64: Final = frozenset({"NonZero", "Shape", "Size"})
"""Ops that write another type than they read."""

Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the graph being written. Numbers beside it take its element type."""

    writer: "Writer"
    name: str
    elem: int
    dims: Dims | None = None
    """The shape, where it is known; rules know it of the model's own values."""

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
        """Element by element; ``==`` compares what the handles stand for."""
        return self._write("Equal", self, other)

    def op(self, op_type: str, *others: Any, **attributes: Any) -> "Tensor":
        """An op of one output whose first input is this value; see :meth:`Writer.op`."""
        return self.writer.op(op_type, self, *others, **attributes)

    def where(self, yes: "Tensor | Number", no: "Tensor | Number") -> "Tensor":
        """``yes`` where this bool holds, ``no`` elsewhere; one of them is a tensor and gives the type."""
        elem = next(side.elem for side in (yes, no) if isinstance(side, Tensor))
        found = (side if isinstance(side, Tensor) else self.writer.number(side, elem) for side in (yes, no))
        return self.writer.op("Where", self, *found, elem=elem)

    def cast(self, elem: int) -> "Tensor":
        """The value with another element type; itself where it has that type."""
        return self if elem == self.elem else self.writer.op("Cast", self, elem=elem, to=elem)

    def shape(self) -> "Tensor":
        """The shape as int64 vector: a constant where all of it is known."""
        if self.dims is not None and all(isinstance(dim, int) for dim in self.dims):
            return self.writer.ints([dim for dim in self.dims if isinstance(dim, int)])
        return self.op("Shape")

    def sum(self, axes: Sequence[int], *, keepdims: bool = True) -> "Tensor":
        """The sum over these axes; itself over none."""
        return self.op("ReduceSum", list(axes), keepdims=int(keepdims)) if axes else self

    def mean(self, axes: Sequence[int]) -> "Tensor":
        """The mean over these axes, which stay with size 1."""
        return self.op("ReduceMean", list(axes), keepdims=1)

    def _write(self, op_type: str, *sides: "Tensor | Number") -> "Tensor":
        return self.writer.op(
            op_type, *(s if isinstance(s, Tensor) else self.writer.number(s, self.elem) for s in sides)
        )


@dataclass(slots=True)
class Writer:
    """The nodes and constants written so far. Each op costs O(1); equal constants are stored once."""

    names: NewNames
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[tuple[int, tuple[int, ...], bytes], TensorProto] = field(default_factory=dict)
    prefix: str = "grad"
    """What the names of new values begin with: the value whose gradient is being written."""

    def op(self, op_type: str, *inputs: Any, elem: int | None = None, into: str = "", **attributes: Any) -> Tensor:
        """Write a node of one output.

        Args:
            op_type: of ai.onnx.
            inputs: tensors, None for one that is left out, lists of ints or arrays for constants.
            elem: element type of the output; by default the first tensor's, or what the op always makes.
            into: name of the output; a new one by default.
            attributes: as helper.make_node takes them; None is left out.
        """
        return self.ops(op_type, *inputs, elem=elem, into=(into,), **attributes)[0]

    def ops(
        self, op_type: str, *inputs: Any, elem: int | None = None, into: Sequence[str] = ("",), **attributes: Any
    ) -> list[Tensor]:
        """Write a node with one output for each name in ``into``; "" asks for a new name."""
        tensors = [self.lift(item) for item in inputs]
        names = [name or self.names.fresh(f"{self.prefix}/{op_type}") for name in into]
        kept = {key: value for key, value in attributes.items() if value is not None}
        node = helper.make_node(op_type, ["" if t is None else t.name for t in tensors], names, **kept)
        node.name = self.names.fresh(f"{names[0]}/node")
        self.nodes.append(node)
        if elem is None and op_type in _BOOL:
            elem = TensorProto.BOOL
        elif elem is None:
            elem = TensorProto.INT64 if op_type in _INT64 else next(t.elem for t in tensors if t is not None)
        return [Tensor(self, name, elem) for name in names]

    def lift(self, item: Any) -> Tensor | None:
        """What the item stands for as an input of a node."""
        if item is None or isinstance(item, Tensor):
            return item
        return self.constant(np.asarray(item, np.int64) if isinstance(item, (list, tuple)) else item)

    def number(self, value: Number, elem: int) -> Tensor:
        """A scalar constant."""
        return self.constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(elem)))

    def ints(self, values: Sequence[int]) -> Tensor:
        """An int64 vector."""
        return self.constant(np.asarray(values, np.int64))

    def constant(self, array: NDArray[Any]) -> Tensor:
        """An initializer that holds the array."""
        elem = helper.np_dtype_to_tensor_dtype(array.dtype)
        key = (elem, array.shape, array.tobytes())
        if key not in self.constants:
            self.constants[key] = numpy_helper.from_array(array, self.names.fresh("grad/constant"))
        return Tensor(self, self.constants[key].name, elem, array.shape)

    def zeros(self, shape: Tensor, elem: int) -> Tensor:
        """Zeros of a shape that is an int64 vector."""
        value = helper.make_tensor("value", elem, [1], [0.0])
        return self.op("ConstantOfShape", shape, elem=elem, value=value)
