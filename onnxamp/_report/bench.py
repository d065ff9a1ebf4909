"""Report of a benchmark."""

from collections.abc import Sequence
from itertools import chain
from typing import Final

from onnxamp._numerics.speed.bench_results import (
    Bench,
    BenchReport,
    OpTime,
    Slowdown,
    TimeRatio,
    Timing,
)
from onnxamp._report import size, time_text
from onnxamp._report.parts import (
    Figure,
    Headline,
    Report,
    Severity,
    Statement,
    Status,
    Table,
    TableRow,
    notes,
    section,
    table,
)

_NOTABLE: Final = 0.1
"""The difference from equal speed beyond which a head does not call two models as fast."""

_UNSURE: Final = "single runs vary too much to be sure"


def bench_report(report: BenchReport) -> Report:
    """Return the report of models timed side by side, the others compared with the first."""
    names = tuple(model.model for model in report.models)
    is_alone = len(names) == 1
    where = "" if report.profiled is None else f" at batch {report.profiled}"
    waiting = ", each kernel waited for" if report.ran_on != "CPU" else ""
    ops = f"Ops that ran{where} (profiled)"
    rows = chain.from_iterable(model.ops for model in report.models)
    if any(row.seconds is not None for row in rows):
        ops = f"Time per op type{where}, in ms (profiled{waiting})"
    shown = [
        timing for timing in report.timings if is_alone or timing.speedup is not None
    ]
    causes = [_cause(cause, cause.model in report.slower) for cause in report.causes]
    return Report(
        "bench",
        _verdict(report),
        names if is_alone else (),
        (report.ran_on, report.runtime, report.inputs),
        tuple(map(_figure, shown)),
        sections=(
            section("Models", _models(report.models)),
            section("Latency", _timings(report.timings)),
            section(ops, _ops(report.models)),
            section("Causes", causes),
            section("Notes", notes(report.notes)),
        ),
    )


def _figure(timing: Timing) -> Figure:
    """Return the time of a run of a single model, or the speed-up of another over the first."""
    batch = "" if timing.batch is None else f" at batch {timing.batch}"
    if (ratio := timing.speedup) is None:
        value = time_text(1e6 * timing.latency.median)
        remark = f"median of {timing.latency.runs:,} runs"
        return Figure(f"latency{batch}", value, remark, f"{value}{batch}")
    remark = f"95 % confidence: {ratio.low:.2f} to {ratio.high:.2f}; {timing.model}"
    value = f"{ratio.value:.2f}"
    return Figure(f"speed-up{batch}", value, remark, f"speed-up {value}{batch}")


def _verdict(report: BenchReport) -> Headline:
    first, *others = (model.model for model in report.models)
    if report.slower:
        return Headline(Status.INEXACT, f"{_are(report.slower)} slower than {first}.")
    if not others:
        return Headline(Status.PASSED, "The model was timed.")
    standings: dict[str, list[str]] = {}
    for model in others:
        # The least favorable of several batch sizes counts.
        own = (timing.speedup for timing in report.timings if timing.model == model)
        ratios = [ratio for ratio in own if ratio]
        standings.setdefault(_standing(ratios, first), []).append(model)
    sentence = ", and ".join(
        f"{_are(models)} {how}" for how, models in standings.items()
    )
    is_sure = not any(how.endswith(_UNSURE) for how in standings)
    return Headline(Status.PASSED if is_sure else Status.UNKNOWN, f"{sentence}.")


def _standing(ratios: Sequence[TimeRatio], first: str) -> str:
    """Return how a model that is not slower compares with the first one, in a clause."""
    if ratios and all(ratio.is_faster for ratio in ratios):
        return f"faster than {first}"
    if any(ratio.is_faster for ratio in ratios):
        return f"faster than {first} at some batch sizes, and as fast at the others"
    # A large difference is not the spread of the same speed: the runs do not tell.
    for is_faster, ratio in ((ratio.value > 1, ratio) for ratio in ratios):
        if abs(ratio.value - 1) > _NOTABLE:
            which = "faster" if is_faster else "slower"
            return f"{which} than {first} by the median, but {_UNSURE}"
    return f"as fast as {first}, within the spread"


def _are(models: Sequence[str]) -> str:
    return f"{', '.join(models)} {'is' if len(models) == 1 else 'are'}"


def _cause(cause: Slowdown, is_slower: bool) -> Statement:
    level = Severity.WARNING if is_slower else Severity.NOTE
    return Statement(
        f"{cause.model}: {cause.text}.", level, cause.kind, action=cause.action
    )


def _models(models: Sequence[Bench]) -> Table:
    rows = []
    for model in models:
        assigned = sorted(model.assigned.items(), key=lambda item: -item[1])
        given = [
            (name, value) for name, value in model.options.items() if value != "0"
        ]
        options = ", ".join(f"{name}={value}" for name, value in given) or "–"
        nodes = ", ".join(f"{count} {name}" for name, count in assigned)
        memory = "–" if model.memory is None else size(model.memory)
        rows.append((model.model, f"{model.load:.2f}", nodes, memory, options))
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


def _with_interval(ratio: TimeRatio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _ops(models: Sequence[Bench]) -> Table:
    """Return one row per op type, provider and type: time and nodes of each model."""
    kinds: dict[tuple[str, str, str], dict[str, OpTime]] = {}
    for model in models:
        for row in model.ops:
            kind = row.op, row.provider, row.dtype
            kinds.setdefault(kind, {})[model.model] = row
    rows = list[TableRow]()
    if kinds:
        rows.append(TableRow(("all", "", "", *map(_total, models)), is_strong=True))

    def rank(kind: tuple[str, str, str]) -> tuple[float, int]:
        """Order by the largest time of any model, or else by the number of nodes."""
        ran = kinds[kind].values()
        return min((-(row.seconds or 0.0), -row.nodes) for row in ran)

    for kind in sorted(kinds, key=rank):
        ran = (_ran(kinds[kind].get(model.model)) for model in models)
        rows.append(TableRow((*kind, *ran)))
    return table("op-times", rows, more=(model.model for model in models))


def _total(model: Bench) -> str:
    """Return the time of all ops together, or their number if the engine reports no times."""
    seconds = [row.seconds for row in model.ops if row.seconds is not None]
    if seconds:
        return f"{sum(seconds) * 1e3:.3f}"
    return f"×{sum(row.nodes for row in model.ops)}"


def _ran(row: OpTime | None) -> str:
    """Return the time and the number of the nodes of one op type."""
    if row is None:
        return "–"
    if row.seconds is None:
        return f"×{row.nodes}"
    return f"{row.seconds * 1e3:.3f} ×{row.nodes}"
