"""Feeds of a step: batches ordered by seed and epoch, feeds cast to the input types, and dropout masks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from onnxamp._errors import ArgumentError
from onnxamp._runtime.values import check_shape
from onnxamp.train._forward import Mask

Feeds = Mapping[str, NDArray[Any]]


class Classes(NamedTuple):
    """The values that labels may have: whole numbers from 0 to below ``number``, or ``ignored``.

    ``axis`` is the axis of the classes, along which labels may have size 1. ``number`` and ``ignored`` may be None.
    """

    label: str
    number: int | None
    axis: int
    ignored: int | None


@dataclass(frozen=True, slots=True)
class Batches:
    """One epoch of batches, shuffled by seed and epoch, so that resumed training sees the same batches.

    Args:
        arrays: one array per input of the model, and the labels. Their first axes are the samples.
        size: samples per batch; the last batch may be smaller.
        seed, epoch: determine the order.

    Raises:
        ArgumentError: there are no samples, or the arrays have different numbers of samples.

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
        """Return the batches of a later epoch."""
        return replace(self, epoch=self.epoch + epochs)

    @property
    def samples(self) -> int:
        """The number of samples."""
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
    """Return the feeds cast to the element types of the inputs; for example, float64 data is rounded to float32.

    Args:
        model: the model that the feeds are for.
        feeds: arrays by name.
        classes: the valid labels, if ONNX Runtime would accept invalid ones or count negative ones from the end.

    Raises:
        ArgumentError: an array has the wrong kind (such as floats for integers) or the wrong shape, the number of
            labels differs from the number of samples, or a label is not a class.
    """
    typed: dict[str, NDArray[Any]] = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            array = np.asarray(feeds[entry.name])
            if classes is not None and entry.name == classes.label:
                array = _without_axis(
                    array, classes.axis, len(entry.type.tensor_type.shape.dim)
                )
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
        _check_labels(model, typed, classes)
    return typed


def _without_axis(labels: NDArray[Any], axis: int, rank: int) -> NDArray[Any]:
    """Return the labels in this rank, without the class axis of size 1 that datasets often store."""
    has_axis = labels.ndim == rank + 1 and labels.shape[axis] == 1
    return labels.squeeze(axis) if has_axis else labels


def _check_labels(model: ModelProto, feeds: Feeds, classes: Classes) -> None:
    label, count = classes.label, classes.number
    others, labels = dict(feeds), feeds[label]
    del others[label]
    sizes = _named_sizes(model, others)
    for dim, size in _named_sizes(model, {label: labels}).items():
        if sizes.get(dim, size) != size:
            raise ArgumentError(
                f"The labels {label!r} have the size {size} in {dim!r}, and other inputs {sizes[dim]}: pass as"
                " many of each."
            )
    is_wrong = (labels < 0) | (labels >= (np.inf if count is None else count))
    if classes.ignored is not None:
        is_wrong &= labels != classes.ignored
    wrong = labels[is_wrong]
    if wrong.size:
        least = "0 or more" if count is None else f"classes from 0 to {count - 1}"
        raise ArgumentError(
            f"The labels {label!r} must be {least}, but {wrong.size} of {labels.size} are not, such as"
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
            sizes |= {
                d.dim_param: n
                for d, n in zip(dims, feeds[entry.name].shape, strict=False)
                if d.dim_param
            }
    return sizes
