"""Upgrades of models to newer opsets, op by op, with the rules of ``_data/upgrades.toml`` for each step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnxamp._base.errors import OpsetError
from onnxamp._base.records import record
from onnxamp._facts.ops import attribute
from onnxamp._graph.editor import GraphEditor, drop_attributes, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._model.protos import all_nodes, copied, default_domain
from onnxamp._options.options import Options
from onnxamp._rewrite import Draft, PassResult, Site, StuckError, take_attribute
from onnxamp._rewrite.passes.upgrade_rules import (
    RULES,
    UpgradeStep,
    is_silent,
    steps_of,
)


@record
class Obstacle:
    """A node that cannot take the step to ``opset``, with the reason."""

    opset: int
    node: str
    op: str
    why: str

    def __str__(self) -> str:
        return f"{self.node!r} ({self.op}) cannot follow to opset {self.opset}: {self.why}"


def upgraded_nodes(
    site: Site, current: int, wanted: int
) -> list[NodeProto] | Obstacle:
    """Return the nodes that replace the site's node at a newer opset, or the obstacle of a step."""
    done = list[NodeProto]()
    # A step may replace a node by several, each of which takes its own further steps.
    waiting = [(copied(site.node.proto), current)]
    while waiting:
        proto, version = waiting.pop()
        step = next(iter(steps_of(proto.op_type, version, wanted)), None)
        if step is None:
            done.append(proto)
            continue
        try:
            nodes = [proto] if step.is_silent else _taken(step, proto, site)
        except StuckError as stuck:
            return Obstacle(step.version, site.node.label, site.node.key, str(stuck))
        waiting += [(node, step.version) for node in reversed(nodes)]
    return done


def _taken(step: UpgradeStep, proto: NodeProto, site: Site) -> list[NodeProto]:
    """Return the nodes that a node becomes by one step.

    Raises:
        StuckError: it cannot take the step.
    """
    if any(item.ref_attr_name for item in proto.attribute):
        raise StuckError("its attributes are those of a function")
    row = _checked(step, proto, site)
    for name, value in row.get("set", {}).items():
        if attribute(proto, name) is None:
            set_attribute(proto, name, value)
    drop_attributes(proto, row.get("drop", ()))
    for name, words in row.get("words", {}).items():
        word = attribute(proto, name) or step.defaults.get(name)
        if word is not None and word.decode() in words:
            set_attribute(proto, name, words[word.decode()])
    for moved in row.get("inputs", ()):
        _move(moved, step, proto, site)
    proto.op_type = step.op
    return RULES[row["call"]](proto, site) if "call" in row else [proto]


def _checked(step: UpgradeStep, proto: NodeProto, site: Site) -> Mapping[str, Any]:
    """Return the row of a step; drop outputs that nothing reads.

    Raises:
        StuckError: the node uses a feature that the new version lacks or changes.
    """
    row = step.row
    if row is None:
        raise StuckError("onnxamp does not know what changes at that opset")
    if step.is_closed:
        raise StuckError(row["why"])
    for name, allowed in row.get("only", {}).items():
        value = attribute(proto, name)
        value = step.defaults.get(name) if value is None else value
        value = value.decode() if isinstance(value, bytes) else value
        if value is not None and value not in allowed:
            raise StuckError(row["why"])
    kind = site.type_of(proto.input[0]) if "types" in row else None
    if kind is not None and kind not in row["types"]:
        raise StuckError(row["why"])
    if "outputs" in row:
        spare = [name for name in proto.output[row["outputs"] :] if name]
        is_needed = "unread" not in row or any(_is_read(site, name) for name in spare)
        if spare and is_needed:
            raise StuckError(row["why"])
        del proto.output[row["outputs"] :]
    for (side, position), admitted in step.lost.items():
        names = proto.input if side == "inputs" else proto.output
        name = names[position] if position < len(names) else ""
        actual = site.type_of(name) if name else None
        if actual is not None and actual not in admitted:
            verb = "takes" if side == "inputs" else "makes"
            raise StuckError(f"it {verb} no {actual} there")
    return row


def _is_read(site: Site, name: str) -> bool:
    value = site.values[name]
    return bool(site.graph.uses[value] or site.graph.results[value])


def _move(
    moved: Mapping[str, Any], step: UpgradeStep, proto: NodeProto, site: Site
) -> None:
    """Turn an attribute into an input."""
    name = moved["from"]
    position = moved["at"]
    value = take_attribute(proto, name, step.defaults.get(name))
    if value is None or _means_nothing(moved, value):
        return
    names = [*proto.input, *[""] * (position + 1 - len(proto.input))]
    names[position] = _constant(moved, value, proto, site)
    proto.input[:] = names


def _means_nothing(moved: Mapping[str, Any], value: Any) -> bool:
    """Return whether the value of an attribute means the same as no input."""
    nothing = moved.get("unless")
    if nothing is None or isinstance(nothing, list):
        return bool(value == nothing)
    return bool(value == np.float32(nothing))


def _constant(
    moved: Mapping[str, Any], value: Any, proto: NodeProto, site: Site
) -> str:
    """Return the name of a constant with the value of an attribute, in the form that the input has."""
    form = moved["as"]
    base = site.named(moved["from"])
    if form == "ints":
        return site.editor.ints(value if isinstance(value, list) else [value], base)
    if form == "int":
        return site.editor.ints(value, base)
    elem = site.elem_of(proto.input[0]) if form == "like" else TensorProto.FLOAT
    return site.editor.constant(np.asarray(value, np.float32), base, elem)


@dataclass(frozen=True)
class Upgrade:
    """The highest opset that a graph can reach, and the changes that it needs.

    Attributes:
        graph: the original graph.
        opset: the opset that its nodes can reach, up to the requested one.
        obstacle: the reason why they cannot reach more.
        editor: has recorded the nodes that change; None if none does.
    """

    graph: Graph
    opset: int
    obstacle: Obstacle | None
    editor: GraphEditor | None = None

    @cached_property
    def result(self) -> Graph:
        """The graph of a copy of the model at the newer opset; the same graph if that is the one it has."""
        if self.editor is None:
            return self.graph
        model = self.editor.finish()
        if "" not in {default_domain(entry.domain) for entry in model.opset_import}:
            model.opset_import.add(domain="", version=self.opset)
        inner = (function.opset_import for function in model.functions)
        for entry in chain(model.opset_import, *inner):
            if default_domain(entry.domain) == "":
                entry.version = max(entry.version, self.opset)
        return Graph.of(model, self.graph.folder)


def plan_upgrade(graph: Graph, opset: int) -> Upgrade:
    """Find how far a graph can be upgraded toward an opset, and the changes for it; the model is not copied.

    Complexity: linear in nodes.
    """
    current = graph.book.opsets[""]
    obstacle = None
    while opset > current:
        editor = GraphEditor(graph)
        found = _attempt(graph, current, opset, editor)
        if found is None:
            return Upgrade(graph, opset, obstacle, editor)
        obstacle = found
        # Every node can take the steps before the first obstacle.
        opset = found.opset - 1
    return Upgrade(graph, current, obstacle)


def _attempt(
    graph: Graph, current: int, opset: int, editor: GraphEditor
) -> Obstacle | None:
    """Record the changes of an upgrade, and return the first obstacle on the way."""
    obstacles = _function_obstacles(graph.model, opset)
    for key, alike in graph.by_key.items():
        if "::" in key or is_silent(key, current, opset):
            continue
        for node in alike:
            if node.signature is None:
                continue
            done = upgraded_nodes(Site(graph, node, editor, opset), current, opset)
            if isinstance(done, Obstacle):
                obstacles.append(done)
            else:
                editor.replace(node.index, done)
    return min(obstacles, key=lambda obstacle: obstacle.opset, default=None)


def _function_obstacles(model: ModelProto, opset: int) -> list[Obstacle]:
    """Return nodes of local functions that would have to change: their types are unknown, and they have no
    initializers.
    """
    obstacles = []
    for function in model.functions:
        imported = {
            default_domain(entry.domain): entry.version
            for entry in function.opset_import
        }
        for node in all_nodes(function.node):
            if default_domain(node.domain) or "" not in imported:
                continue
            steps = steps_of(node.op_type, imported[""], opset)
            loud = [step.version for step in steps if not step.is_silent]
            if loud:
                why = f"it is in the function {function.name}, whose nodes onnxamp does not rewrite; inline it"
                name = node.name or node.output[0]
                obstacles.append(Obstacle(loud[0], name, node.op_type, why))
    return obstacles


def upgraded(graph: Graph, opset: int) -> Graph:
    """Return the graph of a copy of the model at an opset; the same graph if its own is not older.

    Raises:
        OpsetError: a node cannot follow.
    """
    plan = plan_upgrade(graph, opset)
    if plan.obstacle is not None:
        advice = "Leave the opset out, or pass keep."
        if plan.opset > graph.book.opsets[""]:
            advice = (
                f"--opset {plan.opset} is the highest opset that the model can reach."
            )
        raise OpsetError(
            f"The model cannot be upgraded to opset {opset}: {plan.obstacle}. {advice}"
        )
    return plan.result


def apply(draft: Draft, options: Options) -> PassResult:
    """Upgrade a model to the opset that the user asks for, if its own is older.

    Raises:
        OpsetError: a node cannot follow.
    """
    opset = options.opset
    if not isinstance(opset, int):
        return PassResult(draft)
    current = draft.graph.book.opsets[""]
    if opset <= current:
        note = (
            f"The model already has opset {current}; --opset {opset} changes nothing."
        )
        return PassResult(draft, (note,))
    note = f"Upgraded from opset {current} to {opset}."
    return PassResult(Draft.of(upgraded(draft.graph, opset)), (note,), requested=True)
