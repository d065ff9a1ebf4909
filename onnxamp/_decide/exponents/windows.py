"""The exponents that a value or a constant wants: with them it stays in range, and keeps its small elements."""

from collections.abc import Mapping
from math import frexp
from typing import Final, NamedTuple

from onnxamp._decide.exponents.equations import Equations
from onnxamp._decide.exponents.relations import ZERO, Window
from onnxamp._decide.kinds import ByExponents, find_hazards
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.exponents import exponent_rules
from onnxamp._graph.graph import Graph
from onnxamp._model.weights import SENTINEL

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


class Partial(NamedTuple):
    """The sums on the way to a value: the largest sum of magnitudes, and its terms.

    ``power``: sums of squares grow with twice the value's exponent.
    """

    reach: float
    terms: int
    power: int = 1


def wanted_windows(
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


def window_for_sums(window: Window, partial: Partial, low: Format) -> Window:
    """Return the window of a value whose sums also have to fit, and whose terms must not be flushed."""
    # Rounded up here and down below, so that every whole exponent of the window fits.
    least = max(
        window.least, -(-_ceil_log2(partial.reach / low.max_finite) // partial.power)
    )
    typical = partial.reach / partial.terms
    most = -_ceil_log2(_TINY * low.smallest_normal / typical) // partial.power
    return Window(least, max(min(window.most, most), least))


def sums_fit(partial: Partial, exponent: int, low: Format) -> bool:
    """Return whether the sums on the way to a value stay in range if the value has an exponent."""
    return partial.reach * 2.0 ** (-exponent * partial.power) <= low.max_finite


def _ceil_log2(number: float) -> int:
    """Return the least exponent of a power of 2 that is no less than a number."""
    # frexp writes a power of 2 as 0.5 times the next one.
    mantissa, exponent = frexp(number)
    return exponent - (mantissa == 0.5)


def add_constant_windows(equations: Equations, low: Format) -> None:
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
