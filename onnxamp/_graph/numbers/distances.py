"""Squared distances that are expanded, |x|² - 2xy + |y|²: large numbers whose difference is small where x is near y.

k-means, nearest neighbors, code books, kernels of support vector machines, and clouds of points are written this way,
because a product of matrices computes all xy at once. The cosine of two vectors, from which 1 is subtracted, is alike.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from onnxamp._facts.ops import op_facts
from onnxamp._graph.exact_walks import moved_from
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.powers import squared_value
from onnxamp._graph.view import ABSENT, Node

_REACH: Final = 16
"""Nodes that are followed from a term to the sum that it is part of: factors, signs, movement, other sums."""


def expanded_distances(graph: Graph) -> Iterator[frozenset[int]]:
    """Yield the nodes of each expanded distance, from the terms to the last sum.

    Complexity: linear, since few sums of squares are those of an operand of a product.
    """
    squares = defaultdict[int, list[set[int]]](list)
    starts = dict[int, list[Node]]()
    for node in graph.nodes_of({"ReduceSumSquare", "ReduceSum"}):
        value, makers = _squared(graph, node)
        if value != ABSENT:
            squares[value].append({node.index, *makers})
            starts.setdefault(value, []).append(node)
    for node in graph.nodes_of({"ReduceL2"}):
        for square, _ in graph.consumers(node.outputs[0]):
            if squared_value(graph, square) != ABSENT:
                value, moving = moved_from(graph, node.inputs[0])
                squares[value].append({node.index, square.index, *moving})
                starts.setdefault(value, []).append(square)
    if not squares:
        return
    for product in graph.nodes_of(op_facts().contractions - op_facts().reductions):
        for read in graph.float_inputs(product):
            value, moving = moved_from(graph, read)
            for nodes, start in zip(
                squares.get(value, ()), starts.get(value, ()), strict=True
            ):
                joined = _joined(graph, product, start)
                if joined:
                    yield frozenset(nodes | joined.union(moving))


def _squared(graph: Graph, reduction: Node) -> tuple[int, list[int]]:
    """Return the value whose squares a node adds up, and the nodes between; ABSENT if it adds up others."""
    read = reduction.inputs[0]
    if reduction.key == "ReduceSumSquare":
        return moved_from(graph, read)
    maker = graph.producer(graph.passed_on(read), "Mul", "Pow")
    if maker is None or squared_value(graph, maker) == ABSENT:
        return ABSENT, []
    value, moving = moved_from(graph, maker.inputs[0])
    return value, [maker.index, *moving]


def _joined(graph: Graph, product: Node, square: Node) -> set[int]:
    """Return the nodes from both terms to the sums that join them; none if no sum does."""
    one, other = _carried(graph, product), _carried(graph, square)
    sums = {
        index for index in one & other if graph.nodes[index].key in op_facts().additive
    }
    return one | other if sums else set()


def _carried(graph: Graph, start: Node) -> set[int]:
    """Return a node and those through which its result passes on in sums."""
    facts = op_facts()
    nodes = {start.index}
    stack = [start]
    while stack and len(nodes) < _REACH:
        for reader, _ in graph.readers(stack.pop()):
            passes = reader.key in facts.additive or reader.key in facts.carriers
            is_scaling = reader.key in ("Mul", "Div") and any(
                graph.constants.is_constant(value) for value in reader.reads
            )
            is_exact = reader.index in graph.exact
            is_new = reader.index not in nodes and graph.is_float_output(reader)
            if is_new and (passes or is_scaling or is_exact):
                nodes.add(reader.index)
                stack.append(reader)
    return nodes


def cosine_nodes(graph: Graph, node: Node) -> frozenset[int]:
    """Return the nodes of a cosine that ends at a node, with those that normalize the vectors, or divide the product by
    their lengths at last; none for other nodes.
    """
    if node.key == "Div" and ABSENT not in node.inputs:
        lengths = _norm_nodes(graph, node.inputs[1])
        nodes = _product_nodes(graph, graph.producer(node.inputs[0]))
        return nodes | lengths | {node.index} if nodes and lengths else frozenset()
    nodes = _product_nodes(graph, node)
    if not nodes:
        return frozenset()
    (first,) = graph.at(nodes - {node.index}) or [node]
    read = graph.float_inputs(first)
    normalizers = [_normalizer_nodes(graph, value) for value in read]
    is_cosine = len(read) == 2 and all(normalizers)
    return nodes.union(*normalizers) if is_cosine else frozenset()


def _product_nodes(graph: Graph, node: Node | None) -> frozenset[int]:
    """Return the nodes of a product of vectors that ends at a node: one, or a Mul and a sum."""
    facts = op_facts()
    if node is None:
        return frozenset()
    if node.key == "ReduceSum":
        factors = graph.producer(graph.passed_on(node.inputs[0]), "Mul")
        return frozenset((node.index, factors.index) if factors is not None else ())
    is_product = node.key in facts.contractions - facts.reductions
    return frozenset((node.index,) if is_product else ())


def _normalizer_nodes(graph: Graph, value: int) -> frozenset[int]:
    """Return the nodes that divide vectors by their length, and move them; none if the vectors may have any length."""
    facts = op_facts()
    source, moving = moved_from(graph, value)
    maker = graph.producer(source)
    if maker is None:
        return frozenset()
    own = frozenset((maker.index, *moving))
    # A Softmax is no vector of length 1.
    if maker.key in facts.normalizing - facts.saturating:
        return own
    lengths = _norm_nodes(graph, maker.input(1)) if maker.key == "Div" else frozenset()
    return own | lengths if lengths else frozenset()


def _norm_nodes(graph: Graph, value: int) -> frozenset[int]:
    """Return the nodes that compute lengths of vectors, or a product of lengths, guarded or not; none for others."""
    facts = op_facts()
    nodes = set[int]()
    stack = [value]
    while stack and len(nodes) < _REACH:
        maker = graph.producer(stack.pop())
        if maker is None:
            return frozenset()
        nodes.add(maker.index)
        if maker.key == "ReduceL2":
            continue
        if maker.key == "Sqrt":
            total = graph.producer(maker.inputs[0])
            nodes.update(_product_nodes(graph, total))
            continue
        passes = maker.index in graph.exact or maker.key in facts.commutative
        if not (passes or maker.key in facts.carriers):
            return frozenset()
        stack += graph.computed_inputs(maker)
    return frozenset(nodes)
