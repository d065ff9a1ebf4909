"""From measurements to a verdict: limits held, what is inexact in words, and where it starts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnxamp._numerics.limits import TOLERANCES, Limits, metric_name
from onnxamp._numerics.metrics import TensorDiff
from onnxamp._numerics.results import DiffReport, FirstBad, Judgement, LayerDiff


def held_to(report: DiffReport, limits: Limits) -> DiffReport:
    """A comparison judged by these limits; what was measured stays, what was said of other limits goes.

    Raises:
        ArgumentError: a limit names an output that there is not.
    """
    judgements = limits.judge(report.outputs, report.lowest)
    warnings = tuple(_warnings(report.outputs, judgements))
    found = replace(report, judgements=judgements, warnings=warnings, first_bad=None, cure=None)
    limit = min((j.limit for j in judgements if j.metric == "rel_l2"), default=TOLERANCES[report.lowest])
    return found if found.passed else replace(found, first_bad=first_bad(report.layers, limit))


def first_bad(rows: Sequence[LayerDiff], limit: float) -> FirstBad | None:
    """The first float that breaks: on the reference's own values, or to NaN or Inf by what has accumulated.

    Where none does: the first from which on the accumulated error stays beyond the limit.
    """
    floats = [row for row in rows if "float" in row.dtype or row.dtype == "double"]
    for row in floats:
        for measured in (row.local, row.accumulated):
            if measured is not None and measured.alarm and (measured is row.local or measured.broken):
                return FirstBad(row.value, row.node, row.op, measured.alarm)
    start: LayerDiff | None = None
    for row in floats:
        if row.accumulated is not None:
            start = (start or row) if row.accumulated.rel_l2 > limit else None
    if start is None or start.accumulated is None:
        return None
    text = f"the accumulated error is {start.accumulated.rel_l2:.2g}"
    return FirstBad(start.value, start.node, start.op, text, breaks=False)


def size_only(diff: TensorDiff) -> bool:
    """Outputs whose size depends on the data may differ by an element that crossed a threshold."""
    sizes_differ = diff.reference_shape != diff.result_shape
    return sizes_differ and len(diff.reference_shape) == len(diff.result_shape)


def _warnings(outputs: Sequence[TensorDiff], judgements: Sequence[Judgement]) -> Iterator[str]:
    """What is inexact, though not broken."""
    missed = {judgement.output: judgement for judgement in judgements if not judgement.passed}
    for diff in outputs:
        if size_only(diff):
            yield f"Output {diff.name!r} has shape {diff.result_shape}, the reference {diff.reference_shape}."
        elif diff.alarm is None and diff.name in missed:
            told = missed[diff.name]
            yield f"Output {diff.name!r}: {metric_name(told.metric)} is {told.found:.2g}; the limit is {told.limit:g}."
