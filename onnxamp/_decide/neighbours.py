"""Nodes whose precision follows from that of their neighbours."""

from collections.abc import Callable, Container, Iterator
from collections.abc import Set as AbstractSet

from onnxamp._decide.ports import HIGH, NONE, PortVariables
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


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
        is_low: says of a node with no such variable whether it is low in any case.
    """
    low, found = set[int](), set[int]()
    for index in graph.order:
        node = graph.nodes[index]
        roots = [ports.root(one) for one in ports.of_node.get(index, {}).values()]
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
        if is_follower and not is_settled and index not in graph.exact:
            found.add(index)
    return frozenset(found)


def stranded(
    graph: Graph, ports: PortVariables, hard: AbstractSet[int]
) -> frozenset[int]:
    """Return the exact ops that only what has no kernel surrounds: in low precision they would gain but Casts.

    Complexity: linear in ports.

    Args:
        graph: the prepared model.
        ports: the precision variables.
        hard: variables that the target forces to float32.
    """
    exact = {
        index
        for index in graph.exact & ports.of_node.keys()
        if hard.isdisjoint(map(ports.root, ports.of_node[index].values()))
    }
    found, seen = set[int](), set[int]()
    for start in sorted(exact):
        if start in seen:
            continue
        group, around, waiting = set[int](), set[bool](), [start]
        while waiting:
            index = waiting.pop()
            if index in group:
                continue
            group.add(index)
            for neighbour, variable in _neighbours(graph, ports, index):
                if neighbour in exact:
                    waiting.append(neighbour)
                elif variable == HIGH:
                    continue
                else:
                    around.add(ports.root(variable) in hard)
        seen |= group
        if around == {True}:
            found |= group
    return frozenset(found)


def _neighbours(
    graph: Graph, ports: PortVariables, index: int
) -> Iterator[tuple[int, int]]:
    """The nodes before and after a node, each with the variable of its side; weights are none."""
    node = graph.nodes[index]
    for value in node.inputs:
        maker = graph.producer(value)
        variable = NONE if maker is None else ports.produced[value]
        if maker is not None and variable != NONE and value not in ports.free:
            yield maker.index, variable
    for value in node.outputs:
        for reader, port in graph.uses[value] if value != ABSENT else ():
            variable = ports.consumed[reader][port]
            if variable != NONE:
                yield reader, variable
