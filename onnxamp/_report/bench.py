"""Report of a benchmark."""

from collections.abc import Sequence

from onnxamp._audit.bench_results import (
    Bench,
    BenchReport,
    OpTime,
    Ratio,
    Slowdown,
    Timing,
)
from onnxamp._report import size
from onnxamp._report.parts import (
    Figure,
    Item,
    Level,
    Report,
    Row,
    Status,
    Table,
    Verdict,
    notes,
    section,
    table,
)


def bench_report(report: BenchReport) -> Report:
    """Models timed side by side, the others compared with the first."""
    names = tuple(model.model for model in report.models)
    is_alone = len(names) == 1
    where = "" if report.profiled is None else f" at batch {report.profiled}"
    waiting = ", each kernel waited for" if report.ran_on != "CPU" else ""
    ops = f"Ops that ran{where} (profiled)"
    if any(row.seconds is not None for model in report.models for row in model.ops):
        ops = f"Time per op type{where}, in ms (profiled{waiting})"
    return Report(
        "bench",
        _verdict(report),
        names if is_alone else (),
        (report.ran_on, report.runtime, report.inputs),
        tuple(
            _figure(one)
            for one in report.timings
            if is_alone or one.speedup is not None
        ),
        sections=(
            section("Models", _models(report.models)),
            section("Latency", _timings(report.timings)),
            section(ops, _ops(report.models)),
            section(
                "Causes",
                (_cause(one, one.model in report.slower) for one in report.causes),
            ),
            section("Notes", notes(report.notes)),
        ),
    )


def _figure(timing: Timing) -> Figure:
    """Return the time of a run of a single model, or the speed-up of another over the first."""
    batch = "" if timing.batch is None else f" at batch {timing.batch}"
    if (ratio := timing.speedup) is None:
        value = f"{1e3 * timing.latency.median:.3g} ms"
        told = f"median of {timing.latency.runs:,} runs"
        return Figure(f"latency{batch}", value, told, f"{value}{batch}")
    told = f"95 % sure: {ratio.low:.2f} to {ratio.high:.2f}; {timing.model}"
    value = f"{ratio.value:.2f}"
    return Figure(f"speed-up{batch}", value, told, f"speed-up {value}{batch}")


def _verdict(report: BenchReport) -> Verdict:
    first, *others = (model.model for model in report.models)
    if report.slower:
        return Verdict(Status.INEXACT, f"{_are(report.slower)} slower than {first}.")
    if not others:
        return Verdict(Status.PASSED, "The model was timed.")
    standings: dict[str, list[str]] = {}
    for model in others:  # of several batch sizes, the least favorable counts
        ratios = [
            one.speedup for one in report.timings if one.model == model and one.speedup
        ]
        is_faster = bool(ratios) and all(ratio.is_faster for ratio in ratios)
        how = (
            f"faster than {first}"
            if is_faster
            else f"as fast as {first}, within the spread"
        )
        standings.setdefault(how, []).append(model)
    told = ", and ".join(f"{_are(models)} {how}" for how, models in standings.items())
    return Verdict(Status.PASSED, f"{told}.")


def _are(models: Sequence[str]) -> str:
    return f"{', '.join(models)} {'is' if len(models) == 1 else 'are'}"


def _cause(cause: Slowdown, is_slower: bool) -> Item:
    level = Level.WARNING if is_slower else Level.NOTE
    return Item(
        f"{cause.model}: {cause.text}.", level, cause.kind, action=cause.action
    )


def _models(models: Sequence[Bench]) -> Table:
    rows = []
    for model in models:
        assigned = sorted(model.assigned.items(), key=lambda item: -item[1])
        options = [
            f"{name}={value}" for name, value in model.options.items() if value != "0"
        ]
        memory = _size(model.memory)
        nodes = ", ".join(f"{count} {name}" for name, count in assigned)
        rows.append(
            (
                model.model,
                f"{model.load:.2f}",
                nodes,
                memory,
                ", ".join(options) or "–",
            )
        )
    return table("benched-models", rows)


def _timings(timings: Sequence[Timing]) -> Table:
    rows = map(_timing, sorted(timings, key=lambda timing: timing.batch or 0))
    return table("latencies", rows)


def _timing(timing: Timing) -> tuple[str, ...]:
    latency = timing.latency
    times = (
        f"{seconds * 1e3:.3f}"
        for seconds in (latency.first, latency.median, latency.p90, latency.p99)
    )
    batch = "–" if timing.batch is None else str(timing.batch)
    return (
        timing.model,
        batch,
        *times,
        f"{timing.throughput:.1f}",
        str(latency.runs),
        _with_interval(timing.speedup),
    )


def _with_interval(ratio: Ratio | None) -> str:
    return (
        ""
        if ratio is None
        else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    )


def _size(memory: int | None) -> str:
    return "–" if memory is None else size(memory)


def _ops(models: Sequence[Bench]) -> Table:
    """One row per op type, provider and type: time and nodes of each model."""
    kinds: dict[tuple[str, str, str], dict[str, OpTime]] = {}
    for model in models:
        for row in model.ops:
            kinds.setdefault((row.op, row.provider, row.dtype), {})[model.model] = row
    rows = (
        [Row(("all", "", "", *map(_total, models)), is_strong=True)] if kinds else []
    )
    by_time = {
        kind: min((-(row.seconds or 0.0), -row.nodes) for row in ran.values())
        for kind, ran in kinds.items()
    }
    for kind in sorted(kinds, key=by_time.__getitem__):
        ran = (_ran(kinds[kind].get(model.model)) for model in models)
        rows.append(Row((*kind, *ran)))
    return table("op-times", rows, more=(model.model for model in models))


def _total(model: Bench) -> str:
    """Return the time of all ops together, or their number if the engine reports no times."""
    told = [row.seconds for row in model.ops if row.seconds is not None]
    return (
        f"{sum(told) * 1e3:.3f}" if told else f"×{sum(row.nodes for row in model.ops)}"
    )


def _ran(row: OpTime | None) -> str:
    """Time and number of the nodes of one op type."""
    if row is None:
        return "–"
    return (
        f"×{row.nodes}"
        if row.seconds is None
        else f"{row.seconds * 1e3:.3f} ×{row.nodes}"
    )
