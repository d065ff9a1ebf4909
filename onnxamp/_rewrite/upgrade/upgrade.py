"""Upgrades of whole models to newer opsets."""

from dataclasses import dataclass, field

from onnx import ModelProto, NodeProto

from onnxamp._errors import OpsetError
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import NewNames
from onnxamp._model.copying import copied
from onnxamp._model.protos import all_nodes, default_domain
from onnxamp._rewrite.place import add_constants, place_nodes
from onnxamp._rewrite.upgrade.nodes import StuckAtError, upgraded_nodes
from onnxamp._rewrite.upgrade.steps import is_silent, steps_of
from onnxamp._rewrite.upgrade.writer import Site, Writer


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A node that cannot take the step to ``opset``, in the words of ``why``."""

    opset: int
    node: str
    op: str
    why: str

    def __str__(self) -> str:
        return f"{self.node!r} ({self.op}) cannot follow to opset {self.opset}: {self.why}"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """How far a graph can be upgraded, and what that takes.

    Attributes:
        graph: the graph as it is.
        opset: what its nodes can reach, up to what was asked for.
        obstacle: what keeps them from more.
        nodes: node -> the nodes that stand in its place.
    """

    graph: Graph
    opset: int
    obstacle: Obstacle | None
    nodes: dict[int, list[NodeProto]]
    writer: Writer

    def apply(self) -> Graph:
        """The graph of a copy of the model at the newer opset; the same graph if that is the one it has."""
        if self.opset == self.graph.book.opsets[""]:
            return self.graph
        model = copied(self.graph.model)
        place_nodes(self.graph, model, self.nodes)
        self._declare(model)
        return Graph.of(model, self.graph.folder)

    def _declare(self, model: ModelProto) -> None:
        """Add the constants that are read, and write the opset."""
        read = {name for nodes in self.nodes.values() for node in nodes for name in node.input}
        tensors = [tensor for tensor in self.writer.constants.values() if tensor.name in read]
        add_constants(model, tensors)
        sets = [model.opset_import, *(function.opset_import for function in model.functions)]
        for entry in (entry for entries in sets for entry in entries if default_domain(entry.domain) == ""):
            entry.version = max(entry.version, self.opset)
        if not any(default_domain(entry.domain) == "" for entry in model.opset_import):
            model.opset_import.add(domain="", version=self.opset)


def plan_upgrade(graph: Graph, opset: int) -> Upgrade:
    """Find out how far a graph can be upgraded on the way to an opset, and what that takes; the model is not copied.

    Complexity: linear in nodes.
    """
    current, obstacle = graph.book.opsets[""], None
    while opset > current:
        found, upgrade = _attempt(graph, current, opset)
        if found is None:
            return Upgrade(graph, opset, obstacle, upgrade.nodes, upgrade.writer)
        obstacle, opset = found, found.opset - 1
    return Upgrade(graph, current, obstacle, {}, Writer(NewNames(set())))


@dataclass(slots=True)
class _Attempt:
    """The nodes that an upgrade replaces, by index, and what writes the new ones."""

    writer: Writer
    nodes: dict[int, list[NodeProto]] = field(default_factory=dict)


def _attempt(graph: Graph, current: int, opset: int) -> tuple[Obstacle | None, _Attempt]:
    """What an upgrade takes, or the obstacle that is met first on the way."""
    attempt = _Attempt(Writer(NewNames(graph.all_names())))
    found = _function_obstacles(graph.model, opset)
    for key, indices in graph.by_key.items():
        if "::" in key or is_silent(key, current, opset):
            continue
        for node in map(graph.nodes.__getitem__, indices):
            if node.signature is None:
                continue
            try:
                attempt.nodes[node.index] = upgraded_nodes(Site(graph, node, attempt.writer), current, opset)
            except StuckAtError as stuck:
                found.append(Obstacle(stuck.version, node.label, key, str(stuck)))
    return min(found, key=lambda obstacle: obstacle.opset, default=None), attempt


def _function_obstacles(model: ModelProto, opset: int) -> list[Obstacle]:
    """Nodes of local functions that would have to change: their types are unknown, and they have no initializers."""
    found = []
    for function in model.functions:
        imported = {default_domain(entry.domain): entry.version for entry in function.opset_import}
        for node in all_nodes(function.node):
            if default_domain(node.domain) or "" not in imported:
                continue
            steps = steps_of(node.op_type, imported[""], opset)
            if (step := next((step for step in steps if not step.is_silent), None)) is not None:
                why = f"it stands in the function {function.name}, whose nodes are not rewritten; inline it"
                found.append(Obstacle(step.version, node.name or node.output[0], node.op_type, why))
    return found


def upgraded(graph: Graph, opset: int) -> Graph:
    """The graph of a copy of the model at an opset; the same graph if its own is not older.

    Raises:
        OpsetError: a node cannot follow.
    """
    plan = plan_upgrade(graph, opset)
    if plan.obstacle is not None:
        far = plan.opset if plan.opset > graph.book.opsets[""] else None
        advice = f" --opset {far} is as far as the model goes." if far else " Leave the opset out, or pass keep."
        raise OpsetError(f"The model cannot be upgraded to opset {opset}: {plan.obstacle}.{advice}")
    return plan.apply()
