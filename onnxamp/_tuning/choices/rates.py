"""Choices at all rates at which errors may be charged, from everything that pays to nothing."""

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf, log
from typing import Final

from onnxamp._tuning.choices.parts import Choice
from onnxamp._tuning.choices.solver import CandidateSolver

_CUTS: Final = 12
"""The largest number of rates at which to solve a cut, for each way to price Casts."""

CLOSE: Final = 1.02
"""Ratio between two errors, or two rates, below which the search does not look between them."""

LEAST: Final = 1 / 256
"""Share of the error of the best choice below which the search stops."""


def rated_choices(solver: CandidateSolver) -> Iterator[Choice]:
    """Yield the cuts at all rates, where their errors differ: the widest gap is halved until none is left."""
    # At the first rate, all errors together cost one unit; at the last, the smallest one outweighs all savings.
    prices = solver.errors.prices
    ends = [1 / sum(prices), 1e3 * (1 + solver.space.gains) / min(prices)]
    rated = [(rate, solver.choose(rate)) for rate in ends]
    yield from (low for _, low in rated)
    gaps = list[tuple[float, float, float, Choice, Choice]]()

    predicted = solver.errors.predicted
    least = LEAST * predicted(rated[0][1])

    def enter(low: tuple[float, Choice], high: tuple[float, Choice]) -> None:
        """Enter the gap between the choices at two rates, unless it is closed."""
        low_rate, more = low
        high_rate, less = high
        if more == less or high_rate <= CLOSE * low_rate:
            return
        error = predicted(more)
        width = error_ratio(max(predicted(less), least), error)
        if error > least and width > log(CLOSE):
            heappush(gaps, (-width, low_rate, high_rate, more, less))

    enter(*rated)
    for _ in range(_CUTS):
        if not gaps:
            return
        _, low_rate, high_rate, more, less = heappop(gaps)
        middle = (low_rate * high_rate) ** 0.5  # rates span many powers of ten
        choice = solver.choose(middle)
        yield choice
        enter((low_rate, more), (middle, choice))
        enter((middle, choice), (high_rate, less))


def error_ratio(low: float, high: float) -> float:
    """Return the distance of two errors."""
    if not 0 < low < inf or not 0 < high < inf:
        return inf if low < high else 0.0
    return log(high / low)
