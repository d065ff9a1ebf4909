"""Integers carried in floats: indices, sizes, counters. float16 is exact up to 2048, bfloat16 up to 256."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind, counts_exactly
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.index_paths import INTEGERS, index_paths
from onnxamp._graph.numbers.known import is_rounded
from onnxamp._graph.view import Node


def box_offsets(graph: Graph) -> Iterator[Hazard]:
    """Yield nodes that move the boxes of each class apart before a selection.

    They add the class, times more than the largest coordinate. Moved, boxes have large coordinates, whose rounding
    changes how much they overlap. Complexity: linear in nodes, because the walk from each selection ends at the offset.
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
                    claims = counts_exactly(graph, graph.nodes[index])
                    yield Hazard(index, KIND, why, unless=claims)
            elif maker.key in facts.moves_data or maker.key == "Cast":
                stack += [
                    (source, [*path, maker.index])
                    for source in graph.float_inputs(maker)
                ]


_BOX_REACH = 64
"""Limit on the nodes between boxes and their selection, and on those that compute an offset."""


def _offset(graph: Graph, node: Node) -> list[int] | None:
    """Return the nodes that compute an offset by class that a node adds; None if it adds none.

    Boxes may come from integers as well, but never from the largest of them.
    """
    offsets = [_class_arithmetic(graph, value) for value in graph.float_inputs(node)]
    by_largest = (nodes for nodes, has_largest in offsets if has_largest)
    alone = [nodes for nodes, _ in offsets if nodes]
    return next(
        by_largest, alone[0] if len(alone) == 1 and len(offsets) == 2 else None
    )


def _class_arithmetic(graph: Graph, value: int) -> tuple[list[int], bool]:
    """Return the nodes that compute a value from classes, which are integers, and whether they take a maximum.

    Without either, there are no nodes.
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
            stack += graph.float_inputs(maker)
    return (list(seen), has_largest) if is_class or has_largest else ([], False)


class _Indices(HazardKind):
    value = "index path"
    title = "indices, counters or sizes carried in floats"
    looks_at = ("index_inputs", "position_sources", "boxes")
    fault = Fault(
        Effect.MISCOUNTS,
        "computes integers or sizes in LOW",
        ", which counts exactly up to {integers} only",
    )

    def find(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        for use in graph.ask(index_paths).uses:
            claims = counts_exactly(graph, graph.nodes[use.node], use.value)
            yield Hazard(use.node, KIND, use.why, value=use.value, unless=claims)
        yield from box_offsets(graph)
        for node in graph.nodes_of(op_facts().position_sources):
            claims = counts_exactly(graph, node)
            yield Hazard(node.index, KIND, "counts in floating point", unless=claims)

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        return is_rounded(graph, weight, low)


KIND: Final = _Indices()
