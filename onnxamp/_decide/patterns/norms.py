"""Walks through decomposed normalizations and magnitudes, from their root."""

from onnxamp._decide.patterns.steps import REACH, back_to_reduction, carries_on
from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import maker_of
from onnxamp._graph.numbers.powers import squared_value
from onnxamp._graph.view import ABSENT, Node


def normalization(graph: Graph, root: Node) -> set[int]:
    """Return x^2 -> mean or sum -> + eps -> root -> divide: every node between the squared value and the result.

    Gain and bias are included if they are constants or vectors: ONNX Runtime fuses these, wherever they come from.
    """
    if root.key == "Pow" and graph.constants.uniform(root.input(1)) not in (0.5, -0.5):
        return set()
    nodes, bases = _variance(graph, root)
    scaling = _scaling(graph, root, bases) if bases else set()
    return nodes | scaling if scaling else set()


def magnitude(graph: Graph, root: Node) -> set[int]:
    """Return the nodes of sqrt(a^2 + b^2), or of the root of a sum or a mean of squares."""
    total = maker_of(graph, root.input(0), "Add", "Sum")
    if total is None or graph.types[total.outputs[0]] != FLOAT:
        return _root_of_squares(graph, root)
    terms = [maker_of(graph, value) for value in total.inputs]
    squares = {
        node.index for node in terms if node is not None and _squared_by(graph, node)
    }
    if len(squares) >= 2:
        return {root.index, total.index, *squares}
    return _root_of_squares(graph, root)


def _root_of_squares(graph: Graph, root: Node) -> set[int]:
    """Return the nodes of the root of a sum or a mean of squares, unless it scales something, as in normalizations."""
    if root.key != "Sqrt":
        return set()
    for reader, _ in graph.uses[root.outputs[0]]:
        if graph.nodes[reader].key in ("Mul", "Div", "Reciprocal"):
            return set()
    nodes, bases = _variance(graph, root)
    return nodes if bases else set()


def _squared_by(graph: Graph, node: Node) -> set[int]:
    """Return the values that the node squares: two if x - mean(x) is computed twice, none if it is not a square."""
    if node.key == "Mul":
        values = set(map(graph.passed_on, node.inputs))
        minuends = {_minuend(graph, value) for value in values}
        return values if len(minuends) == 1 else set()
    return {squared_value(graph, node)} - {ABSENT}


def _minuend(graph: Graph, value: int) -> int:
    """Return the minuend of a difference; the value itself if it is not a difference."""
    maker = graph.producer(value, "Sub")
    return value if maker is None else graph.passed_on(maker.input(0))


def _variance(graph: Graph, root: Node) -> tuple[set[int], set[int]]:
    """Return nodes from the squared values to the root, and the values that were squared and summed."""
    facts = op_facts()
    nodes = {root.index}
    bases = set[int]()
    # ReduceL2 squares, sums and takes the root in one op.
    if root.key == "ReduceL2":
        return nodes, {graph.passed_on(root.inputs[0])}
    stack = [root.input(0)]
    while stack and len(nodes) < REACH:
        node = graph.producer(stack.pop())
        if node is None or node.index in nodes:
            continue
        summing, squared = _added_squares(graph, node)
        if squared:
            nodes |= summing
            bases |= squared
        elif node.key in facts.norm_arithmetic:
            nodes.add(node.index)
            if node.key not in facts.reductions:
                stack += graph.float_inputs(node)
    for base in list(bases):
        nodes |= _centring(graph, base, bases)
    return nodes, bases


def _added_squares(graph: Graph, node: Node) -> tuple[set[int], set[int]]:
    """Return the nodes with which a node adds up squares, and the squared values; none if it does something else."""
    facts = op_facts()
    if node.key in ("ReduceSumSquare", "Einsum", "MatMul"):
        squared = _squared_by(graph, node)
        if squared:
            return {node.index}, squared
    summed = node.reads[:1]
    if node.key in (facts.contractions | facts.means) - facts.reductions:
        # Squares are added up by stored weights, or in windows, as in GDN layers.
        is_constant = graph.constants.is_constant
        summed = [value for value in node.reads if not is_constant(value)]
    elif node.key not in facts.reductions:
        return set(), set()
    square = maker_of(graph, summed[0]) if len(summed) == 1 else None
    if square is None:
        return set(), set()
    return {node.index, square.index}, _squared_by(graph, square)


def _centring(graph: Graph, base: int, bases: set[int]) -> set[int]:
    """Return the subtraction and the mean if the squared value is x - mean(x); add x to the bases."""
    centered = graph.producer(base, "Sub")
    if centered is None:
        return set()
    mean = back_to_reduction(graph, centered.input(1), op_facts().reductions)
    if not mean:
        return set()
    bases.add(graph.passed_on(centered.inputs[0]))
    return {centered.index} | mean


def _scaling(graph: Graph, root: Node, bases: set[int]) -> set[int]:
    """Return nodes from the root to the normalized result, and the gain and bias after it."""
    nodes: set[int] = set()
    stack = [root.outputs[0]]
    normalized = set[int]()
    while stack and len(nodes) < REACH:
        value = stack.pop()
        for node, port in graph.consumers(value):
            if node.index in nodes or not graph.is_float_output(node):
                continue
            done = value in normalized
            if node.key in ("Mul", "Div", "Add", "Sub"):
                other = node.input(1 - port)
                is_constant = graph.constants.is_constant(other)
                if node.key in ("Mul", "Div") and not done and not is_constant:
                    nodes |= _numerator(graph, other, bases)
                    done = True
                elif not (is_constant or _is_vector(graph, other)):
                    continue
            elif node.index not in graph.passing and (done or not carries_on(node)):
                continue
            if done:
                normalized.add(node.outputs[0])
            nodes.add(node.index)
            stack.append(node.outputs[0])
    return nodes


def _is_vector(graph: Graph, value: int) -> bool:
    """Return whether the value is known to have one axis."""
    shape = graph.shapes[value]
    return shape is not None and len(shape) == 1


def _numerator(graph: Graph, value: int, bases: set[int]) -> set[int]:
    """Return the nodes of the x - mean(x) that is divided, if it is not the one that was squared."""
    node = maker_of(graph, value, "Sub")
    if node is None or graph.passed_on(node.input(0)) not in bases:
        return set()
    return {node.index} | back_to_reduction(
        graph, node.input(1), op_facts().reductions
    )
