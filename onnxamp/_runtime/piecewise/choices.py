"""The conditions of a model's Ifs: which there are, which branches samples take, and how to take the other ones.

An If runs one of its branches, so samples show nothing of the other. A condition that is replaced by a constant makes
the same inputs take that branch, with the captured values as they are.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from onnx import ModelProto, NodeProto

from onnxamp._facts.ops import op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import all_nodes

Branch: TypeAlias = tuple[str, bool]
"""The key of a condition, and whether the branch is the one that runs if it holds."""

_STAMP: Final = "onnxamp.condition"
"""Metadata of an If: the key of its condition, which stays when the If moves and values get other names."""


class Condition(NamedTuple):
    """A condition that at least one If reads, and that is no constant.

    Attributes:
        key: its name; the second value of a name in another body is "name#2". Both forms of a model have the same.
        label: the first If that reads it.
        path: the branches around that If, the outermost first.
        repeats: whether the If is in the body of a Loop or Scan.
        ends: whether the loops around the If end whatever its branches compute.
        computes: the branches that compute floats, rather than only move data.
    """

    key: str
    label: str
    path: tuple[Branch, ...] = ()
    repeats: bool = False
    ends: bool = True
    computes: frozenset[bool] = frozenset()


def branch_name(condition: Condition, *, holds: bool) -> str:
    """Return a branch in words."""
    return f"the {'then' if holds else 'else'} branch of If {condition.label!r}"


def has_choices(model: ModelProto) -> bool:
    """Return whether a model without functions has an If. Complexity: linear in nodes."""
    return any(node.op_type == "If" for node in all_nodes(model.graph.node))


def stamped(
    model: ModelProto, forced: Mapping[str, bool]
) -> tuple[ModelProto, tuple[Condition, ...]]:
    """Return a copy of a model whose Ifs know the keys of their conditions, and the conditions.

    Args:
        model: it is not changed; its functions are inlined.
        forced: conditions to replace, by key; those that the model does not have are ignored.

    Complexity: linear in nodes.
    """
    graph = Graph.of(model)
    editor = GraphEditor(graph)
    conditions: dict[str, Condition] = {}
    keys = dict(_keys(graph))
    busy = _computing(graph)
    paths = {0: Condition("", "")}
    for scope in graph.scopes:
        if scope.index:
            paths[scope.index] = _within(graph, scope.index, paths[scope.parent], keys)
        for index in scope.nodes:
            if index not in keys:
                continue
            key = keys[index]
            node = graph.nodes[index]
            here = paths[scope.index]._replace(key=key, label=node.label)
            # Several Ifs may read one condition: the first gives it its label and path.
            known = conditions.setdefault(key, here)
            sides = {_holds(node, body) for _, body in node.bodies if body in busy}
            conditions[key] = known._replace(computes=known.computes | sides)
            proto = editor.node(index)
            proto.metadata_props.add(key=_STAMP, value=key)
            if key in forced:
                proto.input[0] = editor.constant(np.array(forced[key]), "branch")
    return editor.finish(), tuple(conditions.values())


def stamp_of(node: NodeProto) -> str | None:
    """Return the key of the condition of an If; None if it is a constant."""
    return next(
        (item.value for item in node.metadata_props if item.key == _STAMP), None
    )


def _keys(graph: Graph) -> Iterator[tuple[int, str]]:
    """Yield (If, key of its condition) pairs, without constant conditions."""
    names: dict[str, list[int]] = {}
    for scope in graph.scopes:
        for node in (graph.nodes[index] for index in scope.nodes):
            if node.key != "If" or graph.constants.scalar(node.input(0)) is not None:
                continue
            value = node.input(0)
            name = graph.values[value].name
            known = names.setdefault(name, [])
            if value not in known:
                known.append(value)
            place = known.index(value) + 1
            yield node.index, name if place == 1 else f"{name}#{place}"


def _within(
    graph: Graph, scope: int, around: Condition, keys: Mapping[int, str]
) -> Condition:
    """Return what holds of the Ifs in a body: their path, and the loops around them."""
    owner = graph.nodes[graph.scopes[scope].owner]
    if owner.key in op_facts().repeats:
        ends = around.ends and _ends(graph, owner)
        return around._replace(repeats=True, ends=ends)
    if owner.index not in keys:
        return around
    step = keys[owner.index], _holds(owner, scope)
    return around._replace(path=(*around.path, step))


def _holds(node: Node, scope: int) -> bool:
    """Return whether a branch of an If is the one that runs if its condition holds."""
    return dict(node.bodies).get("then_branch") == scope


def _computing(graph: Graph) -> set[int]:
    """Return the scopes in which a node computes floats, there or in a body."""
    busy = set[int]()
    for scope in reversed(graph.scopes):  # a body comes after the scope around it
        nodes = (graph.nodes[index] for index in scope.nodes)
        if scope.index in busy or any(_computes_floats(graph, node) for node in nodes):
            busy.add(scope.index)
            busy.add(scope.parent)
    return busy


def _computes_floats(graph: Graph, node: Node) -> bool:
    """Return whether a node itself computes floats, rather than moving them or leaving that to a body."""
    facts = op_facts()
    is_moving = node.key in facts.exact or node.key in facts.relabels
    if is_moving or node.key in facts.control_flow:
        return False
    return any("float" in (graph.types[value] or "") for value in node.writes)


def _ends(graph: Graph, loop: Node) -> bool:
    """Return whether a loop ends after a number of trips that its body does not decide."""
    if loop.key != "Loop":
        return True
    if loop.input(0) == ABSENT:
        return False
    ((_, index),) = loop.bodies
    body = graph.scopes[index]
    condition = body.outputs[0]
    while (maker := graph.producer(condition, "Identity")) is not None:
        condition = maker.input(0)
    is_passed = len(body.inputs) > 1 and condition == body.inputs[1]
    return is_passed or graph.constants.scalar(condition) is not None


def uncovered(
    conditions: Iterable[Condition], taken: Iterable[Branch]
) -> list[tuple[Condition, bool]]:
    """Return the branches that compute floats, and that nothing ran, outer ones first."""
    seen = frozenset(taken)
    branches = product(conditions, (True, False))
    return [
        (condition, holds)
        for condition, holds in branches
        if holds in condition.computes and (condition.key, holds) not in seen
    ]


def way_to(condition: Condition, *, holds: bool) -> dict[str, bool]:
    """Return the conditions that lead to a branch."""
    return {**dict(condition.path), condition.key: holds}
