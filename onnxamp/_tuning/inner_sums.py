"""Sums inside ops that a target accumulates in float16: values that are added to a model show how large they become."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto

from onnxamp._decide.exponents.rows import value_names
from onnxamp._decide.exponents.windows import Partial
from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.providers import Profile
from onnxamp._graph.constants import summed_terms, terms_of
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import Node, scope_path
from onnxamp._model.protos import copied
from onnxamp._numerics.unseen.body_ranges import AXES_INPUT

_CONSTANTS_OPSET: Final = 13
"""The opset from which Constant accepts numbers, and Flatten negative axes."""

_ROOTS: Final = frozenset({"ReduceL2", "ReduceLogSumExp"})
"""Sums that follow from their result."""

_CENTERED: Final = 4.0
"""Squared mean over variance up to which a normalization may subtract the mean in float16: it loses one or two digits.
"""

_LEAST_SPREAD: Final = 1e-12
"""Lower bound for variance over squared mean, so that ratios stay below those of sentinels."""


class WatchedNode(NamedTuple):
    """A node, its value, and the added value: the node on magnitudes, or the squared mean over variance of a norm.

    Names are those of :func:`value_names`.
    """

    node: int
    value: str
    name: str


def with_magnitudes(
    graph: Graph, profile: Profile
) -> tuple[ModelProto, list[WatchedNode]]:
    """Return a copy of the model that computes also sums of magnitudes.

    Complexity: linear in nodes.
    """
    editor = GraphEditor(graph)
    watched = list[WatchedNode]()
    names = value_names(graph)
    magnitudes: dict[tuple[int, int], str] = {}

    def watch(node: Node, name: str) -> None:
        path = scope_path(graph, node.scope)
        added = f"{path}/{name}" if path else name
        watched.append(WatchedNode(node.index, names[node.outputs[0]], added))

    for node in graph.nodes_of(profile.cancelling):
        is_new = graph.book.opsets.get("", 0) >= _CONSTANTS_OPSET
        is_open = not graph.scopes[node.scope].opaque
        if is_open and graph.types[node.inputs[0]] == FLOAT and is_new:
            watch(node, _add_squared_mean(graph, node, editor))
    for node in _summing(graph, profile):
        proto = copied(node.proto)
        if node.key in op_facts().biased:  # a bias is added after the sum
            del proto.input[2:]
        for port in range(len(proto.input)):
            value = node.inputs[port]
            if graph.types[value] != FLOAT:
                continue
            if (value, node.scope) not in magnitudes:
                name = editor.names.fresh(f"{graph.values[value].name}_magnitude")
                magnitude = editor.make("Abs", [proto.input[port]], [name], "")
                editor.insert_after(node.index, magnitude)
                magnitudes[value, node.scope] = name
            proto.input[port] = magnitudes[value, node.scope]
        proto.name = ""
        name = editor.names.fresh(f"{node.proto.output[0]}_magnitude")
        proto.output[:] = [name]
        editor.insert_after(node.index, proto)
        watch(node, name)
    return editor.finish(), watched


def _add_squared_mean(graph: Graph, node: Node, editor: GraphEditor) -> str:
    """Compute the squared mean over the variance of the input that a node normalizes, and return the name of the
    result.
    """
    axis = 2 if node.key == "InstanceNormalization" else attribute(node.proto, "axis")
    source = node.proto.input[0]

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        name = editor.names.fresh(f"{source}_{kind}")
        editor.insert_after(
            node.index, editor.make(kind, inputs, [name], "", **attributes)
        )
        return name

    def mean(of: str) -> str:
        if graph.book.opsets[""] >= AXES_INPUT:
            return op("ReduceMean", of, editor.ints([1], "axes"))
        return op("ReduceMean", of, axes=[1])

    flat = op("Flatten", source, axis=-1 if axis is None else axis)
    middle = mean(flat)
    centered = op("Sub", flat, middle)
    square = op("Mul", middle, middle)
    least = op(
        "Mul", square, editor.constant(np.float32(_LEAST_SPREAD), "least_spread")
    )
    return op("Div", square, op("Max", mean(op("Mul", centered, centered)), least))


def centered_norms(
    graph: Graph,
    profile: Profile,
    watched: Sequence[WatchedNode],
    largest: Mapping[str, float],
) -> tuple[str, ...]:
    """Return outputs of normalizations with a mean so small relative to the deviation that it can be subtracted in
    float16.
    """
    norms = (
        item for item in watched if graph.nodes[item.node].key in profile.cancelling
    )
    return tuple(
        item.value for item in norms if largest.get(item.name, inf) <= _CENTERED
    )


def _summing(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Yield nodes whose sums are float16, and do not follow from their results."""
    products = {
        op for op, fact in profile.products.items() if fact.accumulator == "float16"
    }
    sums = {op for op, fact in profile.sums.items() if fact.accumulator == "float16"}
    for node in graph.nodes_of(products | (sums - _ROOTS)):
        value = node.outputs[0]
        is_open = not graph.scopes[node.scope].opaque
        if is_open and graph.types[value] == FLOAT:
            yield node


def partial_sums(
    graph: Graph,
    profile: Profile,
    watched: Sequence[WatchedNode],
    largest: Mapping[str, float],
    shapes: Sequence[Shape | None],
) -> dict[str, Partial]:
    """Return value -> the largest sum on the way to it.

    Args:
        graph: the model.
        profile: how the target accumulates.
        watched: the values that :func:`with_magnitudes` added.
        largest: largest magnitude by name, including these.
        shapes: shapes by value on the samples.
    """
    partial = dict[str, Partial]()
    names = value_names(graph)
    for item in watched:
        node = graph.nodes[item.node]
        if node.key in profile.cancelling:
            continue
        counted = terms_of if node.key in profile.products else summed_terms
        terms = counted(node, shapes)
        reach = largest.get(item.name, 0.0)
        if terms and reach:
            # A mean is divided after its sum.
            times = terms if node.key in op_facts().means else 1
            partial[item.value] = Partial(reach * times, terms)
    overflowing = {op for op, fact in profile.sums.items() if fact.overflows}
    for node in graph.nodes_of(_ROOTS & overflowing):
        name = names[node.outputs[0]]
        if node.key == "ReduceL2" and largest.get(name):
            terms = summed_terms(node, shapes) or 1
            partial[name] = Partial(largest[name] ** 2, terms, power=2)
    return partial
