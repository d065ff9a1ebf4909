"""The language of the gradient rules: arithmetic on values that writes ONNX nodes, and the rules' view of nodes.

``x * (1 - y)`` writes a Sub and a Mul, and is the output of the Mul. Every op is written in its form as of opset 18
(:data:`MIN_OPSET`).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnxamp._base.errors import GradientError
from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT_ELEMS, elem_of, tensor_type
from onnxamp._facts.ops import attribute_in_effect
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.shapes import Dims
from onnxamp._graph.types import output_types
from onnxamp._graph.view import Node

MIN_OPSET: Final = 18
"""The first opset whose reductions take axes as an input and whose ScatterElements and ScatterND can add."""

Number: TypeAlias = int | float


def _binary(
    op_type: str, *, swapped: bool = False
) -> Callable[["Tensor", "Tensor | Number"], "Tensor"]:
    """Return an operator that writes an op on a tensor and the other operand."""

    def write(self: "Tensor", other: "Tensor | Number") -> "Tensor":
        side = self.like(other)
        return side.op(op_type, self) if swapped else self.op(op_type, side)

    return write


@record
class Tensor:
    """A value of the graph being written, with operators that write nodes.

    Numbers take the element type of the tensor they are combined with.

    Attributes:
        name: name of the value in the graph.
        elem: element type, a ``TensorProto.DataType``.
        dims: known shape (int, symbolic name or None per axis); None if even the rank is unknown.
    """

    writer: "Writer"
    name: str
    elem: int
    dims: Dims | None = None

    __add__ = __radd__ = _binary("Add")
    __sub__ = _binary("Sub")
    __rsub__ = _binary("Sub", swapped=True)
    __mul__ = __rmul__ = _binary("Mul")
    __truediv__ = _binary("Div")
    __rtruediv__ = _binary("Div", swapped=True)
    __pow__ = _binary("Pow")
    __lt__ = _binary("Less")
    __gt__ = _binary("Greater")
    equals = _binary("Equal")
    """Elementwise equality (``==`` compares the handles)."""

    def __neg__(self) -> "Tensor":
        return self.op("Neg")

    def op(
        self, op_type: str, *others: Any, into: str = "", **attributes: Any
    ) -> "Tensor":
        """Write an ai.onnx op with one output and this value as its first input.

        Args:
            op_type: op type of ai.onnx.
            others: further inputs: tensors, None for absent inputs, lists of ints or arrays for constants.
            into: name of the output; by default a new one.
            attributes: attributes of the node; those that are None are left out.
        """
        return self.writer.ops(op_type, self, *others, into=(into,), **attributes)[0]

    def like(self, numbers: "Tensor | Number | NDArray[Any]") -> "Tensor":
        """Return numbers as a constant of this element type; return a tensor unchanged."""
        if isinstance(numbers, Tensor):
            return numbers
        dtype = helper.tensor_dtype_to_np_dtype(self.elem)
        return self.writer.constant(np.asarray(numbers).astype(dtype))

    def where(self, yes: "Tensor | Number", no: "Tensor | Number") -> "Tensor":
        """Return ``yes`` where this bool tensor is True, ``no`` elsewhere; at least one of them must be a tensor."""
        kind = next(side for side in (yes, no) if isinstance(side, Tensor))
        return self.op("Where", kind.like(yes), kind.like(no))

    def cast(self, elem: int) -> "Tensor":
        """Return the value in another element type."""
        return self if elem == self.elem else self.op("Cast", to=elem)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floats."""
        return self.elem in FLOAT_ELEMS

    def shape(self) -> "Tensor":
        """Return the shape as an int64 vector: a constant if it is fully known."""
        if self.dims is not None and all(isinstance(dim, int) for dim in self.dims):
            return self.writer.ints(self.dims)
        return self.op("Shape")

    def known_size(self, axis: int) -> int | None:
        """Return the size of an axis if it is a known number, or else None."""
        size = None if self.dims is None else self.dims[axis]
        return size if isinstance(size, int) else None

    def size(self, axis: int) -> "int | Tensor":
        """Return the size of an axis: a number if it is known, otherwise an int64 vector of one element."""
        size = self.known_size(axis)
        if size is not None:
            return size
        # After the last axis there is no end: -1 + 1 would be the first.
        return self.op("Shape", start=axis, end=axis + 1 or None)

    def reshape(self, *sizes: "int | Tensor") -> "Tensor":
        """Return the value in another shape, made of numbers and int64 vectors."""
        return self.op("Reshape", self.writer.vector(*sizes))

    def reshape_like(self, x: "Tensor") -> "Tensor":
        """Return the value in the shape of ``x``, which has the same number of elements."""
        if x.dims is not None and all(x.dims):
            sizes = [dim if isinstance(dim, int) else -1 for dim in x.dims]
            if sizes.count(-1) <= 1:
                return self.op("Reshape", sizes)
        return self.op("Reshape", x.op("Shape"), allowzero=1)

    def transpose(self, perm: Sequence[int] | None) -> "Tensor":
        """Return the value with its axes permuted."""
        return self.op("Transpose", perm=perm)

    def sum(self, axes: Sequence[int], *, keepdims: bool = True) -> "Tensor":
        """Return the sum over some axes; the value itself if there are none."""
        if not axes:  # ReduceSum would sum over all axes
            return self
        return self.op("ReduceSum", list(axes), keepdims=int(keepdims))

    def mean(self, axes: Sequence[int]) -> "Tensor":
        """Return the mean over some axes, which remain with size 1."""
        return self.op("ReduceMean", list(axes), keepdims=1)

    def split(self, sizes: "Sequence[int | Tensor]", axis: int) -> "list[Tensor]":
        """Return the value split into pieces of these sizes along an axis; a single piece is the value itself."""
        if len(sizes) == 1:
            return [self]
        into = [""] * len(sizes)
        return self.writer.ops(
            "Split", self, self.writer.vector(*sizes), into=into, axis=axis
        )

    def zeros_like(self) -> "Tensor":
        """Return zeros of the same shape, to which gradients of the value are added: integers have some in float32."""
        return self.shape().zeros(self.elem if self.is_float else TensorProto.FLOAT)

    def zeros(self, elem: int) -> "Tensor":
        """Return zeros in the shape that this int64 vector holds."""
        return self.op(
            "ConstantOfShape", value=helper.make_tensor("value", elem, [1], [0.0])
        )


@dataclass(slots=True)
class Writer:
    """Writes nodes into a model through its editor."""

    editor: GraphEditor
    prefix: str = "grad"
    """Start of the names of new values: the node or value whose gradient is being written."""
    lacks: Container[str] = ()
    """Features that the intended engine lacks, as in the ``engine.toml`` of a target."""
    nodes: list[NodeProto] = field(default_factory=list)
    """The nodes written so far that are not in the model yet."""
    _inputs: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = {entry.name for entry in self.editor.view.model.graph.input}

    def ops(
        self,
        op_type: str,
        *inputs: Any,
        into: Sequence[str] = ("",),
        **attributes: Any,
    ) -> list[Tensor]:
        """Write a node with one output per name in ``into``; "" asks for a new name. See :meth:`Tensor.op`."""
        tensors = [self._lifted(item) for item in inputs]
        fresh = self.editor.names.fresh
        names = [name or fresh(f"{self.prefix}/{op_type}") for name in into]
        given = {
            name: value for name, value in attributes.items() if value is not None
        }
        reads = ["" if tensor is None else tensor.name for tensor in tensors]
        node = self.editor.make(
            op_type, reads, names, fresh(f"{names[0]}/node"), **given
        )
        self.nodes.append(node)
        kinds = [
            None if tensor is None else tensor_type(tensor.elem) for tensor in tensors
        ]
        signature = self.editor.view.book.get("", op_type)
        types = output_types(node, op_type, signature, kinds)
        return [
            Tensor(self, name, elem_of(kind))
            for name, kind in zip(names, types, strict=True)
        ]

    def _lifted(self, item: Any) -> Tensor | None:
        """Return an item as an input of a node."""
        if item is None or isinstance(item, Tensor):
            return item
        return (
            self.ints(item) if isinstance(item, (list, tuple)) else self.constant(item)
        )

    def constant(self, array: NDArray[Any]) -> Tensor:
        """Return a constant with the values of the array."""
        name = self.editor.constant(array, "grad/constant")
        return Tensor(
            self, name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )

    def ints(self, numbers: Any) -> Tensor:
        """Return a constant of int64, of the shape of ``numbers``."""
        return self.constant(np.asarray(numbers, np.int64))

    def count(self, size: "int | Tensor") -> Tensor:
        """Return the numbers from 0 to below a size, an int64 vector of one element if it is unknown."""
        if isinstance(size, int):
            return self.ints(range(size))
        return self.ints(0).op("Range", size.op("Squeeze"), self.ints(1))

    def vector(self, *parts: "int | Tensor") -> Tensor:
        """Return an int64 vector of numbers and other int64 vectors."""
        pieces: list[Tensor | list[int]] = []
        for part in parts:
            if isinstance(part, Tensor):
                pieces.append(part)
            elif pieces and isinstance(pieces[-1], list):
                pieces[-1].append(part)
            else:
                pieces.append([part])
        tensors = [self.ints(p) if isinstance(p, list) else p for p in pieces]
        return self.concat(tensors, 0)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Return the parts joined along an axis; a single part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        return parts[0].op("Concat", *parts[1:], axis=axis)

    def input(self, name: str, elem: int, dims: Dims = ()) -> Tensor:
        """Return an input of the model, which is added unless it exists."""
        if name not in self._inputs:
            entry = helper.make_tensor_value_info(name, elem, dims)
            self.editor.model.graph.input.append(entry)
            self._inputs.add(name)
        return Tensor(self, name, elem, dims)

    def output(self, tensor: Tensor, dims: Dims | None) -> None:
        """Make a value an additional output of the model."""
        entry = helper.make_tensor_value_info(tensor.name, tensor.elem, dims)
        self.editor.model.graph.output.append(entry)

    def replace(self, index: int) -> None:
        """Replace a node with the nodes written so far; if there are none, the node stays."""
        if self.nodes:
            self.editor.replace(index, self.nodes)
            self.nodes = []

    def finish(self) -> ModelProto:
        """Return the model with the remaining nodes appended."""
        self.editor.insert(0, self.editor.view.scopes[0].nodes.stop, *self.nodes)
        return self.editor.finish()


def inverse(perm: Sequence[int] | None) -> list[int] | None:
    """Return the permutation that undoes another one; None, which stands for the reversal of all axes, for None."""
    return None if perm is None else [int(axis) for axis in np.argsort(perm)]


Several: TypeAlias = Sequence[Tensor | Callable[[], Tensor] | None]
"""Gradients of a node's first inputs, or functions that write them if they are wanted; None if there is no gradient."""
Grads: TypeAlias = Tensor | Several
"""The gradient of the first input, if no other input has one, or several gradients."""


@record
class Call:
    """A node of the forward pass, and the gradients of its outputs.

    ``call[i]`` is input ``i``; ``x``, ``y`` and ``dy`` are the first input, the first output and its gradient.
    """

    writer: Writer
    node: Node
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]
    known: Mapping[str, NDArray[Any]]
    """Constants of the model by name."""
    saved: tuple[Tensor, ...] = ()
    """Values that the forward pass stored for the rule."""
    dys: Sequence[Tensor | None] = ()
    """Gradients of the outputs."""

    def __getitem__(self, position: int) -> Tensor:
        tensor = self.inputs[position]
        assert tensor is not None
        return tensor

    @property
    def x(self) -> Tensor:
        """The first input."""
        return self[0]

    @property
    def y(self) -> Tensor:
        """The first output."""
        assert self.outputs[0] is not None
        return self.outputs[0]

    @property
    def dy(self) -> Tensor:
        """The gradient of the first output. A rule only runs where it exists, except for ops with several outputs."""
        assert self.dys[0] is not None
        return self.dys[0]

    def output(self, position: int) -> Tensor | None:
        """Return an output; None if it is omitted."""
        return self.outputs[position] if position < len(self.outputs) else None

    def has(self, position: int) -> bool:
        """Return whether the node has this optional input."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, or else the schema's default, or ``default``. Bytes are decoded."""
        node = self.node
        opset = self.writer.editor.view.book.opsets[""]
        return attribute_in_effect(node.proto, node.key, opset, name, default)

    def constant(self, position: int) -> NDArray[Any] | None:
        """Return the constant array of an input; None if the input is computed or absent."""
        return self.known.get(self[position].name) if self.has(position) else None

    def rank(self, position: int = 0) -> int:
        """Return the rank of an input.

        Raises:
            GradientError: shape inference cannot determine it.
        """
        dims = self[position].dims
        if dims is None:
            raise self.error(
                f"needs the rank of its input {self[position].name!r}, which is unknown"
            )
        return len(dims)

    def summed(self, dy: Tensor, position: int) -> Tensor:
        """Return ``dy``, which has the shape of the first output, summed to the shape of a broadcast input."""
        return sum_to(dy, self.y.dims, self[position])

    def second_output(self, name: str, elem: int) -> Tensor:
        """Return the optional second output of the node; add one if there is none."""
        outputs = self.writer.editor.node(self.node.index).output
        if len(outputs) < 2 or not outputs[1]:
            del outputs[1:]
            outputs.append(self.writer.editor.names.fresh(f"{self.y.name}/{name}"))
        return Tensor(self.writer, outputs[1], elem)

    def error(self, why: str) -> GradientError:
        """Return the error that names the node and says why it cannot be differentiated."""
        return GradientError(f"Node {self.node.label!r} ({self.node.key}) {why}.")


Rule: TypeAlias = Callable[[Call], Grads]
"""Writes the nodes of an op's vector-Jacobian product."""
Forward: TypeAlias = Callable[[Call], tuple[Tensor, ...]]
"""Writes a replacement of an op's node, if it needs one; returns the values that its rule needs (``Call.saved``)."""


def sum_to(dy: Tensor, y: Dims | None, x: Tensor) -> Tensor:
    """Return ``dy``, of shape ``y``, summed over the axes along which ``x`` was broadcast."""
    axes = repeated_axes(x.dims, y)
    if axes is None:
        return _sum_to_dynamic(dy, x)
    lead = len(y or ()) - len(x.dims or ())
    if axes == list(range(lead)):
        return dy.sum(axes, keepdims=False)
    summed = dy.sum(axes)
    return summed.op("Squeeze", list(range(lead))) if lead else summed


def repeated_axes(x: Dims | None, y: Dims | None) -> list[int] | None:
    """Return the axes of shape ``y`` along which shape ``x`` is broadcast; None if the shapes leave this open."""
    if x is None or y is None:
        return None
    lead = len(y) - len(x)
    axes = list(range(lead))
    for axis, (small, large) in enumerate(zip(x, y[lead:], strict=True), lead):
        is_larger = isinstance(small, int) and small != 1
        is_equal = small is not None and small == large
        if large == 1 or is_larger or is_equal:
            continue
        if small != 1:  # its size is unknown, and may be 1
            return None
        axes.append(axis)
    return axes


def _sum_to_dynamic(dy: Tensor, x: Tensor) -> Tensor:
    """Sum as in :func:`sum_to`, over axes where the shape of ``x``, padded with ones on the left, is 1 at run time."""
    shape = x.op("Shape")
    missing = dy.op("Shape").op("Size") - shape.op("Size")
    padded = dy.writer.vector(
        dy.writer.ints([1]).op("Expand", missing.reshape(1)), shape
    )
    axes = padded.equals(1).op("NonZero").reshape(-1)
    return dy.op("ReduceSum", axes, keepdims=1, noop_with_empty_axes=1).reshape(shape)
