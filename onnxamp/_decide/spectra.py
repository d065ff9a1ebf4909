"""Small numbers before a guarded logarithm, and the transform that makes them, as in power and mel spectra.

A bin of a spectrum is a sum of large products that cancel. Next to a loud bin, low precision loses a quiet one in the
rounding of these products, 66 dB below it in float16, and the logarithm makes an absolute error of its relative one.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node

_REACH: Final = 15
"""Limit on the nodes before a guarded logarithm that are visited, apart from transforms of inputs."""


def small_numbers(graph: Graph, guard: Node) -> Iterator[Node]:
    """Yield the nodes that compute what a guard keeps from zero before its logarithm.

    Where one of them is a square of numbers that are transformed inputs of the model, and nothing else, the whole
    transform follows.

    Complexity: linear.
    """
    near = _spectrum(graph, guard)
    yield from near.values()
    seen = {guard.index, *near}
    for node in near.values():
        if _is_square(node):
            transform = _transform(graph, node)
            yield from (one for index, one in transform.items() if index not in seen)
            seen |= transform.keys()


def _spectrum(graph: Graph, guard: Node) -> dict[int, Node]:
    """Return the next nodes before a guard that are the arithmetic of spectra, by index."""
    walk = op_facts().spectral_arithmetic
    found = dict[int, Node]()
    stack = [guard]
    while stack and len(found) < _REACH:
        for value in graph.computed_inputs(stack.pop()):
            maker = graph.producer(value, *walk)
            if maker is not None and maker.index not in found:
                found[maker.index] = maker
                stack.append(maker)
    return found


def _transform(graph: Graph, square: Node) -> dict[int, Node]:
    """Return the nodes from the inputs of the model to a square, by index; none if not all of them are a transform."""
    facts = op_facts()
    walk = facts.spectral_arithmetic | facts.transform_arithmetic
    found = dict[int, Node]()
    stack = [square]
    while stack:
        for value in graph.computed_inputs(stack.pop()):
            maker = graph.producer(value)
            if maker is None or maker.index in found:
                continue
            if maker.key not in walk:
                return {}
            found[maker.index] = maker
            stack.append(maker)
    return found


def _is_square(node: Node) -> bool:
    """Return whether a node makes squares of its input."""
    is_product_with_itself = node.key == "Mul" and node.inputs[0] == node.inputs[1]
    return is_product_with_itself or node.key in op_facts().squares
