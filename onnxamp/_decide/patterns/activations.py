"""Walks through decomposed activations, from the op at their core."""

from onnxamp._decide.patterns.steps import REACH, scales
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import only_reader, readers_of
from onnxamp._graph.view import ABSENT, Node


def gelu(graph: Graph, core: Node) -> set[int]:
    """Return core -> Add 1 -> Mul by x and by 0.5 in either order, with the polynomial or scaling before the core."""
    plus = _only_reader(graph, core.outputs[0], "Add")
    if plus is None:
        return set()
    if graph.constants.uniform(_other(graph, plus, core.outputs[0])) != 1.0:
        return set()
    nodes = {core.index, plus.index}
    base = _gelu_factors(graph, plus.outputs[0], nodes)
    if base == ABSENT or not _gelu_argument(graph, core.input(0), base, nodes):
        return set()
    return nodes


def _gelu_factors(graph: Graph, value: int, nodes: set[int]) -> int:
    """Return x, by which a value is multiplied along with 0.5; ABSENT if it is not. The Muls are added to the nodes.

    The factors take one Mul each, or one Mul if half of x is computed first.
    """
    base = ABSENT
    for _ in range(2):
        times = _only_reader(graph, value, "Mul")
        if times is None:
            break
        nodes.add(times.index)
        other = _other(graph, times, value)
        value = times.outputs[0]
        if not graph.constants.is_constant(other):
            base = _doubled(graph, other, nodes)
    return base


def _doubled(graph: Graph, value: int, nodes: set[int]) -> int:
    """Return the value that this one is half of, whose Mul is added to the nodes; the value itself if it is none."""
    half = graph.producer(value, "Mul")
    factors = () if half is None else half.inputs
    rest = [factor for factor in factors if graph.constants.uniform(factor) != 0.5]
    if half is None or len(rest) == len(factors):
        return value
    nodes.add(half.index)
    return graph.passed_on(rest[0])


def _gelu_argument(graph: Graph, value: int, base: int, nodes: set[int]) -> bool:
    """Return whether a value is a polynomial of x. The nodes that compute it are added to the others."""
    stack = [value]
    while stack:
        current = graph.passed_on(stack.pop())
        node = graph.producer(current)
        is_known = current == base or graph.constants.is_constant(current)
        if node is None or node.index in nodes or is_known:
            continue
        if node.key not in ("Add", "Div", "Mul", "Pow") or len(nodes) > REACH:
            return False
        nodes.add(node.index)
        stack += node.reads
    return True


def silu(graph: Graph, core: Node) -> set[int]:
    """Return the nodes of Swish: x * Sigmoid(x), and x * Sigmoid(c x)."""
    source = graph.passed_on(core.input(0))
    scaled = graph.producer(source, "Mul")
    if scaled is not None and not any(map(graph.constants.is_constant, scaled.inputs)):
        scaled = None
    for node in readers_of(graph, core.outputs[0]):
        if node.key != "Mul":
            continue
        other = _other(graph, node, core.outputs[0])
        if other == source:
            return {core.index, node.index}
        if scaled is not None and scales(graph, scaled, other):
            return {core.index, node.index, scaled.index}
    return set()


def _only_reader(graph: Graph, value: int, key: str) -> Node | None:
    """Return the only reader of a value if it is an op of that type with two inputs."""
    _, _, node = only_reader(graph, value)
    if node is None or node.key != key or len(node.inputs) != 2:
        return None
    return node


def _other(graph: Graph, node: Node, value: int) -> int:
    """Return the input of a node with two that is not the value."""
    one, other = map(graph.passed_on, node.inputs)
    return other if one == value else one
