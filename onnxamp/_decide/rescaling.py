"""Exponents that bring measured ranges into the window of a low-precision type, as rows that plans can hold."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import frexp, isfinite
from types import MappingProxyType
from typing import Final, NamedTuple

from onnxamp._decide.equations import Equations, find_equations, is_stored
from onnxamp._decide.exponents import Solution, solve
from onnxamp._decide.hazards import ranges
from onnxamp._decide.relations import ZERO, Relation, Window
from onnxamp._decide.verdicts import find_hazards
from onnxamp._dtypes import FLOAT, Format
from onnxamp._errors import ArgumentError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, scope_path
from onnxamp._model.weights import SENTINEL
from onnxamp._ops.relations import exponent_rules
from onnxamp._options.levels import Rescaling, Scaled, Unfit
from onnxamp._options.options import Options

HEADROOM: Final = 4
"""Ranges are measured on samples: a value fits if it could be this much larger."""

_SMALL: Final = -5
"""Exponent of 2 from which on the largest magnitude of a value need not be raised, and may be lowered."""

_SMALL_WEIGHT: Final = -9
"""The same of a constant, whose elements differ less."""

_TINY: Final = 4
"""A value that is smaller than this many smallest normal numbers wants to be raised."""

_FLOAT_EXPONENTS: Final = 128
"""All float32 numbers are below 2 to the power of this."""

_SHOWN: Final = 6
"""Nodes of a chain that are named."""


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
    """Exponents with which as many values as possible fit the low-precision type.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        ranges: magnitudes of its values, those in bodies by the names of :func:`value_names`.

    Complexity: near linear in nodes.
    """
    equations = find_equations(graph, borders=options.keep_io_types is True)
    names, low = value_names(graph), options.low
    values = {name: value for value, name in names.items()}
    measured = _measured(values, ranges.largest)
    wanted = _wanted(graph, low, measured)
    sums = {values[name]: partial for name, partial in ranges.sums.items()}
    for value, window in wanted.items():
        if value in sums:
            window = _for_sums(window, sums[value], low)  # noqa: PLW2901
        equations.problem.windows[equations.values[value]] = window
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
    found: dict[int, str] = {}
    for value, name in value_names(graph).items() if unfit else ():
        if (row := unfit.get(name)) is not None:
            touching = [
                graph.values[value].producer,
                *(node for node, _ in graph.uses[value]),
            ]
            found |= dict.fromkeys(
                touching, f"{name!r} reaches {row.largest:.3g}; {row.why}"
            )
    found.pop(ABSENT, None)
    return found


def fitting_sums(graph: Graph, options: Options) -> frozenset[int]:
    """Return nodes whose sums and means were measured and fit float16, which overrules estimates."""
    known = frozenset((options.rescaling or Rescaling()).sums)
    names = value_names(graph).items() if known else ()
    fitting = (value for value, name in names if name in known)
    return frozenset(graph.values[value].producer for value in fitting)


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
    return _completed(equations, exponents)


def _completed(equations: Equations, exponents: list[int | None]) -> list[int]:
    """Solve relations with one unknown as long as there are any, then set an unknown to 0, and so on."""
    relations = equations.problem.relations
    uses: dict[int, list[int]] = {}
    for index, relation in enumerate(relations):
        for variable in {
            variable for variable, _ in relation if exponents[variable] is None
        }:
            uses.setdefault(variable, []).append(index)
    pending = list(range(len(relations)))
    unknown = iter(list(uses))
    while True:
        while pending:
            found = _solved(relations[pending.pop()], exponents)
            if found is not None:
                exponents[found[0]] = found[1]
                pending += uses[found[0]]
        rest = next(
            (variable for variable in unknown if exponents[variable] is None), None
        )
        if rest is None:
            break
        exponents[rest] = 0
        pending += uses[rest]
    result = [exponent or 0 for exponent in exponents]
    for index, relation in enumerate(relations):
        if sum(result[variable] * number for variable, number in relation):
            owner = equations.owners[index]
            where = (
                "the model's interface"
                if owner == ABSENT
                else _called(equations.graph.nodes[owner])
            )
            raise ArgumentError(
                f"Exponents do not fit together at {where}: they belong to another model."
            )
    return result


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
    return {
        v.index: f"{paths[v.scope]}/{v.name}" if paths[v.scope] else v.name
        for v in graph.values
    }


def _measured(
    values: Mapping[str, int], largest: Mapping[str, float]
) -> dict[int, float]:
    known = (
        (values[name], number) for name, number in largest.items() if name in values
    )
    return {value: number for value, number in known if number and isfinite(number)}


def _wanted(
    graph: Graph, low: Format, measured: Mapping[int, float]
) -> dict[int, Window]:
    """Value -> its window, for values that want to be low."""
    hazards = (
        hazard
        for hazard in graph.ask(find_hazards, low)
        if not hazard.reason.is_cured_by_exponents
    )
    kept = {hazard.node for hazard in hazards}
    return {
        value: _window(number, low.max_finite / HEADROOM, low, _SMALL)
        for value, number in measured.items()
        if graph.types[value] == FLOAT and graph.values[value].producer not in kept
    }


def _window(largest: float, limit: float, low: Format, small: int) -> Window:
    """Return the exponents with which a value stays below a limit and keeps its small elements."""
    least = _ceil_log2(largest / limit)
    room = -_ceil_log2(2.0**small / largest)
    tiny = largest < _TINY * low.smallest_normal
    return Window(least, max(room if tiny else max(room, 0), least))


def _for_sums(window: Window, partial: Partial, low: Format) -> Window:
    """Return the window of a value whose sums also have to fit, and whose terms must not be flushed."""
    least = max(
        window.least, -(-_ceil_log2(partial.reach / low.max_finite) // partial.power)
    )
    typical = partial.reach / partial.terms
    most = -_ceil_log2(_TINY * low.smallest_normal / typical) // partial.power
    return Window(least, max(min(window.most, most), least))


def _fits(partial: Partial, exponent: int, low: Format) -> bool:
    return partial.reach * 2.0 ** (-exponent * partial.power) <= low.max_finite


def _ceil_log2(number: float) -> int:
    mantissa, exponent = frexp(number)
    return exponent - (mantissa == 0.5)


def _constant_windows(equations: Equations, low: Format) -> None:
    """Windows of constants: in range, and not so small that the low type loses their digits; sentinels stay such."""
    graph, problem = equations.graph, equations.problem
    for use, variable in equations.uses.items():
        value = graph.nodes[use[0]].inputs[use[1]]
        stats = graph.constants.stats(value)
        if variable == ZERO or stats is None:
            continue
        windows = []
        if stats.largest_number:
            least, most = _window(
                abs(stats.largest_number), low.max_finite, low, _SMALL_WEIGHT
            )
            rule = exponent_rules().get(graph.nodes[use[0]].key)
            is_factor = stats.uniform is not None and rule is not None and not rule.same
            windows.append((least, most if is_factor else max(most, 0)))
        if (largest := stats.largest) >= SENTINEL:  # they stay finite, and sentinels
            least = frexp(largest)[1] - _FLOAT_EXPONENTS
            windows.append((least, -_ceil_log2(SENTINEL / largest)))
        if windows:
            least, most = (
                max(least for least, _ in windows),
                min(most for _, most in windows),
            )
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
        if hazard.reason != ranges.KIND
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
    graph, labels = equations.graph, dict[str, None]()
    for relation in chain:
        owner = equations.owners[relation]
        labels[
            "an input or output of the model"
            if owner == ABSENT
            else _called(graph.nodes[owner])
        ] = None
    if not labels:
        return "the value that it is multiplied by would leave the range"
    shown = list(labels)
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], "...", shown[-1]]
    return f"its exponent must be 0: {' - '.join(shown)}"


def _called(node: Node) -> str:
    return f"{node.label!r} ({node.key})"
