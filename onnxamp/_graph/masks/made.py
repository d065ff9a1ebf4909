"""Masks that a model makes of an input with a row for each query, and of a constant such as float32's lowest number.

A caller may mask a whole row of such an input. Other masks that models make leave something of every row, as causal
ones do, or have one row for all queries, which masks the whole sample or none of it. Exporters write those into every
layer, and engines fuse the sum with the Softmax, so they stay as they are.
"""

from collections.abc import Set as AbstractSet
from math import inf

from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.added import AddedMasks, added_masks
from onnxamp._graph.masks.given import Given
from onnxamp._graph.masks.paths import mask_arithmetic, mask_path
from onnxamp._graph.masks.rows import row_axis, softmaxes
from onnxamp._graph.numbers.known import stats_of
from onnxamp._graph.view import Node, Origin
from onnxamp._model.weights import SENTINEL


def bounded_masks(graph: Graph, low: Format) -> AddedMasks:
    """Return the masks that are bounded before they become low precision, those that the model makes included.

    Half the largest number of a wide type takes any score. There, the constants of masks saturate to it.
    """
    return graph.ask(_with_made_masks if low.is_narrow else added_masks)


def _with_made_masks(graph: Graph) -> AddedMasks:
    """Return the masks among the inputs, and those that the model makes of inputs.

    Complexity: linear in nodes, and in those that make a mask, for each mask.
    """
    added = graph.ask(added_masks)
    sinks = softmaxes(graph)
    given = Given(graph)
    masks = dict[int, int]()
    leading = graph.at(mask_arithmetic(graph, graph.at(sinks)))
    for node in (one for one in leading if one.key in op_facts().additive):
        value = _mask_of(graph, given, node)
        if value is not None and value not in added.values:
            masks[node.index] = value
    makers = {value: _makers(graph, value) for value in dict.fromkeys(masks.values())}
    masks = {index: value for index, value in masks.items() if makers[value]}
    repeated = _repeated(graph, masks.keys() | added.sums)
    axes = dict[int, set[int | None]]()
    for node in graph.at(masks.keys() - repeated):
        value = masks[node.index]
        axes.setdefault(value, set()).add(row_axis(graph, sinks, node, value))
    shifts = dict[int, int]()
    for value, several in axes.items():
        axis = several.pop() if len(several) == 1 else None
        if axis is not None:
            shifts[value] = axis
    sums = {index for index, value in masks.items() if value in shifts}
    return added._replace(
        values=added.values | shifts.keys(),
        arithmetic=added.arithmetic.union(*(makers[value] for value in shifts)),
        shifts={**added.shifts, **shifts},
        sums=added.sums | (sums - repeated),
    )


def _repeated(graph: Graph, sums: AbstractSet[int]) -> set[int]:
    """Return the sums with another one of them before or after them, so that several masks are added to one score."""
    repeated = set[int]()
    for node in graph.at(sums):
        others = sums & {*mask_path(graph, node)} - {node.index}
        if others:
            repeated |= {node.index, *others}
    return repeated


def _mask_of(graph: Graph, given: Given, node: Node) -> int | None:
    """Return what a node adds to scores, if it has a row for each query and is given; None if there is none."""
    masks = [value for value in node.inputs if value in given]
    if node.key == "Sub" or len(masks) != 1 or len(node.inputs) < 2:
        return None
    (value,) = masks
    shape = graph.shapes[value]
    if not shape or len(shape) < 2 or shape[-2] == 1:
        return None
    # All that reads it adds it to scores.
    readers = [reader for reader, _ in graph.consumers(value)]
    is_read_elsewhere = any(reader.key != node.key for reader in readers)
    return None if graph.results[value] or is_read_elsewhere else value


def _makers(graph: Graph, value: int) -> frozenset[int]:
    """Return the nodes that make a mask, row by row, of inputs and of a constant; none if anything else does."""
    nodes = set[int]()
    has_sentinel = has_input = False
    stack = [value]
    seen = {value}
    while stack:
        value = stack.pop()
        largest = max((stats.largest for stats in stats_of(graph, value)), default=0.0)
        has_sentinel |= SENTINEL <= largest < inf
        if graph.constants.is_constant(value):
            continue
        if (
            graph.values[value].origin is Origin.INPUT
            and not graph.values[value].scope
        ):
            has_input = True
            continue
        maker = graph.producer(value)
        if maker is None or not _is_by_row(graph, maker):
            return frozenset()
        if graph.types[value] == FLOAT:
            nodes.add(maker.index)
        for source in maker.reads:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return frozenset(nodes if has_sentinel and has_input else ())


def _is_by_row(graph: Graph, node: Node) -> bool:
    """Return whether a node computes each number from those at the same place, or finds the largest of each row, as
    nodes do that bound masks.
    """
    facts = op_facts()
    is_largest = node.key in facts.reduces_axes and node.index in graph.exact
    return is_largest or node.key in facts.elementwise
