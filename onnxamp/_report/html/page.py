"""The page: a report, with additional figures and lists."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log10
from pathlib import PurePath
from typing import Final, NamedTuple

from onnxamp._audit import Audit
from onnxamp._convert.plan import Plan
from onnxamp._dtypes import FORMATS, Format
from onnxamp._job.writing import Conversion
from onnxamp._numerics.results import DiffReport, RunCheck
from onnxamp._report.check import check_report, finding_items
from onnxamp._report.comparison import diff_report
from onnxamp._report.conversion import conversion_report, preview_report
from onnxamp._report.html.nodes import Measured, NodeRow, ValueRow, join_nodes
from onnxamp._report.parts import Report, section
from onnxamp._report.text import count, number, percent
from onnxamp._report.tuning import (
    error_text,
    is_expected,
    measured_error,
    speedup_text,
    time_text,
    tolerance_text,
    tuning_report,
)
from onnxamp._tuning.results import Tuned

_TICKS: Final = 8
"""Ticks of the error axis, at most."""
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
    left, right = min(times), max(times)
    errors = [_known_error(tuned, position) for position in range(len(times))]
    real = [error for error in (*errors, tuned.tolerance) if 0 < error < inf]
    ticks = _ticks(min(real), max(real))
    low, high = log10(ticks[0]), log10(ticks[-1])

    def x(time: float) -> float:
        return (
            _EDGE + (100 - 2 * _EDGE) * (time - left) / (right - left)
            if right > left
            else 50.0
        )

    def y(error: float) -> float:
        if not 0 < error < inf:
            return 0.0 if error == inf else 100.0
        return _EDGE + (100 - 2 * _EDGE) * (high - log10(error)) / (high - low)

    steps = (
        [left + (right - left) * k / 4 for k in range(5)] if right > left else [left]
    )
    ends = [error for error in (inf, 0.0) if error in errors]
    labels = {
        tick: error_text(tuned, tick) if tuned.metric == "snr" else number(tick, 1)
        for tick in ticks
    }
    points = tuple(
        _point(tuned, k, x(times[k]), y(error)) for k, error in enumerate(errors)
    )
    return Plot(
        metric=tuned.metric,
        points=points,
        front=tuple(points[k] for k in _front(times, errors)),
        xs=tuple(Tick(x(time), time_text(time)) for time in steps),
        ys=tuple(
            Tick(y(error), labels.get(error) or error_text(tuned, error))
            for error in (*ends, *ticks)
        ),
        limit=Tick(y(tuned.tolerance), tolerance_text(tuned)),
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
    fine = [
        step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)
    ]
    below, above = [x for x in fine if x <= least], [x for x in fine if x >= most]
    ticks = [
        x
        for x in fine
        if below[-1] <= x <= (above[0] if above[0] > below[-1] else above[1])
    ]
    if len(ticks) <= _TICKS:
        return ticks
    every = ceil((last - first) / (_TICKS - 1))
    return [10.0**power for power in range(first, last + every, every)]


def _point(tuned: Tuned, position: int, x: float, y: float) -> Point:
    candidate, error = tuned.candidates[position], _known_error(tuned, position)
    is_chosen = position == tuned.chosen
    flops, traffic = percent(candidate.flops, 1.0), percent(candidate.bytes, 1.0)
    status = ", expected" if is_expected(tuned, position) else ""
    if measured_error(tuned, position) is None:
        status = ", predicted"
    read = (
        f"Candidate {position}" + (", written" if is_chosen else ""),
        f"{tuned.metric} {error_text(tuned, error)}{status}",
        f"{time_text(candidate.time)}, {speedup_text(tuned, candidate)} as fast as float32",
        f"{candidate.nodes:,} of {count(tuned.units, 'node')} low: {flops} of the arithmetic, {traffic} of the traffic",
    )
    return Point(x, y, error <= tuned.tolerance, is_chosen, read)


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page shows. Sections without data are left out of it.

    ``low`` is the low-precision type whose range the figures show, ``limit`` the limit of the relative L2 error if all
    outputs share it, ``first_bad`` the number of the node that goes wrong first.
    """

    report: Report
    nodes: tuple[NodeRow, ...] = ()
    values: tuple[ValueRow, ...] = ()
    low: Format | None = None
    limit: float | None = None
    first_bad: int | None = None
    first_bad_text: str = ""
    plot: Plot | None = None

    @property
    def title(self) -> str:
        """Return the action and the names of its models."""
        command = f"onnxamp {self.report.task.partition(' ')[0].strip(',')}"
        names = " → ".join(
            PurePath(model).name or model for model in self.report.models
        )
        return f"{command}: {names}" if names else command

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Reason -> nodes that stay float32 for it, most frequent first."""
        kept = Counter(
            row.why
            for row in self.nodes
            if row.why and row.precision in ("float32", "mixed")
        )
        return sorted(kept.items(), key=lambda item: (-item[1], item[0]))


def conversion_page(
    made: Conversion | None,
    diff: DiffReport | None,
    audit: Audit | None,
    tuned: Tuned | None = None,
    compared: DiffReport | None = None,
) -> Page:
    """Return the page of a conversion.

    Args:
        made: what was done; without it the page is that of the comparison.
        diff: the result against the original, None if nothing was compared.
        audit: of the result.
        tuned: the candidates of level auto.
        compared: the result against the original if it was not judged: its values, and the figures of texts.
    """
    if made is None:
        return diff_page(diff, audit)
    made, shown = replace(made, validation=diff), diff or compared
    report = (
        tuning_report(made, tuned, audit=audit, compared=compared)
        if tuned
        else conversion_report(made, audit)
    )
    page = _page(
        _with_findings(report, audit),
        audit,
        shown.layers if shown else (),
        diff,
        made.plan,
    )
    return replace(
        page, low=FORMATS[made.plan.dtype], plot=plot_of(tuned) if tuned else None
    )


def preview_page(made: Conversion, audit: Audit, command: str) -> Page:
    """Return the page of a conversion that was only planned. ``audit`` is of the model that ``command`` would write."""
    page = _page(
        _with_findings(preview_report(made, audit, command), audit),
        audit,
        (),
        None,
        made.plan,
    )
    return replace(page, low=FORMATS[made.plan.dtype])


def diff_page(diff: DiffReport | None, audit: Audit | None = None) -> Page:
    """Return the page of a comparison of two models; ``audit`` is of the result."""
    page = _page(
        _with_findings(diff_report(diff), audit),
        audit,
        diff.layers if diff else (),
        diff,
    )
    return replace(page, low=FORMATS.get(diff.lowest) if diff else None)


def check_page(audit: Audit | None, run: RunCheck | None, model: str = "") -> Page:
    """Return the page of a check: facts about a model before it runs, and measurements.

    Args:
        audit: of the model.
        run: of the same model, None if it did not run.
        model: its name on the page.
    """
    page = _page(check_report(audit, run, model), audit, run.values if run else (), run)
    precisions = {row.precision for row in page.nodes} | {
        value.dtype for value in page.values
    }
    return replace(
        page,
        low=next((low for name, low in FORMATS.items() if name in precisions), None),
    )


def _page(
    report: Report,
    audit: Audit | None,
    measured: Iterable[Measured],
    ran: DiffReport | RunCheck | None,
    plan: Plan | None = None,
) -> Page:
    bad = ran.first_bad if ran else None
    limit = _shared_limit(ran) if isinstance(ran, DiffReport) else None
    nodes, values, first = join_nodes(audit, plan, measured, limit, bad)
    return Page(
        report=report,
        nodes=nodes,
        values=values,
        limit=limit,
        first_bad=first,
        first_bad_text=f"{bad.op}: {bad.alarm}" if bad else "",
    )


def _shared_limit(diff: DiffReport) -> float | None:
    """Return the limit of the relative L2 error, if there is just one."""
    limits = {
        judgement.limit for judgement in diff.judgements if judgement.metric == "rel_l2"
    }
    return limits.pop() if len(limits) == 1 else None


def _with_findings(report: Report, audit: Audit | None) -> Report:
    """Return the report with the findings about the result."""
    found = section("Findings in the result", finding_items(audit))
    return report._replace(sections=(*report.sections, found))
