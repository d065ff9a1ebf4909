"""What a benchmark measured."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from onnxamp._bench.records import Bench, BenchReport, Cause, OpTime, Timing
from onnxamp._report import parts
from onnxamp._report.machine import document
from onnxamp._report.text import size

_OPS: Final = 12
"""Op types that the terminal shows without -v."""
_ALIKE: Final = "as fast as"


def bench_report(report: BenchReport) -> parts.Report:
    """Models timed side by side, the first of which is what the others are compared with."""
    where = "" if report.profiled is None else f" at batch {report.profiled}"
    waiting = ", each kernel waited for" if report.ran_on != "CPU" else ""
    told = any(row.seconds is not None for model in report.models for row in model.ops)
    ops = (
        f"Time per op type{where}, in ms (profiled{waiting})"
        if told
        else f"Ops that ran{where} (profiled)"
    )
    causes = [_cause(cause, is_slower=cause.model in report.slower) for cause in report.causes]
    return parts.Report(
        "bench",
        _verdict(report),
        tuple(model.model for model in report.models) if len(report.models) == 1 else (),
        (report.ran_on, report.runtime, report.inputs),
        tuple(map(_latency if len(report.models) == 1 else _speedup, _compared(report))),
        sections=(
            parts.section("Models", [_models(report.models)]),
            parts.section("Latency", [_timings(report.timings)]),
            parts.section(ops, _ops(report.models)),
            parts.section("Causes", causes),
            parts.section("Notes", parts.notes(report.notes)),
        ),
    )


def _compared(report: BenchReport) -> Iterator[Timing]:
    """Timings of all models but the first; of a model alone, its own."""
    return (
        timing for timing in report.timings if timing.speedup is not None or len(report.models) == 1
    )


def _latency(timing: Timing) -> parts.Figure:
    """How long a run takes."""
    batch = "" if timing.batch is None else f" at batch {timing.batch}"
    value = f"{1e3 * timing.latency.median:.3g} ms"
    return parts.Figure(
        f"latency{batch}", value, f"median of {timing.latency.runs:,} runs", f"{value}{batch}"
    )


def _speedup(timing: Timing) -> parts.Figure:
    """How many times as fast as the first model."""
    assert timing.speedup is not None
    batch = "" if timing.batch is None else f" at batch {timing.batch}"
    value, sure = (
        f"{timing.speedup.value:.2f}",
        f"95 % sure: {timing.speedup.low:.2f} to {timing.speedup.high:.2f}",
    )
    return parts.Figure(
        f"speed-up{batch}", value, f"{sure}; {timing.model}", f"speed-up {value}{batch}"
    )


def _verdict(report: BenchReport) -> parts.Verdict:
    first = report.models[0].model
    if report.slower:
        verb = "is" if len(report.slower) == 1 else "are"
        return parts.Verdict(
            parts.Status.INEXACT, f"{', '.join(report.slower)} {verb} slower than {first}."
        )
    if len(report.models) == 1:
        return parts.Verdict(parts.Status.PASSED, "The model was timed.")
    told = ", and ".join(_clause(models, how, first) for how, models in _standings(report).items())
    return parts.Verdict(parts.Status.PASSED, f"{told}.")


def _clause(models: Sequence[str], how: str, first: str) -> str:
    within = ", within the spread" if how == _ALIKE else ""
    return f"{', '.join(models)} {'is' if len(models) == 1 else 'are'} {how} {first}{within}"


def _standings(report: BenchReport) -> dict[str, list[str]]:
    """How models compare with the first -> the models; of several batch sizes the least favourable counts."""
    found: dict[str, list[str]] = {}
    for model in report.models[1:]:
        ratios = [
            timing.speedup
            for timing in report.timings
            if timing.model == model.model and timing.speedup
        ]
        is_faster = bool(ratios) and all(ratio.is_faster for ratio in ratios)
        found.setdefault("faster than" if is_faster else _ALIKE, []).append(model.model)
    return found


def _cause(cause: Cause, *, is_slower: bool) -> parts.Item:
    level = parts.Level.WARNING if is_slower else parts.Level.NOTE
    return parts.Item(f"{cause.model}: {cause.text}.", level, cause.kind, action=cause.action)


def _models(models: Sequence[Bench]) -> parts.Table:
    rows = (
        (
            model.model,
            f"{model.load:.2f}",
            ", ".join(
                f"{count} {name}"
                for name, count in sorted(model.assigned.items(), key=lambda x: -x[1])
            ),
            "–" if model.memory is None else size(model.memory),
            ", ".join(f"{name}={value}" for name, value in model.options.items() if value != "0")
            or "–",
        )
        for model in models
    )
    return parts.table(
        ("model", "load s", "nodes per provider", "device memory", "options"),
        rows,
        right=(1, 3),
        prose=(2, 4),
        drop=(4,),
    )


def _timings(timings: Sequence[Timing]) -> parts.Table:
    columns = (
        "model",
        "batch",
        "first ms",
        "median ms",
        "p90 ms",
        "p99 ms",
        "per second",
        "runs",
        "speed-up [95 %]",
    )
    rows = map(_timing, sorted(timings, key=lambda timing: timing.batch or 0))
    return parts.table(columns, rows, right=range(1, 9), drop=(7, 5, 2, 4, 6))


def _timing(timing: Timing) -> tuple[str, ...]:
    latency, ratio = timing.latency, timing.speedup
    times = (
        f"{seconds * 1e3:.3f}"
        for seconds in (latency.first, latency.median, latency.p90, latency.p99)
    )
    speedup = "" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    batch = "–" if timing.batch is None else str(timing.batch)
    return timing.model, batch, *times, f"{timing.throughput:.1f}", str(latency.runs), speedup


def _ops(models: Sequence[Bench]) -> Iterator[parts.Table]:
    """One row per op type, provider and type: time and nodes of each model."""
    kinds: dict[tuple[str, str, str], dict[str, OpTime]] = {}
    for model in models:
        for row in model.ops:
            kinds.setdefault((row.op, row.provider, row.dtype), {})[model.model] = row
    if not kinds:
        return
    rows = [parts.Row(("all", "", "", *map(_total, models)), is_strong=True)]
    for kind, ran in sorted(kinds.items(), key=lambda item: _slowest_first(item[1].values())):
        rows.append(parts.Row((*kind, *(_ran(ran.get(model.model)) for model in models))))
    columns = ("op", "on", "type", *(model.model for model in models))
    yield parts.table(columns, rows, right=range(3, 3 + len(models)), shown=_OPS + 1, drop=(2, 1))


def _total(model: Bench) -> str:
    """Time of all ops together, or their number where the engine tells no times."""
    told = [row.seconds for row in model.ops if row.seconds is not None]
    return f"{sum(told) * 1e3:.3f}" if told else f"×{sum(row.nodes for row in model.ops)}"


def _slowest_first(rows: Iterable[OpTime]) -> tuple[float, int]:
    """A key that sorts ops by time, and by number where there is none."""
    return min((-(row.seconds or 0.0), -row.nodes) for row in rows)


def _ran(row: OpTime | None) -> str:
    """Time and number of the nodes of one op type."""
    if row is None:
        return "–"
    return f"×{row.nodes}" if row.seconds is None else f"{row.seconds * 1e3:.3f} ×{row.nodes}"


def bench_json(report: BenchReport) -> str:
    """A benchmark; times in seconds, memory in bytes."""
    return document("bench", {"report": report})
