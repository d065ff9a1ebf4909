"""Inputs that are added to the scores of an attention, as masks are: 0, or a number near float32's lowest.

They may be subtracted as well, and hold its largest one then.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import chain
from typing import NamedTuple

from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.given import Given, is_float_input
from onnxamp._graph.masks.rows import row_axis, softmaxes
from onnxamp._graph.masks.walk import MaskWalk


class AddedMasks(NamedTuple):
    """The masks among a model's inputs.

    Attributes:
        inputs: the inputs that are only joined with scores before a Softmax.
        factors: those of a single number, by which a mask is multiplied.
        values: these, and the values that they pass through on their way to the scores.
        subtracted: those of them that mask by large numbers, because they are subtracted.
        arithmetic: the nodes that compute one of these values from another. Masks are small beside the scores.
        shifts: the values that are added to scores, or subtracted, with the axis along which the Softmax sums up,
            counted from the end.
        sums: the nodes that add them to scores.
        emptying: the values that only ops read that return 0 for a row of which a mask leaves nothing.
        unaligned: those sums for whose operands no such axis is known, or that add several masks to the same scores.
    """

    inputs: frozenset[int] = frozenset()
    factors: frozenset[int] = frozenset()
    values: frozenset[int] = frozenset()
    subtracted: frozenset[int] = frozenset()
    arithmetic: frozenset[int] = frozenset()
    shifts: Mapping[int, int] = {}
    sums: frozenset[int] = frozenset()
    emptying: frozenset[int] = frozenset()
    unaligned: frozenset[int] = frozenset()


def added_masks(graph: Graph) -> AddedMasks:
    """Find the float inputs that are masks.

    Such an input is moved, scaled, and computed with constants and other inputs. Then it is added to scores,
    subtracted from them, or chosen in their place, and all of it ends in a Softmax or in an op that contains one. An
    input that is subtracted from a constant, or multiplied by a large number, holds zeros and ones instead.

    Complexity: linear in nodes for each input that leads to a Softmax alone.
    """
    sinks = softmaxes(graph)
    if not sinks and not graph.nodes_of(op_facts().score_masks):
        return AddedMasks()
    given = Given(graph)
    walks = dict[int, MaskWalk]()
    for value in graph.scopes[0].inputs:
        if not is_float_input(graph, value) or _divides(graph, value):
            continue
        # Scores may be an input as well. Then nothing but another input is there to tell them from a mask.
        for others in (given, None):
            walk = MaskWalk(graph, sinks, given.passed, others)
            if walk.is_mask(value):
                walks[value] = walk
                break
    return _gathered(graph, sinks, given, walks)


def _divides(graph: Graph, value: int) -> bool:
    """Return whether a node divides by a value, as by the temperature of logits."""
    divisors = op_facts().divisors
    readers = graph.consumers(value)
    return any(port in divisors.get(node.key, ()) for node, port in readers)


def _gathered(
    graph: Graph,
    sinks: AbstractSet[int],
    given: Given,
    walks: Mapping[int, MaskWalk],
) -> AddedMasks:
    """Return what the walks from all masks found."""
    all_walks = walks.values()
    masks = _all(walk.before for walk in all_walks)
    sums = _all(walk.sums for walk in all_walks)
    chosen = _all(walk.chosen for walk in all_walks)
    axes = dict[int, int]()
    unaligned = set[int]()
    for value, nodes in _operands(all_walks).items():
        axis = None if value in chosen else _axis(graph, sinks, value, nodes)
        if axis is None:
            unaligned |= nodes & sums
        else:
            axes[value] = axis
    unaligned |= _repeated(all_walks)
    # A Cast may come before the control flow that passes a mask on.
    for value in [*axes]:
        for source in given.origins(value):
            axes.setdefault(source, axes[value])
    return AddedMasks(
        inputs=frozenset(walks),
        factors=frozenset(value for value, walk in walks.items() if walk.is_factor),
        values=_all(walk.sides for walk in all_walks),
        subtracted=_all(walk.subtracted() for walk in all_walks),
        arithmetic=_all(walk.arithmetic for walk in all_walks),
        shifts=axes,
        sums=_last_sums(graph, sums, masks),
        emptying=frozenset(filter(partial(_is_emptying, graph), axes)),
        unaligned=frozenset(unaligned),
    )


def _all(indices: Iterable[Iterable[int]]) -> frozenset[int]:
    """Return the indices that several walks found, together."""
    return frozenset(chain.from_iterable(indices))


def _axis(
    graph: Graph, sinks: AbstractSet[int], value: int, nodes: Iterable[int]
) -> int | None:
    """Return the axis of a mask along which the Softmaxes after all nodes that add it sum up; None if unknown."""
    axes = {row_axis(graph, sinks, node, value) for node in graph.at(nodes)}
    axis = axes.pop() if len(axes) == 1 else None
    shape = graph.shapes[value]
    if axis is None or shape is None:
        return None
    has_axis = len(shape) >= -axis
    return axis if has_axis else None


def _is_emptying(graph: Graph, value: int) -> bool:
    """Return whether all that reads a mask returns 0 for a row of which the mask leaves nothing."""
    readers = graph.consumers(value)
    empties = op_facts().empties_rows
    return bool(readers) and all(reader.key in empties for reader, _ in readers)


def _operands(walks: Iterable[MaskWalk]) -> dict[int, set[int]]:
    """Return the masks that are added to scores, each with the nodes that do so."""
    operands = dict[int, set[int]]()
    for walk in walks:
        for value, nodes in walk.operands.items():
            operands.setdefault(value, set()).update(nodes)
    return operands


def _repeated(walks: Iterable[MaskWalk]) -> set[int]:
    """Return the sums that add several masks to the same scores, and those that add the first of them.

    Only all masks together tell which rows are masked as a whole.
    """
    # Of two inputs that are added to each other alone, one holds the scores.
    open_walks = [walk for walk in walks if walk.others is not None]
    count = Counter(chain.from_iterable(_operands(open_walks).values()))
    repeated = {index for index, masks in count.items() if masks > 1}
    for walk in open_walks:
        own = _all(walk.operands.values())
        # A sum that adds another mask to what this one is joined with.
        if (walk.sums - own) & count.keys():
            repeated |= walk.sums
    return repeated


def _last_sums(
    graph: Graph, sums: AbstractSet[int], masks: AbstractSet[int]
) -> frozenset[int]:
    """Return the sums, except for each that is read by another sum alone, which adds no further mask to it.

    A bound of the second sum is one of both, and a bounded first one would show the traces of what the second adds.
    """
    last = set(sums)
    for node in graph.at(sums):
        reader = graph.only_reader(node.outputs[0])
        if reader is None or reader.index not in sums:
            continue
        if not any(value in masks for value in reader.inputs):
            last.discard(node.index)
    return frozenset(last)


def may_be_bounded(graph: Graph) -> bool:
    """Return whether a node can bound masks: Max and Min broadcast since opset 8 (onnx/defs/math/defs.cc)."""
    return graph.book.opsets[""] >= 8
