"""Exponents that bring measured ranges into the window of a low-precision type, as rows that plans can hold.

A value ``v`` with exponent ``e`` is stored as ``v * 2**-e``. Linear equations among exponents follow from ops, bodies
and constants: :mod:`onnxamp._facts.exponents` says which exponents of inputs and outputs fit together.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import frexp, isfinite, prod
from types import MappingProxyType
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError
from onnxamp._decide.exponents import Solution, solve
from onnxamp._decide.kinds import ByExponents, find_hazards
from onnxamp._decide.relations import ZERO, ExponentProblem, Relation, Window
from onnxamp._facts.dtypes import FLOAT, Format, holds_float
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
    body_sources,
    body_targets,
    carried,
    scope_path,
)
from onnxamp._model.weights import SENTINEL, ConstantStats
from onnxamp._options.options import Options
from onnxamp._options.values import Rescaling, Scaled, Unfit

_BORDER: Final = 8
"""Cost of a node that is added at the model's interface or after a logarithm; a constant that changes costs 1."""

_LARGE: Final = 4096
"""Elements from which on all readers of a constant get the same multiple of it, if that is possible."""
_NONE: Final = -1
"""In place of a variable: the port is absent."""
HEADROOM: Final = 4
"""Ranges are measured on samples: a value fits if it could be this much larger."""
_SMALL: Final = -5
"""Exponent of 2 from which on the largest magnitude of a value need not be raised, and may be lowered."""
_SMALL_WEIGHT: Final = -9
"""The same for a constant, whose elements differ less."""
_TINY: Final = 4
"""A value that is smaller than this many smallest normal numbers wants to be raised."""
_FLOAT_EXPONENTS: Final = 128
"""All float32 numbers are below 2 to the power of this."""
_SHOWN: Final = 6
"""Most nodes of a chain that a sentence names."""


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
    made = Equations(graph)
    _variables(made)
    _ends(made, borders=borders)
    for node in graph.nodes:
        is_known = node.signature is not None and not graph.scopes[node.scope].opaque
        if is_known and node.key in op_facts().control_flow:
            _bodies(made, node)
        else:
            _node(made, node, _rule(graph, node) if is_known else None)
    return made


def _variables(made: Equations) -> None:
    """Add the variables of float32 values, and of each reader of a small constant."""
    graph, problem = made.graph, made.problem
    for known in graph.values:
        if holds_float(graph.types[known.index]):
            made.values[known.index] = problem.variable()
    for value, stats in graph.constants.floats().items():
        if not is_stored(graph, value):
            continue
        invariant = stats is not None and stats.largest == 0
        shared = not invariant and _is_shared(graph, value, stats)
        for use in graph.uses[value]:
            made.uses[use] = made.values[value] if shared else problem.variable()
        if invariant:
            made.invariant.update(graph.uses[value])
        else:
            own = {made.values[value]} if shared else set[int]()
            for variable in own.union(made.uses[use] for use in graph.uses[value]):
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


def _ends(made: Equations, *, borders: bool) -> None:
    """Fix or price inputs and outputs of the model and of opaque bodies, and values that callers can override."""
    graph = made.graph
    for known in graph.values:
        if known.index not in made.values or known.origin is Origin.NODE:
            continue
        variable = made.values[known.index]
        is_input = known.origin is Origin.INPUT and known.scope == 0
        is_fixed = is_input or known.origin in (Origin.DEFAULT, Origin.SPARSE)
        if is_input and borders and _can_scale(graph, known.index):
            made.problem.costs[variable] = _BORDER
        elif is_fixed or graph.scopes[known.scope].opaque:
            made.relate(ABSENT, ((variable, 1),))
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
    """Return how exponents pass through a node; None if they do not."""
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
        sources = body_sources(node, len(scope.inputs))
        targets = body_targets(node, len(scope.outputs))
        for inner, source in zip(scope.inputs, sources, strict=True):
            if source >= 0:
                made.same(node.index, made.value(inner), made.read(node, source))
        for value, target in zip(scope.outputs, targets, strict=True):
            outer = made.value(node.output(target))
            made.same(node.index, made.value(value), outer)
        for source, target in carried(graph, node):
            inner = scope.outputs[targets.index(target)]
            made.same(node.index, made.read(node, source), made.value(inner))


def _node(made: Equations, node: Node, rule: ExponentRule | None) -> None:
    """Add the relations that a node poses."""
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
            made.relate(node.index, (term for term in terms if term[0] > ZERO))
    for port, variable in floats:
        if port not in named:
            made.relate(node.index, ((variable, 1),))
    read = ports.get((False, 0), _NONE)
    if rule.logarithm and read > ZERO:
        made.logarithms[node.index] = read
        made.problem.costs[read] = made.problem.costs.get(read, 0) + _BORDER
    for name, item in (rule.attributes or {}).items():
        moved = tuple(term for term in terms_of(item.by) if term[0] > ZERO)
        made.attributes.append(Moved(node.index, name, moved, item.default))


class Partial(NamedTuple):
    """The sums on the way to a value: the largest sum of magnitudes, and its terms.

    ``power``: sums of squares grow with twice the value's exponent.
    """

    reach: float
    terms: int
    power: int = 1


class Ranges(NamedTuple):
    """Measured ranges, by name of a value.

    ``largest`` is the largest magnitude, sentinels apart; ``sums`` are those of targets that accumulate in float16, and
    ``centered`` the outputs of normalizations that subtract a small mean there.
    """

    largest: Mapping[str, float]
    sums: Mapping[str, Partial] = MappingProxyType({})
    centered: tuple[str, ...] = ()


def find_rescaling(graph: Graph, options: Options, ranges: Ranges) -> Rescaling:
    """Return exponents with which as many values as possible fit the low-precision type.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        ranges: magnitudes of its values, those in bodies by the names of :func:`value_names`.

    Complexity: near linear in nodes.
    """
    equations = find_equations(graph, borders=options.keep_io_types is True)
    names, low = value_names(graph), options.low
    values = {name: value for value, name in names.items()}
    measured = {
        values[name]: number
        for name, number in ranges.largest.items()
        if name in values and number and isfinite(number)
    }
    wanted = _wanted(graph, low, measured)
    sums = {values[name]: partial for name, partial in ranges.sums.items()}
    for value, window in wanted.items():
        partial = sums.get(value)
        both = window if partial is None else _for_sums(window, partial, low)
        equations.problem.windows[equations.values[value]] = both
    _constant_windows(equations, low)
    solution = solve(equations.problem)
    exponents = {
        value: solution.exponents[variable]
        for value, variable in equations.values.items()
    }
    scaled = rows_of(equations, solution.exponents, measured)
    unfit = tuple(_unfit(equations, solution, low, measured, exponents))
    fitting = (
        value
        for value, item in sums.items()
        if _fits(item, exponents.get(value, 0), low)
    )
    known = (*(names[value] for value in fitting), *ranges.centered)
    return Rescaling(scaled, unfit, sums=known, gap=solution.gap)


def unfit_nodes(graph: Graph, options: Options) -> dict[int, str]:
    """Return nodes that write or read a value that no exponent brings into range -> the reason."""
    unfit = {row.value: row for row in (options.rescaling or Rescaling()).unfit}
    found = dict[int, str]()
    for value, name in value_names(graph).items() if unfit else ():
        if name in unfit:
            why = f"{name!r} reaches {unfit[name].largest:.3g}; {unfit[name].why}"
            found[graph.values[value].producer] = why
            found |= {node: why for node, _ in graph.uses[value]}
    found.pop(ABSENT, None)
    return found


def fitting_sums(graph: Graph, options: Options) -> frozenset[int]:
    """Return nodes whose sums and means were measured and fit float16, which overrules estimates."""
    known = frozenset((options.rescaling or Rescaling()).sums)
    names = value_names(graph).items() if known else ()
    return frozenset(
        graph.values[value].producer for value, name in names if name in known
    )


def rows_of(
    equations: Equations, exponents: Sequence[int], largest: Mapping[int, float]
) -> tuple[Scaled, ...]:
    """Return the values with an exponent, constants apart, which follow from the others."""
    names = value_names(equations.graph)
    return tuple(
        Scaled(names[value], exponents[variable], largest.get(value))
        for value, variable in equations.values.items()
        if exponents[variable] and not is_stored(equations.graph, value)
    )


def complete(equations: Equations, rescaling: Rescaling) -> list[int]:
    """Return exponents of all variables, given those of values: constants absorb the differences.

    Raises:
        ArgumentError: the exponents belong to another model.

    Complexity: linear in the terms of relations.
    """
    graph, problem = equations.graph, equations.problem
    exponents: list[int | None] = [None] * problem.count
    exponents[ZERO] = 0
    names, by_name = value_names(graph), dict[str, int]()
    for value, variable in equations.values.items():
        by_name[names[value]] = variable
        if not is_stored(graph, value):
            exponents[variable] = 0
    for row in rescaling.scaled:
        if row.value not in by_name:
            raise ArgumentError(
                f"The model has no float32 value {row.value!r}: the exponents belong to another model."
            )
        exponents[by_name[row.value]] = row.exponent
    result = _completed(problem.relations, exponents)
    for index, relation in enumerate(problem.relations):
        if sum(result[variable] * number for variable, number in relation):
            where = equations.owner(index, "the model's interface")
            raise ArgumentError(
                f"Exponents do not fit together at {where}: they belong to another model."
            )
    return result


def _completed(
    relations: Sequence[Relation], exponents: list[int | None]
) -> list[int]:
    """Solve relations with one unknown as long as there are any, then set an unknown to 0, and so on."""
    uses = dict[int, list[int]]()
    for index, relation in enumerate(relations):
        unknown = {one for one, _ in relation if exponents[one] is None}
        for variable in unknown:
            uses.setdefault(variable, []).append(index)
    pending = list(range(len(relations)))
    for rest in (None, *uses):
        if rest is not None and exponents[rest] is None:
            exponents[rest] = 0
            pending += uses[rest]
        while pending:
            found = _solved(relations[pending.pop()], exponents)
            if found is not None:
                exponents[found[0]] = found[1]
                pending += uses[found[0]]
    return [exponent or 0 for exponent in exponents]


def _solved(
    relation: Relation, exponents: Sequence[int | None]
) -> tuple[int, int] | None:
    """Return the one unknown of a relation, and its exponent; None if there is none or more than one."""
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
    """Return value -> its name, after those of the nodes whose bodies it is in."""
    paths = [scope_path(graph, scope.index) for scope in graph.scopes]
    homes = [f"{path}/" if path else "" for path in paths]
    return {value.index: homes[value.scope] + value.name for value in graph.values}


def _wanted(
    graph: Graph, low: Format, measured: Mapping[int, float]
) -> dict[int, Window]:
    """Return value -> its window, for values that want to be low."""
    kept = {
        hazard.node
        for hazard in graph.ask(find_hazards, low)
        if hazard.reason.exponents is ByExponents.NOTHING
    }
    return {
        value: _window(number, low.max_finite / HEADROOM, low, _SMALL)
        for value, number in measured.items()
        if graph.types[value] == FLOAT and graph.values[value].producer not in kept
    }


def _window(largest: float, limit: float, low: Format, small: int) -> Window:
    """Return the exponents with which a value stays below a limit and keeps its small elements."""
    least = _ceil_log2(largest / limit)
    room = -_ceil_log2(2.0**small / largest)
    # Only a tiny value asks to be raised; others may stay as they are.
    tiny = largest < _TINY * low.smallest_normal
    return Window(least, max(room if tiny else max(room, 0), least))


def _for_sums(window: Window, partial: Partial, low: Format) -> Window:
    """Return the window of a value whose sums also have to fit, and whose terms must not be flushed."""
    # Rounded up here and down below, so that every whole exponent of the window fits.
    least = max(
        window.least, -(-_ceil_log2(partial.reach / low.max_finite) // partial.power)
    )
    typical = partial.reach / partial.terms
    most = -_ceil_log2(_TINY * low.smallest_normal / typical) // partial.power
    return Window(least, max(min(window.most, most), least))


def _fits(partial: Partial, exponent: int, low: Format) -> bool:
    """Return whether the sums on the way to a value stay in range if the value has an exponent."""
    return partial.reach * 2.0 ** (-exponent * partial.power) <= low.max_finite


def _ceil_log2(number: float) -> int:
    """Return the least exponent of a power of 2 that is no less than a number."""
    # frexp writes a power of 2 as 0.5 times the next one.
    mantissa, exponent = frexp(number)
    return exponent - (mantissa == 0.5)


def _constant_windows(equations: Equations, low: Format) -> None:
    """Add the windows of constants: in range, and large enough for the low type to keep their digits."""
    graph, problem = equations.graph, equations.problem
    for use, variable in equations.uses.items():
        value = graph.nodes[use[0]].inputs[use[1]]
        stats = graph.constants.stats(value)
        if variable == ZERO or stats is None:
            continue
        windows, largest = list[Window](), abs(stats.largest_number)
        if largest:
            # Constants are known exactly, so they need no headroom.
            least, most = _window(largest, low.max_finite, low, _SMALL_WEIGHT)
            rule = exponent_rules().get(graph.nodes[use[0]].key)
            is_factor = (
                stats.uniform is not None and rule is not None and not rule.same
            )
            windows.append(Window(least, most if is_factor else max(most, 0)))
        # Sentinels stay finite, and sentinels.
        if stats.largest >= SENTINEL:
            least = frexp(stats.largest)[1] - _FLOAT_EXPONENTS
            windows.append(Window(least, -_ceil_log2(SENTINEL / stats.largest)))
        if windows:
            least = max(window.least for window in windows)
            most = min(window.most for window in windows)
            problem.windows[variable] = Window(least, max(least, most))


def _unfit(
    equations: Equations,
    solution: Solution,
    low: Format,
    measured: Mapping[int, float],
    exponents: Mapping[int, int],
) -> Iterator[Unfit]:
    """Yield values out of range for all exponents, and those at borders, whose Mul must stay in float32."""
    graph, names = equations.graph, value_names(equations.graph)
    borders = {*graph.scopes[0].inputs, *graph.scopes[0].outputs}
    known = {
        hazard.node
        for hazard in graph.ask(find_hazards, low)
        if hazard.reason.exponents is not ByExponents.SETTLE
    }
    for value, number in measured.items():
        exponent = 0 if value in borders else exponents.get(value, 0)
        judged = graph.types[value] != FLOAT or graph.values[value].producer in known
        if judged or number * 2.0**-exponent <= low.max_finite:
            continue
        if exponents.get(value, 0):
            why = f"a Mul by 2^{exponents[value]} at the model's interface must stay in float32"
        else:
            why = chain_text(equations, solution.chain(equations.values[value]))
        yield Unfit(names[value], number, why)


def chain_text(equations: Equations, chain: Iterable[int]) -> str:
    """Return the nodes of a chain of relations in words."""
    border = "an input or output of the model"
    shown = list(dict.fromkeys(equations.owner(index, border) for index in chain))
    if not shown:
        return "the value that it is multiplied by would leave the range"
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], "...", shown[-1]]
    return f"its exponent must be 0: {' - '.join(shown)}"
