"""Every fold that a model offers: each kind has conditions in addition to its form, which cannot express them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import isclose, prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxamp._base.records import record
from onnxamp._decide.patterns.forms import find_forms
from onnxamp._decide.patterns.fusion_groups import constant_batch_norms
from onnxamp._facts.dtypes import (
    ELEM_NUMBERS,
    FLOAT,
    FLOAT32_MAX,
    LOW_TENSORS,
    element_name,
)
from onnxamp._facts.ops import attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Kind, Match, form_table, only_reader
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied
from onnxamp._model.weights import read_array


@record
class NewWeight:
    """A weight that a fold adds, with a name based on ``base``; it is computed on demand."""

    base: str
    make: Callable[[], TensorProto]


@record
class Fold:
    """One node for many.

    ``kind`` is its name in reports, ``opset`` the first that has the op. The new node replaces ``last``, with its name
    and its first output; or ``first`` stays in place, with its attributes and other ``inputs``.
    """

    kind: str
    op: str
    opset: int
    nodes: frozenset[int]
    last: int
    inputs: tuple[int | NewWeight, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    first: int = ABSENT

    @property
    def reads(self) -> set[int]:
        """The values that the new node reads."""
        return {value for value in self.inputs if isinstance(value, int)}


KIND = "BatchNorm"
_EPSILON = 1e-5
"""The schema's default."""

Array = NDArray[Any]


def batch_norms(graph: Graph) -> list[Fold]:
    """Return the folds of batch normalizations into weights.

    Complexity: each weight that changes is read here, and again when it is computed.
    """
    folds = []
    for producer, node in constant_batch_norms(
        graph, graph.constants.tensors.__contains__
    ):
        values = [
            value for value in (*producer.inputs, *node.inputs) if value != ABSENT
        ]
        if any(graph.types[value] != FLOAT for value in values):
            continue
        weights = _weights(graph, producer, node)
        if weights is not None:
            folds.append(
                Fold(
                    kind=KIND,
                    op=producer.key,
                    opset=1,
                    nodes=frozenset((producer.index, node.index)),
                    last=node.index,
                    inputs=(producer.inputs[0], *weights),
                    first=producer.index,
                )
            )
    return folds


def _weights(
    graph: Graph, producer: Node, node: Node
) -> tuple[NewWeight, NewWeight] | None:
    """Return the weight and the bias of the producer with the normalization in them.

    Return None if their shapes do not fit, or if a number would be NaN or exceed float32.
    """
    # In float64, so that the new weights are rounded once.
    scale, shift, mean, variance = (
        _read(graph, value).astype(np.float64) for value in node.inputs[1:]
    )
    epsilon = attribute(node.proto, "epsilon")
    channels = scale.size
    weight = _read(graph, producer.inputs[1])
    bias = _bias(graph, producer, channels)
    shapes = _shapes(producer, weight.shape, channels)
    if shapes is None or bias is None:
        return None
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + (_EPSILON if epsilon is None else epsilon))
        total = (bias - mean) * factor + shift
        largest = max(
            float(weight.max(initial=0)), -float(weight.min(initial=0))
        ) * np.abs(factor)
    if not (np.concatenate((largest, np.abs(total))) < FLOAT32_MAX).all():
        return None
    names = graph.values[producer.inputs[1]].name, f"{producer.label}_bias"
    if producer.input(2) != ABSENT:
        names = names[0], graph.values[producer.inputs[2]].name
    return (
        NewWeight(
            names[0], lambda: numpy_helper.from_array(_times(weight, factor, *shapes))
        ),
        NewWeight(names[1], lambda: numpy_helper.from_array(total.astype(np.float32))),
    )


def _read(graph: Graph, value: int) -> Array:
    return read_array(graph.constants.tensors[value], graph.folder)


def _bias(graph: Graph, producer: Node, channels: int) -> Array | None:
    """Return the bias of the producer per channel; None if it is not one number for each."""
    if producer.input(2) == ABSENT:
        return np.zeros(channels)
    bias = _read(graph, producer.inputs[2]).astype(np.float64)
    if producer.key != "Gemm":
        return bias if bias.shape == (channels,) else None
    beta = attribute(producer.proto, "beta")
    is_per_channel = bias.size == 1 or bias.shape in ((channels,), (1, channels))
    if not is_per_channel:
        return None
    factor = 1.0 if beta is None else beta
    return np.broadcast_to(bias.reshape(-1), channels) * factor


def _shapes(
    producer: Node, weight: tuple[int, ...], channels: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes in which weight and factor are multiplied; None if the output channels do not match."""
    if producer.key == "Gemm":
        axis = 0 if attribute(producer.proto, "transB") else 1
        fits = len(weight) == 2 and weight[axis] == channels
        return (
            (weight, (channels, 1) if axis == 0 else (1, channels)) if fits else None
        )
    ones = (1,) * (len(weight) - 2)
    if len(weight) < 3:
        return None
    if producer.key == "Conv":
        return (weight, (channels, 1, *ones)) if weight[0] == channels else None
    groups = attribute(producer.proto, "group") or 1
    if weight[1] * groups != channels or weight[0] % groups:
        return None
    return (groups, weight[0] // groups, *weight[1:]), (groups, 1, weight[1], *ones)


def _times(
    weight: Array, factor: Array, split: tuple[int, ...], shape: tuple[int, ...]
) -> Array:
    """Return the product in float64, one part of the first axis at a time, which avoids a second copy of the weight."""
    product = np.empty(split, np.float32)
    source = weight.reshape(split)
    factors = factor.reshape(shape)
    for index in range(split[0]):
        product[index] = source[index] * factors[index if shape[0] > 1 else 0]
    return product.reshape(weight.shape)


def _folded(
    kind: Kind,
    match: Match,
    inputs: tuple[int | NewWeight, ...],
    attributes: Mapping[str, Any],
) -> Fold:
    """Return the fold of a match into the op of its kind."""
    return Fold(
        kind=kind.name,
        op=kind.op,
        opset=kind.opset,
        nodes=match.nodes,
        last=match.core,
        inputs=inputs,
        attributes=attributes,
    )


_AXIS_BY_ITSELF = 13
"""First opset at which Softmax works along one axis, not along all axes from that one on."""


def activation(graph: Graph, kind: Kind, match: Match) -> Fold | None:
    """Return the fold of an activation; None for a number without an axis.

    The constants of the form may have the shape [1] and give the result an axis, which the op would not.
    """
    x = match.values["x"]
    if graph.shapes[x] == ():
        return None
    return _folded(kind, match, (x,), kind.attributes)


def softmax(graph: Graph, kind: Kind, match: Match) -> Fold | None:
    """Return the fold of a softmax along one axis; None for several axes."""
    x = match.values["x"]
    if len(match.axes) != 1:
        return None
    axis = match.axes[0]
    shape = graph.shapes[x]
    if graph.book.opsets[""] < _AXIS_BY_ITSELF and axis == -1 and shape is not None:
        axis = len(shape) - 1
        kind = kind._replace(opset=1)
    return _folded(kind, match, (x,), {"axis": axis})


_ONES: Final = 1 << 16
"""Most elements of a gain of ones that a fold creates."""


def norm(graph: Graph, kind: Kind, match: Match) -> Fold | None:
    """Return the fold of a normalization with its gain and bias; None if the form does not compute one."""
    count = len(match.axes)
    epsilon = graph.constants.scalar(match.values["epsilon"])
    if (
        match.axes != tuple(range(-count, 0))
        or epsilon is None
        or epsilon < 0
        or not _is_mean(graph, match)
    ):
        return None
    match = _narrowed(graph, match)
    dims = _normalized(graph, match)
    given = {
        name: match.values[name] for name in ("gain", "bias") if name in match.values
    }
    weights = {
        name: _suiting(graph, match, value, dims) for name, value in given.items()
    }
    if None in weights.values():
        return None
    # Twice: for the gain, and for the bias after it.
    for _ in range(2):
        match = _with_next(
            graph, match, dims, weights, has_bias=kind.op == "LayerNormalization"
        )
    gain = weights["gain"] if "gain" in weights else _ones(graph, match, dims)
    if gain is None:
        return None
    bias = weights.get("bias")
    inputs = (match.values["x"], gain, *(() if bias is None else (bias,)))
    return _folded(kind, match, inputs, {"axis": -count, "epsilon": epsilon})


def _is_mean(graph: Graph, match: Match) -> bool:
    """Return whether sums divide their own terms."""
    wanted = {"count", "share"} & match.values.keys()
    if not wanted:
        return True
    shape = graph.shapes[match.values["x"]]
    sizes = [] if shape is None else [shape[axis] for axis in match.axes]
    if not sizes or None in sizes:
        return False
    total = prod(size or 0 for size in sizes)
    parts = {"count": total, "share": 1 / max(total, 1)}
    for name in wanted:
        number = graph.constants.scalar(match.values[name])
        if number is None or not isclose(number, parts[name], rel_tol=1e-6):
            return False
    return True


def _narrowed(graph: Graph, match: Match) -> Match:
    """Return the form with the Casts around it, if they are from and to the same low type and nothing else reads the
    values between.
    """
    before = graph.producer(match.values["x"])
    between, _, behind = only_reader(graph, graph.nodes[match.core].outputs[0])
    if before is None or behind is None or not before.key == behind.key == "Cast":
        return match
    low = graph.types[before.inputs[0]]
    if low != graph.types[behind.outputs[0]] or low not in LOW_TENSORS:
        return match
    # Gain and bias of the form are applied before the result is rounded.
    if {"gain", "bias"} & match.values.keys():
        return match
    values = {**match.values, "x": before.inputs[0]}
    return replace(
        match,
        nodes=match.nodes | between | {behind.index},
        values=values,
        core=behind.index,
    )


def _normalized(graph: Graph, match: Match) -> tuple[int | None, ...]:
    """Return the sizes of the normalized axes, None where they are unknown."""
    shape = graph.shapes[match.values["x"]]
    count = len(match.axes)
    return (None,) * count if shape is None else tuple(shape[-count:])


def _with_next(
    graph: Graph,
    match: Match,
    dims: Sequence[int | None],
    weights: dict[str, int | NewWeight | None],
    *,
    has_bias: bool,
) -> Match:
    """Return the match with the multiplication by the gain, or the addition of the bias, that follows."""
    nodes, value, node = only_reader(graph, graph.nodes[match.core].outputs[0])
    if node is None or "bias" in weights:
        return match
    is_gain = node.key == "Mul" and "gain" not in weights
    if not is_gain and not (has_bias and node.key == "Add"):
        return match
    name = "gain" if is_gain else "bias"
    other = node.inputs[1] if node.inputs[0] == value else node.inputs[0]
    weight = _suiting(graph, match, other, dims)
    if weight is None:
        return match
    weights[name] = weight
    return replace(match, nodes=match.nodes | nodes | {node.index}, core=node.index)


def _suiting(
    graph: Graph, match: Match, value: int, dims: Sequence[int | None]
) -> int | NewWeight | None:
    """Return the constant as a weight of the normalized shape; None if it is not constant or has another one.

    An unknown length of one axis is taken from the constant, unless that is 1, which fits any length.
    """
    value = graph.passed_on(value)
    tensor = graph.constants.tensors.get(value)
    shape = graph.shapes[match.values["x"]]
    if tensor is None or tensor.data_type != _elem(graph, match):
        return None
    stored: list[int] = tensor.dims[:]
    sizes = stored.copy()
    rank = len(dims) if shape is None else len(shape)
    if len(sizes) > rank:
        return None
    # Leading axes of size 1 broadcast, and change no number.
    while len(sizes) > len(dims) and sizes[0] == 1:
        del sizes[0]
    if len(sizes) != len(dims) or any(
        dim not in (None, size) for dim, size in zip(dims, sizes, strict=True)
    ):
        return None
    if None in dims and (len(dims) > 1 or sizes == [1]):
        return None
    if sizes == stored:
        return value
    return NewWeight(f"{graph.values[value].name}_flat", partial(_flat, tensor, sizes))


def _flat(tensor: TensorProto, sizes: Sequence[int]) -> TensorProto:
    reshaped = copied(tensor)
    del reshaped.dims[:]
    reshaped.dims.extend(sizes)
    return reshaped


def _ones(graph: Graph, match: Match, dims: Sequence[int | None]) -> NewWeight | None:
    sizes = [dim for dim in dims if dim is not None]
    if len(sizes) < len(dims) or not 0 < prod(sizes) <= _ONES:
        return None
    ones = partial(
        helper.make_tensor, "", _elem(graph, match), sizes, [1.0] * prod(sizes)
    )
    return NewWeight(f"{graph.nodes[match.core].proto.output[0]}_ones", ones)


def _elem(graph: Graph, match: Match) -> int:
    return ELEM_NUMBERS[element_name(graph.types[match.values["x"]] or FLOAT)]


_RULES: Final[Mapping[str, Callable[[Graph, Kind, Match], Fold | None]]] = {
    "LayerNormalization": norm,
    "RMSNormalization": norm,
    "Gelu": activation,
    "Softmax": softmax,
    "LogSoftmax": softmax,
}
"""Conditions that a form alone cannot express, by op."""


def find_folds(graph: Graph, *, with_weights: bool = True) -> Sequence[Fold]:
    """Return the folds, none of which shares a node with another, producers first.

    Args:
        graph: the graph.
        with_weights: also fold batch normalizations into weights, which reads and computes these.

    Complexity: linear in the matches of forms, see :func:`onnxamp._decide.patterns.forms.find_forms`.
    """
    folds = batch_norms(graph) if with_weights else []
    if with_weights and not folds:
        return graph.ask(find_folds, with_weights=False)
    return [*folds, *folds_of(graph, folds=folds)]


def folds_of(
    graph: Graph,
    patterns: Iterable[Match] | None = None,
    folds: Iterable[Fold] = (),
) -> Iterator[Fold]:
    """Yield the folds of patterns, none of which shares a node with another, producers first.

    Args:
        graph: the graph.
        patterns: the patterns; by default, all.
        folds: others, whose nodes are taken.
    """
    used = set[int]().union(*(fold.nodes for fold in folds))
    for core, matches in find_forms(graph, patterns):
        if core.index in used:
            continue
        fold = next(_complete(graph, matches), None)
        if fold is None:
            continue
        if used.isdisjoint(fold.nodes) and graph.hidden.isdisjoint(fold.reads):
            used |= fold.nodes
            yield fold


def _complete(graph: Graph, matches: Iterable[Match]) -> Iterator[Fold]:
    """Yield the folds of those matches that meet the conditions of their kinds."""
    for match in matches:
        kind = form_table().kinds[match.kind]
        fold = _RULES[kind.op](graph, kind, match)
        if fold is not None:
            yield fold
