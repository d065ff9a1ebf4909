"""Weights that a conversion stores in low precision and that rows are multiplied by: which nodes read them, and how."""

from collections.abc import Iterator
from typing import NamedTuple

from onnx import TensorProto

from onnxamp._convert.analysis import Analysis
from onnxamp._dtypes import FLOAT
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._numerics.arrangement import Arrangement, arranged
from onnxamp._ops.facts import Product, attribute, op_facts


class Reader(NamedTuple):
    """A node that multiplies rows by a weight; ``rows`` is the value that these are in."""

    node: Node
    product: Product
    rows: str
    shape: tuple[int, ...]
    """Of the weight as the node reads it."""


class ProductWeight(NamedTuple):
    """A weight of products alone, whose readers see it as the same matrices."""

    value: int
    tensor: TensorProto
    arrangement: Arrangement
    readers: tuple[Reader, ...]


def product_weights(analysis: Analysis) -> tuple[list[ProductWeight], list[str]]:
    """Weights that become low precision and could be rounded with compensation, and the names of those that cannot be,
    though a product reads them.

    Those are read by other nodes, too, or as other matrices, or in a body, or the rows are constants as well.
    Complexity: linear in the uses of weights.
    """
    graph = analysis.graph
    tensors, found, others = graph.ask(constant_tensors), list[ProductWeight](), list[str]()
    copied = {copy.value for copy in analysis.edits.copies}
    for value in sorted(_lowered(analysis)):
        tensor = tensors.get(value)
        if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2:
            continue
        readers = list(_readers(analysis, value, tuple(tensor.dims), only_low=value in copied))
        ways = {way for _, way in readers}
        if len(ways) == 1 and (way := ways.pop()) is not None and not graph.results[value]:
            found.append(
                ProductWeight(value, tensor, way, tuple(reader for reader, _ in readers if reader))
            )
        elif any(way is not None for _, way in readers):
            others.append(graph.values[value].name)
    return found, others


def _lowered(analysis: Analysis) -> set[int]:
    """Constants that are stored in low precision."""
    graph, edits = analysis.graph, analysis.edits
    made = {
        graph.nodes[node].outputs[0]
        for node in edits.attributes
        if graph.nodes[node].key == "Constant"
    }
    return edits.weights | made | {copy.value for copy in edits.copies if copy.low}


def _readers(
    analysis: Analysis, value: int, shape: tuple[int, ...], *, only_low: bool
) -> Iterator[tuple[Reader | None, Arrangement | None]]:
    """Who reads a weight, also through Transposes, and how; None for what is no product of the main graph.

    Args:
        only_low: leave out those that read a float32 copy of it.
    """
    graph, start = analysis.graph, tuple(range(len(shape)))
    waiting = [
        (node, port, start)
        for node, port in graph.uses[value]
        if not only_low or analysis.decision.is_low(analysis.ports.consumed[node][port])
    ]
    while waiting:
        index, port, turn = waiting.pop()
        node = graph.nodes[index]
        if (
            node.key in ("Transpose", "Identity")
            and node.scope == 0
            and not graph.results[node.outputs[0]]
        ):
            axes = (
                (attribute(node.proto, "perm") or start[::-1]) if node.key == "Transpose" else start
            )
            turned = tuple(turn[axis] for axis in axes)
            waiting += [(*use, turned) for use in graph.uses[node.outputs[0]]]
            continue
        yield _read(graph, node, port, shape, turn)


def _read(
    graph: Graph, node: Node, port: int, shape: tuple[int, ...], turn: tuple[int, ...]
) -> tuple[Reader | None, Arrangement | None]:
    """A node as a reader of a weight at an input."""
    for product in op_facts().products.get(node.key, ()) if node.scope == 0 else ():
        rows = (
            node.input(product.rows)
            if product.rows is not None
            else node.outputs[product.steps or 0]
        )
        way = arranged(node.proto, product, shape, turn) if product.weight == port else None
        if (
            way is not None
            and rows != ABSENT
            and graph.types[rows] == FLOAT
            and not graph.constants.is_constant(rows)
        ):
            seen = tuple(shape[axis] for axis in turn)
            return Reader(node, product, graph.values[rows].name, seen), way
    return None, None
