"""What a gradient rule is given and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray
from onnx import NodeProto, helper

from onnxamp._errors import GradientError
from onnxamp.train._gradients.writer import Tensor, Writer


@dataclass(frozen=True, slots=True)
class Call:
    """A node of the forward pass as its rule sees it."""

    writer: Writer
    proto: NodeProto
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, ...]
    wants: tuple[bool, ...]
    """Which inputs lead to a wanted gradient."""
    label: str
    known: Mapping[str, NDArray[Any]]
    """Constants of the model by name."""
    saved: tuple[Tensor, ...] = ()
    """What the op's forward pass kept for its rule."""

    def x(self, position: int = 0) -> Tensor:
        """An input that is there."""
        found = self.inputs[position]
        assert found is not None
        return found

    def has(self, position: int) -> bool:
        """Whether the node has this optional input."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def wants_input(self, position: int) -> bool:
        """Whether the gradient of this input is wanted."""
        return position < len(self.wants) and self.wants[position]

    @property
    def y(self) -> Tensor:
        """The first output."""
        found = self.outputs[0]
        assert found is not None
        return found

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value; strings are text."""
        for item in self.proto.attribute:
            if item.name == name:
                value = helper.get_attribute_value(item)
                return value.decode() if isinstance(value, bytes) else value
        return default

    def constant(self, position: int) -> NDArray[Any] | None:
        """The array that an input always holds, None where it is computed, or not there."""
        return self.known.get(self.x(position).name) if self.has(position) else None

    def rank(self, position: int = 0) -> int:
        """Rank of an input.

        Raises:
            GradientError: it is not known.
        """
        dims = self.x(position).dims
        if dims is None:
            raise self.refusal(f"needs the rank of its input {self.x(position).name!r}, which nothing tells")
        return len(dims)

    def refusal(self, why: str) -> GradientError:
        """The error that says which node cannot be differentiated, and why."""
        return GradientError(f"Node {self.label!r} ({self.proto.op_type}) {why}.")


Grads: TypeAlias = Sequence[Tensor | None]
"""One gradient for each output (what a rule is given) or each input (what it returns); None for none."""
Rule: TypeAlias = Callable[[Call, Grads], Grads]
"""The vector-Jacobian product of an op: it writes nodes. Gradients that are not wanted may be left out."""
Forward: TypeAlias = Callable[[Call], tuple[Tensor, ...]]
"""Writes an op's forward pass in place of its node, and returns what its rule wants kept (``Call.saved``)."""


@dataclass(frozen=True, slots=True)
class At:
    """What most rules ask for: a node's first input and output, and the gradient of that output."""

    call: Call
    x: Tensor
    y: Tensor
    dy: Tensor


def first(dys: Grads) -> Tensor:
    """The gradient of the first output, for ops with one output: their rules are called only where it is there."""
    assert dys[0] is not None
    return dys[0]
