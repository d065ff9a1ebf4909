"""The exponents that bring measured ranges into the window of a low-precision type, and the values that none does."""

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from types import MappingProxyType
from typing import Final, NamedTuple

from onnxamp._decide.exponents.equations import Equations, find_equations
from onnxamp._decide.exponents.rows import rows_of, value_names
from onnxamp._decide.exponents.solve import Solution, solve
from onnxamp._decide.exponents.windows import (
    Partial,
    add_constant_windows,
    sums_fit,
    wanted_windows,
    window_for_sums,
)
from onnxamp._decide.kinds import ByExponents, find_hazards
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.extremes import DIGITS
from onnxamp._options.options import Options
from onnxamp._options.values import Rescaling, Unfit

_TRIALS: Final = 4
"""Values that are given up one after the other, so that others keep their digits."""

_SHOWN: Final = 6
"""Most nodes of a chain that a sentence names."""


class Ranges(NamedTuple):
    """Measured ranges, by name of a value.

    ``largest`` is the largest magnitude, sentinels apart; ``sums`` are those of targets that accumulate in float16, and
    ``centered`` the outputs of normalizations that subtract a small mean there.
    """

    largest: Mapping[str, float]
    sums: Mapping[str, Partial] = MappingProxyType({})
    centered: tuple[str, ...] = ()

    def __or__(self, more: "Ranges") -> "Ranges":
        """Those of these inputs and of more."""
        largest, sums = dict(self.largest), dict(self.sums)
        for name, reach in more.largest.items():
            largest[name] = max(reach, largest.get(name, 0.0))
        for name, partial in more.sums.items():
            sums[name] = max(partial, sums.get(name, partial))
        # A mean that is large on some of them is lost there.
        centered = tuple(name for name in self.centered if name in more.centered)
        return Ranges(largest, sums, centered)


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
    wanted = wanted_windows(graph, low, measured)
    sums = {values[name]: partial for name, partial in ranges.sums.items()}
    for value, window in wanted.items():
        partial = sums.get(value)
        both = window if partial is None else window_for_sums(window, partial, low)
        equations.problem.windows[equations.values[value]] = both
    add_constant_windows(equations, low)
    solution, exponents = _solved(equations, low, measured)
    scaled = rows_of(equations, solution.exponents, measured)
    unfit = tuple(_unfit(equations, solution, low, measured, exponents))
    fitting = (
        value
        for value, item in sums.items()
        if sums_fit(item, exponents.get(value, 0), low)
    )
    known = (*(names[value] for value in fitting), *ranges.centered)
    return Rescaling(scaled, unfit, sums=known, gap=solution.gap)


def _solved(
    equations: Equations, low: Format, measured: Mapping[int, float]
) -> tuple[Solution, dict[int, int]]:
    """Return the exponents that bring values into range without taking all digits from others.

    An exponential may be so large for some inputs that what is computed with it would become tiny. The largest value
    stays in float32 then.
    """
    windows = equations.problem.windows
    given = dict(windows)
    first = solution, exponents = _exponents(equations)
    for _ in range(_TRIALS):
        if not _takes_digits(exponents, low, measured):
            return solution, exponents
        beyond = [
            value
            for value, number in measured.items()
            if number > low.max_finite and equations.values.get(value) in windows
        ]
        if not beyond:
            break
        largest = max(beyond, key=measured.__getitem__)
        del windows[equations.values[largest]]
        solution, exponents = _exponents(equations)
    if _takes_digits(exponents, low, measured):
        # Nothing is gained by giving these values up.
        windows.update(given)
        return first
    return solution, exponents


def _exponents(equations: Equations) -> tuple[Solution, dict[int, int]]:
    """Solve the equations; return the solution, and the exponent by value."""
    solution = solve(equations.problem)
    by_value = {
        value: solution.exponents[variable]
        for value, variable in equations.values.items()
    }
    return solution, by_value


def _takes_digits(
    exponents: Mapping[int, int], low: Format, measured: Mapping[int, float]
) -> bool:
    """Return whether exponents make a value so small that its elements lose their digits."""
    # Elements far below the largest one need digits as well.
    least = DIGITS * low.smallest_normal
    return any(
        number >= least > number * 2.0 ** -exponents.get(value, 0)
        for value, number in measured.items()
    )


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
