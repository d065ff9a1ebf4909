"""Paths of attention masks: from a constant through mask arithmetic to each Softmax that it reaches."""

from collections.abc import Iterable

from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._model.weights import SENTINEL


def sentinel_paths(graph: Graph, low: Format) -> list[list[int]]:
    """Return groups of nodes in one precision: the ops from a sentinel constant to its Softmax, both ends included."""
    groups = []
    leading = mask_arithmetic(graph, graph.nodes_of(op_facts().mask_sinks))
    walked: set[int] = set()
    for node in graph.at(leading):
        read = graph.float_inputs(node)
        values = [value for value in read if holds_sentinel(graph, low, value)]
        if not values:
            continue
        # The rest of its path is in the group of an earlier walk, which has this node as well.
        path = [node.index] if node.index in walked else mask_path(graph, node)
        walked.update(path)
        # The node that makes the sentinel joins: a Cast from float32 would turn it into minus infinity.
        makers = (graph.producer(graph.constants.source(value)) for value in values)
        if path:
            groups.append(
                [*path, *(maker.index for maker in makers if maker is not None)]
            )
    return groups


def holds_sentinel(graph: Graph, low: Format, value: int) -> bool:
    """Return whether a value is a constant with an element that is a sentinel, and infinite in low precision."""
    stats = graph.constants.stats(value)
    return stats is not None and stats.has_sentinel(low) and stats.largest >= SENTINEL


def mask_arithmetic(graph: Graph, sinks: Iterable[Node]) -> set[int]:
    """Return nodes of mask arithmetic that lead to some nodes, found upstream from all of them at once."""
    walk = op_facts().mask_arithmetic
    stack = [*sinks]
    nodes = set[int]()
    while stack:
        for value in stack.pop().reads:
            maker = graph.producer(value)
            if maker is not None and maker.index not in nodes and maker.key in walk:
                nodes.add(maker.index)
                stack.append(maker)
    return nodes


def mask_path(graph: Graph, start: Node) -> list[int]:
    """Return nodes from ``start`` through mask arithmetic to each Softmax that it reaches, both ends included."""
    walk = op_facts().mask_arithmetic
    sinks = op_facts().mask_sinks
    previous: dict[int, list[int]] = {start.index: []}
    stack = [start]
    pending = []
    while stack:
        node = stack.pop()
        if node.key in sinks:
            pending.append(node.index)
            continue
        if node.key not in walk or not graph.is_float_output(node):
            continue
        for reader, _ in graph.readers(node):
            if reader.index not in previous and len(previous) < _MASK_REACH:
                previous[reader.index] = []
                stack.append(reader)
            previous.get(reader.index, []).append(node.index)
    path: set[int] = set()
    while pending:
        index = pending.pop()
        if index not in path:
            path.add(index)
            pending += previous[index]
    return sorted(path)


_MASK_REACH = 4096
"""Most nodes visited from one mask: deep models share one mask among all layers."""


def saturated(low: Format) -> tuple[float, float]:
    """Return the saturated value of a sentinel: the largest number of the type, or half of it."""
    return low.max_finite, low.max_finite / 2
