"""A benchmark as terminal tables, and as JSON."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp._bench.records import Bench, BenchReport, Timing
from onnxamp._report.machine import document
from onnxamp._report.parts import heading, line, make_table, plain, size

_OPS = 12
"""Op types that are shown unless all are asked for."""


def bench_json(report: BenchReport) -> str:
    """A benchmark as one JSON object; times in seconds, memory in bytes."""
    return document("bench", {"report": report})


def bench_report(report: BenchReport, *, verbose: bool = False) -> RenderableType:
    """The whole benchmark."""
    head = f"{report.ran_on}, {report.runtime}, {report.inputs}"
    parts: list[RenderableType] = [plain(head), heading("Models")]
    parts += [_table(_models(report.models)), heading("Latency"), _table(_timings(report.timings))]
    if any(model.ops for model in report.models):
        where = "" if report.profiled is None else f" at batch {report.profiled}"
        note = ", each kernel waited for" if report.ran_on != "CPU" else ""
        parts += [heading(f"Time per op type{where}, ms (profiled{note})"), *_ops(report.models, verbose=verbose)]
    mark = Text("!", style="yellow")
    for name in report.slower:
        parts += ["", line(mark, plain(f"{name} is slower than {report.models[0].model}."))]
    for cause in report.causes:
        sign = mark if cause.model in report.slower else Text("•")
        said = plain(f"{cause.text}. {cause.action}")
        parts.append(line(sign, Text.assemble((f"{cause.kind}: ", "bold"), said)))
    parts += [line("•", plain(note)) for note in report.notes]
    return Group(*parts)


def _table(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 2), expand=False)


def _models(models: Sequence[Bench]) -> Table:
    table = make_table("model", "load s", "nodes per provider", "device memory", "options", right=(1, 3))
    for model in models:
        nodes = ", ".join(f"{count} {name}" for name, count in sorted(model.assigned.items(), key=lambda x: -x[1]))
        options = ", ".join(f"{name}={value}" for name, value in model.options.items() if value != "0") or "–"
        memory = "–" if model.memory is None else size(model.memory)
        table.add_row(plain(model.model), f"{model.load:.2f}", nodes, memory, options)
    return table


def _timings(timings: Sequence[Timing]) -> Table:
    columns = ("model", "batch", "first ms", "median ms", "p90 ms", "p99 ms", "per second", "runs", "times as fast")
    table = make_table(*columns)
    for timing in sorted(timings, key=lambda timing: timing.batch or 0):
        found, ratio = timing.latency, timing.speedup
        spread = "" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        times = (f"{seconds * 1e3:.3f}" for seconds in (found.first, found.median, found.p90, found.p99))
        batch = "–" if timing.batch is None else str(timing.batch)
        table.add_row(plain(timing.model), batch, *times, f"{timing.throughput:.1f}", str(found.runs), spread)
    return table


def _ops(models: Sequence[Bench], *, verbose: bool) -> list[RenderableType]:
    """One row per op type, provider and type; nodes and time of each model beside each other."""
    kinds: dict[tuple[str, str, str], dict[str, tuple[int, float]]] = {}
    for model in models:
        for row in model.ops:
            kinds.setdefault((row.op, row.provider, row.dtype), {})[model.model] = (row.nodes, row.seconds)
    ranked = sorted(kinds.items(), key=lambda item: -max(seconds for _, seconds in item[1].values()))
    shown = ranked if verbose else ranked[:_OPS]
    table = make_table("op", "on", "type", *(model.model for model in models), right=tuple(range(3, 3 + len(models))))
    for kind, found in shown:
        cells = (found.get(model.model) for model in models)
        table.add_row(
            *map(plain, kind), *("–" if cell is None else f"{cell[1] * 1e3:.3f} ×{cell[0]}" for cell in cells)
        )
    totals = (f"{sum(row.seconds for row in model.ops) * 1e3:.3f}" for model in models)
    table.add_row("all", "", "", *totals, style="bold")
    rest = len(ranked) - len(shown)
    more: list[RenderableType] = [line("", Text(f"… and {rest} more (-v shows all)", style="dim"))] if rest else []
    return [_table(table), *more]
