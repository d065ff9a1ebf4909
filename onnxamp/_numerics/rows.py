"""Which outputs of a model are lists of detections: rows of boxes, scores and labels that an op selected."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TypeProto

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._numerics.metrics import MEASURABLE
from onnxamp._ops.facts import op_facts
from onnxamp._runtime.flow import Flow

Array: TypeAlias = npt.NDArray[Any]

_MOST_ROWS: Final = 2000
"""Rows of a list that are matched, the ones with the highest scores: an assignment takes cubic time."""

_LISTS: Final = (2, 3)
"""Ranks of lists of boxes: [rows, 4] and [images, rows, 4]."""

_PACKED: Final[Mapping[int, tuple[slice, int, int | None]]] = {
    5: (slice(0, 4), 4, None),
    6: (slice(0, 4), 4, 5),
    7: (slice(1, 5), 6, 5),
}
"""Columns of a row that holds a whole detection -> boxes, score and label: (box, score), (box, score, label) and
(image, box, label, score), as detectors with their selection inside are exported."""


def selected_outputs(graph: Graph) -> frozenset[str]:
    """Outputs of a model that depend on what an op selected or ordered by its values. Complexity: linear."""
    facts = op_facts()
    pending = [node.index for node in graph.nodes if node.key in facts.selections]
    reached, outputs = set(pending), set[str]()
    while pending:
        node = graph.nodes[pending.pop()]
        readers = {reader.index for reader, _ in graph.readers(node)}
        for scope, position in (
            place for value in node.outputs if value != ABSENT for place in graph.results[value]
        ):
            owner = graph.scopes[scope].owner
            if owner != ABSENT:
                readers.add(owner)
            elif scope == 0:
                outputs.add(graph.model.graph.output[position].name)
        pending += readers - reached
        reached |= readers
    return frozenset(outputs)


def listed_outputs(model: Model, metric: str) -> frozenset[str]:
    """The outputs in which a metric looks for detections: "detections" in all, "auto" where an op selected rows."""
    if metric == "auto":
        selected = selected_outputs(model.ask(graph_of))
        entries = [
            entry.type.tensor_type for entry in model.proto.graph.output if entry.name in selected
        ]
        return selected if _may_list(entries) else frozenset()
    return frozenset(entry.name for entry in model.proto.graph.output if metric == "detections")


def _may_list(entries: Sequence[TypeProto.Tensor]) -> bool:
    """Whether outputs of these types may list detections: what is routed to experts by TopK, say, does not."""
    floats = [entry for entry in entries if entry.elem_type in FLOAT_ELEMS]
    integers = {len(entry.shape.dim) for entry in entries if entry.elem_type not in FLOAT_ELEMS}
    return any(
        not entry.HasField("shape")
        or len(entry.shape.dim) in integers
        or (len(entry.shape.dim) in _LISTS and entry.shape.dim[-1].dim_value in {0, 4, *_PACKED})
        for entry in floats
    )


class Columns(NamedTuple):
    """The detections in a group of outputs: one row each, image by image."""

    boxes: Array | None
    """[images, rows, 4]."""
    scores: Array
    """[images, rows]."""
    labels: Array | None
    """[images, rows]."""

    def image(self, index: int) -> "tuple[Columns, Array]":
        """One image's rows, those with the highest scores if there are too many, and their numbers."""
        best = np.argsort(-self.scores[index], kind="stable")[:_MOST_ROWS]
        boxes = None if self.boxes is None else self.boxes[index, best]
        labels = None if self.labels is None else self.labels[index, best]
        return Columns(boxes, self.scores[index, best], labels), best

    def squashed(self) -> "Columns":
        """The same with logits turned into scores from 0 to 1, in the same order."""
        return self._replace(scores=1 / (1 + np.exp(-np.clip(self.scores, -500, 500))))


def is_rows(array: Any) -> bool:
    """Whether an output is an array of numbers with at least one axis."""
    return isinstance(array, np.ndarray) and array.ndim >= 1 and array.dtype.kind in "biufV"


def _is_float(array: Array) -> bool:
    return array.dtype.kind in "fV"


def groups(arrays: Mapping[str, Array]) -> Iterator[tuple[str, ...]]:
    """Names of outputs that belong together: boxes and scores first, then labels."""
    free = dict(arrays)
    for name, boxes in list(free.items()):
        if (
            name not in free
            or not _is_float(boxes)
            or boxes.ndim not in _LISTS
            or boxes.shape[-1] != 4
        ):
            continue
        rows = boxes.shape[:-1]
        scores = [
            other for other, a in free.items() if other != name and _is_float(a) and _lists(a, rows)
        ]
        if scores:
            labels = [other for other, a in free.items() if not _is_float(a) and a.shape == rows]
            group = (name, scores[0], *labels[:1])
            for member in group:
                del free[member]
            yield group
    for name, array in list(free.items()):
        if (
            _is_float(array)
            and array.ndim in _LISTS
            and array.shape[-1] in _PACKED
            and array.shape[-2] > 1
        ):
            del free[name]
            yield (name,)
    for name, scores_of in list(free.items()):
        labels = [
            other for other, a in free.items() if not _is_float(a) and a.shape == scores_of.shape
        ]
        if _is_float(scores_of) and labels and name in free:
            del free[name], free[labels[0]]
            yield (name, labels[0])


def _lists(scores: Array, rows: tuple[int, ...]) -> bool:
    """Whether it holds one score, or one for each class, per row."""
    return scores.shape == rows or (scores.ndim == len(rows) + 1 and scores.shape[:-1] == rows)


def columns_of(arrays: Sequence[Array]) -> Columns:
    """The arrays of a group, with the images as their first axis."""
    numbers = [np.asarray(array, np.float64) for array in arrays]
    boxes: Array | None = None
    labels: Array | None = None
    if len(numbers) == 1:
        box, score, label = _PACKED[numbers[0].shape[-1]]
        rows = numbers[0]
        boxes, scores, labels = (
            rows[..., box],
            rows[..., score],
            None if label is None else rows[..., label],
        )
    elif not _is_float(arrays[1]):
        scores, labels = numbers
    else:
        boxes, scores = numbers[:2]
        labels = numbers[2] if len(numbers) > 2 else None
        if scores.ndim == boxes.ndim and scores.shape[-1] > 0:
            labels = scores.argmax(-1) if labels is None else labels
            scores = scores.max(-1)
    batch = (
        (-1, scores.shape[-1])
        if scores.size
        else (int(np.prod(scores.shape[:-1])), scores.shape[-1])
    )
    return Columns(
        None if boxes is None else boxes.reshape(*batch, 4),
        scores.reshape(batch),
        None if labels is None else labels.reshape(batch),
    )


def by_row(array: Array, side: Columns) -> Array | None:
    """The array with the rows of all images along its first axis; None if it has not one for each detection."""
    images, rows = side.scores.shape
    for axis, size in enumerate(array.shape):
        if size == rows and prod(array.shape[:axis]) == images:
            return array.reshape(images * rows, *array.shape[axis + 1 :])
    return None


_REACH: Final = 64
"""Nodes that may lie between a value of the result and the nearest values that the reference has, too."""


class Replay(NamedTuple):
    """Nodes of the result, in order, that compute a value from values of the reference, and those values."""

    nodes: tuple[int, ...]
    reads: tuple[str, ...]
    rounded: frozenset[str]
    """Those of ``reads`` that are low precision in the result, but not in the reference."""


class Pairing(NamedTuple):
    """Values that nodes of both models compute under one name, and how the result's ops are fed to be judged alone."""

    shared: Mapping[str, Replay | None]
    """In the reference's order; None if too many nodes lie between a value and the nearest that the reference has."""
    replaceable: frozenset[str] = frozenset()
    """Values of the result that are replaced by the reference's when ops are replayed."""
    accumulated: bool = True
    """Whether the result's own values are compared as well as the replayed ones."""
    exponents: Mapping[str, int] = {}
    """Value -> e, where the result stores it as a multiple by 2^-e of what the reference does."""

    def reads(self) -> Counter[str]:
        """By value of the reference: the number of replays that read it."""
        return Counter(
            name for replay in self.shared.values() if replay is not None for name in replay.reads
        )


def pair(reference: Flow, result: Flow) -> Pairing:
    """Match values by name and type.

    Complexity: linear in nodes, times the few nodes (Casts) between shared values.
    """
    both = reference.own & result.own
    made = [
        name
        for node in reference.nodes
        for name in node.output
        if name in result.maker and name in both
    ]
    shared = {
        name: _replay(reference, result, name)
        for name in made
        if _is_measurable(reference, result, name)
    }
    replaceable = frozenset(name for name in made if _can_replace(reference, result, name))
    return Pairing(shared, replaceable, exponents=exponents_between(reference, result))


def exponents_between(reference: Flow, result: Flow) -> dict[str, int]:
    """Value -> e, where the result stores it as a multiple by 2^-e of what the reference does."""
    one, other = reference.exponents, result.exponents
    differences = {name: other.get(name, 0) - one.get(name, 0) for name in (*one, *other)}
    return {name: exponent for name, exponent in differences.items() if exponent}


def _is_measurable(reference: Flow, result: Flow, name: str) -> bool:
    """Whether both values are tensors of numbers, as far as types are known."""
    return all(
        kind is None or kind in MEASURABLE
        for kind in (reference.types.get(name), result.types.get(name))
    )


def _replay(reference: Flow, result: Flow, target: str) -> Replay | None:
    nodes, reads = {result.maker[target]}, dict[str, None]()
    waiting = list(nodes)
    while waiting:
        for name in result.reads[waiting.pop()]:
            if _can_replace(reference, result, name):
                reads[name] = None
            elif name in result.maker and result.maker[name] not in nodes:
                nodes.add(result.maker[name])
                waiting.append(result.maker[name])
            elif name in result.inputs or name in result.defaults:
                return None
        if len(nodes) > _REACH:
            return None
    rounded = frozenset(
        name for name in reads if result.low.get(name) not in (None, reference.low.get(name))
    )
    return Replay(tuple(sorted(nodes)), tuple(reads), rounded)


def _can_replace(reference: Flow, result: Flow, name: str) -> bool:
    """Whether the reference's value can be fed to readers of the result's."""
    known = name in reference.maker or name in reference.inputs or name in reference.defaults
    if not known or name not in reference.own:
        return False
    one, other = reference.types.get(name), result.types.get(name)
    if (one or "").startswith("optional"):
        return False  # an empty one could not be fed
    return one == other or (one == "tensor(float)" and name in result.low)
