"""A comparison of two models as terminal tables."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp._numerics.metrics import TensorDiff, metric_name
from onnxamp._numerics.results import DiffReport, LayerDiff
from onnxamp._report.parts import heading, line, make_table, plain, printable

_ROWS = 15
"""Layers that are shown unless all are asked for."""

_NOISE = {"float16": "0.35 %", "bfloat16": "2 %"}
"""What the order of accumulation alone was measured to move outputs by."""


def diff_report(report: DiffReport, *, verbose: bool) -> RenderableType:
    """All that a comparison has to say."""
    mark = ("✔ ", "green") if report.passed else ("! ", "yellow") if report.skipped else ("✘ ", "red")
    head = Text.assemble(mark, plain(report.result), "  against  ", plain(report.reference))
    parts: list[RenderableType] = [head, *comparison(report, "Outputs", verbose=verbose)]
    if report.layers:
        parts += _layers(report.layers, verbose=verbose)
    noise = _NOISE.get(report.lowest)
    if noise is not None and not report.ran_on.startswith("CUDA"):
        text = f"Emulated: every low value is rounded; the order of sums alone moves outputs by up to {noise}."
        parts.append(Text(f"\n{text}", style="dim"))
    return Group(*parts)


def comparison(report: DiffReport, title: str, *, verbose: bool) -> list[RenderableType]:
    """The outputs of both models beside each other, and what follows from them."""
    parts: list[RenderableType] = [heading(f"{title} on {report.ran_on}, {report.inputs}")]
    if report.skipped:
        return [*parts, line("!", plain(f"Not compared. {report.skipped}"))]
    if report.outputs:
        parts.append(Padding(_outputs(report), (0, 0, 0, 2), expand=False))
    if verbose:
        parts += [Padding(_details(diff), (1, 0, 0, 2), expand=False) for diff in report.outputs]
        parts += [heading("Limits"), *_judgements(report)] if report.judgements else []
    if report.failure:
        parts.append(line(Text("✘", style="bold red"), plain(report.failure)))
    parts += [line(Text("✘", style="red"), plain(text)) for text in report.warnings]
    parts += [line("•", plain(text)) for text in report.notes]
    if report.noise is not None:
        text = f"Float32 there and on CPU, same model and inputs: relative L2 {number(report.noise)} (the noise floor)."
        parts.append(line("•", Text(text)))
    if report.first_bad:
        bad = report.first_bad
        node = f" of node {bad.node!r}" if bad.node != bad.value else ""
        start = "It starts at" if bad.breaks else "No op breaks by itself. The limit is passed for good at"
        parts.append(line("", plain(f"{start} {bad.value!r}{node} ({bad.op}): {bad.alarm}.")))
    return parts


def _outputs(report: DiffReport) -> Table:
    table = make_table("output", "shape", "rel. L2", "max abs", "SNR dB", "cosine", "top-1", "NaN", "Inf", "zero", "")
    missed = {judgement.output for judgement in report.judgements if not judgement.passed}
    good = Text("✔", style="green")
    for d in report.outputs:
        broken = (d.alarm is not None and report.failure is not None) or d.name in missed
        table.add_row(
            plain(d.name), "×".join(map(str, d.result_shape)) or "scalar", number(d.rel_l2), number(d.max_abs),
            f"{d.snr_db:.1f}", f"{d.cosine:.6f}", "" if d.argmax_agreement is None else f"{d.argmax_agreement:.1%}",
            *(_both(d, kind) for kind in ("nan", "inf", "zero")), Text("✘", style="red") if broken else good,
        )  # fmt: skip
    return table


def _both(diff: TensorDiff, kind: str) -> str:
    """A count on both sides, once where they agree."""
    one, other = getattr(diff, f"reference_{kind}"), getattr(diff, f"result_{kind}")
    return str(one) if one == other else f"{one} → {other}"


def _details(d: TensorDiff) -> Table:
    """The rest of what is known of one output."""
    table = make_table(printable(d.name), "", right=())
    rows = {
        "types": f"{d.reference_dtype} → {d.result_dtype}",
        "mean absolute error": number(d.mean_abs),
        "RMS error": number(d.rmse),
        "largest relative error": number(d.max_rel),
        "required tolerance": f"{number(d.required_tolerance)}  (atol = rtol)",
        "top-5 agreement": "" if d.top5_agreement is None else f"{d.top5_agreement:.1%}",
        "elements that differ": f"{d.differing:.1%} of {d.size:,}",
    }
    if d.worst_index is not None:
        where = f"{list(d.worst_index)} of sample {d.worst_sample}"
        rows["worst element"] = f"{where}: {d.worst_reference} → {d.worst_result}"
    for name, text in rows.items():
        if text:
            table.add_row(name, plain(text))
    return table


def _layers(rows: Sequence[LayerDiff], *, verbose: bool) -> list[RenderableType]:
    """The values that both share, those with the largest local error first."""
    ranked = sorted(rows, key=_badness, reverse=True)
    shown = ranked if verbose else ranked[:_ROWS]
    table = make_table("value", "op", "type", "local", "accumulated", "max |x|", "", right=(3, 4, 5))
    for row in shown:
        local, accumulated = row.local, row.accumulated
        alarm = (local and local.alarm) or (accumulated and accumulated.alarm) or row.note or ""
        table.add_row(
            plain(row.value), plain(row.op), row.dtype, number(local.rel_l2) if local else "–",
            number(accumulated.rel_l2) if accumulated else "–",
            largest(accumulated.reference_max, accumulated.reference_zero) if accumulated else "–",
            Text(printable(alarm), style="red"),
        )  # fmt: skip
    head = f"Layers: {len(rows)} shared values; the largest local errors first"
    parts: list[RenderableType] = [heading(head), Padding(table, (0, 0, 0, 2), expand=False)]
    if len(shown) < len(rows):
        parts.append(line("", Text(f"… and {len(rows) - len(shown)} more (-v shows all)", style="dim")))
    return parts


def _badness(row: LayerDiff) -> tuple[float, float]:
    return row.local.rel_l2 if row.local else -1.0, row.accumulated.rel_l2 if row.accumulated else -1.0


def largest(x: float, zeros: int) -> str:
    """A largest magnitude; a dash where it is 0 without any zero: then no element is an ordinary number."""
    return number(x) if x or zeros else "–"


def number(x: float) -> str:
    """Three digits; infinities by name."""
    return f"{x:.2e}" if isfinite(x) else str(x)


def _judgements(report: DiffReport) -> list[RenderableType]:
    """Limits that were held against the outputs, one line each."""
    return [
        line(Text("✔", style="green") if j.passed else Text("✘", style="red"),
             plain(f"{j.output}: {metric_name(j.metric)} {number(j.found)}, limit {j.limit:g}"))
        for j in report.judgements
    ]  # fmt: skip
