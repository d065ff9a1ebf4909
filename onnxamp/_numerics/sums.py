"""The sums that a target keeps in float16 on the way to a value: how far they reach, and how small their terms are.

A product whose terms are replaced by their magnitudes bounds every partial sum, in whatever order. So a copy of the
model gets, beside each such node, the same node on magnitudes, and what that reaches is measured with all other ranges.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto

from onnxamp._decide.rescaling import Partial
from onnxamp._dtypes import FLOAT
from onnxamp._graph.constants import summed_terms, terms_of
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._ops.profiles import Profile

_LEAST_OPSET: Final = 13
"""Where Constant takes numbers, and Flatten an axis from the end."""

_ROOTS: Final = frozenset({"ReduceL2", "ReduceLogSumExp"})
"""Sums that follow from their result."""


_CENTRED: Final = 4.0
"""Squared mean over variance up to which a normalisation may subtract the mean in float16: a digit is lost or two."""

_LEAST_SPREAD: Final = 1e-12
"""Variance over squared mean that counts as this much at least, so that ratios stay below those of sentinels."""

_AXES_INPUT: Final = 18
"""Opset from which on ReduceMean takes its axes as an input."""


class Watch(NamedTuple):
    """A node, the value that it makes, and what was added: it on magnitudes, or a norm's squared mean over variance."""

    node: int
    value: str
    name: str


def with_magnitudes(graph: Graph, profile: Profile) -> tuple[ModelProto, list[Watch]]:
    """A copy of the model that computes sums of magnitudes, too.

    Complexity: linear in nodes.
    """
    editor, watched = GraphEditor(graph), list[Watch]()
    magnitudes: dict[int, str] = {}
    for node in graph.nodes_of(profile.cancelling):
        is_new = graph.book.opsets.get("", 0) >= _LEAST_OPSET
        if node.scope == 0 and graph.types[node.inputs[0]] == FLOAT and is_new:
            name = _add_squared_mean(graph, node, editor)
            watched.append(Watch(node.index, graph.values[node.outputs[0]].name, name))
    for node in _summing(graph, profile):
        proto = copied(node.proto)
        if node.key in op_facts().biased:
            del proto.input[2:]
        for port in range(len(proto.input)):
            value = node.inputs[port]
            if value == ABSENT or graph.types[value] != FLOAT:
                continue
            if value not in magnitudes:
                magnitudes[value] = editor.names.fresh(f"{graph.values[value].name}_magnitude")
                made = editor.make("Abs", [proto.input[port]], [magnitudes[value]], "")
                editor.insert_after(node.index, made)
            proto.input[port] = magnitudes[value]
        proto.name, name = "", editor.names.fresh(f"{node.proto.output[0]}_magnitude")
        proto.output[:] = [name]
        editor.insert_after(node.index, proto)
        watched.append(Watch(node.index, graph.values[node.outputs[0]].name, name))
    return editor.finish(), watched


def _add_squared_mean(graph: Graph, node: Node, editor: GraphEditor) -> str:
    """Compute the squared mean over the variance of what a node normalises; the name of the result."""
    axis = 2 if node.key == "InstanceNormalization" else attribute(node.proto, "axis")
    source = node.proto.input[0]

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        name = editor.names.fresh(f"{source}_{kind}")
        editor.insert_after(node.index, editor.make(kind, inputs, [name], "", **attributes))
        return name

    def mean(of: str) -> str:
        if graph.book.opsets[""] >= _AXES_INPUT:
            return op("ReduceMean", of, editor.ints([1], "axes"))
        return op("ReduceMean", of, axes=[1])

    flat = op("Flatten", source, axis=-1 if axis is None else axis)
    middle = mean(flat)
    centred = op("Sub", flat, middle)
    square = op("Mul", middle, middle)
    least = op("Mul", square, editor.constant(np.float32(_LEAST_SPREAD), "least_spread"))
    return op("Div", square, op("Max", mean(op("Mul", centred, centred)), least))


def centred_norms(
    graph: Graph, profile: Profile, watched: Sequence[Watch], largest: Mapping[str, float]
) -> tuple[str, ...]:
    """What normalisations make whose mean is small beside the deviation: it can be subtracted in float16."""
    norms = (item for item in watched if graph.nodes[item.node].key in profile.cancelling)
    return tuple(item.value for item in norms if largest.get(item.name, inf) <= _CENTRED)


def _summing(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Nodes of the main graph whose sums are float16, and do not follow from their results."""
    products = {op for op, fact in profile.products.items() if fact.accumulator == "float16"}
    sums = {op for op, fact in profile.sums.items() if fact.accumulator == "float16"} - _ROOTS
    for node in graph.nodes_of(frozenset(products | sums)):
        value = node.outputs[0]
        if node.scope == 0 and value != ABSENT and graph.types[value] == FLOAT:
            yield node


def partial_sums(
    graph: Graph,
    profile: Profile,
    watched: Sequence[Watch],
    largest: Mapping[str, float],
    shapes: Sequence[Shape | None],
) -> dict[str, Partial]:
    """Value -> what the sums on the way to it reach.

    Args:
        graph: the model.
        profile: how the target sums up.
        watched: what :func:`with_magnitudes` added.
        largest: largest magnitude by name, those included.
        shapes: shapes by value on the samples.
    """
    found: dict[str, Partial] = {}
    for item in watched:
        node = graph.nodes[item.node]
        if node.key in profile.cancelling:
            continue
        terms = (
            terms_of(node, shapes) if node.key in profile.products else summed_terms(node, shapes)
        )
        reach = largest.get(item.name, 0.0)
        if terms and reach:
            found[item.value] = Partial(
                reach * (terms if node.key in op_facts().means else 1), terms
            )
    for node in graph.nodes_of(
        _ROOTS & {op for op, fact in profile.sums.items() if fact.overflows}
    ):
        name = graph.values[node.outputs[0]].name
        if node.key == "ReduceL2" and node.scope == 0 and largest.get(name):
            found[name] = Partial(largest[name] ** 2, summed_terms(node, shapes) or 1, power=2)
    return found
