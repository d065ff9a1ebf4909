"""Products whose terms were split: what adds up the parts is one with them."""

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._patterns.match import declared_axes


def split_products(graph: Graph) -> list[tuple[int, int]]:
    """(product, ReduceSum) pairs: the sum of the products of parts of rows, as a Reshape makes them, over the parts.

    Complexity: linear in sums.
    """
    found = []
    for node in graph.nodes_of({"ReduceSum"}):
        product = graph.producer(node.input(0))
        if product is None or product.key != "MatMul" or graph.only_reader(node.inputs[0]) is not node:
            continue
        shape, axes = graph.shapes[node.inputs[0]], declared_axes(graph, node)
        if shape is not None and axes and {-3, len(shape) - 3} & {*axes} and _has_parts(graph, product):
            found.append((product.index, node.index))
    return found


def _has_parts(graph: Graph, product: Node) -> bool:
    """Whether the rows of a product are parts of longer ones."""
    maker = graph.producer(product.input(0))
    if maker is not None and maker.key == "Transpose":
        maker = graph.producer(maker.input(0))
    if maker is None or maker.key != "Reshape" or ABSENT in (maker.input(0), maker.outputs[0]):
        return False
    before, after = graph.shapes[maker.inputs[0]], graph.shapes[maker.outputs[0]]
    return before is not None and after is not None and len(after) > len(before)
