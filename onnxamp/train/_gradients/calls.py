"""What a gradient rule is given, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray
from onnx import NodeProto, helper

from onnxamp._errors import GradientError
from onnxamp._graph.shapes import Dims
from onnxamp.train._gradients.writer import Tensor, Writer

Grads: TypeAlias = Sequence[Tensor | None]
"""One gradient per output or input of a node; None where there is none."""


@dataclass(frozen=True, slots=True)
class Call:
    """A node of the forward pass, and the gradients of its outputs.

    ``call[i]`` is input ``i``; ``x``, ``y`` and ``dy`` are the first input, the first output and its gradient.
    """

    writer: Writer
    proto: NodeProto
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]
    wants: tuple[bool, ...]
    """Which inputs need a gradient."""
    label: str
    known: Mapping[str, NDArray[Any]]
    """Constants of the model by name."""
    saved: tuple[Tensor, ...] = ()
    """What the forward pass kept for the rule."""
    dys: Grads = ()

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

    def has(self, position: int) -> bool:
        """Whether the node has this optional input."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def wants_input(self, position: int) -> bool:
        """Whether this optional input is present and needs a gradient."""
        return position < len(self.wants) and self.wants[position]

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute; byte strings are decoded."""
        for item in self.proto.attribute:
            if item.name == name:
                value = helper.get_attribute_value(item)
                return value.decode() if isinstance(value, bytes) else value
        return default

    def constant(self, position: int) -> NDArray[Any] | None:
        """The constant array of an input; None where the input is computed or absent."""
        return self.known.get(self[position].name) if self.has(position) else None

    def rank(self, position: int = 0) -> int:
        """Rank of an input.

        Raises:
            GradientError: shape inference cannot determine it.
        """
        dims = self[position].dims
        if dims is None:
            raise self.error(
                f"needs the rank of its input {self[position].name!r}, which is unknown"
            )
        return len(dims)

    def with_second_output(self, name: str, elem: int) -> Tensor:
        """Write the node itself, with its optional second output; returns that output."""
        outputs = self.proto.output
        if len(outputs) < 2 or not outputs[1]:
            del outputs[1:]
            outputs.append(self.writer.names.fresh(f"{self.y.name}/{name}"))
        self.writer.nodes.append(self.proto)
        return Tensor(self.writer, outputs[1], elem)

    def error(self, why: str) -> GradientError:
        """The error that names the node and says why it cannot be differentiated."""
        return GradientError(f"Node {self.label!r} ({self.proto.op_type}) {why}.")


Rule: TypeAlias = Callable[[Call], Grads]
"""The vector-Jacobian product of an op: writes nodes, returns one gradient per input. Unwanted ones may be left out."""
Forward: TypeAlias = Callable[[Call], tuple[Tensor, ...]]
"""Writes an op's forward pass in place of its node; returns what its rule needs later (``Call.saved``)."""


def sum_to(dy: Tensor, y: Dims | None, x: Tensor) -> Tensor:
    """``dy``, of shape ``y``, summed over the axes along which ``x`` was broadcast."""
    axes = repeated_axes(x.dims, y)
    if axes is None:
        return _sum_to_dynamic(dy, x)
    lead = len(y or ()) - len(x.dims or ())
    if axes == list(range(lead)):
        return dy.sum(axes, keepdims=False)
    summed = dy.sum(axes)
    return summed.op("Squeeze", list(range(lead))) if lead else summed


def repeated_axes(x: Dims | None, y: Dims | None) -> list[int] | None:
    """Axes of shape ``y`` along which shape ``x`` is broadcast; None where the shapes do not tell."""
    if x is None or y is None:
        return None
    lead = len(y) - len(x)
    axes = list(range(lead))
    for axis, (small, large) in enumerate(zip(x, y[lead:], strict=True), lead):
        if (
            large == 1
            or (isinstance(small, int) and small != 1)
            or (small is not None and small == large)
        ):
            continue
        if small != 1:
            return None
        axes.append(axis)
    return axes


def _sum_to_dynamic(dy: Tensor, x: Tensor) -> Tensor:
    """As :func:`sum_to`, over the axes where the shape of ``x``, padded with ones on the left, is 1 at run time."""
    shape = x.op("Shape")
    missing = dy.op("Shape").op("Size") - shape.op("Size")
    padded = dy.writer.vector(dy.writer.ints([1]).op("Expand", missing.reshape(1)), shape)
    axes = padded.equals(1).op("NonZero").reshape(-1)
    return dy.op("ReduceSum", axes, keepdims=1, noop_with_empty_axes=1).reshape(shape)


def reshape_like(dy: Tensor, x: Tensor) -> Tensor:
    """``dy`` in the shape of ``x``, which has the same number of elements."""
    if x.dims is not None and all(x.dims):
        sizes = [dim if isinstance(dim, int) else -1 for dim in x.dims]
        if sizes.count(-1) <= 1:
            return dy.op("Reshape", sizes)
    return dy.reshape(x.op("Shape"))


def per_channel(x: Tensor, rank: int) -> Tensor:
    """A vector shaped so that it lies along axis 1 of a tensor of this rank."""
    return x.reshape(1, -1, *[1] * (rank - 2))
