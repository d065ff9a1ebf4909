"""The exponents of a graph as variables, and the linear equations among them.

A value ``v`` with exponent ``e`` is stored as ``v * 2**-e``. Equations follow from ops, bodies and constants:
:mod:`onnxamp._facts.exponents` says which exponents of inputs and outputs fit together.
"""

from collections.abc import Iterable
from math import prod
from typing import Final, NamedTuple

from onnxamp._decide.exponents.relations import ZERO, ExponentProblem, Relation
from onnxamp._facts.dtypes import FLOAT, holds_float
from onnxamp._facts.exponents import (
    ALL,
    ExponentRule,
    Sum,
    exponent_rules,
    moving_rule,
    power_rule,
)
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    carried,
    entering_values,
    leaving_values,
)
from onnxamp._model.constant_stats import ConstantStats

_BORDER: Final = 8
"""Cost of a node that is added at the model's interface or after a logarithm; a constant that changes costs 1."""
_LARGE: Final = 4096
"""Elements from which on all readers of a constant get the same multiple of it, if that is possible."""
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
        self.problem = ExponentProblem()
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

    def owner(self, relation: int, border: str) -> str:
        """Return the node that poses a relation in words; ``border`` where it is an input or output."""
        if self.owners[relation] == ABSENT:
            return border
        node = self.graph.nodes[self.owners[relation]]
        return f"{node.label!r} ({node.key})"

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
    equations = Equations(graph)
    _variables(equations)
    _ends(equations, borders=borders)
    for node in graph.nodes:
        is_known = node.signature is not None and not graph.scopes[node.scope].opaque
        if is_known and node.key in op_facts().control_flow:
            _bodies(equations, node)
        else:
            _node(equations, node, _rule(graph, node) if is_known else None)
    return equations


def _variables(equations: Equations) -> None:
    """Add the variables of float32 values, and of each reader of a small constant."""
    graph, problem = equations.graph, equations.problem
    for known in graph.values:
        if holds_float(graph.types[known.index]):
            equations.values[known.index] = problem.variable()
    for value, stats in graph.constants.floats().items():
        if not is_stored(graph, value):
            continue
        invariant = stats is not None and stats.largest == 0
        shared = not invariant and _is_shared(graph, value, stats)
        for use in graph.uses[value]:
            equations.uses[use] = (
                equations.values[value] if shared else problem.variable()
            )
        if invariant:
            equations.invariant.update(graph.uses[value])
        else:
            own = {equations.values[value]} if shared else set[int]()
            for variable in own.union(
                equations.uses[use] for use in graph.uses[value]
            ):
                problem.costs[variable] = 1


def _is_shared(graph: Graph, value: int, stats: ConstantStats | None) -> bool:
    """Return whether all readers of a constant get the same multiple of it.

    Masks contain only zeros and sentinels, so they do not tie layers to each other, however large they are.
    """
    tensor = graph.constants.tensors.get(value)
    is_large = tensor is not None and prod(tensor.dims) >= _LARGE
    is_mask = stats is not None and stats.largest_number == 0
    return bool(graph.results[value]) or (is_large and not is_mask)


def is_stored(graph: Graph, value: int) -> bool:
    """Return whether the value is a constant itself, rather than moved from one."""
    constants = graph.constants
    return constants.source(value) == value and constants.is_constant(value)


def _ends(equations: Equations, *, borders: bool) -> None:
    """Fix or price inputs and outputs of the model and of opaque bodies, and values that callers can override."""
    graph = equations.graph
    for known in graph.values:
        if known.index not in equations.values or known.origin is Origin.NODE:
            continue
        variable = equations.values[known.index]
        is_input = known.origin is Origin.INPUT and known.scope == 0
        is_fixed = is_input or known.origin in (Origin.DEFAULT, Origin.SPARSE)
        if is_input and borders and _can_scale(graph, known.index):
            equations.problem.costs[variable] = _BORDER
        elif is_fixed or graph.scopes[known.scope].opaque:
            equations.relate(ABSENT, ((variable, 1),))
    for scope in graph.scopes:
        for value in scope.outputs if scope.index == 0 or scope.opaque else ():
            variable = equations.value(value)
            if scope.index == 0 and borders and _can_scale(graph, value):
                equations.problem.costs[variable] = _BORDER
            elif variable > ZERO:
                equations.relate(ABSENT, ((variable, 1),))


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
    """Return how exponents pass through a node; None if they do not."""
    rule = exponent_rules().get(node.key) or moving_rule(node.proto, node.key)
    # A value of unknown type may be a float without exponent.
    is_typed = graph.untyped.isdisjoint((*node.inputs, *node.outputs))
    if rule is None or not is_typed or not rule.holds(node.proto):
        return None
    if rule.power is None:
        return rule
    return power_rule(graph.constants.uniform(node.input(rule.power)))


def _bodies(equations: Equations, node: Node) -> None:
    """Tie the values that control flow passes into bodies, out of them, and from one iteration to the next."""
    graph = equations.graph
    for _, body in node.bodies:
        leaving = leaving_values(node, graph.scopes[body])
        for source, inner in entering_values(node, graph.scopes[body]).items():
            equations.same(
                node.index, equations.value(inner), equations.read(node, source)
            )
        for target, value in leaving.items():
            outer = equations.value(node.output(target))
            equations.same(node.index, equations.value(value), outer)
        for source, target in carried(graph, node):
            after = equations.value(leaving[target])
            equations.same(node.index, equations.read(node, source), after)


def _node(equations: Equations, node: Node, rule: ExponentRule | None) -> None:
    """Add the relations that a node poses."""
    ports = {(False, k): equations.read(node, k) for k in range(len(node.inputs))}
    ports |= {
        (True, k): equations.value(value) for k, value in enumerate(node.outputs)
    }
    floats = [(port, variable) for port, variable in ports.items() if variable > ZERO]
    if rule is None:
        for _, variable in floats:
            equations.relate(node.index, ((variable, 1),))
        return
    if rule.same:
        for _, variable in floats[1:]:
            equations.same(node.index, floats[0][1], variable)
        return
    named = set(rule.free)

    def terms_of(side: Sum) -> list[tuple[int, int]]:
        """Return the variables of a side of an equation with their coefficients."""
        terms = list[tuple[int, int]]()
        for number, is_output, position in side:
            every = range(len(node.inputs)) if position == ALL else (position,)
            named.update((is_output, k) for k in every)
            terms += [(ports.get((is_output, k), _NONE), number) for k in every]
        return terms

    for sides in rule.equations:
        left, right = map(terms_of, sides)
        # An equation with a side of absent ports, such as an optional input, asks for nothing.
        absent = [dict(side).keys() == {_NONE} for side in (left, right)]
        if not any(absent):
            terms = (*left, *((variable, -number) for variable, number in right))
            equations.relate(node.index, (term for term in terms if term[0] > ZERO))
    for port, variable in floats:
        if port not in named:
            equations.relate(node.index, ((variable, 1),))
    read = ports.get((False, 0), _NONE)
    if rule.logarithm and read > ZERO:
        equations.logarithms[node.index] = read
        equations.problem.costs[read] = equations.problem.costs.get(read, 0) + _BORDER
    for name, item in (rule.attributes or {}).items():
        moved = tuple(term for term in terms_of(item.by) if term[0] > ZERO)
        equations.attributes.append(Moved(node.index, name, moved, item.default))
