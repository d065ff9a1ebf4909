"""What tuning found, for the page: the candidates as points, and what stays float32 for measured reasons."""

from collections import Counter
from collections.abc import Sequence
from math import ceil, floor, inf, log10
from typing import Final

from onnxamp._report.html.facts import number, percent
from onnxamp._report.html.records import (
    Figure,
    Front,
    KeptGroup,
    KeptRow,
    Point,
    Status,
    Tick,
    Verdict,
    named,
    said,
)
from onnxamp._report.tune import WHY, effort, error_text, time_text, wanted_text
from onnxamp._tuning.results import Tuned
from onnxamp._tuning.search import Candidate

_COLUMNS: Final = ("time", "speed-up", "measured", "predicted", "nodes low", "arithmetic", "traffic")

_KEPT_ROWS: Final = 200
"""Nodes that are listed for one reason."""

_TICKS: Final = 8
"""Ticks of the error's axis, at most."""

_EDGE: Final = 8.0
"""Percent of an axis that is left free at either end."""


def tuned_verdict(tuned: Tuned) -> Verdict:
    """Whether the tolerance holds, and what was written."""
    found = tuned.candidates[tuned.chosen]
    share = percent(found.bytes, 1.0)
    text = f"{tuned.metric} {error_text(tuned, tuned.error)}, where {wanted_text(tuned)} is wanted."
    if not tuned.held:
        return Verdict(Status.FAILED, f"The tolerance does not hold: {text}")
    if not found.nodes:
        return Verdict(Status.GOOD, "Nothing can be low within the tolerance.", (text,))
    return Verdict(Status.GOOD, f"The tolerance holds, with {share} of the float traffic low.", (said(text),))


def tuned_figures(tuned: Tuned) -> list[Figure]:
    """The chosen candidate and what it took to find it."""
    found = tuned.candidates[tuned.chosen]
    return [
        Figure(tuned.metric, error_text(tuned, tuned.error), f"{wanted_text(tuned)} is wanted; {tuned.ran_on}"),
        Figure("speed-up", _speedup(tuned, found), "of the nodes that could be low"),
        Figure("runs", f"{tuned.runs:,}", f"of one session, {tuned.conversions:,} of converted models"),
    ]


def front_of(tuned: Tuned) -> Front:
    """The candidates, where they are drawn, and all that is said of them."""
    times = [found.time for found in tuned.candidates]
    left, right = min(times), max(times)
    errors = [_error(tuned, number) for number in range(len(tuned.candidates))]
    real = [error for error in (*errors, tuned.tolerance) if 0 < error < inf]
    ticks = _ticks(min(real), max(real))
    low, high = log10(ticks[0]), log10(ticks[-1])

    def x(time: float) -> float:
        return _EDGE + (100 - 2 * _EDGE) * ((time - left) / (right - left) if right > left else 0.5)

    def y(error: float) -> float:
        share = 1.0 if error <= 0 else 0.0 if error == inf else (high - log10(error)) / (high - low)
        return _EDGE + (100 - 2 * _EDGE) * share if 0 < error < inf else 100.0 * share

    points = tuple(
        _point(tuned, number, x(found.time), y(errors[number])) for number, found in enumerate(tuned.candidates)
    )
    ys = [Tick(y(tick), error_text(tuned, tick) if tuned.metric == "snr" else number(tick, 1)) for tick in ticks]
    zero = [Tick(y(0.0), error_text(tuned, 0.0))] if 0 in errors else []
    broken = [Tick(y(inf), error_text(tuned, inf))] if inf in errors else []
    return Front(
        columns=_COLUMNS,
        points=points,
        xs=tuple(Tick(x(left + (right - left) * k / 4), time_text(left + (right - left) * k / 4)) for k in range(5))
        if right > left else (Tick(50.0, time_text(left)),),
        ys=(*broken, *ys, *zero),
        limit=Tick(y(tuned.tolerance), wanted_text(tuned)),
        metric=named(tuned.metric),
        times=tuned.times,
        said=tuple(map(said, effort(tuned))),
        kept=_kept(tuned),
    )  # fmt: skip


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


def _error(tuned: Tuned, position: int) -> float:
    """The error of a candidate: of the one that was written, that of the converted model on all samples."""
    return tuned.error if position == tuned.chosen else tuned.candidates[position].least


def _point(tuned: Tuned, position: int, x: float, y: float) -> Point:
    found, error = tuned.candidates[position], _error(tuned, position)
    chosen = position == tuned.chosen
    measured = error if chosen or found.error is not None else None
    cells = (
        time_text(found.time), _speedup(tuned, found), "" if measured is None else error_text(tuned, measured),
        error_text(tuned, found.predicted), f"{found.nodes:,}", percent(found.flops, 1.0), percent(found.bytes, 1.0),
    )  # fmt: skip
    read = (
        f"Candidate {position}" + (", written" if chosen else ""),
        f"{tuned.metric} {error_text(tuned, error)}" + ("" if measured is not None else ", predicted"),
        f"{cells[0]}, {cells[1]} as fast as float32",
        f"{found.nodes:,} of {tuned.units:,} nodes low: {cells[5]} of the arithmetic, {cells[6]} of the traffic",
    )
    return Point(x, y, error <= tuned.tolerance, chosen, cells, tuple(map(named, read)))


def _speedup(tuned: Tuned, found: Candidate) -> str:
    slowest = max(candidate.time for candidate in tuned.candidates)
    return f"{slowest / found.time:.2f}×" if found.time else "–"


def _kept(tuned: Tuned) -> tuple[KeptGroup, ...]:
    def rows(why: str) -> Sequence[KeptRow]:
        mine = [row for row in tuned.kept if row.why == why][:_KEPT_ROWS]
        return [KeptRow(named(row.node), named(row.op), said(row.detail)) for row in mine]

    counts = Counter(row.why for row in tuned.kept)
    return tuple(KeptGroup(WHY[why], count, tuple(rows(why))) for why, count in counts.most_common())
