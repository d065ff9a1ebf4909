"""The patterns of a graph: ``graph.ask(find_patterns)`` recognizes them; ``find_forms(graph)`` matches exactly.

A listed name means the nodes of its op types, and the patterns that exporters write for it (:func:`named_nodes`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import is_exact, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import (
    Form,
    FormSearch,
    Match,
    form_table,
    maker_of,
    only_reader,
    readers_of,
)
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.lists import forms_named, ops_named

_REACH = 32
"""Most nodes that one walk may visit; decomposed normalizations have about 20 at most."""


def _normalization(graph: Graph, root: Node) -> set[int]:
    """Return x^2 -> mean or sum -> + eps -> root -> divide: every node between the squared value and the result.

    Gain and bias are included if they are constants or vectors: ONNX Runtime fuses these, wherever they come from.
    """
    if root.key == "Pow" and graph.constants.uniform(root.input(1)) not in (0.5, -0.5):
        return set()
    nodes, bases = _variance(graph, root)
    scaling = _scaling(graph, root, bases) if bases else set()
    return nodes | scaling if scaling else set()


def _magnitude(graph: Graph, root: Node) -> set[int]:
    """Return the nodes of sqrt(a^2 + b^2)."""
    total = maker_of(graph, root.input(0), "Add", "Sum")
    if total is None or graph.types[total.outputs[0]] != FLOAT:
        return set()
    terms = [maker_of(graph, value) for value in total.inputs]
    squares = {
        node.index for node in terms if node is not None and _squared_by(graph, node)
    }
    return {root.index, total.index, *squares} if len(squares) >= 2 else set()


def _softmax(graph: Graph, exp: Node) -> set[int]:
    """Return Exp -> sum -> divide (or Log), with the subtraction of the maximum before it."""
    if not graph.is_float_output(exp):
        return set()
    sums = [
        node for node in readers_of(graph, exp.outputs[0]) if node.key == "ReduceSum"
    ]
    ends = set().union(*(_softmax_end(graph, exp, total) for total in sums))
    if not ends:
        return set()
    shift = maker_of(graph, exp.inputs[0], "Sub")
    if shift is not None:
        ends |= {shift.index} | _back_to_reduction(
            graph, shift.input(1), {"ReduceMax"}
        )
    return {exp.index, *ends}


def squared_value(graph: Graph, node: Node) -> int:
    """Return the value that the node squares; ABSENT if it is not a square."""
    values = set(map(graph.passed_on, node.inputs))
    is_square = (
        node.key == "ReduceSumSquare"
        or (node.key == "Mul" and len(values) == 1)
        or (node.key == "Pow" and graph.constants.uniform(node.input(1)) == 2.0)
    )
    return graph.passed_on(node.inputs[0]) if is_square else ABSENT


def _squared_by(graph: Graph, node: Node) -> set[int]:
    """Return the values that the node squares: two if x - mean(x) is computed twice, none if it is not a square."""
    if node.key == "Mul":
        values = set(map(graph.passed_on, node.inputs))
        return (
            values if len({_minuend(graph, value) for value in values}) == 1 else set()
        )
    return {squared_value(graph, node)} - {ABSENT}


def _minuend(graph: Graph, value: int) -> int:
    """Return the minuend of a difference; the value itself if it is not a difference."""
    maker = graph.producer(value, "Sub")
    return value if maker is None else graph.passed_on(maker.input(0))


def _variance(graph: Graph, root: Node) -> tuple[set[int], set[int]]:
    """Return nodes from the squared values to the root, and the values that were squared and summed."""
    walk = op_facts().norm_arithmetic
    reductions = op_facts().reductions
    nodes = {root.index}
    bases = set[int]()
    # ReduceL2 squares, sums and takes the root in one op.
    if root.key == "ReduceL2":
        return nodes, {graph.passed_on(root.inputs[0])}
    stack = [root.input(0)]
    while stack and len(nodes) < _REACH:
        node = graph.producer(stack.pop())
        if (
            node is None
            or node.index in nodes
            or not (node.key in walk or node.key == "ReduceSumSquare")
        ):
            continue
        nodes.add(node.index)
        if node.key == "ReduceSumSquare":
            bases |= _squared_by(graph, node)
        elif node.key in reductions:
            square = maker_of(graph, node.input(0))
            if square is not None and (squared := _squared_by(graph, square)):
                nodes.add(square.index)
                bases |= squared
        else:
            stack += [value for _, value in graph.float_inputs(node)]
    for base in list(bases):
        nodes |= _centring(graph, base, bases)
    return nodes, bases


def _centring(graph: Graph, base: int, bases: set[int]) -> set[int]:
    """Return the subtraction and the mean if the squared value is x - mean(x); add x to the bases."""
    centered = graph.producer(base, "Sub")
    if centered is None:
        return set()
    mean = _back_to_reduction(graph, centered.input(1), op_facts().reductions)
    if not mean:
        return set()
    bases.add(graph.passed_on(centered.inputs[0]))
    return {centered.index} | mean


def _back_to_reduction(
    graph: Graph, value: int, reductions: frozenset[str] | set[str]
) -> set[int]:
    """Return nodes from ``value`` back to a reduction, through data movement and scaling; empty if there is none."""
    path: set[int] = set()
    for _ in range(_REACH):
        node = graph.producer(value)
        if node is None:
            return set()
        path.add(node.index)
        if node.key in reductions:
            return path
        if not is_exact(node.proto) and node.key not in ("Mul", "Div"):
            return set()
        value = node.input(0)
    return set()


def _scaling(graph: Graph, root: Node, bases: set[int]) -> set[int]:
    """Return nodes from the root to the normalized result, and the gain and bias after it."""
    nodes: set[int] = set()
    stack = [root.outputs[0]]
    normalized = set[int]()
    while stack and len(nodes) < _REACH:
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
            elif node.index not in graph.passing and (done or not _carries(node)):
                continue
            if done:
                normalized.add(node.outputs[0])
            nodes.add(node.index)
            stack.append(node.outputs[0])
    return nodes


def _carries(node: Node) -> bool:
    """Return whether the node may stand between a root or a sum and its division."""
    return is_exact(node.proto) or node.key == "Reciprocal"


def _is_vector(graph: Graph, value: int) -> bool:
    """Return whether the value is known to have one axis."""
    shape = graph.shapes[value]
    return shape is not None and len(shape) == 1


def _numerator(graph: Graph, value: int, bases: set[int]) -> set[int]:
    """Return the nodes of the x - mean(x) that is divided, if it is not the one that was squared."""
    node = maker_of(graph, value, "Sub")
    if node is None or graph.passed_on(node.input(0)) not in bases:
        return set()
    return {node.index} | _back_to_reduction(
        graph, node.input(1), op_facts().reductions
    )


def _softmax_end(graph: Graph, exp: Node, total: Node) -> set[int]:
    """Return nodes from the sum of exponentials to the softmax's last division or logarithm; empty if there is none."""
    path = {total.index}
    value = total.outputs[0]
    for _ in range(_REACH):
        readers = [node for node, _ in graph.consumers(value)]
        ends = {
            node.index
            for node in readers
            if node.key == "Log" or _scales(graph, node, exp.outputs[0])
        }
        if ends:
            return path | ends
        onward = next(filter(_carries, readers), None)
        if onward is None or onward.outputs[0] == ABSENT:
            return set()
        path.add(onward.index)
        value = onward.outputs[0]
    return set()


def _scales(graph: Graph, node: Node, value: int) -> bool:
    """Return whether the node multiplies or divides the value."""
    return node.key in ("Div", "Mul") and value in map(graph.passed_on, node.inputs)


def _gelu(graph: Graph, core: Node) -> set[int]:
    """Return core -> Add 1 -> Mul by x and by 0.5 in either order, with the polynomial or scaling before the core."""
    plus = _only_reader(graph, core.outputs[0], "Add")
    if plus is None:
        return set()
    if graph.constants.uniform(_other(graph, plus, core.outputs[0])) != 1.0:
        return set()
    group = {core.index, plus.index}
    value = plus.outputs[0]
    base = ABSENT
    # The factors x and 0.5 take one Mul each, or one Mul if half of x is computed first.
    for _ in range(2):
        times = _only_reader(graph, value, "Mul")
        if times is None:
            break
        group.add(times.index)
        other = _other(graph, times, value)
        value = times.outputs[0]
        if not graph.constants.is_constant(other):
            half = graph.producer(other, "Mul")
            factors = () if half is None else half.inputs
            rest = [
                value for value in factors if graph.constants.uniform(value) != 0.5
            ]
            if half is not None and len(rest) < len(factors):
                group.add(half.index)
                other = graph.passed_on(rest[0])
            base = other
    if base == ABSENT:
        return set()
    stack = [core.input(0)]
    while stack:
        current = graph.passed_on(stack.pop())
        node = graph.producer(current)
        is_known = current == base or graph.constants.is_constant(current)
        if node is None or node.index in group or is_known:
            continue
        if node.key not in ("Add", "Div", "Mul", "Pow") or len(group) > _REACH:
            return set()
        group.add(node.index)
        stack += node.reads
    return group


def _silu(graph: Graph, core: Node) -> set[int]:
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
        if scaled is not None and _scales(graph, scaled, other):
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


WALKS: Final[Mapping[str, Callable[[Graph, Node], set[int]]]] = {
    "normalization": _normalization,
    "softmax": _softmax,
    "magnitude": _magnitude,
    "gelu": _gelu,
    "silu": _silu,
}
"""Kind of match -> the walk from its core that returns the nodes; an empty set if there is no match."""


def find_patterns(graph: Graph) -> tuple[Match, ...]:
    """Return the decomposed ops that the walks recognize, in the order of their cores. Complexity: linear."""
    cores = op_facts().core_of
    found = list[Match]()
    for node in graph.nodes_of(cores):
        for kind in cores[node.key]:
            if nodes := WALKS[kind](graph, node):
                between = _between(graph, nodes) if graph.passing else set()
                found.append(Match(kind, node.index, frozenset(nodes | between)))
    return tuple(found)


def _between(graph: Graph, nodes: set[int]) -> set[int]:
    """Return the nodes that pass on values from one of the nodes to another."""
    between = set[int]()
    for value in chain.from_iterable(graph.nodes[index].inputs for index in nodes):
        path = set[int]()
        node = graph.producer(value)
        while (
            node is not None
            and node.index not in nodes
            and node.index in graph.passing
        ):
            path.add(node.index)
            node = graph.producer(node.inputs[0])
        if path and node is not None and node.index in nodes:
            between |= path
    return between


GROWING: Final = ("normalization", "softmax", "magnitude")
"""Kinds of decomposed ops with inner values, such as squares, that leave the range of inputs and results."""


TIED: Final = ("gelu", "silu", "normalization")
"""Kinds of decomposed ops whose nodes need one precision, unless options split them."""


def patterns_of(graph: Graph, *kinds: str) -> Iterator[Match]:
    """Return the patterns of some kinds."""
    return (match for match in graph.ask(find_patterns) if match.kind in kinds)


def find_forms(
    graph: Graph, patterns: Iterable[Match] | None = None
) -> Iterator[tuple[Node, Iterator[Match]]]:
    """Yield the nodes at which forms may end, producers first, each with the matches of the table's forms there.

    In each match, only the core's result is read from outside. Matches may overlap. A core may have several matches,
    the largest forms first. The search is lazy: a caller that takes the first match of a node pays for no other.

    Args:
        graph: the graph.
        patterns: those to search; by default, all.

    Complexity: near linear. A form is tried only at the nodes of patterns, and at those directly after them.
    """
    cores_at = _last_nodes(
        graph, graph.ask(find_patterns) if patterns is None else patterns
    )
    ending_in = form_table().ending_in
    search = FormSearch(graph)
    known = dict[tuple[object, ...], list[Form]]()
    """The forms that nodes after the same op types may end: large models repeat few."""
    for node in graph.order if cores_at else ():
        forms = ending_in.get(node.key)
        cores = cores_at.get(node.index) if forms else None
        if not forms or not cores or graph.scopes[node.scope].opaque:
            continue
        look = node.key, frozenset(cores), search.look_of(node)
        able = known.get(look)
        if able is None:
            able = known[look] = [
                form
                for form, ends in forms
                if not form.cores.isdisjoint(cores) and search.may_be_any(ends, node)
            ]
        if able:
            yield node, _closed_matches(search, able, node)


def _closed_matches(
    search: FormSearch, forms: Iterable[Form], core: Node
) -> Iterator[Match]:
    """Yield the matches of forms that end at a node, and of which only its result is read from outside."""
    for form in forms:
        for match in search.matches(form, core):
            if is_closed(search.graph, match):
                yield match


def _last_nodes(graph: Graph, patterns: Iterable[Match]) -> dict[int, set[str]]:
    """Return possible last nodes of forms -> core types of the patterns that contain them or end before them."""
    cores = defaultdict[int, set[str]](set)
    for match in patterns:
        reached = set(match.nodes)
        for index in match.nodes:
            for value in graph.nodes[index].writes:
                if graph.passing:
                    reached.update(node.index for node in readers_of(graph, value))
                    continue
                for reader, _ in graph.uses[value]:
                    reached.add(reader)
        core = graph.nodes[match.core].key
        for index in reached:
            cores[index].add(core)
    return cores


def is_closed(graph: Graph, match: Match) -> bool:
    """Return whether only the output of the core is read outside the match."""
    inner = graph.at(match.nodes - {match.core})
    for value in chain.from_iterable(node.writes for node in inner):
        readers = {reader for reader, _ in graph.uses[value]}
        if graph.results[value] or not readers <= match.nodes:
            return False
    return True


def named_forms(graph: Graph, name: str) -> frozenset[int]:
    """Return the nodes that a name means in addition to those of its op types.

    Complexity: linear in the nodes of the graph.
    """
    found = set[int]()
    for kind in forms_named(name):
        finder = FINDERS.get(kind)
        if finder is not None:
            found.update(finder(graph, ops_named(name)))
        else:
            found.update(*(match.nodes for match in patterns_of(graph, kind)))
    return frozenset(found)


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
