"""Losses, written in float32: LogSoftmax and a gather, since SoftmaxCrossEntropyLoss has no CUDA kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from onnx import TensorProto

from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.shapes import Dims
from onnxamp.train._gradients.writer import Tensor

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(output of the model as float32, labels) -> a float32 scalar; it writes nodes by arithmetic on what it is given."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the input that it adds to the graph: its labels.

    ``output`` names the output of the model that it judges, by default its first float one. ``label_type`` is the ONNX
    element type of the labels; they have the shape of that output, without the axis ``but`` where one is given.
    """

    function: LossFunction
    label: str = "label"
    label_type: int = TensorProto.FLOAT
    but: int | None = None
    output: str | None = None

    def label_shape(self, output: Dims | None) -> Dims:
        """Shape of the labels from that of the output.

        Raises:
            ModelError: not even its rank is known.
        """
        if output is None:
            raise ModelError(
                "Nothing tells the rank of the model's output, which the labels follow: declare its shape."
            )
        return output if self.but is None else tuple(dim for axis, dim in enumerate(output) if axis != self.but)


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, classes, ...], and int64 classes [batch, ...]."""
    likely = output.op("LogSoftmax", axis=1).op("GatherElements", labels.op("Unsqueeze", [1]), axis=1)
    return -likely.op("ReduceMean", keepdims=0)


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Mean of the squared difference of the output and the labels."""
    difference = output - labels
    return (difference * difference).op("ReduceMean", keepdims=0)


def binary_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy of logits of any shape, and labels in [0, 1] of that shape."""
    return (output.op("Softplus") - output * labels).op("ReduceMean", keepdims=0)


LOSSES: Final[Mapping[str, Loss]] = {
    "binary-cross-entropy": Loss(binary_cross_entropy),
    "cross-entropy": Loss(cross_entropy, label_type=TensorProto.INT64, but=1),
    "mean-squared-error": Loss(mean_squared_error),
}


def find_loss(loss: "str | Loss | LossFunction") -> Loss:
    """The loss of that name, or around that function (float32 labels called "label", in the shape of the output).

    Raises:
        ArgumentError: there is none.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ArgumentError(f"Unknown loss {loss!r}: choose one of {', '.join(LOSSES)}, or pass a function.")
        return LOSSES[loss]
    if not callable(loss):
        raise ArgumentError(f"loss_fn must be a name, a Loss or a function, not {type(loss).__name__}.")
    return Loss(loss)
