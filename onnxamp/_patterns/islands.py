"""Ops that belong together: normalisations and softmaxes written out as single ops, and written-out activations.

A normalisation squares and sums, which overflows float16 into *silent zeros*; it stays float32 as a unit. A
written-out activation (Gelu, SiLU) is harmless, but ONNX Runtime fuses it only if no Cast stands inside: its nodes
take one precision.
"""

from collections.abc import Iterator

from onnxamp._decide.verdicts import Hazard, Reason
from onnxamp._dtypes import FLOAT, LowType
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import attribute, is_exact, op_facts

_REACH = 32
"""Nodes that the search for one island may visit; written-out normalisations have at most about 20."""


def decomposed_norms(graph: Graph) -> list[tuple[Node, list[int]]]:
    """x^2 -> mean or sum -> + eps -> root -> divide: the root, and every node between squared value and result.

    Gain and bias belong to it where they are constant, or vectors: ONNX Runtime fuses such, wherever they come from.
    """
    found = []
    for root in graph.nodes:
        if _is_root(graph, root):
            nodes, bases = _variance(graph, root)
            scaling = _scaling(graph, root, bases) if bases else set()
            if scaling:
                found.append((root, sorted(nodes | scaling)))
    return found


def magnitudes(graph: Graph) -> Iterator[Hazard]:
    """sqrt(a^2 + b^2): the squares need twice the range of their root, and rounding before it costs the same Casts."""
    for root in graph.nodes:
        total = graph.producer(root.input(0)) if root.key == "Sqrt" else None
        if total is None or total.key not in ("Add", "Sum") or graph.types[total.outputs[0]] != FLOAT:
            continue
        terms = [graph.producer(value) for value in total.inputs]
        squares = [node for node in terms if node is not None and _square_of(graph, node) != ABSENT]
        if len(squares) >= 2:
            for index in sorted({root.index, total.index, *(node.index for node in squares)}):
                yield Hazard(index, Reason.ISLAND, f"part of the magnitude {root.label!r}")


def softmax_islands(graph: Graph) -> Iterator[Hazard]:
    """Exp -> sum -> divide (or Log), with the subtraction of the maximum before it."""
    for exp in graph.nodes:
        if exp.key != "Exp" or exp.outputs[0] == ABSENT or graph.types[exp.outputs[0]] != FLOAT:
            continue
        sums = [node for node, _ in graph.consumers(exp.outputs[0]) if node.key == "ReduceSum"]
        island = {exp.index}
        for total in sums:
            island |= _softmax_end(graph, exp, total)
        if len(island) == 1:
            continue
        shift = graph.producer(exp.inputs[0])
        if shift is not None and shift.key == "Sub":
            island |= {shift.index} | _back_to_reduction(graph, shift.input(1), {"ReduceMax"})
        for index in sorted(island):
            yield Hazard(index, Reason.ISLAND, f"part of the softmax around {exp.label!r}")


def absorbed_casts(graph: Graph, low: LowType) -> dict[int, str]:
    """Inputs of written-out LayerNorms and RMSNorms in front of which a Cast must not stand alone, with the name of the
    first reader.

    ONNX Runtime's layer_norm_fusion.cc takes a Cast into the fused node that feeds only the mean and the subtraction,
    or the square and the division, and then cannot load the model: from opset 17 on, LayerNormalization wants one type
    for input and scale, and in bfloat16 no CUDA kernel takes two (seen with 1.31.1).
    """
    found: dict[int, str] = {}
    mixed = low.name != "bfloat16"
    if graph.book.opsets[""] < 17 and mixed:
        return found
    for _, nodes in graph.ask(decomposed_norms):
        for first in (graph.nodes[index] for index in nodes):
            value = _centred_alone(graph, first)
            if value == ABSENT and not mixed:
                value = _divided_square(graph, first)
            if value == ABSENT or graph.types[value] != FLOAT:
                continue
            found[value] = first.label
            while (before := graph.producer(value)) is not None and before.key in op_facts().eliminated:
                value = before.inputs[0]
                found[value] = first.label
    return found


def _centred_alone(graph: Graph, mean: Node) -> int:
    """The input of a mean that only x - mean(x) reads; ABSENT where it is no such mean."""
    if mean.key != "ReduceMean" or not _reduces_last(graph, mean):
        return ABSENT
    readers = [node for node, _ in graph.consumers(mean.outputs[0])]
    centred = readers and all(node.key == "Sub" and node.input(0) == mean.inputs[0] for node in readers)
    return mean.inputs[0] if centred else ABSENT


def _divided_square(graph: Graph, square: Node) -> int:
    """The value that is squared by Pow, and then divided; ABSENT where the node is no such square."""
    if square.key != "Pow" or graph.constants.uniform(square.input(1)) != 2.0:
        return ABSENT
    readers = [(node.key, port) for node, port in graph.consumers(square.inputs[0])]
    return square.inputs[0] if ("Div", 0) in readers else ABSENT


def _reduces_last(graph: Graph, mean: Node) -> bool:
    """Whether the axes are the last ones, as far as is known; only then it can be a LayerNormalization."""
    axes = attribute(mean.proto, "axes")
    if axes is None and mean.input(1) != ABSENT:
        axes = graph.constants.integers(mean.inputs[1])
    shape = graph.shapes[mean.inputs[0]]
    if not axes:
        return True
    rank = len(shape) if shape is not None else None
    return -1 in axes or rank is None or rank - 1 in axes


def activation_groups(graph: Graph) -> list[list[int]]:
    """Written-out Gelu (erf and tanh forms) and SiLU: node groups that take one precision.

    The forms are those of ONNX Runtime's gelu_fusion.cc, fast_gelu_fusion.cc and quick_gelu_fusion.cc.
    """
    groups = []
    for node in graph.nodes:
        if node.key in ("Erf", "Tanh"):
            group = _gelu(graph, node)
        elif node.key == "Sigmoid":
            group = _silu(graph, node)
        else:
            continue
        if len(group) > 1:
            groups.append(sorted(group))
    return groups


def _is_root(graph: Graph, node: Node) -> bool:
    if node.key == "Pow":
        return graph.constants.uniform(node.input(1)) in (0.5, -0.5)
    return node.key in ("ReduceL2", "Sqrt", "com.microsoft::Rsqrt")


def _square_of(graph: Graph, node: Node) -> int:
    """The value that the node squares, ABSENT if it does not."""
    if node.key == "Mul" and node.input(0) == node.input(1):
        return node.inputs[0]
    if node.key == "Pow" and graph.constants.uniform(node.input(1)) == 2.0:
        return node.inputs[0]
    return node.inputs[0] if node.key == "ReduceSumSquare" else ABSENT


def _variance(graph: Graph, root: Node) -> tuple[set[int], set[int]]:
    """Nodes from the squared values to the root, and the values that were squared and summed (none: no island)."""
    walk, reductions = op_facts().norm_arithmetic, op_facts().reductions
    nodes, bases = {root.index}, set[int]()
    if root.key == "ReduceL2":  # squares, sums and takes the root by itself
        return nodes, {root.inputs[0]}
    stack = [root.input(0)]
    while stack and len(nodes) < _REACH:
        node = graph.producer(stack.pop())
        if node is None or node.index in nodes or not (node.key in walk or node.key == "ReduceSumSquare"):
            continue
        nodes.add(node.index)
        if node.key == "ReduceSumSquare":
            bases.add(node.inputs[0])
        elif node.key in reductions:
            square = graph.producer(node.input(0))
            squared = ABSENT if square is None else _square_of(graph, square)
            if square is not None and squared != ABSENT:
                nodes.add(square.index)
                bases.add(squared)
        else:
            stack += [value for _, value in graph.float_inputs(node)]
    for base in list(bases):
        nodes |= _centring(graph, base, bases)
    return nodes, bases


def _centring(graph: Graph, base: int, bases: set[int]) -> set[int]:
    """Where the squared value is x - mean(x): the subtraction and the mean; x joins the bases."""
    centred = graph.producer(base)
    if centred is None or centred.key != "Sub":
        return set()
    mean = _back_to_reduction(graph, centred.input(1), op_facts().reductions)
    if not mean:
        return set()
    bases.add(centred.inputs[0])
    return {centred.index} | mean


def _back_to_reduction(graph: Graph, value: int, reductions: frozenset[str] | set[str]) -> set[int]:
    """Nodes from ``value`` back to a reduction through data movement and scaling; empty if none is there."""
    found: set[int] = set()
    for _ in range(_REACH):
        node = graph.producer(value)
        if node is None:
            return set()
        found.add(node.index)
        if node.key in reductions:
            return found
        if not is_exact(node.proto) and node.key not in ("Mul", "Div"):
            return set()
        value = node.input(0)
    return set()


def _scaling(graph: Graph, root: Node, bases: set[int]) -> set[int]:
    """Nodes from the root to the normalised result, with gain and bias behind it."""
    nodes: set[int] = set()
    stack, normalised = [root.outputs[0]], set[int]()
    while stack and len(nodes) < _REACH:
        value = stack.pop()
        for node, port in graph.consumers(value):
            if node.index in nodes or node.outputs[0] == ABSENT or graph.types[node.outputs[0]] != FLOAT:
                continue
            other = node.input(1 - port) if node.key in ("Mul", "Div", "Add", "Sub") else ABSENT
            done = value in normalised
            if node.key == "Cast":  # to the type that is there
                if done:
                    normalised.add(node.outputs[0])
            elif is_exact(node.proto) or node.key == "Reciprocal":
                if done:
                    continue
            elif node.key in ("Mul", "Div") and not done and not graph.constants.is_constant(other):
                normalised.add(node.outputs[0])
                nodes |= _numerator(graph, other, bases)
            elif node.key in ("Mul", "Add", "Sub", "Div") and (
                graph.constants.is_constant(other) or _is_vector(graph, other)
            ):
                if done:
                    normalised.add(node.outputs[0])
            else:
                continue
            nodes.add(node.index)
            stack.append(node.outputs[0])
    return nodes


def _is_vector(graph: Graph, value: int) -> bool:
    shape = graph.shapes[value] if value != ABSENT else None
    return shape is not None and len(shape) == 1


def _numerator(graph: Graph, value: int, bases: set[int]) -> set[int]:
    """The x - mean(x) that is divided, where it is not the one that was squared."""
    node = graph.producer(value)
    if node is None or node.key != "Sub" or node.input(0) not in bases:
        return set()
    return {node.index} | _back_to_reduction(graph, node.input(1), op_facts().reductions)


def _softmax_end(graph: Graph, exp: Node, total: Node) -> set[int]:
    """Nodes from the sum of exponentials to the division or logarithm that ends the softmax; empty if none does."""
    found, value = {total.index}, total.outputs[0]
    for _ in range(_REACH):
        readers = [node for node, _ in graph.consumers(value)]
        ends = {n.index for n in readers if n.key == "Log" or (n.key in ("Div", "Mul") and exp.outputs[0] in n.inputs)}
        if ends:
            return found | ends
        onward = next((node for node in readers if is_exact(node.proto) or node.key == "Reciprocal"), None)
        if onward is None or onward.outputs[0] == ABSENT:
            return set()
        found.add(onward.index)
        value = onward.outputs[0]
    return set()


def _gelu(graph: Graph, core: Node) -> set[int]:
    """Core -> Add 1 -> Mul by x and by 0.5 in either order, with the polynomial or scaling before the core."""
    plus = _only_reader(graph, core.outputs[0], "Add")
    if plus is None or graph.constants.uniform(_other(plus, core.outputs[0])) != 1.0:
        return set()
    group, value, base = {core.index, plus.index}, plus.outputs[0], ABSENT
    for _ in range(2):
        times = _only_reader(graph, value, "Mul")
        if times is None:
            break
        group.add(times.index)
        other, value = _other(times, value), times.outputs[0]
        if not graph.constants.is_constant(other):
            half = graph.producer(other)
            if half is not None and half.key == "Mul" and any(graph.constants.uniform(v) == 0.5 for v in half.inputs):
                group.add(half.index)
                other = next(v for v in half.inputs if graph.constants.uniform(v) != 0.5)
            base = other
    if base == ABSENT:
        return set()
    stack = [core.input(0)]
    while stack:
        current = stack.pop()
        node = graph.producer(current)
        if current == base or node is None or node.index in group or graph.constants.is_constant(current):
            continue
        if node.key not in ("Add", "Div", "Mul", "Pow") or len(group) > _REACH:
            return set()
        group.add(node.index)
        stack += [v for v in node.inputs if v != ABSENT]
    return group


def _silu(graph: Graph, core: Node) -> set[int]:
    """Swish: x * Sigmoid(x), and x * Sigmoid(c x)."""
    source, scaled = core.input(0), graph.producer(core.input(0))
    for node, _ in graph.consumers(core.outputs[0]):
        if node.key != "Mul":
            continue
        other = _other(node, core.outputs[0])
        if other == source:
            return {core.index, node.index}
        is_scaled = scaled is not None and scaled.key == "Mul" and other in scaled.inputs
        if scaled is not None and is_scaled and any(graph.constants.is_constant(v) for v in scaled.inputs):
            return {core.index, node.index, scaled.index}
    return set()


def _only_reader(graph: Graph, value: int, key: str) -> Node | None:
    if value == ABSENT or len(graph.uses[value]) != 1 or graph.results[value]:
        return None
    node = graph.nodes[graph.uses[value][0][0]]
    return node if node.key == key and len(node.inputs) == 2 else None


def _other(node: Node, value: int) -> int:
    return node.inputs[1] if node.inputs[0] == value else node.inputs[0]
