"""Products of dequantized numbers that the builder of a target does not take (``_data/targets``)."""

from collections.abc import Iterator, Mapping

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.profiles import Profile


def split_scales(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node, Node]]:
    """(product, what dequantizes its first factor, and its second), where their scales have one type."""
    behind = _dequantized(graph, profile)
    for node in graph.nodes_of(profile.one_scale):
        first, second = (behind.get(value) for value in node.inputs[:2])
        if first is not None and second is not None and first is not second:
            yield node, first, second


def integer_factors(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Products of something dequantized and a Cast of integers, which are float32."""
    behind = _dequantized(graph, profile)
    for node in graph.nodes_of(profile.one_scale):
        casts = (graph.producer(other) for value, other in (node.inputs[:2], node.inputs[1::-1]) if value in behind)
        if any(cast is not None and cast.key == "Cast" and _reads_integers(graph, cast) for cast in casts):
            yield node


def shared_factors(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node]]:
    """Two products of dequantized factors that share the first one."""
    behind, first = _dequantized(graph, profile), dict[int, Node]()
    origins = _origins(graph) if behind else {}
    for node in graph.nodes_of(profile.shared_factors):
        left, right = (behind.get(value) for value in node.inputs[:2])
        if left is not None and right is not None:
            other = first.setdefault(origins[left.index], node)
            if other is not node:
                yield other, node


def dequantized_values(graph: Graph, profile: Profile) -> Mapping[int, int]:
    """Values that are dequantized -> what they are dequantized from."""
    origins = _origins(graph)
    return {value: origins[node.index] for value, node in _dequantized(graph, profile).items()}


def _origins(graph: Graph) -> Mapping[int, int]:
    """What dequantizes -> the value that it dequantizes, or what that was before it was quantized once more."""
    facts, origins = op_facts(), dict[int, int]()
    for index in graph.order:
        node = graph.nodes[index]
        if node.key in facts.dequantize:
            origin, made = node.input(0), graph.producer(node.input(0))
            before = graph.producer(made.input(0)) if made is not None and made.key in facts.quantize else None
            origins[index] = origins.get(before.index, origin) if before is not None else origin
    return origins


def _reads_integers(graph: Graph, node: Node) -> bool:
    return graph.types[node.input(0)] in op_facts().free_sources["Cast"]


def _dequantized(graph: Graph, profile: Profile) -> Mapping[int, Node]:
    """Values -> what dequantizes them, also through ops that read one value that is computed.

    Complexity: linear in nodes.
    """
    behind: dict[int, Node] = {}
    for index in graph.order if graph.nodes_of(profile.one_scale | profile.shared_factors | profile.one_choice) else ():
        node = graph.nodes[index]
        found = node if node.key in op_facts().dequantize else None
        if found is None:
            computed = [value for value in node.inputs if value != ABSENT and value not in graph.constants.tensors]
            found = behind.get(computed[0]) if len(computed) == 1 else None
        if found is not None:
            behind |= dict.fromkeys(node.outputs, found)
    return behind
