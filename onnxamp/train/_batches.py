"""The inputs of a training step: batches ordered by seed and epoch, arrays of the right types, dropout masks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
)
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._options.doors import door
from onnxamp._options.values import checked_array
from onnxamp._runtime.sessions.values import check_shape
from onnxamp.train._forward import Mask

Feeds = Mapping[str, NDArray[Any]]


class LabelClasses(NamedTuple):
    """The values that labels may have: whole numbers from 0 to below ``number``, or ``ignored``.

    ``axis`` is the axis of the classes, along which labels may have size 1. ``number`` and ``ignored`` may be None.
    """

    label: str
    number: int | None
    axis: int
    ignored: int | None


@door
@dataclass(frozen=True, slots=True)
class Batches:
    """One epoch of batches, shuffled by seed and epoch, so that resumed training sees the same batches.

    Args:
        arrays: one array per input of the model, and the labels. Their first axes are the samples.
        size: samples per batch; the last batch may be smaller.
        seed, epoch: determine the order.

    Raises:
        ArgumentError: there are no samples, or the arrays have different numbers of samples.
        ArgumentTypeError: ``arrays`` is no dict of arrays, or another argument not a whole number.

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
        if not isinstance(self.arrays, Mapping):
            raise ArgumentTypeError(
                "arrays must be a dict of arrays, by the names of the inputs and the labels, not"
                f" {type(self.arrays).__name__}."
            )
        counts = {
            name: _sample_count(name, array) for name, array in self.arrays.items()
        }
        what = "a positive whole number"
        checked_number("size", self.size, what, lambda n: n > 0, WHOLE)
        what = "a whole number, 0 or greater"
        checked_number("seed", self.seed, what, lambda n: n >= 0, WHOLE)
        checked_number("epoch", self.epoch, what, lambda n: n >= 0, WHOLE)
        sizes = set(counts.values())
        if len(sizes) != 1 or 0 in sizes:
            raise ArgumentError(
                f"All arrays need the same number of samples, at least one; they have {counts}."
            )

    def after(self, epochs: int) -> "Batches":
        """Return the batches of a later epoch."""
        return replace(self, epoch=self.epoch + epochs)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return int(next(iter(self.arrays.values())).shape[0])

    def __len__(self) -> int:
        return (self.samples + self.size - 1) // self.size

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(self.samples)
        for start in range(0, self.samples, self.size):
            rows = order[start : start + self.size]
            yield {name: array[rows] for name, array in self.arrays.items()}


def _sample_count(name: str, array: NDArray[Any]) -> int:
    """Return the number of samples in an array.

    Raises:
        ArgumentTypeError: it is no array.
    """
    if not hasattr(array, "shape") or not hasattr(array, "ndim"):
        raise ArgumentTypeError(
            f"{name!r} must be an array, not {type(array).__name__}."
        )
    return int(array.shape[0]) if array.ndim else 0


def typed_feeds(
    model: ModelProto, feeds: Mapping[str, Any], classes: LabelClasses | None
) -> dict[str, NDArray[Any]]:
    """Return the feeds cast to the element types of the inputs; for example, float64 data is rounded to float32.

    Args:
        model: the model that the feeds are for.
        feeds: arrays by name.
        classes: the valid labels, if ONNX Runtime would accept invalid ones or count negative ones from the end.

    Raises:
        ArgumentError: an array has the wrong kind (such as floats for integers) or the wrong shape, the number of
            labels differs from the number of samples, or a label is not a class.
        ArgumentTypeError: NumPy makes no array of what is given.
    """
    typed: dict[str, NDArray[Any]] = {}
    for entry in model.graph.input:
        if entry.name not in feeds:
            continue
        kind = entry.type.tensor_type
        array = checked_array(f"The input {entry.name!r}", feeds[entry.name])
        if classes is not None and entry.name == classes.label:
            array = _without_axis(array, classes.axis, len(kind.shape.dim))
        wanted = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        is_castable = np.can_cast(array.dtype, wanted, "same_kind")
        if array.dtype != wanted and not is_castable:
            raise ArgumentError(
                f"The input {entry.name!r} takes {wanted} numbers, not {array.dtype}."
            )
        if kind.HasField("shape"):
            check_shape(entry.name, array.shape, kind.shape)
        typed[entry.name] = array.astype(wanted, copy=False)
    _check_sizes(model, typed)
    if classes is not None:
        _check_labels(typed, classes)
    return typed


def _without_axis(labels: NDArray[Any], axis: int, rank: int) -> NDArray[Any]:
    """Return the labels in this rank, without the class axis of size 1 that datasets often store."""
    has_axis = labels.ndim == rank + 1 and labels.shape[axis] == 1
    return labels.squeeze(axis) if has_axis else labels


def _check_sizes(model: ModelProto, feeds: Feeds) -> None:
    """Check that dimensions of one name have one size: ONNX Runtime would repeat a single label for all samples."""
    sizes = dict[str, int]()
    for name, array in feeds.items():
        for dim, size in _named_sizes(model, {name: array}).items():
            if sizes.setdefault(dim, size) != size:
                raise ArgumentError(
                    f"The input {name!r} has the size {size} in {dim!r}, and another one {sizes[dim]}: pass equally many"
                    " samples of each."
                )


def _check_labels(feeds: Feeds, classes: LabelClasses) -> None:
    label = classes.label
    count = classes.number
    labels = feeds[label]
    is_wrong = (labels < 0) | (labels >= (np.inf if count is None else count))
    if classes.ignored is not None:
        is_wrong &= labels != classes.ignored
    wrong = labels[is_wrong]
    if wrong.size:
        allowed = "0 or more" if count is None else f"classes from 0 to {count - 1}"
        raise ArgumentError(
            f"The labels {label!r} must be {allowed}, but {wrong.size} of {labels.size} are not, such as"
            f" {wrong[0]}: correct them, or leave these samples out."
        )


def draw_masks(
    masks: Sequence[Mask], model: ModelProto, feeds: Feeds, seed: int, step: int
) -> dict[str, NDArray[np.bool_]]:
    """Draw dropout masks from a counter-based generator keyed by seed and step, so that resumed training draws the
    same.

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
    """Return the sizes of the dimensions that have a name."""
    sizes: dict[str, int] = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            dims = entry.type.tensor_type.shape.dim
            for dim, size in zip(dims, feeds[entry.name].shape, strict=False):
                if dim.dim_param:
                    sizes[dim.dim_param] = size
    return sizes
