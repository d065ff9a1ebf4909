"""Nodes whose precision follows from that of their neighbors."""

from collections.abc import Callable, Container, Iterator
from collections.abc import Set as AbstractSet

from onnxamp._decide.ports import HIGH, NONE, PortVariables
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def followers(
    graph: Graph,
    ports: PortVariables,
    high: Container[int],
    is_low: Callable[[Node], bool],
) -> frozenset[int]:
    """Return the nodes that read low precision alone, apart from numbers, and may be low. Exact ones are left out.

    Complexity: linear in nodes.

    Args:
        graph: the prepared model.
        ports: the precision variables.
        high: variables that are float32.
        is_low: returns whether a node without such a variable is low in any case.
    """
    low, found = set[int](), set[int]()
    for node in graph.order:
        roots = [ports.root(one) for one in ports.of(node.index)]
        if not roots or any(root in high for root in roots):
            continue
        read = [
            value
            for _, value in graph.float_inputs(node)
            if graph.constants.scalar(value) is None
        ]
        is_settled = is_low(node)
        is_follower = bool(read) and low.issuperset(read)
        if is_settled or is_follower:
            low.update(node.outputs)
        if is_follower and not is_settled and node.index not in graph.exact:
            found.add(node.index)
    return frozenset(found)


def stranded(
    graph: Graph,
    ports: PortVariables,
    hard: AbstractSet[int],
    settled: AbstractSet[int],
) -> frozenset[int]:
    """Return the exact ops that are surrounded by nodes without a kernel: in low precision, they would only gain Casts.

    Complexity: linear in ports.

    Args:
        graph: the prepared model.
        ports: the precision variables.
        hard: variables that the target forces to float32.
        settled: variables that the user settled.
    """
    pinned = hard | settled
    given = {value.index for value in graph.overridable()} | {*graph.scopes[0].inputs}
    found = set[int]()
    for index in graph.exact & ports.of_node.keys():
        own = map(ports.root, ports.of_node[index].values())
        around = {
            ports.root(variable) in hard
            for variable in _sides(graph, ports, given, index)
            if variable != HIGH
        }
        if around == {True} and pinned.isdisjoint(own):
            found.add(index)
    return frozenset(found)


def _sides(
    graph: Graph, ports: PortVariables, given: Container[int], index: int
) -> Iterator[int]:
    """Yield the variables of the producers and consumers of a node's values; weights have none, unless the user lowers
    them.

    Inputs and outputs of the model count as nodes that cast them, which exist after conversion.
    """
    node = graph.nodes[index]
    for value in node.inputs:
        if value in ports.free or ports.produced[value] == NONE:
            continue
        variable = ports.produced[value]
        is_made = graph.producer(value) is not None or value in given
        if is_made or variable in ports.requested_low:
            yield variable
    for value in node.outputs:
        for reader, port in graph.uses[value]:
            if ports.consumed[reader][port] != NONE:
                yield ports.consumed[reader][port]
        for result in graph.results[value]:
            yield ports.returned.get(result, HIGH)
