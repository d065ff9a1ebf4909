"""Nodes that lists and levels treat like their neighbors: followers of low nodes, and nodes stranded among float32."""

from collections.abc import Container, Iterator
from collections.abc import Set as AbstractSet

from onnxamp._decide.mincut import Question
from onnxamp._decide.variables.ports import HIGH, NONE, PortVariables
from onnxamp._graph.graph import Graph


def followers(
    graph: Graph,
    ports: PortVariables,
    high: AbstractSet[Question],
    settled: Container[int],
) -> frozenset[int]:
    """Return the nodes that may be low and read only low precision, apart from single numbers; exact ops are left out.

    Complexity: linear in nodes.

    Args:
        graph: the prepared model.
        ports: the precision variables.
        high: variables that are float32.
        settled: nodes that are low in any case if they have no such variable.
    """
    low = set[int]()
    nodes = set[int]()
    # Producers come first, so one pass sees whether everything that a node reads is low.
    for node in graph.order:
        roots = ports.deciding(node.index)
        if not roots or not high.isdisjoint(roots):
            continue
        read = [
            value
            for value in graph.float_inputs(node)
            if graph.constants.scalar(value) is None
        ]
        is_follower = bool(read) and low.issuperset(read)
        if node.index in settled:
            low.update(node.outputs)
        elif is_follower:
            low.update(node.outputs)
            nodes.add(node.index)
    return frozenset(nodes - graph.exact)


def exact_between_float32(
    graph: Graph,
    ports: PortVariables,
    hard: AbstractSet[Question],
    settled: AbstractSet[Question],
) -> frozenset[int]:
    """Return the exact ops between nodes without a low-precision kernel, where low precision would only add Casts.

    Complexity: linear in ports.

    Args:
        graph: the prepared model.
        ports: the precision variables.
        hard: variables that the target forces to float32.
        settled: variables that the user settled.
    """
    pinned = hard | settled
    given = {value.index for value in graph.overridable()} | {*graph.scopes[0].inputs}
    nodes = set[int]()
    for index in graph.exact & ports.of_node.keys():
        around = {
            ports.root(variable) in hard
            for variable in _sides(graph, ports, given, index)
            if variable != HIGH
        }
        if around == {True} and pinned.isdisjoint(ports.deciding(index)):
            nodes.add(index)
    return frozenset(nodes)


def _sides(
    graph: Graph, ports: PortVariables, given: Container[int], index: int
) -> Iterator[Question]:
    """Yield the variables of producers and consumers of a node's values, except weights that the user does not lower.

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
