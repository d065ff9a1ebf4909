"""Values that nodes of the main graph compute from nothing but constants."""

from collections.abc import Container, Iterable

from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._graph.wiring import Wiring


def fixed_values(
    graph: Graph, nodes: Iterable[Node], wiring: Wiring, constants: Container[str]
) -> frozenset[str]:
    """Return the names of these values. Custom ops may draw numbers, as random ops do.

    Args:
        nodes: those of the main graph, in order.
        wiring: what they need.
        constants: names of the constants.

    Complexity: linear in nodes and reads.
    """
    random = {
        wiring.outermost[node.index] for node in graph.nodes_of(op_facts().random)
    }
    fixed = set[str]()
    for node in nodes:
        if node.signature is None or node.index in random:
            continue
        needs = (graph.values[value].name for value in wiring.needs[node.index])
        if all(name in constants or name in fixed for name in needs):
            fixed.update(filter(None, node.proto.output))
    return frozenset(fixed)
