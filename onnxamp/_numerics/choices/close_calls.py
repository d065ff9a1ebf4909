"""Choices that a model makes by its values: how many are closer than the error of what they compare.

An index of the largest element, a comparison or a rounding to an integer jumps where a tie is. No precision gets ties
right, not even float32 on another device, so a choice that differs is no fault by itself. The counts tell how much the
outputs depend on such choices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import NodeProto

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.records import record
from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, may_be_float
from onnxamp._facts.ops import attribute_of, op_facts, op_key
from onnxamp._numerics.choices.margins import Boxes, Counts, boxes, order, rank, steps
from onnxamp._numerics.differences.blocks import Array
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.pieces import run_alone
from onnxamp._runtime.sessions.values import Feeds

_BYTES: Final = 256 << 20
"""Bytes that the values may take which choices compare. No budget of memory decides, so that counts depend on none."""


@record
class CloseCalls:
    """The choices of a node, over all samples.

    Attributes:
        node: its name, or that of its first output.
        op: its type.
        choices: how many it makes: one for each row, element or box.
        close: how many are decided by less than the error of what they compare.
        differ: how many the result decides otherwise; they count as close.
    """

    node: str
    op: str
    choices: int
    close: int = 0
    differ: int = 0

    def __add__(self, later: "CloseCalls") -> "CloseCalls":
        """With those of another sample."""
        return replace(
            self,
            choices=self.choices + later.choices,
            close=self.close + later.close,
            differ=self.differ + later.differ,
        )


class Chooser(NamedTuple):
    """A node that chooses, in both models, and the values that show its choices."""

    node: NodeProto
    result: NodeProto

    @property
    def how(self) -> str:
        """The kind of its choices."""
        return op_facts().decides[op_key(self.node)]

    def reads(self, node: NodeProto) -> list[str]:
        """Return the values to look at of one of both: inputs and, of boxes, those that are kept."""
        kept = node.output[:1] if self.how == "boxes" else []
        return [name for name in (*node.input, *kept) if name]


def choosers(reference: DataflowGraph, result: DataflowGraph) -> list[Chooser]:
    """Return the nodes that choose by floats which low precision reaches.

    Args:
        reference: the original.
        result: its conversion.

    Complexity: linear in nodes.
    """
    reached = set(result.low)
    for node, reads in zip(result.nodes, result.reads, strict=True):
        if not reached.isdisjoint(reads):
            reached.update(node.output)
    choosing = list[Chooser]()
    room = _BYTES
    for node in reference.nodes:
        is_chosen = _chooses_by_floats(reference, node)
        if not is_chosen or _reads_integers(reference, node):
            continue
        twin = _twin(result, node)
        if twin is None or reached.isdisjoint(twin.input):
            continue
        room -= 2 * sum(reference.sizes.get(name, 0) for name in node.input)
        if room < 0:
            break
        choosing.append(Chooser(node, twin))
    return choosing


def read_by(choosing: Sequence[Chooser]) -> list[str]:
    """Return the values of the conversion that show the choices of nodes."""
    return [name for one in choosing for name in one.reads(one.result)]


def _chooses_by_floats(flow: DataflowGraph, node: NodeProto) -> bool:
    """Return whether a node chooses by floats; a Cast does if it makes integers."""
    key = op_key(node)
    if key not in op_facts().decides:
        return False
    kind = flow.types.get(node.output[0]) or ""
    if key == "Cast" and not kind.startswith(("tensor(int", "tensor(uint")):
        return False
    return flow.types.get(node.input[0]) in ANY_FLOAT_TENSORS


def _reads_integers(flow: DataflowGraph, node: NodeProto) -> bool:
    """Return whether a node chooses between numbers that were integers, such as counters, or are constants."""
    for name in filter(None, node.input):
        place = flow.maker.get(name)
        if place is None:
            if name in flow.inputs:
                return False
            continue
        maker = flow.nodes[place]
        is_cast = op_key(maker) == "Cast"
        if not is_cast or may_be_float(flow.types.get(maker.input[0])):
            return False
    return True


def _twin(flow: DataflowGraph, node: NodeProto) -> NodeProto | None:
    """Return the node of another model that makes the same choices, before any Cast of what it returns."""
    name = next(filter(None, node.output))
    while name in flow.maker:
        twin = flow.nodes[flow.maker[name]]
        if op_key(twin) == op_key(node) and _chooses_by_floats(flow, twin):
            return twin
        if op_key(twin) not in op_facts().relabels:
            break
        name = twin.input[0]
    return None


def close_calls(
    models: tuple[Session, Session],
    feeds: Feeds,
    known: tuple[Outputs, Outputs],
    choosing: Sequence[Chooser],
) -> Iterator[CloseCalls]:
    """Yield the choices of nodes on a sample, as far as both models compute them here.

    Args:
        models: the original and its conversion.
        feeds: the sample.
        known: values of both that are known, by name; others are computed.
        choosing: the nodes.
    """
    if not choosing:
        return
    wanted = (
        [name for one in choosing for name in one.reads(one.node)],
        read_by(choosing),
    )
    try:
        values, others = map(_values, models, (feeds, feeds), known, wanted)
    except RuntimeFailure:
        return
    exponents = models[1].prepare(feeds).flow.exponents
    for one in choosing:
        reads = _arrays(one.reads(one.node), values, {})
        other = _arrays(one.reads(one.result), others, exponents)
        if [array.shape for array in reads[:2]] != [
            array.shape for array in other[:2]
        ]:
            continue  # rows that an earlier choice selected
        counts = _counts(one, reads, other)
        if counts is not None and counts.choices:
            label = one.node.name or one.node.output[0]
            yield CloseCalls(label, op_key(one.node), *counts)


def _values(
    model: Session, feeds: Feeds, known: Outputs, names: Sequence[str]
) -> dict[str, Any]:
    """Return values of a model; those that are not known are computed.

    Raises:
        RuntimeFailure: it does not run in pieces.
    """
    lacking = [name for name in dict.fromkeys(names) if name not in known]
    values = {name: known[name] for name in names if name in known}
    if lacking:
        run = run_alone(model.prepare(feeds), feeds, lacking, model.budget)
        values |= {name: run.output(name) for name in lacking}
    return values


def _arrays(
    names: Sequence[str], values: Mapping[str, Any], exponents: Mapping[str, int]
) -> list[Array]:
    """Return values in the units of the original."""
    arrays = list[Array]()
    for name in names:
        array = np.asarray(values[name])
        exponent = exponents.get(name, 0)
        arrays.append(array * np.float32(2.0**exponent) if exponent else array)
    return arrays


def _counts(
    one: Chooser, reads: Sequence[Array], other: Sequence[Array]
) -> Counts | None:
    """Return how close the choices of a node are; None if it makes none."""
    node, how = one.node, one.how
    if how == "boxes":
        return _box_counts(node, reads, other)
    if how == "rank":
        is_top = op_key(node) == "TopK"
        is_largest = op_key(node) != "ArgMin"
        margins = rank(
            reads[0],
            other[0],
            axis=attribute_of(node, "axis", -1 if is_top else 0),
            count=_chosen_count(node, reads) if is_top else 1,
            largest=bool(attribute_of(node, "largest", 1)) and is_largest,
        )
        return None if margins is None else margins.counts()
    if len(reads) > 1:
        if attribute_of(node, "broadcast", 0):
            return None  # before opset 7, an attribute named the axis to begin with
        return order(how, reads[:2], other[:2]).counts()
    return steps(how, reads[0], other[0]).counts()


def _chosen_count(node: NodeProto, reads: Sequence[Array]) -> int:
    """Return how many elements of each row a TopK chooses; before opset 10, an attribute said so."""
    if len(reads) > 1:
        return int(reads[1].reshape(-1)[0])
    return int(attribute_of(node, "k", 1))


def _box_counts(
    node: NodeProto, reads: Sequence[Array], other: Sequence[Array]
) -> Counts:
    """Return how close the decisions about the boxes of a NonMaxSuppression are."""
    is_centered = bool(attribute_of(node, "center_point_box", 0))
    one, two = (
        Boxes.of(each[0], each[1], each[-1], centers=is_centered)
        for each in (reads, other)
    )
    given = [name for name in node.input if name]
    thresholds = [
        float(reads[given.index(node.input[port])].reshape(-1)[0])
        if len(node.input) > port and node.input[port]
        else default
        for port, default in ((3, 0.0), (4, -np.inf))
    ]
    return boxes(one, two, *thresholds)
