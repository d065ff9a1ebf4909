"""Exponents as the rows that plans hold: those of values, from which those of constants follow.

Rows also say which nodes no exponent helps, and whose sums fit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from onnxamp._base.errors import ArgumentError
from onnxamp._decide.exponents.equations import Equations, is_stored
from onnxamp._decide.exponents.relations import ZERO, Relation
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, scope_path
from onnxamp._options.options import Options
from onnxamp._options.values import Rescaling, Scaled


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
            solved = _solved(relations[pending.pop()], exponents)
            if solved is not None:
                exponents[solved[0]] = solved[1]
                pending += uses[solved[0]]
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


def unfit_nodes(graph: Graph, options: Options) -> dict[int, str]:
    """Return nodes that write or read a value that no exponent brings into range -> the reason."""
    unfit = {row.value: row for row in (options.rescaling or Rescaling()).unfit}
    reasons = dict[int, str]()
    for value, name in value_names(graph).items() if unfit else ():
        if name in unfit:
            why = f"{name!r} reaches {unfit[name].largest:.3g}; {unfit[name].why}"
            reasons[graph.values[value].producer] = why
            reasons |= {node: why for node, _ in graph.uses[value]}
    reasons.pop(ABSENT, None)
    return reasons


def fitting_sums(graph: Graph, options: Options) -> frozenset[int]:
    """Return nodes whose sums and means were measured and fit float16, which overrules estimates."""
    known = frozenset((options.rescaling or Rescaling()).sums)
    names = value_names(graph).items() if known else ()
    return frozenset(
        graph.values[value].producer for value, name in names if name in known
    )


def value_names(graph: Graph) -> dict[int, str]:
    """Return value -> its name, after those of the nodes whose bodies it is in."""
    paths = [scope_path(graph, scope.index) for scope in graph.scopes]
    homes = [f"{path}/" if path else "" for path in paths]
    return {value.index: homes[value.scope] + value.name for value in graph.values}
