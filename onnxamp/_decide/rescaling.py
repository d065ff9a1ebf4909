"""Exponents of a graph's values: the equations that the ops pose, and exponents that bring measured ranges into a window.

A value ``v`` with exponent ``e`` is stored as ``v * 2**-e``. :mod:`onnxamp._ops.exponents` says which exponents of inputs
and outputs fit together, bodies of control flow tie theirs, and constants take up differences.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, frexp, isfinite
from typing import Final, NamedTuple

from onnxamp._decide.exponents import ZERO, Problem, Relation, Solution, Window, solve
from onnxamp._decide.hazards import find_hazards
from onnxamp._decide.verdicts import Reason
from onnxamp._dtypes import FLOAT, LowType
from onnxamp._errors import ArgumentError
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import body_sources, body_targets, carried, inner_type
from onnxamp._graph.view import ABSENT, Node, Origin, scope_path
from onnxamp._ops.exponents import ALL, ExponentRule, ScaledAttribute, Sum, exponent_rules, moving_rule, power_rule
from onnxamp._ops.facts import op_facts
from onnxamp._options.options import Options
from onnxamp._options.rescaling import Rescaling, Scaled, Unfit

HEADROOM: Final = 4
"""Ranges are measured on samples: a value fits if it could be this much larger."""

_SMALL: Final = -5
"""A value need not be raised, or may be lowered, where its largest magnitude is 2 to the power of this."""

_SMALL_WEIGHT: Final = -9
"""The same of a constant, whose elements differ less."""

_TINY: Final = 4
"""A value that is smaller than this many smallest normal numbers wants to be raised."""

_BORDER: Final = 8
"""Cost of a Mul behind an input or in front of an output, in constants that change."""

_LARGE: Final = 4096
"""Elements from which on a constant with several readers is multiplied for all of them alike, if that is possible."""

_SHOWN: Final = 6
"""Nodes of a chain that are named."""

_HARMLESS: Final = frozenset({Reason.RANGE, Reason.REDUCTION, Reason.FUSION})
"""Hazards whose nodes want to be low nevertheless, once exponents bring their values into range."""


_NONE: Final = -1
"""In place of a variable: the port is absent."""

_ANY: Final = -2
"""In place of a variable: the port holds zeros and infinities alone, which no factor changes."""


class Moved(NamedTuple):
    """An attribute of a node that is multiplied by 2 to the power of minus ``terms``: variables and coefficients."""

    node: int
    name: str
    terms: Relation
    default: float | None


@dataclass(slots=True)
class Equations:
    """The exponents of a graph as variables, and what holds among them.

    Attributes:
        graph: the graph.
        problem: variables and relations.
        owners: relation -> the node that poses it; ABSENT for inputs and outputs.
        values: value -> its variable; values that are no float32 have none.
        uses: (node, input position) that reads a constant -> its variable.
        attributes: attributes that move along.
    """

    graph: Graph
    problem: Problem = field(default_factory=Problem)
    owners: list[int] = field(default_factory=list)
    values: dict[int, int] = field(default_factory=dict)
    uses: dict[tuple[int, int], int] = field(default_factory=dict)
    attributes: list[Moved] = field(default_factory=list)

    def relate(self, owner: int, terms: Iterable[tuple[int, int]]) -> None:
        """Add a relation that a node poses."""
        self.problem.relations.append(tuple(terms))
        self.owners.append(owner)

    def same(self, owner: int, one: int, other: int) -> None:
        """Make two variables equal; what is absent, or zeros alone, needs no exponent."""
        if one >= ZERO and other >= ZERO:
            self.relate(owner, ((one, 1), (other, -1)))

    def value(self, value: int) -> int:
        """The variable of a value; ZERO where it can have no exponent, _NONE where it is absent."""
        return _NONE if value == ABSENT else self.values.get(value, ZERO)

    def read(self, node: Node, position: int) -> int:
        """The variable of an input; _ANY for a constant that no factor changes."""
        known = self.uses.get((node.index, position))
        return self.value(node.input(position)) if known is None else known


def find_equations(graph: Graph, *, borders: bool = True) -> Equations:
    """The equations of a graph.

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
            rule = None
        elif node.key in op_facts().control_flow:
            _bodies(made, node)
            continue
        else:
            rule = _rule(graph, node)
        _node(made, node, rule)
    return made


def _variables(made: Equations) -> None:
    """Variables of float32 values, and of each reader of a small constant."""
    graph, problem = made.graph, made.problem
    for value in graph.values:
        if _is_float(graph, value.index):
            made.values[value.index] = problem.variable()
    for value in graph.constants.floats():
        if not _is_stored(graph, value):
            continue
        stats = graph.constants.stats(value)
        empty = stats is not None and stats.largest_number == 0
        shared = bool(graph.results[value]) or _elements(graph, value) >= _LARGE
        if not empty and shared:
            problem.costs[made.values[value]] = 1
        for use in graph.uses[value]:
            made.uses[use] = _ANY if empty else made.values[value] if shared else problem.variable()
            if not empty and not shared:
                problem.costs[made.uses[use]] = 1


def _is_float(graph: Graph, value: int) -> bool:
    kind = graph.types[value]
    while kind is not None and kind != inner_type(kind) and not kind.startswith("tensor"):
        kind = inner_type(kind)
    return kind == FLOAT


def _is_stored(graph: Graph, value: int) -> bool:
    """Whether the value is a constant itself, and not moved from one."""
    return graph.constants.source(value) == value and graph.constants.is_constant(value)


def _elements(graph: Graph, value: int) -> int:
    shape = graph.constants.tensors[value].dims if value in graph.constants.tensors else ()
    count = 1
    for size in shape:
        count *= size
    return count


def _ends(made: Equations, *, borders: bool) -> None:
    """Inputs and outputs of the model, and of opaque bodies, and what callers can override."""
    graph = made.graph
    for value in graph.values:
        if value.index not in made.values or value.origin is Origin.NODE:
            continue
        is_input = value.origin is Origin.INPUT and value.scope == 0
        if is_input and borders and _can_scale(graph, value.index):
            made.problem.costs[made.values[value.index]] = _BORDER
        elif is_input or value.origin in (Origin.DEFAULT, Origin.SPARSE) or graph.scopes[value.scope].opaque:
            made.relate(ABSENT, ((made.values[value.index], 1),))
    for scope in graph.scopes:
        for value in scope.outputs if scope.index == 0 or scope.opaque else ():
            variable = made.value(value)
            if scope.index == 0 and borders and _can_scale(graph, value):
                made.problem.costs[variable] = _BORDER
            elif variable > ZERO:
                made.relate(ABSENT, ((variable, 1),))


def _can_scale(graph: Graph, value: int) -> bool:
    """Whether a Mul can stand between the value and the model's interface."""
    returned = [scope for scope, _ in graph.results[value]]
    is_input = graph.values[value].producer == ABSENT
    return (
        graph.types[value] == FLOAT
        and returned == ([] if is_input else [0])
        and not graph.constants.is_constant(value)
    )


def _rule(graph: Graph, node: Node) -> ExponentRule | None:
    rule = exponent_rules().get(node.key) or moving_rule(node.proto, node.key)
    if rule is None or not rule.holds(node.proto):
        return None
    return power_rule(graph.constants.uniform(node.input(rule.power))) if rule.power is not None else rule


def _bodies(made: Equations, node: Node) -> None:
    """Tie what control flow passes into bodies, out of them, and from one round to the next."""
    graph = made.graph
    for _, body in node.bodies:
        scope = graph.scopes[body]
        for inner, source in zip(scope.inputs, body_sources(node, len(scope.inputs)), strict=True):
            if source >= 0:
                made.same(node.index, made.value(inner), made.read(node, source))
        for value, target in zip(scope.outputs, body_targets(node, len(scope.outputs)), strict=True):
            if 0 <= target < len(node.outputs):
                made.same(node.index, made.value(value), made.value(node.outputs[target]))
        for source, target in carried(graph, node):
            inner = scope.outputs[target + (node.key == "Loop")]
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
            made.relate(node.index, ((floats[0][1], 1), (variable, -1)))
        return
    named = set(rule.free)
    for left, right in rule.equations:
        sides = [_side(node, side, ports) for side in (left, right)]
        named |= {port for found, _ in sides for port, _ in found}
        if any(is_absent for _, is_absent in sides):
            continue
        terms = [(ports.get(port, _NONE), sign * number)
                 for (found, _), sign in zip(sides, (1, -1), strict=True) for port, number in found]  # fmt: skip
        if not any(variable == _ANY for variable, _ in terms):
            made.relate(node.index, ((variable, number) for variable, number in terms if variable > ZERO))
    for port, variable in floats:
        if port not in named:
            made.relate(node.index, ((variable, 1),))
    for name, item in (rule.attributes or {}).items():
        made.attributes.append(_moved(node, name, item, ports))


def _side(node: Node, side: Sum, ports: Mapping[tuple[bool, int], int]) -> tuple[list[tuple[tuple[bool, int], int]], bool]:
    """The ports of a side of an equation with their coefficients, and whether all of them are absent."""
    found = []
    for number, is_output, position in side:
        every = range(len(node.inputs)) if position == ALL else (position,)
        found += [((is_output, k), number) for k in every]
    return found, bool(found) and all(ports.get(port, _NONE) == _NONE for port, _ in found)


def _moved(node: Node, name: str, item: ScaledAttribute, ports: Mapping[tuple[bool, int], int]) -> Moved:
    terms = ((ports.get((term.is_output, term.position), _NONE), term.coefficient) for term in item.by)
    return Moved(node.index, name, tuple((v, number) for v, number in terms if v > ZERO), item.default)


def find_rescaling(graph: Graph, options: Options, largest: Mapping[str, float]) -> Rescaling:
    """Exponents with which as many values as possible fit the low-precision type.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        largest: largest magnitude by name of a value of the main graph, sentinels apart.

    Complexity: near linear in nodes.
    """
    equations = find_equations(graph, borders=options.keep_io_types is True)
    low, measured = options.low, _measured(graph, largest)
    wanted = _wanted(graph, low, measured)
    for value, window in wanted.items():
        equations.problem.windows[equations.values[value]] = window
    _constant_windows(equations, low)
    solution = solve(equations.problem)
    exponents = {value: solution.exponents[variable] for value, variable in equations.values.items()}
    scaled = rows_of(equations, solution.exponents, measured)
    unfit = tuple(_unfit(equations, solution, low, measured, exponents))
    return Rescaling(scaled, unfit)


def unfit_nodes(graph: Graph, options: Options) -> dict[int, str]:
    """Nodes that make or read a value that no exponent brings into range -> why."""
    unfit = {row.value: row for row in (options.rescaling or Rescaling()).unfit}
    found: dict[int, str] = {}
    for value, name in value_names(graph).items() if unfit else ():
        row = unfit.get(name)
        if row is not None:
            touching = [graph.values[value].producer, *(node for node, _ in graph.uses[value])]
            why = f"{name!r} reaches {row.largest:.3g}; {row.why}"
            found |= {node: why for node in touching if node != ABSENT}
    return found


def rows_of(equations: Equations, exponents: Sequence[int], largest: Mapping[int, float]) -> tuple[Scaled, ...]:
    """The values with an exponent, constants apart, which follow from the others."""
    names = value_names(equations.graph)
    return tuple(
        Scaled(names[value], exponents[variable], largest.get(value))
        for value, variable in equations.values.items()
        if exponents[variable] and not _is_stored(equations.graph, value)
    )


def complete(equations: Equations, rescaling: Rescaling) -> list[int]:
    """Exponents of all variables where those of values are given: constants take up the differences.

    Raises:
        ArgumentError: the exponents belong to another model.

    Complexity: linear in the terms of relations.
    """
    graph, problem = equations.graph, equations.problem
    exponents: list[int | None] = [None] * problem.count
    exponents[ZERO] = 0
    names = value_names(graph)
    for value, variable in equations.values.items():
        if not _is_stored(graph, value):
            exponents[variable] = 0
    by_name = {names[value]: variable for value, variable in equations.values.items()}
    for row in rescaling.scaled:
        if row.value not in by_name:
            raise ArgumentError(f"The model has no float32 value {row.value!r}: the exponents belong to another one.")
        exponents[by_name[row.value]] = row.exponent
    return _completed(equations, exponents)


def _completed(equations: Equations, exponents: list[int | None]) -> list[int]:
    """Solve relations with one unknown as long as there are any, then set an unknown to 0, and so on."""
    relations = equations.problem.relations
    uses: dict[int, list[int]] = {}
    for index, relation in enumerate(relations):
        for variable in {variable for variable, _ in relation if exponents[variable] is None}:
            uses.setdefault(variable, []).append(index)
    pending = list(range(len(relations)))
    unknown = iter(list(uses))
    while True:
        while pending:
            found = _solved(relations[pending.pop()], exponents)
            if found is not None:
                exponents[found[0]] = found[1]
                pending += uses[found[0]]
        rest = next((variable for variable in unknown if exponents[variable] is None), None)
        if rest is None:
            break
        exponents[rest] = 0
        pending += uses[rest]
    result = [exponent or 0 for exponent in exponents]
    for index, relation in enumerate(relations):
        if sum(result[variable] * number for variable, number in relation):
            owner = equations.owners[index]
            where = "the model's interface" if owner == ABSENT else _called(equations.graph.nodes[owner])
            raise ArgumentError(f"Exponents do not fit together at {where}: they belong to another model.")
    return result


def _solved(relation: Relation, exponents: Sequence[int | None]) -> tuple[int, int] | None:
    """The one unknown of a relation, and its exponent; None where there is no or more than one."""
    unknown: Counter[int] = Counter()
    rest = 0
    for variable, number in relation:
        known = exponents[variable]
        if known is None:
            unknown[variable] += number
        else:
            rest -= known * number
    if len(unknown) != 1:
        return None
    ((variable, number),) = unknown.items()
    return (variable, rest // number) if number and rest % number == 0 else None


def value_names(graph: Graph) -> dict[int, str]:
    """Value -> its name, behind those of the nodes whose bodies it is in."""
    paths = [scope_path(graph, scope.index) for scope in graph.scopes]
    return {v.index: f"{paths[v.scope]}/{v.name}" if paths[v.scope] else v.name for v in graph.values}


def _measured(graph: Graph, largest: Mapping[str, float]) -> dict[int, float]:
    names = graph.scopes[0].names
    return {names[name]: number for name, number in largest.items() if name in names and number and isfinite(number)}


def _wanted(graph: Graph, low: LowType, measured: Mapping[int, float]) -> dict[int, Window]:
    """Value -> its window, for values that want to be low."""
    hazards = (hazard for hazard in graph.ask(find_hazards, low) if hazard.reason not in _HARMLESS)
    kept = {hazard.node for hazard in hazards}
    return {
        value: _window(number, low, _SMALL)
        for value, number in measured.items()
        if graph.types[value] == FLOAT and graph.values[value].producer not in kept
    }


def _window(largest: float, low: LowType, small: int) -> Window:
    """The exponents with which a value fits and keeps its small elements."""
    least = _ceil_log2(largest / (low.max_finite / HEADROOM))
    room = -_ceil_log2(2.0**small / largest)
    tiny = largest < _TINY * low.smallest_normal
    return Window(least, max(room if tiny else max(room, 0), least))


def _ceil_log2(number: float) -> int:
    mantissa, exponent = frexp(number)
    return exponent - (mantissa == 0.5)


def _constant_windows(equations: Equations, low: LowType) -> None:
    """Windows of constants: in range, and not so small that the low type loses their digits."""
    graph, problem = equations.graph, equations.problem
    for use, variable in equations.uses.items():
        value = graph.nodes[use[0]].inputs[use[1]]
        stats = graph.constants.stats(value)
        if variable > ZERO and stats is not None and stats.largest_number:
            magnitude = abs(stats.largest_number)
            least = _ceil_log2(magnitude / low.max_finite)
            room = -_ceil_log2(2.0**_SMALL_WEIGHT / magnitude)
            problem.windows[variable] = Window(least, max(room, 0, least))


def _unfit(
    equations: Equations, solution: Solution, low: LowType, measured: Mapping[int, float],
    exponents: Mapping[int, int],
) -> Iterator[Unfit]:  # fmt: skip
    """Values out of range whatever exponents do, and those at borders, whose Mul has to stay float32."""
    graph, names = equations.graph, value_names(equations.graph)
    borders = {*graph.scopes[0].inputs, *graph.scopes[0].outputs}
    known = {hazard.node for hazard in graph.ask(find_hazards, low)}
    for value, number in measured.items():
        exponent = 0 if value in borders else exponents.get(value, 0)
        judged = graph.types[value] != FLOAT or graph.values[value].producer in known
        if judged or number * 2.0**-exponent <= low.max_finite:
            continue
        if exponents.get(value, 0):
            why = f"the model's interface: a Mul by 2^{exponents[value]} stands there"
        else:
            why = chain_text(equations, solution.chain(equations.values[value]))
        yield Unfit(names[value], number, why)


def chain_text(equations: Equations, chain: Iterable[int]) -> str:
    """The nodes of a chain of relations in words."""
    graph, labels = equations.graph, dict[str, None]()
    for relation in chain:
        owner = equations.owners[relation]
        labels["an input or output of the model" if owner == ABSENT else _called(graph.nodes[owner])] = None
    if not labels:
        return "what it is multiplied with would leave its range"
    shown = list(labels)
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], "...", shown[-1]]
    return f"its exponent must be 0: {' - '.join(shown)}"


def _called(node: Node) -> str:
    return f"{node.label!r} ({node.key})"
