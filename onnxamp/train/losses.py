"""Losses, written in float32: LogSoftmax and a gather, since SoftmaxCrossEntropyLoss has no CUDA kernel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from onnx import TensorProto

from onnxamp.errors import ArgumentError, ModelError
from onnxamp.sizes import Dims
from onnxamp.train.gradients.writer import Tensor

LossFunction: TypeAlias = Callable[[Sequence[Tensor], Tensor], Tensor]
"""(outputs of the model as float32, labels) -> a float32 scalar; it writes nodes by arithmetic on what it is given."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the input that it adds to the graph: its labels.

    ``label_type`` is their ONNX element type. They have the shape of the model's first float output, without the axis
    ``but`` where one is given.
    """

    function: LossFunction
    label: str = "label"
    label_type: int = TensorProto.FLOAT
    but: int | None = None

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


def cross_entropy(outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Mean cross entropy of the first output, logits [batch, classes, ...], and int64 classes [batch, ...]."""
    likely = outputs[0].op("LogSoftmax", axis=1).op("GatherElements", labels.op("Unsqueeze", [1]), axis=1)
    return -likely.op("ReduceMean", keepdims=0)


def mean_squared_error(outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Mean of the squared difference of the first output and the labels."""
    difference = outputs[0] - labels
    return (difference * difference).op("ReduceMean", keepdims=0)


def binary_cross_entropy(outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Mean binary cross entropy of the first output, logits of any shape, and labels in [0, 1] of that shape."""
    return (outputs[0].op("Softplus") - outputs[0] * labels).op("ReduceMean", keepdims=0)


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
