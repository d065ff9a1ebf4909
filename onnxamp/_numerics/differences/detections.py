"""Comparing detections: rows that an op selected by their values, so that near-equal ones may change places.

TopK, NonMaxSuppression and the like turn a rounding error into another order of rows, or into a row more or less at the
end. Compared in place, every row after it would count as wrong. So rows are matched first (an assignment of least cost:
boxes by their overlap, scores by their difference, labels must agree), and the rest is measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import TypeProto

from onnxamp._base.optional import require
from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT_ELEMS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._numerics.differences.blocks import Array
from onnxamp._numerics.differences.boxes import corners_of, overlaps_of
from onnxamp._numerics.differences.compare import compare, compare_outputs
from onnxamp._numerics.differences.metrics import TensorDiff

_MOST_ROWS: Final = 2000
"""Rows of a list that are matched, highest scores first. The number is limited because an assignment takes cubic time.
"""

_LISTS: Final = (2, 3)
"""Ranks of lists of boxes: [rows, 4] and [images, rows, 4]."""

_PACKED: Final[Mapping[int, tuple[slice, int, int | None]]] = {
    5: (slice(0, 4), 4, None),
    6: (slice(0, 4), 4, 5),
    7: (slice(1, 5), 6, 5),
}
"""Columns of a row that holds a whole detection -> boxes, score and label: (box, score), (box, score, label) and
(image, box, label, score), as detectors with their selection inside are exported."""


def selected_outputs(graph: Graph, /) -> frozenset[str]:
    """Return the outputs of a model that depend on values which an op selected or ordered. Complexity: linear."""
    facts = op_facts()
    pending = [node.index for node in graph.nodes if node.key in facts.selections]
    reached = set(pending)
    outputs = set[str]()
    while pending:
        node = graph.nodes[pending.pop()]
        readers = {reader.index for reader, _ in graph.readers(node)}
        outputs_of_node = [value for value in node.outputs if value != ABSENT]
        places = chain.from_iterable(graph.results[value] for value in outputs_of_node)
        for scope, position in places:
            owner = graph.scopes[scope].owner
            if owner != ABSENT:
                readers.add(owner)
            elif scope == 0:
                outputs.add(graph.model.graph.output[position].name)
        pending += readers - reached
        reached |= readers
    return frozenset(outputs)


def listed_outputs(model: Model, metric: object) -> frozenset[str]:
    """Return the outputs in which a metric looks for detections: all for "detections"; for "auto", those with rows that
    an op selected. A function of the user matches rows itself.
    """
    if metric == "auto":
        selected = selected_outputs(model.ask(graph_of))
        entries = [
            entry.type.tensor_type
            for entry in model.proto.graph.output
            if entry.name in selected
        ]
        return selected if _may_list(entries) else frozenset()
    return frozenset(
        entry.name for entry in model.proto.graph.output if metric == "detections"
    )


def _may_list(entries: Sequence[TypeProto.Tensor]) -> bool:
    """Return whether outputs of these types may list detections. Tokens that TopK routes to experts, for example, do
    not.
    """
    ranks = {
        len(entry.shape.dim) for entry in entries if entry.elem_type not in FLOAT_ELEMS
    }
    for entry in entries:
        if entry.elem_type in FLOAT_ELEMS:
            dims = entry.shape.dim
            is_list = len(dims) in _LISTS and dims[-1].dim_value in {0, 4, *_PACKED}
            if not entry.HasField("shape") or len(dims) in ranks or is_list:
                return True
    return False


class Columns(NamedTuple):
    """The detections in a group of outputs: one row each, image by image."""

    boxes: Array | None
    """[images, rows, 4]."""
    scores: Array
    """[images, rows]."""
    labels: Array | None
    """[images, rows]."""

    def image(self, index: int) -> "tuple[Columns, Array]":
        """Return one image's rows, those with the highest scores if there are too many, and their numbers."""
        best = np.argsort(-self.scores[index], kind="stable")[:_MOST_ROWS]
        boxes = None if self.boxes is None else self.boxes[index, best]
        labels = None if self.labels is None else self.labels[index, best]
        return Columns(boxes, self.scores[index, best], labels), best

    def squashed(self) -> "Columns":
        """Return the same with logits turned into scores from 0 to 1, in the same order."""
        logits = np.clip(self.scores, -500, 500)
        return self._replace(scores=1 / (1 + np.exp(-logits)))


def is_rows(array: Any) -> bool:
    """Return whether an output is an array of numbers with at least one axis."""
    return (
        isinstance(array, np.ndarray)
        and array.ndim >= 1
        and array.dtype.kind in "biufV"
    )


def _is_float(array: Array) -> bool:
    return array.dtype.kind in "fV"


def groups(arrays: Mapping[str, Array]) -> Iterator[tuple[str, ...]]:
    """Yield names of outputs that belong together: boxes and scores first, then labels."""
    free = dict(arrays)

    def labels_of(shape: tuple[int, ...]) -> list[str]:
        fitting = (name for name, a in free.items() if a.shape == shape)
        return [name for name in fitting if not _is_float(free[name])][:1]

    for name, boxes in list(free.items()):
        is_list = _is_float(boxes) and boxes.ndim in _LISTS and boxes.shape[-1] == 4
        if name not in free or not is_list:
            continue
        rows = boxes.shape[:-1]
        scores = [
            other
            for other, a in free.items()
            if other != name and _is_float(a) and _lists(a, rows)
        ]
        if scores:
            group = (name, scores[0], *labels_of(rows))
            for member in group:
                del free[member]
            yield group
    for name, array in list(free.items()):
        is_list = _is_float(array) and array.ndim in _LISTS and array.shape[-2] > 1
        if is_list and array.shape[-1] in _PACKED:
            del free[name]
            yield (name,)
    for name, scores_of in list(free.items()):
        labels = labels_of(scores_of.shape) if _is_float(scores_of) else []
        if labels:
            del free[name], free[labels[0]]
            yield (name, labels[0])


def _lists(scores: Array, rows: tuple[int, ...]) -> bool:
    """Return whether it has one score per row, or one per row and class."""
    has_classes = scores.ndim == len(rows) + 1
    return scores.shape == rows or (has_classes and scores.shape[:-1] == rows)


def columns_of(arrays: Sequence[Array]) -> Columns:
    """Return the arrays of a group, with the images as their first axis."""
    numbers = [np.asarray(array, np.float64) for array in arrays]
    boxes: Array | None = None
    labels: Array | None = None
    if len(numbers) == 1:
        rows = numbers[0]
        box, score, label = _PACKED[rows.shape[-1]]
        boxes = rows[..., box]
        scores = rows[..., score]
        labels = None if label is None else rows[..., label]
    elif not _is_float(arrays[1]):
        scores, labels = numbers
    else:
        boxes, scores = numbers[:2]
        labels = numbers[2] if len(numbers) > 2 else None
        if scores.ndim == boxes.ndim and scores.shape[-1] > 0:
            labels = scores.argmax(-1) if labels is None else labels
            scores = scores.max(-1)
    batch = prod(scores.shape[:-1]), scores.shape[-1]
    return Columns(
        None if boxes is None else boxes.reshape(*batch, 4),
        scores.reshape(batch),
        None if labels is None else labels.reshape(batch),
    )


def by_row(array: Array, side: Columns) -> Array | None:
    """Return the array with the rows of all images along its first axis; None if it has not one for each detection."""
    images, rows = side.scores.shape
    for axis, size in enumerate(array.shape):
        if size == rows and prod(array.shape[:axis]) == images:
            return array.reshape(images * rows, *array.shape[axis + 1 :])
    return None


_LEAST_OVERLAP: Final = 0.5
"""Boxes with a smaller intersection over union are different detections, by the usage of PASCAL VOC."""

_OVERLAP_WEIGHT: Final = 0.2
"""Error of a match per share of its box that does not overlap."""

_APART: Final = 1e3
"""Cost of a pair that is no match: more than any sum of costs of pairs that are."""


@record
class Detections:
    """The result of matching rows of outputs that belong together, over all samples.

    Attributes:
        outputs: names of the outputs.
        rows: detections of the reference.
        matched: rows that the result also has, with the same label and boxes that overlap by at least one half.
        lost, new: detections that only the reference has, and only the result.
        worst_overlap: the smallest intersection over union of two matched boxes; None without boxes.
        worst_score: the largest difference of two matched scores.
        error: the largest error of a row, relative to the largest score. That of a match is the difference of its
            scores, or a fifth of 1 - overlap times the score: 0.95, the strictest overlap that COCO's evaluation asks
            for, is an error of 1 %. That of a row without one is how far its score lies above the
            lowest one that was selected: by so much the result must be wrong to leave it out. If no row of an image has
            a match, it is the score itself.
    """

    outputs: tuple[str, ...]
    rows: int
    matched: int
    lost: int
    new: int
    worst_overlap: float | None
    worst_score: float
    error: float

    def __add__(self, other: "Detections") -> "Detections":
        both = self.worst_overlap, other.worst_overlap
        overlaps = [overlap for overlap in both if overlap is not None]
        return Detections(
            outputs=self.outputs,
            rows=self.rows + other.rows,
            matched=self.matched + other.matched,
            lost=self.lost + other.lost,
            new=self.new + other.new,
            worst_overlap=min(overlaps, default=None),
            worst_score=max(self.worst_score, other.worst_score),
            error=max(self.error, other.error),
        )


class MatchedRows(NamedTuple):
    """Detections, and the arrays of both models without the rows that have no match, in one order.

    ``reference`` and ``result`` hold arrays [matched rows, ...] by output: those of the detections, and other outputs
    with one row for each (masks, keypoints).
    """

    detections: Detections
    reference: dict[str, Array]
    result: dict[str, Array]


def compare_matched(
    reference: Mapping[str, Any], result: Mapping[str, Any], selected: frozenset[str]
) -> tuple[list[Detections], list[TensorDiff]]:
    """Compare all outputs, those that list detections after their rows are matched.

    Args:
        reference, result, selected: as for :func:`match_rows`.

    Returns:
        The detections, and the differences of all outputs: of detections those of matched rows.
    """
    groups = match_rows(reference, result, selected)
    matched = dict[str, MatchedRows]()
    for group in groups:
        matched |= dict.fromkeys(group.reference, group)
    diffs: list[TensorDiff] = []
    for name, value in reference.items():
        if name not in matched:
            diffs += compare_outputs(name, value, result[name])
            continue
        group = matched[name]
        detections = group.detections
        error = detections.error if name in detections.outputs else None
        diff = compare(name, group.reference[name], group.result[name])
        diffs.append(replace(diff, detections=error))
    return [group.detections for group in groups], diffs


def match_rows(
    reference: Mapping[str, Any], result: Mapping[str, Any], selected: frozenset[str]
) -> tuple[MatchedRows, ...]:
    """Match the rows of outputs.

    Args:
        reference, result: arrays by output.
        selected: the outputs that may hold detections.

    Returns:
        One item per group of outputs that belong together: boxes [..., rows, 4] with scores [..., rows] or [..., rows,
        classes], and labels [..., rows] if there are any; scores and labels of one shape, as from TopK; or one output
        whose rows contain all of these.
    """
    arrays = {
        name: array
        for name, array in reference.items()
        if name in selected and is_rows(array) and is_rows(result.get(name))
    }
    matched = []
    for names in groups(arrays):
        if not arrays.keys() >= {*names}:
            continue  # rows of detections that are matched already
        one = columns_of([reference[name] for name in names])
        if not _differ_in_rows(reference, result, names, one.scores.shape[1]):
            continue
        other = columns_of([result[name] for name in names])
        # Beside boxes, scores below zero are logits, except -1, which pads lists.
        is_logit = (one.scores < 0) & (one.scores != -1)
        if one.boxes is not None and is_logit.any():
            one = one.squashed()
            other = other.squashed()
        detections, rows, columns = _compared(names, one, other)
        group = MatchedRows(detections, {}, {})
        for name in list(arrays):
            mine = by_row(reference[name], one)
            theirs = by_row(result[name], other)
            if mine is not None and theirs is not None:
                group.reference[name] = mine[rows]
                group.result[name] = theirs[columns]
                del arrays[name]
        matched.append(group)
    return tuple(matched)


def _differ_in_rows(
    reference: Mapping[str, Any],
    result: Mapping[str, Any],
    names: Sequence[str],
    rows: int,
) -> bool:
    """Return whether the outputs of both sides have the same shapes, apart from the number of rows of the result."""
    counts = list[set[int]]()
    for name in names:
        mine, theirs = np.shape(reference[name]), np.shape(result[name])
        if len(mine) != len(theirs):
            return False
        counts.append(
            {
                theirs[axis]
                for axis, size in enumerate(mine)
                if size == rows
                and mine[:axis] == theirs[:axis]
                and mine[axis + 1 :] == theirs[axis + 1 :]
            }
        )
    return bool(set[int].intersection(*counts))


def _compared(
    names: tuple[str, ...], reference: Columns, result: Columns
) -> tuple[Detections, Array, Array]:
    """Return the detections of all images, and which rows of both sides match, counted through all images."""
    scale = max(float(np.abs(reference.scores).max(initial=0)), 1e-12)
    # An empty batch has no images, and so no detections.
    total = Detections(
        outputs=names,
        rows=0,
        matched=0,
        lost=0,
        new=0,
        worst_overlap=None,
        worst_score=0.0,
        error=0.0,
    )
    rows = [np.empty(0, int)]
    columns = [np.empty(0, int)]
    for index in range(len(reference.scores)):
        (one, kept), (other, others) = reference.image(index), result.image(index)
        detections, mine, theirs = _image(names, one, other, scale)
        total += detections
        starts = index * reference.scores.shape[1], index * result.scores.shape[1]
        rows.append(kept[mine] + starts[0])
        columns.append(others[theirs] + starts[1])
    return total, np.concatenate(rows), np.concatenate(columns)


def _image(
    names: tuple[str, ...], one: Columns, other: Columns, scale: float
) -> tuple[Detections, Array, Array]:
    """Return the detections of one image, and the rows and columns that match."""
    overlaps = None
    if one.boxes is not None and other.boxes is not None:
        overlaps = _overlaps(one.boxes, other.boxes)
    rows, columns = _matches(one, other, overlaps)
    gaps = np.abs(one.scores[rows] - other.scores[columns])
    errors = [gaps]
    worst = None
    if overlaps is not None and len(rows):
        kept = overlaps[rows, columns]
        worst = float(kept.min())
        errors.append(_OVERLAP_WEIGHT * (1 - kept) * np.abs(one.scores[rows]))
    lost = np.delete(np.arange(len(one.scores)), rows)
    new = np.delete(np.arange(len(other.scores)), columns)
    errors += [
        _excess(lost, one.scores, other.scores),
        _excess(new, other.scores, one.scores),
    ]
    error = float(np.concatenate(errors).max(initial=0)) / scale  # NaN if any is
    detections = Detections(
        outputs=names,
        rows=len(one.scores),
        matched=len(rows),
        lost=len(lost),
        new=len(new),
        worst_overlap=worst,
        worst_score=float(gaps.max(initial=0)),
        error=error if np.isfinite(error) else np.inf,
    )
    return detections, rows, columns


def _excess(missing: npt.NDArray[np.intp], mine: Array, others: Array) -> Array:
    """Return how far scores of rows that the other side lacks lie above the lowest that was selected there.

    If the number of rows depends on a threshold, no score of either side is below it. If none of the rows has a match,
    their boxes or labels are wrong rather than their order, and each counts in full.
    """
    are_listed = _are_detections(mine)
    lacking = mine[missing[are_listed[missing]]]
    known = others[_are_detections(others)]
    if len(mine) != len(others):
        known = np.concatenate([mine[are_listed], known])
    if not known.size or lacking.size == np.count_nonzero(are_listed):
        return np.asarray(np.abs(lacking))
    return np.asarray(np.maximum(lacking - known.min(), 0))


def _are_detections(scores: Array) -> npt.NDArray[np.bool_]:
    """Return which rows do not only pad a list to a fixed length: those have the score 0, or a negative one such as -1
    beside positive ones.
    """
    negative = scores < 0
    pads = scores == 0
    if (scores > 0).any() and len(np.unique(scores[negative])) == 1:
        pads |= negative
    return np.asarray(~pads)


def _matches(
    one: Columns, other: Columns, overlaps: Array | None
) -> tuple[Array, Array]:
    """Return the rows and columns of the pairs that are the same detection."""
    require("scipy", "Matching detections needs scipy", "measure")
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - only detections need it

    costs = np.abs(one.scores[:, None] - other.scores)
    costs[~np.isfinite(costs)] = _APART
    apart = np.zeros(costs.shape, bool)
    if overlaps is not None:
        costs = costs + (1 - overlaps)
        apart |= overlaps < _LEAST_OVERLAP
    if one.labels is not None and other.labels is not None:
        apart |= one.labels[:, None] != other.labels
    costs = np.where(apart, _APART, np.minimum(costs, _APART))
    rows, columns = linear_sum_assignment(costs)
    good = costs[rows, columns] < _APART
    return rows[good], columns[good]


def _overlaps(one: Array, other: Array) -> Array:
    """Return the intersection over union of every pair of boxes.

    These are corners or, if the reference's cannot be, centers and sizes.
    """
    if not (one[:, 2:] >= one[:, :2]).all():
        one = corners_of(one)
        other = corners_of(other)
    # Equal boxes without an area, or with infinite corners, are the same box as well.
    same = (one[:, None] == other).all(-1)
    return np.where(same, 1.0, overlaps_of(one, other))
