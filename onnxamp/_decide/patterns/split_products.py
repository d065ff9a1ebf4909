"""Products in parts, whose results are added (split-K): where targets need them, and where a model has them."""

from typing import Final

from onnxamp._facts.dtypes import FLOAT16
from onnxamp._facts.providers import emulated_arithmetic
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import declared_axes
from onnxamp._graph.view import Node
from onnxamp._options.options import Options
from onnxamp._options.values import Level

SUM: Final = "ReduceSum"
"""The op that adds the results of parts; op lists do not refer to it."""


def target_sums_low(options: Options) -> bool:
    """Return whether the target accumulates the low-precision type in float16."""
    return emulated_arithmetic(options.target) is not None and options.low is FLOAT16


def may_split(options: Options) -> bool:
    """Return whether the target accumulates float16 in float16, and products may be split for it."""
    return target_sums_low(options) and options.split_k and options.level != Level.O0


def split_products(graph: Graph) -> list[tuple[int, int]]:
    """Return (product, ReduceSum) pairs that sum the products of parts of rows, which a Reshape makes, over the parts.

    Complexity: linear in sums.
    """
    pairs = []
    for node in graph.nodes_of({SUM}):
        source = node.input(0)
        product = graph.producer(source, "MatMul")
        if product is None or graph.only_reader(source) is not node:
            continue
        shape = graph.shapes[source]
        axes = declared_axes(graph, node)
        # The parts lie along the axis before the two of the product.
        over_parts = shape is not None and axes and {-3, len(shape) - 3} & {*axes}
        if over_parts and _has_parts(graph, product):
            pairs.append((product.index, node.index))
    return pairs


def _has_parts(graph: Graph, product: Node) -> bool:
    """Return whether the rows of a product are parts of longer rows."""
    turned = graph.producer(product.input(0), "Transpose")
    rows = product.input(0) if turned is None else turned.input(0)
    maker = graph.producer(rows, "Reshape")
    if maker is None:
        return False
    before = graph.shapes[maker.input(0)]
    after = graph.shapes[maker.outputs[0]]
    return before is not None and after is not None and len(after) > len(before)
