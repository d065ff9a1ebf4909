"""What a step is fed: batches in an order that seed and epoch decide, in the types of the inputs; dropout masks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._errors import ArgumentError, ArgumentTypeError, ModelError
from onnxamp._gradients.writer import Tensor
from onnxamp._graph.shapes import Dims
from onnxamp._runtime.values import check_shape
from onnxamp.train._forward import Mask

Feeds = Mapping[str, NDArray[Any]]


class Classes(NamedTuple):
    """What labels may be: whole numbers from 0 to below ``number``, which is None where nothing tells it."""

    label: str
    number: int | None


@dataclass(frozen=True, slots=True)
class Batches:
    """One epoch of batches, shuffled by seed and epoch: whoever resumes training meets the same ones.

    Args:
        arrays: one array per input of the model, and the labels. Their first axes are the samples.
        size: samples per batch; the last batch may be smaller.
        seed, epoch: of the order.

    Raises:
        ArgumentError: there are no samples, or the arrays hold different numbers of them.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import Batches
        >>> batches = Batches({"x": np.zeros((10, 6)), "label": np.zeros(10, np.int64)}, size=4)
        >>> [batch["x"].shape for batch in batches]
        [(4, 6), (4, 6), (2, 6)]
    """

    arrays: Mapping[str, NDArray[Any]]
    size: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        counts = {
            name: array.shape[0] if array.ndim else 0
            for name, array in self.arrays.items()
        }
        if not counts or min(counts.values()) == 0 or len(set(counts.values())) > 1:
            raise ArgumentError(
                f"All arrays need the same number of samples, at least one; they have {counts}."
            )
        if self.size < 1:
            raise ArgumentError(f"A batch needs at least one sample, not {self.size}.")

    def after(self, epochs: int) -> "Batches":
        """The batches of a later epoch."""
        return replace(self, epoch=self.epoch + epochs)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(next(iter(self.arrays.values())).shape[0])

    def __len__(self) -> int:
        return (self.samples + self.size - 1) // self.size

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)
        for start in range(0, self.samples, self.size):
            rows = order[start : start + self.size]
            yield {name: array[rows] for name, array in self.arrays.items()}


def typed_feeds(
    model: ModelProto, feeds: Mapping[str, Any], classes: Classes | None
) -> dict[str, NDArray[Any]]:
    """The feeds in the element types of the inputs; float64 data, say, is rounded to float32.

    Args:
        model: whose inputs they are.
        feeds: arrays by name.
        classes: what labels may be, where ONNX Runtime would not miss some, or count negative ones from the end.

    Raises:
        ArgumentError: an array is of another kind, such as floats for integers, or of another shape, there are fewer or
            more labels than samples, or one is no class.
    """
    typed: dict[str, NDArray[Any]] = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            array = np.asarray(feeds[entry.name])
            wanted = np.dtype(
                helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
            )
            if array.dtype != wanted and not np.can_cast(
                array.dtype, wanted, "same_kind"
            ):
                raise ArgumentError(
                    f"The input {entry.name!r} takes {wanted} numbers, not {array.dtype}."
                )
            if entry.type.tensor_type.HasField("shape"):
                check_shape(entry.name, array.shape, entry.type.tensor_type.shape)
            typed[entry.name] = array.astype(wanted, copy=False)
    if classes is not None:
        _check_labels(model, typed, *classes)
    return typed


def _check_labels(
    model: ModelProto, feeds: Feeds, label: str, count: int | None
) -> None:
    others, labels = dict(feeds), feeds[label]
    del others[label]
    sizes = _named_sizes(model, others)
    for dim, size in _named_sizes(model, {label: labels}).items():
        if sizes.get(dim, size) != size:
            raise ArgumentError(
                f"The labels {label!r} have the size {size} in {dim!r}, and other inputs {sizes[dim]}: pass as"
                " many of each."
            )
    wrong = labels[(labels < 0) | (labels >= (np.inf if count is None else count))]
    if wrong.size:
        least = "0 or more" if count is None else f"classes from 0 to {count - 1}"
        raise ArgumentError(
            f"The labels {label!r} must be {least}, but {wrong.size} of {labels.size} are not, such as"
            f" {wrong[0]}: correct them, or leave these samples out."
        )


def draw_masks(
    masks: Sequence[Mask], model: ModelProto, feeds: Feeds, seed: int, step: int
) -> dict[str, NDArray[np.bool_]]:
    """Dropout masks from a counter-based generator keyed by seed and step, so that a resumed training draws the same.

    Raises:
        ArgumentError: the feeds do not determine the shape of a mask.
    """
    sizes = _named_sizes(model, feeds)
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    drawn = {}
    for mask in masks:
        shape = [
            dim if isinstance(dim, int) else sizes.get(str(dim), -1)
            for dim in mask.dims
        ]
        if -1 in shape:
            raise ArgumentError(
                f"The dropout mask {mask.name!r} has the size {mask.dims[shape.index(-1)]!r}, which no input has."
            )
        drawn[mask.name] = generator.random(shape, np.float32) >= mask.ratio
    return drawn


def _named_sizes(model: ModelProto, feeds: Feeds) -> dict[str, int]:
    """The sizes of the dimensions that have a name."""
    sizes: dict[str, int] = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            dims = entry.type.tensor_type.shape.dim
            sizes |= {
                d.dim_param: n
                for d, n in zip(dims, feeds[entry.name].shape, strict=False)
                if d.dim_param
            }
    return sizes


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

    def classes(self, output: Dims | None) -> Classes | None:
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
        return tuple(dim for axis, dim in enumerate(output) if axis != self.but)


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
    "cross-entropy": Loss(
        cross_entropy, label_type=TensorProto.INT64, but=1, picks=True
    ),
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
