"""What lies between the wanted values and the loss."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxamp._dtypes import ELEM_NUMBERS, element_name
from onnxamp._graph.types import infer_types
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp.train._gradients.table import FLAT
from onnxamp.train._gradients.writer import FLOATS


@dataclass(frozen=True, slots=True)
class Path:
    """Nodes of the main graph through which a gradient flows, in order, and the values that carry one."""

    nodes: tuple[Node, ...]
    moved: frozenset[int]
    """Values that move with a wanted one."""
    elems: Sequence[int]
    """Element type by value; 0 where it is unknown, or the value is no tensor."""


def find_path(view: View, wanted: Iterable[int], loss: int) -> Path:
    """Nodes from which the loss is reached and that are reached from a wanted value through floats. Linear."""
    types = infer_types(view)
    elems = [ELEM_NUMBERS.get(element_name(found), 0) for found in types]
    carriers = FLOATS | {0}  # what an unknown op makes may be floats
    moved = set(wanted)
    movers: list[Node] = []
    captured = _captured(view)
    order = [view.nodes[index] for index in view.order if view.nodes[index].scope == 0]
    for node in order:
        reads = (*node.inputs, *captured.get(node.index, ()))
        if node.key not in FLAT and any(value in moved for value in reads):
            movers.append(node)
            moved.update(value for value in node.outputs if value != ABSENT and elems[value] in carriers)
    needed, between = {loss} & moved, []
    for node in reversed(movers):
        if any(value in needed for value in node.outputs):
            between.append(node)
            needed.update(value for value in (*node.inputs, *captured.get(node.index, ())) if value in moved)
    return Path(tuple(between[::-1]), frozenset(moved), elems)


def _captured(view: View) -> dict[int, list[int]]:
    """Node of the main graph -> values of the main graph that its bodies read."""
    owners: dict[int, int] = {}
    for scope in view.scopes[1:]:  # a scope stands behind the one around it
        outer = view.nodes[scope.owner].scope
        owners[scope.index] = scope.owner if outer == 0 else owners[outer]
    found: dict[int, list[int]] = {}
    for value in view.values:
        if value.scope == 0:
            for index, _ in view.uses[value.index]:
                if view.nodes[index].scope:
                    found.setdefault(owners[view.nodes[index].scope], []).append(value.index)
            for body, _ in view.results[value.index]:
                if body:
                    found.setdefault(owners[body], []).append(value.index)
    return found
