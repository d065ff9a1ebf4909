"""Exponents of a graph's values as linear equations, which follow from ops, bodies and constants.

A value ``v`` with exponent ``e`` is stored as ``v * 2**-e``. :mod:`onnxamp._ops.relations` says which exponents of
inputs and outputs fit together.
"""

from collections.abc import Iterable
from math import prod
from typing import Final, NamedTuple

from onnxamp._decide.relations import ZERO, Problem, Relation
from onnxamp._dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import inner_type
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    body_sources,
    body_targets,
    carried,
)
from onnxamp._model.weights import ConstantStats
from onnxamp._ops.facts import op_facts
from onnxamp._ops.relations import (
    ALL,
    ExponentRule,
    Sum,
    exponent_rules,
    moving_rule,
    power_rule,
)

_BORDER: Final = 8
"""Cost of a node that is added, at the model's interface or after a logarithm, in constants that change."""

_LARGE: Final = 4096
"""Elements from which on a constant with several readers is multiplied for all of them alike, if that is possible."""

_NONE: Final = -1
"""In place of a variable: the port is absent."""


class Moved(NamedTuple):
    """An attribute of a node that is multiplied by 2 to the power of minus ``terms``: variables and coefficients."""

    node: int
    name: str
    terms: Relation
    default: float | None


class Equations:
    """The exponents of a graph as variables, and the relations among them.

    Attributes:
        graph: the graph.
        problem: variables and relations.
        owners: relation -> the node that poses it; ABSENT for inputs and outputs.
        values: value -> its variable; values that are no float32 have none.
        uses: (node, input position) that reads a constant -> its variable.
        invariant: those of ``uses`` whose constant holds zeros and infinities alone, which no factor changes. They
            have a variable nevertheless: without one, the relations that it is in would not tie the other ports.
        attributes: attributes that move along.
        logarithms: nodes that turn a factor into a summand -> the variable of what they read.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.problem = Problem()
        self.owners = list[int]()
        self.values = dict[int, int]()
        self.uses = dict[tuple[int, int], int]()
        self.invariant = set[tuple[int, int]]()
        self.attributes = list[Moved]()
        self.logarithms = dict[int, int]()

    def relate(self, owner: int, terms: Iterable[tuple[int, int]]) -> None:
        """Add a relation that a node poses."""
        self.problem.relations.append(tuple(terms))
        self.owners.append(owner)

    def same(self, owner: int, one: int, other: int) -> None:
        """Make two variables equal; absent values need no exponent."""
        if one >= ZERO and other >= ZERO:
            self.relate(owner, ((one, 1), (other, -1)))

    def value(self, value: int) -> int:
        """Return the variable of a value; ZERO where it can have no exponent, _NONE where it is absent."""
        return _NONE if value == ABSENT else self.values.get(value, ZERO)

    def read(self, node: Node, position: int) -> int:
        """Return the variable of an input: that of this reader alone, if it is a small constant."""
        known = self.uses.get((node.index, position))
        return self.value(node.input(position)) if known is None else known


def find_equations(graph: Graph, *, borders: bool = True) -> Equations:
    """Return the equations of a graph.

    Args:
        graph: the graph.
        borders: whether inputs and outputs may have exponents, at the cost of a Mul.

    Complexity: linear in nodes and values; each constant is read once.
    """
    made = Equations(graph)
    _variables(made)
    _ends(made, borders=borders)
    for node in graph.nodes:
        if graph.scopes[node.scope].opaque or node.signature is None:
            _node(made, node, None)
        elif node.key in op_facts().control_flow:
            _bodies(made, node)
        else:
            _node(made, node, _rule(graph, node))
    return made


def _variables(made: Equations) -> None:
    """Variables of float32 values, and of each reader of a small constant."""
    graph, problem = made.graph, made.problem
    for known in graph.values:
        if _is_float(graph, known.index):
            made.values[known.index] = problem.variable()
    for value, stats in graph.constants.floats().items():
        if not is_stored(graph, value):
            continue
        invariant = stats is not None and stats.largest == 0
        if invariant:
            made.invariant.update(graph.uses[value])
        shared = not invariant and _is_shared(graph, value, stats)
        if shared:
            problem.costs[made.values[value]] = 1
        for use in graph.uses[value]:
            made.uses[use] = made.values[value] if shared else problem.variable()
            if not invariant and not shared:
                problem.costs[made.uses[use]] = 1


def _is_shared(graph: Graph, value: int, stats: ConstantStats | None) -> bool:
    """Return whether all readers of a constant get the same multiple of it.

    Masks contain only zeros and sentinels, so they do not tie layers to each other, however large they are.
    """
    is_mask = stats is not None and stats.largest_number == 0
    return bool(graph.results[value]) or (
        _elements(graph, value) >= _LARGE and not is_mask
    )


def _is_float(graph: Graph, value: int) -> bool:
    kind = graph.types[value]
    while (
        kind is not None and kind != inner_type(kind) and not kind.startswith("tensor")
    ):
        kind = inner_type(kind)
    return kind == FLOAT


def is_stored(graph: Graph, value: int) -> bool:
    """Return whether the value is a constant itself, rather than moved from one."""
    return graph.constants.source(value) == value and graph.constants.is_constant(value)


def _elements(graph: Graph, value: int) -> int:
    tensor = graph.constants.tensors.get(value)
    return 1 if tensor is None else prod(tensor.dims)


def _ends(made: Equations, *, borders: bool) -> None:
    """Return inputs and outputs of the model and of opaque bodies, and values that callers can override."""
    graph = made.graph
    for known in graph.values:
        if known.index not in made.values or known.origin is Origin.NODE:
            continue
        is_input = known.origin is Origin.INPUT and known.scope == 0
        if is_input and borders and _can_scale(graph, known.index):
            made.problem.costs[made.values[known.index]] = _BORDER
        elif (
            is_input
            or known.origin in (Origin.DEFAULT, Origin.SPARSE)
            or graph.scopes[known.scope].opaque
        ):
            made.relate(ABSENT, ((made.values[known.index], 1),))
    for scope in graph.scopes:
        for value in scope.outputs if scope.index == 0 or scope.opaque else ():
            variable = made.value(value)
            if scope.index == 0 and borders and _can_scale(graph, value):
                made.problem.costs[variable] = _BORDER
            elif variable > ZERO:
                made.relate(ABSENT, ((variable, 1),))


def _can_scale(graph: Graph, value: int) -> bool:
    """Return whether a Mul can stand between the value and the model's interface."""
    returned = [scope for scope, _ in graph.results[value]]
    is_input = graph.values[value].producer == ABSENT
    return (
        graph.types[value] == FLOAT
        and returned == ([] if is_input else [0])
        and not graph.constants.is_constant(value)
    )


def _rule(graph: Graph, node: Node) -> ExponentRule | None:
    rule = exponent_rules().get(node.key) or moving_rule(node.proto, node.key)
    # A value of unknown type may be a float without exponent.
    is_typed = graph.untyped.isdisjoint((*node.inputs, *node.outputs))
    if rule is None or not is_typed or not rule.holds(node.proto):
        return None
    if rule.power is None:
        return rule
    return power_rule(graph.constants.uniform(node.input(rule.power)))


def _bodies(made: Equations, node: Node) -> None:
    """Tie the values that control flow passes into bodies, out of them, and from one iteration to the next."""
    graph = made.graph
    for _, body in node.bodies:
        scope = graph.scopes[body]
        for inner, source in zip(
            scope.inputs, body_sources(node, len(scope.inputs)), strict=True
        ):
            if source >= 0:
                made.same(node.index, made.value(inner), made.read(node, source))
        targets = body_targets(node, len(scope.outputs))
        for value, target in zip(scope.outputs, targets, strict=True):
            if 0 <= target < len(node.outputs):
                made.same(
                    node.index, made.value(value), made.value(node.outputs[target])
                )
        for source, target in carried(graph, node):
            inner = scope.outputs[targets.index(target)]
            made.same(node.index, made.read(node, source), made.value(inner))


def _node(made: Equations, node: Node, rule: ExponentRule | None) -> None:
    """The relations that a node poses."""
    ports = {(False, k): made.read(node, k) for k in range(len(node.inputs))}
    ports |= {(True, k): made.value(value) for k, value in enumerate(node.outputs)}
    floats = [(port, variable) for port, variable in ports.items() if variable > ZERO]
    if rule is None:
        for _, variable in floats:
            made.relate(node.index, ((variable, 1),))
        return
    if rule.same:
        for _, variable in floats[1:]:
            made.same(node.index, floats[0][1], variable)
        return
    named = set(rule.free)
    for left, right in rule.equations:
        sides = _ports(node, left), _ports(node, right)
        named |= {port for side in sides for port, _ in side}
        if any(
            side and all(ports.get(port, _NONE) == _NONE for port, _ in side)
            for side in sides
        ):
            continue  # all of a side is absent
        signed = (*sides[0], *((port, -number) for port, number in sides[1]))
        terms = ((ports.get(port, _NONE), number) for port, number in signed)
        made.relate(node.index, (term for term in terms if term[0] > ZERO))
    for port, variable in floats:
        if port not in named:
            made.relate(node.index, ((variable, 1),))
    if rule.logarithm and ports[False, 0] > ZERO:
        made.logarithms[node.index] = ports[False, 0]
        made.problem.costs[ports[False, 0]] = (
            made.problem.costs.get(ports[False, 0], 0) + _BORDER
        )
    for name, item in (rule.attributes or {}).items():
        terms = (
            (ports.get(port, _NONE), number) for port, number in _ports(node, item.by)
        )
        moved = tuple(term for term in terms if term[0] > ZERO)
        made.attributes.append(Moved(node.index, name, moved, item.default))


def _ports(node: Node, side: Sum) -> list[tuple[tuple[bool, int], int]]:
    """Return the ports of a side of an equation with their coefficients."""
    found = []
    for number, is_output, position in side:
        every = range(len(node.inputs)) if position == ALL else (position,)
        found += [((is_output, k), number) for k in every]
    return found
