"""Header, outputs and budget of the page: numbers become text with units here, and nowhere else in Python."""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite, isnan
from typing import Final

from onnxamp._audit import Audit
from onnxamp._convert.convert import Conversion
from onnxamp._numerics.metrics import TensorDiff, metric_name
from onnxamp._numerics.results import Cure, DiffReport, FirstBad
from onnxamp._ops.facts import op_facts
from onnxamp._report.html.records import (
    Action,
    Bar,
    BarGroup,
    Budget,
    Figure,
    LimitRow,
    NodeRow,
    OutputRow,
    Share,
    Status,
    WeightRow,
    named,
    said,
)
from onnxamp._report.parts import printable, size

OUTPUT_COLUMNS: Final = (
    "shape", "type", "relative L2", "max abs", "max relative", "SNR (dB)", "cosine", "top-1 agrees", "NaN", "Inf",
)  # fmt: skip
_LOST_ROWS: Final = 200
"""Weights that lost elements: rows of the table, the worst first."""
_PRECISIONS: Final = ("float16", "bfloat16", "mixed", "float32", "float64", "no floats")


def number(x: float | None, digits: int = 3) -> str:
    """A number for people: 0.0123, 1.23e-5, ∞, NaN; a dash where there is none."""
    if x is None:
        return "–"
    if isnan(x):
        return "NaN"
    if not isfinite(x):
        return "∞" if x > 0 else "−∞"
    text = f"{x:.{digits - 1}e}" if 0 < abs(x) < 1e-3 else f"{x:.{digits}g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` in whole percents, but never 0 or 100 where it is not."""
    if not whole:
        return "–"
    share = 100 * part / whole
    if 0 < share < 1:
        return "<1 %"
    return ">99 %" if 99 < share < 100 else f"{share:.0f} %"


def action_of(cure: Cure | None, *, is_options: bool = False) -> Action | None:
    """What came of the search for a cure, if there was one. Its command is never shortened: it would be another one.

    ``is_options``: the command is options alone, for the conversion of an original that is not at hand.
    """
    if cure is None:
        return None
    nodes = tuple(map(named, cure.nodes))
    return Action(printable(cure.command), is_options, said(cure.outcome), nodes, cure.confirmed)


def bad_sentence(bad: FirstBad) -> str:
    """Where it starts to go wrong, or where what has accumulated becomes too much."""
    start = "It starts at" if bad.breaks else "No op breaks by itself. The limit is passed for good at"
    return said(f"{start} {bad.value!r}, made by {bad.op} {bad.node!r}: {bad.alarm}")


def node_figures(nodes: Iterable[NodeRow]) -> list[Figure]:
    """How much of the model is low."""
    counts = _precisions(nodes)
    low = counts["float16"] + counts["bfloat16"] + counts["mixed"]
    floats = low + counts["float32"] + counts["float64"]
    if not floats:
        return []
    name = "bfloat16" if counts["bfloat16"] else "float16"
    return [Figure(f"nodes in {name}", percent(low, floats), f"{low:,} of {floats:,} that compute with floats")]


def _precisions(nodes: Iterable[NodeRow]) -> Counter[str]:
    """Precision -> nodes that compute something of their own."""
    return Counter(node.precision for node in nodes if node.op not in op_facts().uncounted)


def conversion_figures(made: Conversion) -> list[Figure]:
    """Casts and weights before and after."""
    summary = made.summary
    after = summary.casts_before + summary.casts_added - summary.casts_removed
    change = f"{summary.casts_before:,} before"
    weights = f"{percent(made.bytes_after, made.bytes_before)} of {size(made.bytes_before)}"
    return [Figure("Casts", f"{after:,}", change), Figure("weights", size(made.bytes_after), weights)]


def worst_figure(report: DiffReport) -> list[Figure]:
    """The output that is farthest from the reference."""
    if not report.outputs:
        return []
    worst = max(report.outputs, key=lambda diff: (isnan(diff.rel_l2), diff.rel_l2))
    return [Figure("largest relative L2", number(worst.rel_l2), f"of output {named(worst.name)}")]


def output_rows(report: DiffReport) -> tuple[OutputRow, ...]:
    """One row per output; its status joins its alarm with the limits held against it."""
    broken = {judgement.output for judgement in report.judgements if not judgement.passed}
    return tuple(_output(diff, is_over=diff.name in broken) for diff in report.outputs)


def _output(diff: TensorDiff, *, is_over: bool) -> OutputRow:
    status = Status.FAILED if diff.alarm else Status.INEXACT if is_over else Status.GOOD
    shape = _shape(diff.result_shape)
    if diff.reference_shape != diff.result_shape:
        shape = f"{_shape(diff.reference_shape)} → {shape}"
    types = [diff.reference_dtype, diff.result_dtype]
    agreement = "–" if diff.argmax_agreement is None else f"{100 * diff.argmax_agreement:.4g} %"
    cells = (
        shape, " → ".join(dict.fromkeys(types)), number(diff.rel_l2), number(diff.max_abs), number(diff.max_rel),
        number(diff.snr_db, 4), number(diff.cosine, 7), agreement,
        _pair(diff.reference_nan, diff.result_nan), _pair(diff.reference_inf, diff.result_inf),
    )  # fmt: skip
    remark = said(diff.alarm or "")
    if not remark and diff.worst_index is not None and diff.max_abs:
        where = f" at {list(diff.worst_index)}" if diff.worst_index else ""
        where += f" of sample {diff.worst_sample}" if diff.worst_sample else ""
        remark = said(f"Worst{where}: {_scalar(diff.worst_result)} instead of {_scalar(diff.worst_reference)}.")
    return OutputRow(named(diff.name), status, cells, remark)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _pair(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{before:,} → {after:,}"


def _scalar(x: float | str | None) -> str:
    return repr(x) if isinstance(x, str) else number(x, 6)


def limit_rows(report: DiffReport) -> tuple[LimitRow, ...]:
    """The limits, those that were broken first."""
    rows = (
        LimitRow(
            named(j.output), named(metric_name(j.metric)), number(j.found, 7 if j.metric == "cosine" else 3),
            number(j.limit, 7), j.passed,
        )
        for j in report.judgements
    )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.passed))


def shared_limit(report: DiffReport | None) -> float | None:
    """The limit of the relative L2 error, where there is just one."""
    limits = {j.limit for j in report.judgements if j.metric == "rel_l2"} if report is not None else set()
    return limits.pop() if len(limits) == 1 else None


def budget_of(made: Conversion | None, audit: Audit | None, nodes: Iterable[NodeRow]) -> Budget:
    """Sizes, Casts and precisions, as far as they are known."""
    groups: list[BarGroup] = []
    lost: list[WeightRow] = []
    if made is not None:
        low, summary = made.plan.dtype, made.summary
        before, after = (_renamed(counts, low) for counts in (summary.nodes_before, summary.nodes))
        groups.append(BarGroup("Nodes per precision", (_nodes_bar("before", before), _nodes_bar("after", after))))
        groups.append(BarGroup("Weights", (_bytes_bar("before", made.bytes_before), _weights_after(made, audit))))
        lost = _lost(made)
    elif audit is not None:
        counts = _precisions(nodes)
        groups.append(BarGroup("Nodes per precision", (_nodes_bar("", counts),)))
        groups.append(BarGroup("Weights", (_types_bar("", audit.weight_bytes),)))
    shown_groups = tuple(group for group in groups if any(bar.shares for bar in group.bars))
    of = len(made.weights) if made is not None else 0
    return Budget(shown_groups, _traffic(made, audit), tuple(lost[:_LOST_ROWS]), len(lost), of)


def _renamed(counts: Mapping[str, int], low: str) -> Counter[str]:
    return Counter({low if kind == "low" else kind: count for kind, count in counts.items()})


def _nodes_bar(label: str, counts: Mapping[str, int]) -> Bar:
    shares = [Share(kind, counts[kind], f"{counts[kind]:,}") for kind in _PRECISIONS if counts.get(kind)]
    return Bar(label, f"{sum(counts.values()):,} nodes", tuple(shares))


def _bytes_bar(label: str, count: int) -> Bar:
    return Bar(label, size(count), (Share("weights", count, size(count)),) if count else ())


def _weights_after(made: Conversion, audit: Audit | None) -> Bar:
    return _types_bar("after", audit.weight_bytes) if audit is not None else _bytes_bar("after", made.bytes_after)


def _types_bar(label: str, sizes: Mapping[str, int]) -> Bar:
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shares = [Share(kind, count, size(count)) for kind, count in ordered if count]
    return Bar(label, size(sum(sizes.values())), tuple(shares))


def _traffic(made: Conversion | None, audit: Audit | None) -> tuple[Figure, ...]:
    found = []
    if made is not None:
        found.append(Figure("Casts added", f"{made.summary.casts_added:,}"))
        found.append(Figure("Casts removed", f"{made.summary.casts_removed:,}"))
    if audit is not None:
        found.append(Figure("Casts between floats", f"{audit.casts.count:,}", f"{audit.casts.redundant:,} redundant"))
        found.append(Figure("Cast traffic", size(audit.casts.bytes), "per run, estimated"))
        opsets = ", ".join(f"{named(domain) or 'ai.onnx'} {version}" for domain, version in audit.opsets.items())
        found.append(Figure("opset", opsets or "–"))
    return tuple(found)


def _lost(made: Conversion) -> list[WeightRow]:
    rows = [
        WeightRow(named(name), c.elements, c.overflowed, c.flushed, c.subnormal)
        for name, c in made.weights.items()
        if c.overflowed or c.flushed or c.subnormal
    ]
    return sorted(rows, key=lambda row: (-row.saturated, -row.zero, -row.subnormal, row.name))
