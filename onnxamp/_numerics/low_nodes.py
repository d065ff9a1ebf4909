"""The nodes that a choice lowers: those that compute, and those that only move numbers."""

from dataclasses import dataclass

from onnxamp._convert.analysis import Analysis, low_ports
from onnxamp._graph.view import ABSENT, Node, Ports, View
from onnxamp._ops.facts import is_exact, op_facts


@dataclass(frozen=True, slots=True)
class LowNode:
    """A node that is in low precision, or can be.

    Attributes:
        key: its first output.
        names: those of its first output, also as the result of an If.
        node: its index.
        ports: those that are in low precision.
    """

    key: str
    names: tuple[str, ...]
    node: int
    ports: Ports


def computes(node: Node) -> bool:
    """Return whether the node computes. Others, such as exact ops, cost no accuracy and follow their neighbors."""
    moves = is_exact(node.proto) or node.key in op_facts().following
    return not moves and node.signature is not None


def low_node(analysis: Analysis, node: Node) -> LowNode | None:
    """Return the part of a node that an analysis lowers; None if that is nothing, or holds no numbers of its own."""
    ports = low_ports(analysis, node)
    if not (ports.inputs or ports.outputs):
        return None
    if not (computes(node) or is_exact(node.proto)):
        return None
    key = node.first_output
    return LowNode(key, (key, *_results(analysis.graph, node)), node.index, ports)


def _results(view: View, node: Node) -> list[str]:
    """Return names of Ifs' outputs that the node's first output becomes."""
    names: list[str] = []
    value = next(iter(node.writes), ABSENT)
    while value != ABSENT:
        owners = (
            (view.nodes[view.scopes[scope].owner], port)
            for scope, port in view.results[value]
            if scope
        )
        value = next(
            (owner.outputs[port] for owner, port in owners if owner.key == "If"), ABSENT
        )
        if value != ABSENT:
            names.append(view.values[value].name)
    return names
