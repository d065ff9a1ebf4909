"""The plot of a tuning's candidates: their times and errors, as positions in percent of its axes."""

from collections.abc import Iterator, Sequence
from math import ceil, floor, inf, log10
from typing import Final, NamedTuple

from onnxamp._base.words import count
from onnxamp._report import number, percent, time_text
from onnxamp._report.tuning import (
    error_text,
    known_error,
    measured_error,
    speedup_text,
    tolerance_text,
)
from onnxamp._tuning.results import Tuned

_TICKS: Final = 8
"""The largest number of ticks on the error axis."""
_EDGE: Final = 8.0
"""Percent of an axis that stays free at each end."""


class Tick(NamedTuple):
    """A mark on an axis: where, in percent of its length from the left or the top, and its label."""

    at: float
    text: str


class Point(NamedTuple):
    """A candidate, in percent from the left and from the top; ``read`` are the lines of its tooltip."""

    x: float
    y: float
    holds: bool
    chosen: bool
    read: tuple[str, ...]


class Plot(NamedTuple):
    """Candidates, those from fast to slow that none is both faster and more accurate than, axes, and the tolerance."""

    metric: str
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    limit: Tick


def plot_of(tuned: Tuned) -> Plot:
    """Return the plot of a tuning's candidates."""
    times = [candidate.time for candidate in tuned.candidates]
    left = min(times)
    right = max(times)
    errors = [known_error(tuned, position) for position in range(len(times))]
    real = [error for error in (*errors, tuned.tolerance) if 0 < error < inf]
    ticks = _ticks(min(real), max(real))
    low = log10(ticks[0])
    high = log10(ticks[-1])

    def x(time: float) -> float:
        if right == left:
            return 50.0
        return _EDGE + (100 - 2 * _EDGE) * (time - left) / (right - left)

    def y(error: float) -> float:
        if not 0 < error < inf:
            return 0.0 if error == inf else 100.0
        return _EDGE + (100 - 2 * _EDGE) * (high - log10(error)) / (high - low)

    steps = [left]
    if right > left:
        steps = [left + (right - left) * k / 4 for k in range(5)]
    # Errors without a logarithm stand at the ends of the axis.
    ends = [error for error in (inf, 0.0) if error in errors]
    labels = {
        tick: error_text(tuned, tick) if tuned.metric == "snr" else number(tick, 1)
        for tick in ticks
    }
    points = tuple(
        _point(tuned, k, x(times[k]), y(error)) for k, error in enumerate(errors)
    )
    labels |= {error: error_text(tuned, error) for error in ends}
    return Plot(
        metric=tuned.metric,
        points=points,
        front=tuple(points[k] for k in _front(times, errors)),
        xs=tuple(Tick(x(time), time_text(time)) for time in steps),
        ys=tuple(Tick(y(error), labels[error]) for error in (*ends, *ticks)),
        limit=Tick(y(tuned.tolerance), tolerance_text(tuned)),
    )


def _front(times: Sequence[float], errors: Sequence[float]) -> Iterator[int]:
    """Yield the candidates that are more accurate than all faster ones, from fast to slow."""
    least = inf
    rows = zip(times, errors, range(len(times)), strict=True)
    for _, error, candidate in sorted(rows):
        if error < least:
            yield candidate
            least = error


def _ticks(least: float, most: float) -> list[float]:
    """Return round numbers from below ``least`` to above ``most``, at most as many as there is room for."""
    first = floor(log10(least))
    last = ceil(log10(most))
    fine = list[float]()
    for power in range(first, last + 1):
        fine += (step * 10.0**power for step in (1, 2, 5))
    start = max(x for x in fine if x <= least)
    above = [x for x in fine if x >= most]
    # An axis needs two ends, even if a single error is a round number.
    end = above[0] if above[0] > start else above[1]
    ticks = [x for x in fine if start <= x <= end]
    if len(ticks) <= _TICKS:
        return ticks
    # Too many: one for each power of ten, or for every second or third one.
    every = ceil((last - first) / (_TICKS - 1))
    return [10.0**power for power in range(first, last + every, every)]


def _point(tuned: Tuned, position: int, x: float, y: float) -> Point:
    candidate = tuned.candidates[position]
    error = known_error(tuned, position)
    is_chosen = position == tuned.chosen
    faster = speedup_text(tuned.candidates[-1].time, candidate.time)
    flops = percent(candidate.flops, 1.0)
    traffic = percent(candidate.bytes, 1.0)
    status = "" if candidate.verified else ", expected"
    if measured_error(tuned, position) is None:
        status = ", predicted"
    read = (
        f"Candidate {position}{', written' if is_chosen else ''}",
        f"{tuned.metric} {error_text(tuned, error)}{status}",
        f"{time_text(candidate.time)}, {faster} as fast as float32",
        f"{candidate.nodes:,} of {count(tuned.units, 'node')} low: {flops} of the arithmetic, {traffic} of the traffic",
    )
    return Point(x, y, error <= tuned.tolerance, is_chosen, read)
