"""Reports judged by limits: the sentences about what misses them, and where the error starts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from onnxamp._facts.ops import op_facts
from onnxamp._numerics.differences.metrics import (
    TOLERANCES,
    Measurement,
    TensorDiff,
    metric_of,
)
from onnxamp._numerics.limits import Limits, is_plain, size_only
from onnxamp._numerics.results import DiffReport, Extra, FirstBad, Judgement, LayerDiff
from onnxamp._numerics.unseen.excursions import Excursion, NotRun
from onnxamp._runtime.inputs.sample_counts import NUMBERS

_EXPLAINED: Final = 0.5
"""Share of the error of the worst output from which on the error of one op explains it."""


def apply_limits(report: DiffReport, limits: Limits) -> DiffReport:
    """Return a comparison on samples judged by these limits. Measurements stay; earlier verdicts, warnings and remedies
    go.
    """
    judgements = limits.judge(
        report.outputs,
        report.lowest,
        report.noise,
        drawn=report.drawn,
        redrawn=report.redrawn,
    )
    judged = replace(
        report,
        judgements=judgements,
        warnings=tuple(_warnings(report, judgements, limits)),
        first_bad=None,
        cure=None,
    )
    if judged.passed:
        return judged
    limit = min(usual_limits(judgements), default=TOLERANCES[report.lowest])
    rows = _up_to_parts(judged) if misses_parts(judged) else report.layers
    return replace(judged, first_bad=_first_bad(report, rows, limit))


def usual_limits(judgements: Iterable[Judgement]) -> list[float]:
    """Return the limits of relative L2 errors on the samples that a verdict takes first."""
    limits = dict[str, float]()
    for one in judgements:
        if one.metric in ("rel_l2", "usual_rel_l2"):
            limits[one.output] = min(one.limit, limits.get(one.output, inf))
    return list(limits.values())


def closeness(report: DiffReport, limits: Limits) -> float:
    """Return the largest relative L2 error of an output or a part, as a share of its limit.

    It is 0 if limits of single metrics were requested, which hold for the samples, or if the limit allows for
    integers, which cost about as much.
    """
    if limits.of or limits.coarse or not report.passed:
        return 0.0
    shares = (
        judgement.found / judgement.limit
        for judgement in report.judgements
        if judgement.metric in ("rel_l2", "part_rel_l2") and judgement.limit
    )
    return max(shares, default=0.0)


def missed(report: DiffReport) -> frozenset[str]:
    """Return the outputs that miss a limit."""
    return frozenset(
        judgement.output for judgement in report.judgements if not judgement.passed
    )


def misses_parts(report: DiffReport) -> bool:
    """Return whether only parts of outputs miss their limits: the norms of whole values hide their errors."""
    metrics = {
        judgement.metric for judgement in report.judgements if not judgement.passed
    }
    return not report.failure and metrics == {"part_rel_l2"}


def _up_to_parts(report: DiffReport) -> Sequence[LayerDiff]:
    """Return the values up to the last part that misses its limit, if only parts do: what follows is no cause."""
    outputs = missed(report)
    parts = {d.part.value for d in report.outputs if d.name in outputs and d.part}
    ends = [row.position for row in report.layers if row.value in parts]
    return [row for row in report.layers if row.position <= max(ends, default=inf)]


def limits_beyond(limits: Limits, where: Excursion, lowest: str) -> Limits:
    """Return the limits of a comparison beyond the samples; ``lowest`` is the low-precision type."""
    if where.is_empty:
        return limits.finite
    return limits.hard(lowest) if where.is_hard else limits.beyond


def with_extra(
    report: DiffReport, excursion: Excursion, comparison: DiffReport
) -> DiffReport:
    """Return a report with a comparison beyond its samples; if that fails, with its fault, and where that starts.

    Args:
        report: the comparison on the samples, which passes.
        excursion: what was compared beyond them.
        comparison: the comparison there.
    """
    what = excursion.what
    if comparison.skipped:
        left = NotRun(what, comparison.skipped.rstrip("."))
        return replace(report, not_run=(*report.not_run, left.clause))
    warnings = tuple(f"With {what}: {text}" for text in comparison.warnings)
    failure = f"With {what}: {comparison.failure}" if comparison.failure else None
    extra = Extra(
        what=what,
        outputs=comparison.outputs,
        judgements=comparison.judgements,
        failure=failure,
        warnings=warnings,
        is_hard=excursion.is_hard,
        is_empty=excursion.is_empty,
        choices=comparison.choices,
    )
    report = replace(report, extras=(*report.extras, extra))
    if comparison.passed:
        return report
    return replace(
        report,
        failure=failure,
        warnings=(*report.warnings, *warnings),
        first_bad=comparison.first_bad,
        layers=comparison.layers,
    )


def _first_bad(
    report: DiffReport, rows: Sequence[LayerDiff], limit: float
) -> FirstBad | None:
    """Return the first float value that breaks: on the reference's inputs, or to NaN or Inf by accumulated error.

    If there is none: the first whose own error explains that of the outputs; then the first from which on the
    accumulated error stays beyond the limit. Errors that the norms of whole values hide count where they were measured.
    """
    floats = [row for row in rows if "float" in row.dtype]
    for row in floats:
        if alarm := _alarm_of(row):
            return FirstBad(row.value, row.node, row.op, f"{alarm}{_in_body(row)}")
    own = _first_lossy(report.outputs, floats, limit)
    if own is not None:
        return own
    start: LayerDiff | None = None
    for row in floats:
        if row.accumulated is not None:
            start = (start or row) if row.whole_error > limit else None
    if start is None or start.accumulated is None:
        return None
    error = start.whole_error
    text = f"the accumulated error is {error:.2g}{_of_some(start.accumulated, error)}"
    return FirstBad(start.value, start.node, start.op, text, breaks=False)


def _alarm_of(row: LayerDiff) -> str | None:
    """Return how a value breaks: on the reference's inputs, or to NaN or Inf by accumulated error; None if sound."""
    for one in (row.local, row.accumulated):
        if one and one.alarm and (one is row.local or one.broken):
            return one.alarm
    return None


def is_broken(report: DiffReport) -> bool:
    """Return whether the first bad value breaks, rather than loses precision."""
    bad = report.first_bad
    return bad is not None and any(
        row.value == bad.value and _alarm_of(row) for row in report.layers
    )


def _first_lossy(
    outputs: Sequence[TensorDiff], floats: Sequence[LayerDiff], limit: float
) -> FirstBad | None:
    """Return the first value whose op, on the reference's inputs, is off by about as much as the worst output."""
    errors = [d.rel_l2 for d in outputs if d.is_float]
    errors += [d.part.rel_l2 for d in outputs if d.part is not None]
    least = max(limit, _EXPLAINED * max(errors, default=0.0))
    for row in floats:
        error = row.own_error
        stays = row.accumulated is None or row.whole_error > least
        if row.local is not None and error > least and stays:
            some = _of_some(row.local, error)
            text = f"its own error is {error:.2g}{some}{_in_body(row)}"
            return FirstBad(row.value, row.node, row.op, text)
    return None


def _of_some(measured: Measurement, error: float) -> str:
    """Return a clause if an error is larger than that of a whole value."""
    return " in its small numbers" if error > measured.rel_l2 else ""


def _in_body(row: LayerDiff) -> str:
    """Return where in a Loop or Scan a fault arises, in a clause; "" for other ops."""
    if row.state:
        return f", in the state {row.state!r} that its body carries"
    return ", in its body" if row.op in op_facts().control_flow else ""


def _warnings(
    report: DiffReport, judgements: Sequence[Judgement], limits: Limits
) -> Iterator[str]:
    """Return sentences about outputs that are inexact, but not broken."""
    misses = defaultdict[str, list[Judgement]](list)
    for judgement in judgements:
        if not judgement.passed:
            misses[judgement.output].append(judgement)
    for diff in report.outputs:
        if limits.plain and not is_plain(diff):
            continue
        if size_only(diff):
            yield f"Output {diff.name!r} has shape {diff.result_shape}, the reference {diff.reference_shape}."
        elif diff.alarm is None:
            # The typical error of all samples, which says most, comes last.
            for miss in reversed(misses[diff.name]):
                yield _miss_sentence(report, diff, miss, limits)


def _miss_sentence(
    report: DiffReport, diff: TensorDiff, miss: Judgement, limits: Limits
) -> str:
    """Return a sentence about a limit that an output misses."""
    limit = f"{miss.limit:g}"
    if limits.share(diff, report.lowest, drawn=report.drawn) < 1:
        why = "other inputs may show more"
        if diff.size < NUMBERS:
            why = f"samples show few of its numbers ({diff.size})"
        limit = f"{miss.limit:.2g}, as {why}"
    number = _told_apart(miss.found, miss.limit)
    whose = metric_of(miss.metric, diff)
    return f"Output {diff.name!r}: {whose} is {number}; the limit is {limit}."


def _told_apart(number: float, limit: float) -> str:
    """Return a number with two digits, or with as many as distinguish it from the limit."""
    texts = (f"{number:.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if float(text) != limit), str(number))
