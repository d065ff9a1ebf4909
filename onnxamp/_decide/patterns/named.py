"""What a listed name means: the nodes of its op types, and the patterns that exporters write for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from onnxamp._decide.patterns.find import pattern_nodes
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.powers import squared_value
from onnxamp._graph.view import ABSENT
from onnxamp._options.lists import forms_named, ops_named


def named_forms(graph: Graph, name: str) -> frozenset[int]:
    """Return the nodes that a name means in addition to those of its op types.

    Complexity: linear in the nodes of the graph.
    """
    nodes = set[int]()
    for kind in forms_named(name):
        finder = FINDERS.get(kind)
        if finder is not None:
            nodes.update(finder(graph, ops_named(name)))
        else:
            nodes |= pattern_nodes(graph, kind)
    return frozenset(nodes)


def named_nodes(graph: Graph, name: str) -> frozenset[int]:
    """Return all nodes that a name means."""
    own = {node.index for node in graph.nodes_of(ops_named(name))}
    return graph.ask(named_forms, name) | own


def unrecognized(graph: Graph, name: str) -> tuple[str, ...]:
    """Return op types of the graph that may belong to what the name means, in a form that no pattern recognizes."""
    kinds = set(forms_named(name))
    cores = op_facts().core_of
    return tuple(
        sorted(key for key in graph.by_key.keys() & cores if kinds & {*cores[key]})
    )


def _squares(graph: Graph, _: Iterable[str]) -> Iterator[int]:
    """Yield products of a value with itself, and powers of 2."""
    for node in graph.nodes_of(("Mul", "Pow")):
        if squared_value(graph, node) != ABSENT:
            yield node.index


def _biases(graph: Graph, ops: Iterable[str]) -> Iterator[int]:
    """Yield sums of a vector and a product with weights that one of the ops computes."""
    for product in graph.nodes_of(ops):
        if not product.outputs or not _is_stored(graph, product.input(1)):
            continue
        for node, port in graph.consumers(product.outputs[0]):
            if node.key == "Add" and _is_weight_vector(graph, node.input(1 - port)):
                yield node.index


def _is_stored(graph: Graph, value: int) -> bool:
    """Return whether the value is a weight: a constant, or an input, as in a training step."""
    return value != ABSENT and (
        graph.producer(value) is None or graph.constants.is_constant(value)
    )


def _is_weight_vector(graph: Graph, value: int) -> bool:
    """Return whether the value is a weight with a single axis, not counting axes of length 1."""
    shape = graph.shapes[value] if _is_stored(graph, value) else None
    return shape is not None and bool(shape) and sum(size != 1 for size in shape) <= 1


FINDERS: Final[Mapping[str, Callable[[Graph, Iterable[str]], Iterator[int]]]] = {
    "bias": _biases,
    "square": _squares,
}
"""Kinds of forms other than decomposed ops -> the function that finds them, given the op types of the name."""
