"""Where the candidates of a tuning stand on the page: error against time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log10
from typing import Final

from onnxamp._report.text import count, number, percent
from onnxamp._report.tuning import error_text, is_expected, measured_error, speedup_text, time_text, tolerance_text
from onnxamp._tuning.results import Tuned

_TICKS: Final = 8
"""Ticks of the error axis, at most."""
_EDGE: Final = 8.0
"""Percent of an axis that is left free at either end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: where, in percent of its length from the left or the top, and its label."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate, in percent from the left and from the top; ``read`` are the lines of its tooltip."""

    x: float
    y: float
    holds: bool
    chosen: bool
    read: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """Candidates, those from fast to slow that none is both faster and more accurate than, axes, and the tolerance."""

    metric: str
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    limit: Tick


def plot_of(tuned: Tuned) -> Plot:
    """The plot of a tuning's candidates."""
    times = [candidate.time for candidate in tuned.candidates]
    left, right = min(times), max(times)
    errors = [_known_error(tuned, position) for position in range(len(times))]
    real = [error for error in (*errors, tuned.tolerance) if 0 < error < inf]
    ticks = _ticks(min(real), max(real))
    low, high = log10(ticks[0]), log10(ticks[-1])

    def x(time: float) -> float:
        return _EDGE + (100 - 2 * _EDGE) * (time - left) / (right - left) if right > left else 50.0

    def y(error: float) -> float:
        if not 0 < error < inf:
            return 0.0 if error == inf else 100.0
        return _EDGE + (100 - 2 * _EDGE) * (high - log10(error)) / (high - low)

    steps = [left + (right - left) * k / 4 for k in range(5)] if right > left else [left]
    ends = [error for error in (inf, 0.0) if error in errors]
    labels = {tick: error_text(tuned, tick) if tuned.metric == "snr" else number(tick, 1) for tick in ticks}
    points = tuple(_point(tuned, k, x(times[k]), y(error)) for k, error in enumerate(errors))
    return Plot(
        tuned.metric,
        points,
        tuple(points[k] for k in _front(times, errors)),
        tuple(Tick(x(time), time_text(time)) for time in steps),
        tuple(Tick(y(error), labels.get(error) or error_text(tuned, error)) for error in (*ends, *ticks)),
        Tick(y(tuned.tolerance), tolerance_text(tuned)),
    )


def _front(times: Sequence[float], errors: Sequence[float]) -> Iterator[int]:
    """From fast to slow, the candidates that are more accurate than all faster ones."""
    least = inf
    for k in sorted(range(len(times)), key=lambda k: (times[k], errors[k])):
        if errors[k] < least:
            yield k
            least = errors[k]


def _known_error(tuned: Tuned, position: int) -> float:
    measured = measured_error(tuned, position)
    return tuned.candidates[position].predicted if measured is None else measured


def _ticks(least: float, most: float) -> list[float]:
    """Round numbers from below ``least`` to above ``most``, at most as many as there is room for."""
    first, last = floor(log10(least)), ceil(log10(most))
    fine = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    below, above = [x for x in fine if x <= least], [x for x in fine if x >= most]
    ticks = [x for x in fine if below[-1] <= x <= (above[0] if above[0] > below[-1] else above[1])]
    if len(ticks) <= _TICKS:
        return ticks
    every = ceil((last - first) / (_TICKS - 1))
    return [10.0**power for power in range(first, last + every, every)]


def _point(tuned: Tuned, position: int, x: float, y: float) -> Point:
    candidate, error = tuned.candidates[position], _known_error(tuned, position)
    is_chosen, expected = position == tuned.chosen, is_expected(tuned, position)
    flops, traffic = percent(candidate.flops, 1.0), percent(candidate.bytes, 1.0)
    read = (
        f"Candidate {position}" + (", written" if is_chosen else ""),
        f"{tuned.metric} {error_text(tuned, error)}"
        + (", predicted" if measured_error(tuned, position) is None else ", expected" if expected else ""),
        f"{time_text(candidate.time)}, {speedup_text(tuned, candidate)} as fast as float32",
        f"{candidate.nodes:,} of {count(tuned.units, 'node')} low: {flops} of the arithmetic, {traffic} of the traffic",
    )
    return Point(x, y, error <= tuned.tolerance, is_chosen, read)
