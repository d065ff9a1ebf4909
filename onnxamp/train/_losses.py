"""Losses, written in float32. Cross entropy is LogSoftmax and a gather: SoftmaxCrossEntropyLoss has no CUDA kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp._errors import ArgumentError, ArgumentTypeError, ModelError
from onnxamp._graph.shapes import Dims
from onnxamp.train._gradients.writer import Tensor

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Writes a loss: from an output of the model, as float32, and the labels to a float32 scalar."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and the input for labels that it adds to the graph.

    Args:
        function: from the output (as float32) and the labels to a float32 scalar. It computes with their operators and
            methods, which write nodes: ``output - labels``, ``output.op("Abs")``, ``(output > 0).where(a, b)``.
        label: name of the labels.
        label_type: their ONNX element type, such as ``TensorProto.INT64``.
        but: an axis of the output that the labels do not have. Otherwise labels and output have the same shape.
        output: the output of the model to judge; None for the first float output.
        picks: whether labels are positions along ``but``, so that others are an error.

    Example:
        >>> from onnxamp.train import Loss
        >>> def mean_absolute_error(output, labels):
        ...     return (output - labels).op("Abs").op("ReduceMean", keepdims=0)
        >>> loss = Loss(mean_absolute_error, label="target", output="logits")
    """

    function: LossFunction
    label: str = "label"
    label_type: int = TensorProto.FLOAT
    but: int | None = None
    output: str | None = None
    picks: bool = False

    def classes(self, output: Dims | None) -> "Classes | None":
        """What labels may be for an output of this shape; None for anything."""
        if not self.picks or self.but is None:
            return None
        size = None if output is None else output[self.but]
        return Classes(self.label, size if isinstance(size, int) else None)

    def label_shape(self, output: Dims | None) -> Dims:
        """The shape of the labels for an output of this shape.

        Raises:
            ModelError: even the rank of the output is unknown.
        """
        if output is None:
            raise ModelError(
                "The rank of the model's output is unknown, but the labels need it: declare its shape."
            )
        return (
            output
            if self.but is None
            else tuple(dim for axis, dim in enumerate(output) if axis != self.but)
        )


@dataclass(frozen=True, slots=True)
class Classes:
    """What labels may be: whole numbers from 0 to below ``count``, which is None where nothing tells it."""

    label: str
    count: int | None

    def check(self, labels: NDArray[Any]) -> None:
        """Look for other numbers: ONNX Runtime counts negative ones from the end.

        Raises:
            ArgumentError: there are some.
        """
        wrong = labels[(labels < 0) | (labels >= (np.inf if self.count is None else self.count))]
        if wrong.size:
            least = "0 or more" if self.count is None else f"classes from 0 to {self.count - 1}"
            raise ArgumentError(
                f"The labels {self.label!r} must be {least}, but {wrong.size} of {labels.size} are not, such as"
                f" {wrong[0]}: correct them, or leave these samples out."
            )


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, classes, ...] and int64 classes [batch, ...]."""
    likelihood = output.op("LogSoftmax", axis=1).op(
        "GatherElements", labels.op("Unsqueeze", [1]), axis=1
    )
    return -likelihood.op("ReduceMean", keepdims=0)


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean squared difference of output and labels."""
    difference = output - labels
    return (difference * difference).op("ReduceMean", keepdims=0)


def binary_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy of logits of any shape and labels in [0, 1] of that shape."""
    return (output.op("Softplus") - output * labels).op("ReduceMean", keepdims=0)


LOSSES: Final[Mapping[str, Loss]] = {
    "binary-cross-entropy": Loss(binary_cross_entropy),
    "cross-entropy": Loss(cross_entropy, label_type=TensorProto.INT64, but=1, picks=True),
    "mean-squared-error": Loss(mean_squared_error),
}


def find_loss(loss: "str | Loss | LossFunction") -> Loss:
    """The loss of that name, or around that function (with float32 labels called "label", shaped as the output).

    Raises:
        ArgumentError: there is none.
        ArgumentTypeError: it is none of these.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ArgumentError(
                f"Unknown loss {loss!r}: choose one of {', '.join(LOSSES)}, or pass a function."
            )
        return LOSSES[loss]
    if not callable(loss):
        raise ArgumentTypeError(
            f"loss_fn must be a name, a Loss or a function, not {type(loss).__name__}."
        )
    return Loss(loss)
