"""Walks through exact ops, which hand on what they read."""

from collections.abc import Iterator
from typing import Final

from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


def readers_through_exact(graph: Graph, node: Node, seen: set[int]) -> Iterator[Node]:
    """Yield nodes that are not yet in ``seen`` and read the node's outputs, directly or through exact ops, which are
    included.

    Nodes are added to ``seen``, so that all walks of a graph together take linear time.
    """
    stack = [node]
    while stack:
        for reader, _ in graph.readers(stack.pop()):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            yield reader
            if reader.index in graph.exact and graph.is_float_output(reader):
                stack.append(reader)


def makers_through_exact(graph: Graph, value: int) -> Iterator[Node]:
    """Yield the nodes that compute a value, and the exact ops between."""
    stack = [value]
    seen = {ABSENT}
    while stack:
        value = stack.pop()
        maker = None if value in seen else graph.producer(value)
        seen.add(value)
        if maker is not None:
            yield maker
            if maker.index in graph.exact:
                stack += graph.float_inputs(maker)


def before_offsets(graph: Graph, value: int, most: int) -> list[Node]:
    """Return the nodes that make a value, from the last one back to the first that does more than add or move.

    There are none if they are more than ``most``, or if an input of the model leads there.
    """
    path = list[Node]()
    while len(path) < most:
        maker = graph.producer(value)
        if maker is None:
            return []
        path.append(maker)
        computed = graph.computed_inputs(maker)
        is_kept = maker.key in op_facts().additive | {"Cast"}
        if not (is_kept or maker.index in graph.exact) or len(computed) != 1:
            return path
        value = computed[0]
    return []


def moved_from(graph: Graph, value: int) -> tuple[int, list[int]]:
    """Return the value before the data movement that leads to this one, such as a Transpose, and the nodes of that."""
    moving = list[int]()
    while len(moving) < _REACH:
        maker = graph.producer(value)
        if maker is None or not (maker.key in _MOVING or maker.index in graph.passing):
            break
        moving.append(maker.index)
        value = maker.inputs[0]
    return value, moving


_MOVING: Final = frozenset(("Transpose", "Unsqueeze", "Squeeze", "Reshape", "Flatten"))
"""Ops that keep all elements of one input. Others that move data select some, or join several."""

_REACH: Final = 16
"""Nodes that move one value."""
