"""Powers, and the nodes that read them: values grow by squaring, until something brings them back into range."""

from collections.abc import Iterable
from typing import Final

from onnxamp._facts.ops import op_facts
from onnxamp._graph.exact_walks import moved_from
from onnxamp._graph.graph import Graph
from onnxamp._graph.passed import passed_on
from onnxamp._graph.view import ABSENT, Node

_REACH: Final = 16
"""Nodes that are followed from a power."""


def squared_value(graph: Graph, node: Node) -> int:
    """Return the value that the node squares; ABSENT if it is not a square."""
    values = set(map(graph.passed_on, node.inputs))
    is_of_one = len(values) == 1 and len(node.inputs) == 2
    is_square = (
        node.key == "ReduceSumSquare"
        or (node.key in ("Mul", "Einsum") and is_of_one)
        or (node.key == "Pow" and graph.constants.uniform(node.input(1)) == 2.0)
    )
    shape = graph.shapes[node.outputs[0]] if node.key == "MatMul" else None
    if shape is not None and shape[-2:] in ((), (1,), (1, 1)):
        return _multiplied_by_itself(graph, node)
    return graph.passed_on(node.inputs[0]) if is_square else ABSENT


def _multiplied_by_itself(graph: Graph, product: Node) -> int:
    """Return the value whose vectors a node that makes single numbers multiplies by themselves; ABSENT for others."""
    one, other = product.inputs
    source, _ = moved_from(graph, one)
    is_same = source == moved_from(graph, other)[0]
    return graph.passed_on(source) if is_same else ABSENT


def is_power(graph: Graph, node: Node) -> bool:
    """Return whether a node squares its first input, or raises it to a higher power."""
    if node.key == "Mul":
        one, other = (uncast(graph, value) for value in node.inputs)
        return one == other
    if node.key == "Pow":
        exponent = graph.constants.uniform(node.input(1))
        return exponent is not None and exponent >= 2
    return node.key == "ReduceSumSquare"


def uncast(graph: Graph, value: int) -> int:
    """Return the value that is passed on as this one, in any type."""
    while (maker := graph.producer(graph.passed_on(value), "Cast")) is not None:
        value = maker.inputs[0]
    return graph.passed_on(value)


def ends_in_curve(graph: Graph, node: Node) -> bool:
    """Return whether a root, a logarithm or another curve follows a node, which brings its results into range."""
    return _has_curve(_spread(graph, node))


def readers_of_power(graph: Graph, power: Node) -> list[Node]:
    """Return the nodes that read a power, up to those that bring it back into range: a root, a logarithm, weights.

    Weights may bring powers back into range. Those of a spectrum do not if its logarithm follows.
    """
    readers = _spread(graph, power)
    for product in [*readers]:
        if product.key in op_facts().contractions:
            after = _spread(graph, product)
            readers += after if _has_curve(after) else ()
    return graph.at({reader.index for reader in readers})


def _spread(graph: Graph, start: Node) -> list[Node]:
    """Return the nodes that read the results of a node, directly or through sums, factors and exact ops."""
    seen = {start.index}
    nodes = list[Node]()
    stack = [start]
    while stack and len(nodes) < _REACH:
        for reader, port in passed_on(graph, stack.pop()).readers(graph):
            if reader.index in seen or reader.bodies or _has_one_type(reader, port):
                continue
            seen.add(reader.index)
            nodes.append(reader)
            if _keeps_magnitude(graph, reader):
                stack.append(reader)
    return nodes


def _has_curve(nodes: Iterable[Node]) -> bool:
    """Return whether a root, a logarithm or another curve is among some nodes."""
    return any(node.key in op_facts().curves for node in nodes)


def _keeps_magnitude(graph: Graph, node: Node) -> bool:
    """Return whether the result of a node may be as large as what it reads: of sums, factors and exact ops."""
    facts = op_facts()
    passes = facts.additive | facts.reductions | facts.means
    if node.key in passes or node.index in graph.exact:
        return True
    is_constant = graph.constants.is_constant
    computed = [value for value in node.reads if not is_constant(value)]
    return node.key in facts.linear and len(computed) == 1


def _has_one_type(node: Node, port: int) -> bool:
    """Return whether an input has the same type in any precision, as the scales of a Resize have."""
    signature = node.signature
    if signature is None:
        return False
    formal = signature.input(port)
    return formal is not None and formal.type not in signature.params
