"""Products of dequantized numbers that the builder of a target does not take (``_data/targets``)."""

from collections.abc import Iterator, Mapping

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.profiles import Profile


def split_scales(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node, Node]]:
    """(product, what dequantizes its first factor, and its second), where their scales have one type."""
    nodes = graph.nodes_of(profile.one_scale)
    behind = graph.ask(_dequantized) if nodes else {}
    for node in nodes:
        first, second = (behind.get(value) for value in node.inputs[:2])
        if first is not None and second is not None and first is not second:
            yield node, first, second


def integer_factors(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Products of something dequantized and a Cast of integers, which are float32."""
    nodes = graph.nodes_of(profile.one_scale)
    behind = graph.ask(_dequantized) if nodes else {}
    for node in nodes:
        casts = (
            graph.producer(other)
            for value, other in (node.inputs[:2], node.inputs[1::-1])
            if value in behind
        )
        if any(
            cast is not None and cast.key == "Cast" and _reads_integers(graph, cast)
            for cast in casts
        ):
            yield node


def shared_factors(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node]]:
    """Two products of dequantized factors that share the first one."""
    nodes, first = graph.nodes_of(profile.shared_factors), dict[int, Node]()
    behind, origins = (graph.ask(_dequantized), graph.ask(_origins)) if nodes else ({}, {})
    for node in nodes:
        left, right = (behind.get(value) for value in node.inputs[:2])
        if left is not None and right is not None:
            other = first.setdefault(origins[left.index], node)
            if other is not node:
                yield other, node


def dequantized_values(graph: Graph) -> Mapping[int, int]:
    """Values that are dequantized -> what they are dequantized from."""
    origins = graph.ask(_origins)
    return {value: origins[node.index] for value, node in graph.ask(_dequantized).items()}


def _origins(graph: Graph) -> Mapping[int, int]:
    """What dequantizes -> the value that it dequantizes, or what that was before it was quantized once more."""
    facts, origins = op_facts(), dict[int, int]()
    for index in graph.order:
        node = graph.nodes[index]
        if node.key in facts.dequantize:
            origin, made = node.input(0), graph.producer(node.input(0))
            before = (
                graph.producer(made.input(0))
                if made is not None and made.key in facts.quantize
                else None
            )
            origins[index] = origins.get(before.index, origin) if before is not None else origin
    return origins


def _reads_integers(graph: Graph, node: Node) -> bool:
    return graph.types[node.input(0)] in op_facts().free_sources["Cast"]


def _dequantized(graph: Graph) -> Mapping[int, Node]:
    """Values -> what dequantizes them, also through ops that read one value that is computed.

    Complexity: linear in nodes.
    """
    behind: dict[int, Node] = {}
    for index in graph.order if graph.nodes_of(op_facts().dequantize) else ():
        node = graph.nodes[index]
        found = node if node.key in op_facts().dequantize else None
        if found is None:
            computed = [
                value
                for value in node.inputs
                if value != ABSENT and value not in graph.constants.tensors
            ]
            found = behind.get(computed[0]) if len(computed) == 1 else None
        if found is not None:
            behind |= dict.fromkeys(node.outputs, found)
    return behind
