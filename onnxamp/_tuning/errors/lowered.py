"""The nodes that an analysis lowers, and the values at their ports that it rounds, for measurements of errors."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis, low_ports
from onnxamp._decide.variables.ports import NONE
from onnxamp._facts.ops import is_exact, op_facts
from onnxamp._graph.view import ABSENT, Node, Ports, View


@record
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
    """Return the low ports of a node; None if it has none, or neither computes nor passes numbers on."""
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
            (owner.outputs[port] for owner, port in owners if owner.key == "If"),
            ABSENT,
        )
        if value != ABSENT:
            names.append(view.values[value].name)
    return names


class Settled(NamedTuple):
    """The values that an analysis rounds at the user's request, even if all nodes stay in float32.

    Attributes:
        stored: weights and inputs that the model holds in low precision.
        returned: values that it returns in low precision.
    """

    stored: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()

    @classmethod
    def of(cls, analysis: Analysis) -> "Settled":
        """Return those of an analysis."""
        graph = analysis.graph
        ports = analysis.ports
        is_low = analysis.decision.is_low
        own = {*graph.constants.tensors, *graph.scopes[0].inputs}
        returned = {
            value
            for position, value in enumerate(graph.scopes[0].outputs)
            if is_low(ports.returned.get((0, position), NONE))
        }
        return cls(frozenset(filter(ports.enters_low, own)), frozenset(returned))


def rounded_ports(analysis: Analysis, settled: Settled) -> Mapping[str, Ports]:
    """Return the ports whose values an analysis rounds, by first output of their node."""

    def among(values: Sequence[int], others: AbstractSet[int]) -> Iterator[int]:
        return (place for place, value in enumerate(values) if value in others)

    rounded = dict[str, Ports]()
    for node in analysis.graph.order:
        inputs, outputs = low_ports(analysis, node)
        rounded[node.first_output] = Ports(
            inputs=tuple({*inputs, *among(node.inputs, settled.stored)}),
            outputs=tuple({*outputs, *among(node.outputs, settled.returned)}),
        )
    return rounded
