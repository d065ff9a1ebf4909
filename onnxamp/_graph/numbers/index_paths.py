"""Integers stored as floats: the path of an index, size or counter to the node where it becomes an integer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from onnxamp._facts.dtypes import FLOAT, FORMATS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, passages, passing_port

_WIDE = frozenset({FLOAT, "tensor(double)"})
_EXACT = min(low.exact_integers for low in FORMATS.values())
"""The largest integer up to which every low-precision type represents all integers."""
_ALL_INTEGERS = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
)
INTEGERS = frozenset(
    f"tensor({name})" for name in _ALL_INTEGERS if np.iinfo(name).max > _EXACT
)
"""Integer types with values that low precision cannot represent. Those of 8 bits are exact in float16 and
in bfloat16.
"""


class IndexUse(NamedTuple):
    """A node that computes, passes on or reads an index, the reason, and the value; ABSENT for all of its values."""

    node: int
    why: str
    value: int = ABSENT


class Indices(NamedTuple):
    """Numbers that become integers, sizes or steps: the nodes that they pass through, and all values on the way, with a
    description.
    """

    uses: tuple[IndexUse, ...]
    values: Mapping[int, str]


def index_paths(graph: Graph) -> Indices:
    """Return the index arithmetic upstream of Casts to integers, and of sizes and scales, and these reads.

    The walk stops at all ops that compute something else (Conv, MatMul, activations), so an image that is cast to
    integers at the end does not make a whole network an index. Casts and control flow pass indices on. Complexity:
    linear; each value is visited once.
    """
    walk = op_facts().index_arithmetic
    passes = _passes(graph)
    counting = _counting(graph, passes)
    uses = list[IndexUse]()
    values = dict[int, str]()
    seen: set[int] = set()
    stack: list[tuple[int, str]] = []
    for node, value, why in _counted(graph):
        stack.append((value, f"{why} {node.label!r}"))
        if node.key == "Range" and node.index not in seen:
            seen.add(node.index)
            uses.append(IndexUse(node.index, "counts in floating point"))
        elif node.key != "Cast" or value in counting or _counts(graph, value):
            text = "reads integers that are stored as floats"
            uses.append(IndexUse(node.index, text, value=value))
    while stack:
        value, why = stack.pop()
        if value in values:
            continue
        values[value] = why
        producer = graph.producer(value)
        for source in passes.get(value, ()) if value in counting else ():
            owner, port = passing_port(graph, source, value)
            uses.append(IndexUse(owner, why, value=port))
            stack.append((source, why))
        if producer is None or producer.index in seen:
            continue
        is_counted = producer.key == "Cast" and _counts(graph, value)
        if producer.key in walk or is_counted:
            seen.add(producer.index)
            uses.append(IndexUse(producer.index, why))
        if producer.key in walk:
            stack += [
                (source, why) for source in producer.inputs if _is_wide(graph, source)
            ]
    return Indices(tuple(uses), values)


def _counted(graph: Graph) -> Iterator[tuple[Node, int, str]]:
    """Yield (node, input, description) where a float becomes integers or is a size."""
    sized = op_facts().index_inputs
    for node in graph.nodes_of({"Cast", *sized}):
        is_cast = node.key == "Cast" and _is_wide(graph, node.input(0))
        if is_cast and graph.types[node.outputs[0]] in INTEGERS:
            yield node, node.inputs[0], "becomes integers at"
        for port in sized.get(node.key, ()):
            value = node.input(port)
            if graph.types[value] == FLOAT and not _is_roi(node, port):
                yield node, value, "is a size or step of"


def _passes(graph: Graph) -> dict[int, list[int]]:
    """Return value -> the values that are passed on as it: into bodies, out of them, or as another type of float."""
    sources: dict[int, list[int]] = {}
    casts = ((node.input(0), node.outputs[0]) for node in graph.nodes_of({"Cast"}))
    passed = ((source, result) for _, source, result in passages(graph))
    for source, result in chain(casts, passed):
        if _is_wide(graph, source) and _is_wide(graph, result):
            sources.setdefault(result, []).append(source)
    return sources


def _counting(graph: Graph, passes: Mapping[int, Sequence[int]]) -> set[int]:
    """Return values that are passed on and may be integers because their sources are."""
    results: dict[int, list[int]] = {}
    for result, sources in passes.items():
        for source in sources:
            results.setdefault(source, []).append(result)
    ends = (
        source for source in results if source not in passes and _counts(graph, source)
    )
    # A constant of one number, such as the zero that a state begins with, says nothing about what it is passed on to.
    stack = [source for source in ends if graph.constants.uniform(source) is None]
    values: set[int] = set()
    while stack:
        for result in results.get(stack.pop(), ()):
            if result not in values:
                values.add(result)
                stack.append(result)
    return values


def _counts(graph: Graph, value: int) -> bool:
    """Return whether a value may be an integer: an input, a constant, integers as floats, or a value computed from
    these.
    """
    producer = graph.producer(value)
    if producer is None or producer.key == "Constant":
        return graph.constants.is_constant(value) or graph.values[value].scope == 0
    if producer.key == "Cast":
        return graph.types[producer.input(0)] in INTEGERS
    return producer.key in op_facts().index_arithmetic


def _is_wide(graph: Graph, value: int) -> bool:
    """Return whether a value is a float that low precision would round."""
    return graph.types[value] in _WIDE


def _is_roi(node: Node, port: int) -> bool:
    """Return whether the port is a region of interest."""
    region = op_facts().region.get(node.key)
    signature = node.signature
    if region is None or signature is None:
        return False
    return port == region["input"] and signature.since >= region["since"]
