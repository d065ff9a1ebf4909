"""Integers carried in floats: indices, sizes, counters. float16 is exact up to 2048, bfloat16 up to 256."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from onnxamp._decide.verdicts import Audit, Hazard, Kind
from onnxamp._facts.dtypes import FLOAT, FORMATS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node, transfers

_WIDE = frozenset({FLOAT, "tensor(double)"})
INTEGERS = frozenset(
    f"tensor({name})"
    for name in (
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
    )
    if np.iinfo(name).max > min(low.exact_integers for low in FORMATS.values())
)
"""Integer types with values that low precision cannot represent. Those of 8 bits are exact in float16 and
in bfloat16.
"""


class Indices(NamedTuple):
    """Numbers that become integers, sizes or steps: their hazards, and all values on the way, with a description."""

    hazards: tuple[Hazard, ...]
    values: Mapping[int, str]


def index_paths(graph: Graph) -> Indices:
    """Index arithmetic upstream of Casts to integers, and of sizes and scales, stays float32, and so do these reads.

    The walk stops at all ops that compute something else (Conv, MatMul, activations), so an image that is cast to
    integers at the end does not keep a whole network in float32. Casts and control flow pass indices on. Complexity:
    linear; each value is visited once.
    """
    walk = op_facts().index_arithmetic
    passes = _passes(graph)
    counting = _counting(graph, passes)
    hazards = list[Hazard]()
    values = dict[int, str]()
    seen: set[int] = set()
    stack: list[tuple[int, str]] = []
    for node, value, why in _counted(graph):
        stack.append((value, f"{why} {node.label!r}"))
        if node.key == "Range" and node.index not in seen:
            seen.add(node.index)
            hazards.append(Hazard(node.index, KIND, "counts in floating point"))
        elif node.key != "Cast" or value in counting or _counts(graph, value):
            text = "reads integers that are stored as floats"
            hazards.append(Hazard(node.index, KIND, text, value=value))
    while stack:
        value, why = stack.pop()
        if value in values:
            continue
        values[value] = why
        producer = graph.producer(value)
        for owner, source in passes.get(value, ()) if value in counting else ():
            port = value if value in graph.nodes[owner].outputs else source
            hazards.append(Hazard(owner, KIND, why, value=port))
            stack.append((source, why))
        if producer is None or producer.index in seen:
            continue
        is_counted = producer.key == "Cast" and _counts(graph, value)
        if producer.key in walk or is_counted:
            seen.add(producer.index)
            hazards.append(Hazard(producer.index, KIND, why))
        if producer.key in walk:
            stack += [
                (source, why) for source in producer.inputs if _is_wide(graph, source)
            ]
    return Indices(tuple(hazards), values)


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


def _passes(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """Value -> (node, value) that passes it on: into bodies, out of them, or as another type of float."""
    found: dict[int, list[tuple[int, int]]] = {}
    for node in graph.nodes_of({"Cast", *op_facts().control_flow}):
        if node.key == "Cast":
            pairs: Iterable[tuple[int, int]] = [(node.input(0), node.outputs[0])]
        else:
            pairs = transfers(graph, node)
        for source, result in pairs:
            if _is_wide(graph, source) and _is_wide(graph, result):
                found.setdefault(result, []).append((node.index, source))
    return found


def _counting(
    graph: Graph, passes: Mapping[int, Sequence[tuple[int, int]]]
) -> set[int]:
    """Return values that are passed on and may be integers because their sources are."""
    results: dict[int, list[int]] = {}
    for result, sources in passes.items():
        for _, source in sources:
            results.setdefault(source, []).append(result)
    ends = (
        source for source in results if source not in passes and _counts(graph, source)
    )
    stack = [source for source in ends if graph.constants.uniform(source) is None]
    found: set[int] = set()
    while stack:
        for result in results.get(stack.pop(), ()):
            if result not in found:
                found.add(result)
                stack.append(result)
    return found


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


def box_offsets(graph: Graph) -> Iterator[Hazard]:
    """Yield nodes that move the boxes of each class apart before a selection: by the class, times more than the largest
    coordinate.

    Moved, boxes have large coordinates, whose rounding changes how much they overlap. Complexity: linear in nodes,
    because the walk from each selection ends at the offset.
    """
    facts = op_facts()
    for node in graph.nodes_of(facts.boxes):
        stack = [(node.input(port), [node.index]) for port in facts.boxes[node.key]]
        steps = 0
        while stack and steps < _BOX_REACH:
            steps += 1
            value, path = stack.pop()
            maker = graph.producer(value)
            if maker is None:
                continue
            offset = _offset(graph, maker) if maker.key in facts.additive else None
            if offset is not None:
                why = f"moves the boxes of each class apart for {node.label!r}"
                for index in (*path, maker.index, *offset):
                    yield Hazard(index, KIND, why)
            elif maker.key in facts.moves_data or maker.key == "Cast":
                stack += [
                    (source, [*path, maker.index])
                    for _, source in graph.float_inputs(maker)
                ]


_BOX_REACH = 64
"""Limit on the nodes between boxes and their selection, and on those that compute an offset."""


def _offset(graph: Graph, node: Node) -> list[int] | None:
    """Return the nodes that compute an offset by class that a node adds; None if it adds none.

    Boxes may come from integers as well, but never from the largest of them.
    """
    found = [_class_arithmetic(graph, value) for _, value in graph.float_inputs(node)]
    by_largest = (nodes for nodes, has_largest in found if has_largest)
    alone = [nodes for nodes, _ in found if nodes]
    return next(by_largest, alone[0] if len(alone) == 1 and len(found) == 2 else None)


def _class_arithmetic(graph: Graph, value: int) -> tuple[list[int], bool]:
    """Return the nodes that compute a value from classes, which are integers, none if there are none; and whether they
    take the largest of something.
    """
    facts = op_facts()
    seen: dict[int, None] = {}
    stack = [value]
    is_class = has_largest = False
    while stack and len(seen) < _BOX_REACH:
        maker = graph.producer(stack.pop())
        if maker is None or maker.index in seen:
            continue
        is_cast = maker.key == "Cast" and graph.types[maker.input(0)] in INTEGERS
        is_largest = maker.key in facts.reduces_axes and maker.index in graph.exact
        if not (
            is_cast
            or is_largest
            or maker.key in facts.index_arithmetic
            or maker.key == "Cast"
        ):
            return [], False
        seen[maker.index] = None
        is_class |= is_cast
        has_largest |= is_largest
        if not (is_cast or is_largest):
            stack += [source for _, source in graph.float_inputs(maker)]
    return (list(seen), has_largest) if is_class or has_largest else ([], False)


def index_hazards(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Integers and sizes carried in floats."""
    yield from graph.ask(index_paths).hazards
    yield from box_offsets(graph)
    for node in graph.nodes_of(op_facts().position_sources):
        yield Hazard(node.index, KIND, "counts in floating point")


def loses(graph: Graph, value: int, low: Format) -> bool:
    """Return whether low precision rounds any number of a weight."""
    return graph.constants.stats(value) is not None and not graph.constants.fits(
        value, low
    )


KIND: Final = Kind(
    "index path",
    title="indices, counters or sizes carried in floats",
    rule=index_hazards,
    audit=Audit(
        4,
        "computes integers or sizes in LOW",
        ", which counts exactly up to {integers} only",
    ),
    loses=loses,
)
