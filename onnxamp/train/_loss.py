"""A loss as a graph, and the input for labels that it adds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    ModelError,
)
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._gradients.writer import Tensor, Writer
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims
from onnxamp._model.protos import small_model
from onnxamp._options.doors import door
from onnxamp._options.values import checked_array, checked_flag
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp.train._batches import LabelClasses, typed_feeds

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function that writes a loss: it maps a float32 output of the model and the labels to float32 values, usually a
scalar.
"""

_FLOAT = TensorProto.FLOAT


@door
@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and the input for labels that it adds to the graph.

    Called with arrays, it returns the loss of an output and its labels. If that is not a scalar, training
    minimizes its sum.

    Args:
        function: maps the output (as float32) and the labels to float32 values, usually a scalar. It uses their
            operators and methods, which write nodes: ``output - labels``, ``output.op("Abs")``,
            ``(output > 0).where(a, b)``.
        label: the name of the labels.
        label_type: their ONNX element type, such as ``TensorProto.INT64``.
        but: an axis of the output that the labels do not have. Otherwise labels and output have the same shape.
        output: the output of the model that the loss is computed from; None for the first float output.
        picks: whether labels are positions along ``but``; other values are then an error.
        ignored: a label that is not a position, but is allowed.

    Raises:
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> from onnxamp.train import Loss
        >>> def mean_absolute_error(output, labels):
        ...     return (output - labels).op("Abs").op("ReduceMean", keepdims=0)
        >>> loss = Loss(mean_absolute_error, label="target", output="logits")
        >>> float(loss([1.0, 2.0], [1.0, 4.0]))
        1.0
    """

    function: LossFunction
    label: str = "label"
    label_type: int = _FLOAT
    but: int | None = None
    output: str | None = None
    picks: bool = False
    ignored: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ArgumentTypeError(
                f"function must be a function of an output and labels, not {type(self.function).__name__}."
            )
        checked_flag("picks", self.picks)
        for name in ("but", "ignored"):
            number = getattr(self, name)
            if number is not None:
                checked_number(
                    name, number, "a whole number or None", lambda _: True, WHOLE
                )

    def classes(self, output: Dims | None) -> LabelClasses | None:
        """Return the values that labels may have for an output of this shape; None for any."""
        if not self.picks or self.but is None:
            return None
        size = None if output is None else output[self.but]
        number = size if isinstance(size, int) else None
        return LabelClasses(self.label, number, self.but, self.ignored)

    def label_shape(self, output: Dims | None) -> Dims:
        """Return the shape of the labels for an output of this shape.

        Raises:
            ModelError: even the rank of the output is unknown.
            ArgumentError: the output has no axis ``but``.
        """
        if output is None:
            raise ModelError(
                "The rank of the model's output is unknown, but the labels need it: declare its shape."
            )
        if self.but is None:
            return output
        rank = len(output)
        if not -rank <= self.but < rank:
            raise ArgumentError(
                f"The loss needs the axis {self.but} of an output that has {rank} axes."
            )
        left_out = self.but % rank
        return tuple(dim for axis, dim in enumerate(output) if axis != left_out)

    def write(self, output: Tensor, labels: Tensor) -> Tensor:
        """Write the loss.

        Raises:
            ArgumentTypeError: the function did not return a tensor.
        """
        value = self.function(output, labels)
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"A loss function must return a tensor, not {type(value).__name__}."
            )
        return value

    def __call__(self, output: ArrayLike, labels: ArrayLike) -> NDArray[np.float32]:
        """Compute the loss of an output and its labels.

        Raises:
            ArgumentError: the labels do not fit the output.
            ArgumentTypeError: the output or the labels are not numbers.
        """
        # The graph that training writes computes it, so that both give the same numbers.
        given = float_array("output", output)
        entry = helper.make_tensor_value_info("train/output", _FLOAT, given.shape)
        graph = Graph.of(small_model([], [entry], []))
        writer = Writer(GraphEditor(graph), "train/loss")
        value = self.write(
            writer.input(entry.name, _FLOAT, given.shape),
            writer.input(self.label, self.label_type, self.label_shape(given.shape)),
        )
        writer.output(value, None)
        model = writer.finish()
        feeds = {entry.name: given, self.label: labels}
        typed = typed_feeds(model, feeds, self.classes(given.shape))
        result: NDArray[np.float32] = run(make_session(model), typed)[value.name]
        return result


def float_array(what: str, given: ArrayLike) -> NDArray[np.float32]:
    """Return numbers as an array.

    Raises:
        ArgumentTypeError: they are not numbers.
    """
    array = checked_array(what, given)
    if array.dtype.kind not in "biuf":
        raise ArgumentTypeError(
            f"{what} must be an array of numbers, not {given!r:.80}."
        )
    return array.astype(np.float32)
