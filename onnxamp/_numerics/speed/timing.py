"""Timing functions side by side: warmed up until they are stable, in turns, and with the spread of the result.

Each function runs in blocks of a few consecutive runs, as in production. The blocks of all functions take turns, in
reverse order every other round, so that drifting clocks and temperatures affect all functions alike.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from onnxamp._base.public import no_collections
from onnxamp._facts.dtypes import FORMATS, LOWEST_FIRST
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import read_table
from onnxamp._numerics.speed.bench_results import (
    Bench,
    Latency,
    OpTime,
    Slowdown,
    TimeRatio,
    Timing,
)
from onnxamp._runtime.profile import (
    engine_kernels,
    is_dispatch_only,
    node_events,
    profiled_run,
    times_of,
)
from onnxamp._runtime.sessions.session import Provider, short_provider
from onnxamp._runtime.sessions.values import Feed


class Executed(NamedTuple):
    """The tables of ``_data/executed.toml``."""

    channels: Mapping[str, int]
    convolutions: frozenset[str]
    conv_activations: frozenset[str]
    attentions: frozenset[str]
    copies: frozenset[str]
    glue: frozenset[str]
    standard: Mapping[str, str]
    kernels: Mapping[str, Mapping[str, Any]]


@cache
def executed() -> Executed:
    """Return the facts, which are parsed on the first call."""
    data = read_table("executed")
    ops = {name: frozenset(ops) for name, ops in data["ops"].items()}
    return Executed(
        data["channels"], **ops, standard=data["standard"], kernels=data["kernels"]
    )


Run = Callable[[], None]
Clock = Callable[[], float]
Timed = Callable[[int], list[float]]
"""A function that runs so many times in a row, and returns the seconds of each run."""
Blocks = list[list[float]]
"""The seconds of each run, by round."""

_WINDOW: Final = 5
_STEADY: Final = 0.03
"""A function is warm if the medians of two windows of ``_WINDOW`` runs differ by less than this share."""
_BLOCK: Final = 0.02
"""The desired duration of a block, in seconds."""
_MOST: Final = 50
"""The maximum number of runs in a block."""
_ROUNDS: Final = (8, 60)
"""The fewest and the most rounds that are timed."""
_RESAMPLES: Final = 2000
"""Bootstrap samples, of which the interval leaves out the outer 50 at each end."""


def timed(run: Run, clock: Clock) -> Timed:
    """Return a function that runs ``run`` several times, and times it from outside."""

    def block(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = clock()
            run()
            seconds.append(clock() - start)
        return seconds

    return block


def warm_up(run: Timed, clock: Clock, longest: float) -> float:
    """Run until two consecutive windows take the same time, or ``longest`` seconds have passed.

    Returns:
        The seconds per run at the end.
    """
    start = clock()
    before = math.inf
    now = run(1)[0]
    while clock() - start < longest and abs(before - now) > _STEADY * now:
        before = now
        now = median(run(_WINDOW))
    return now


def interleave(
    runs: Sequence[Timed], each: Sequence[float], seconds: float, rest: float = 0.0
) -> list[Blocks]:
    """Time functions in turns, for about ``seconds`` per function.

    Args:
        runs: the functions, at least one.
        each: the seconds that one run of each function takes, from :func:`warm_up`.
        seconds: time per function.
        rest: seconds to wait before each block.

    Returns:
        The rounds of each function, the same number for all.
    """
    fitting = (math.ceil(_BLOCK / max(cost, 1e-7)) for cost in each)
    sizes = [max(2, min(_MOST, size)) for size in fitting]
    # Each block starts with a run that is not counted.
    costs = zip(each, sizes, strict=True)
    round_cost = sum(rest + cost * (size + 1) for cost, size in costs)
    affordable = seconds * len(runs) / max(round_cost, 1e-7)
    rounds = int(min(max(affordable, _ROUNDS[0]), _ROUNDS[1]))
    blocks: list[Blocks] = [[] for _ in runs]
    with no_collections():  # a garbage collection would count for only one function
        for number in range(rounds):
            order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                if rest:
                    time.sleep(rest)
                # Not counted: it refills the caches that other functions have overwritten.
                runs[index](1)
                blocks[index].append(runs[index](sizes[index]))
    return blocks


def latency(first: float, blocks: Blocks) -> Latency:
    """Return quantiles over all runs of all rounds."""
    every = np.concatenate([np.asarray(block) for block in blocks])
    middle, p90, p99 = np.quantile(every, (0.5, 0.9, 0.99)).tolist()
    return Latency(first, middle, p90, p99, every.size)


def ratio(reference: Blocks, other: Blocks) -> TimeRatio:
    """Return how many times as fast ``other`` is: the median over rounds of the ratio of a round's two medians.

    The interval spans the 2.5th to the 97.5th percentile of that median when rounds are resampled with replacement
    (Efron's percentile bootstrap, seeded).
    """
    rounds = zip(reference, other, strict=True)
    medians = [(median(a), median(b)) for a, b in rounds]
    quotients = np.array([one / max(two, 1e-12) for one, two in medians])
    count = quotients.size
    drawn = np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
    low, high = np.quantile(np.median(quotients[drawn], axis=1), (0.025, 0.975))
    p10, p90 = np.quantile(quotients, (0.1, 0.9))
    return TimeRatio(
        value=float(np.median(quotients)),
        low=float(low),
        high=float(high),
        spread=float(p90 - p10) / 2,
    )


_LOWEST: Final = (*LOWEST_FIRST, "float", "double")
_NAMES: Final = {"float": "float32", "double": "float64"}


def profiled(
    facts: Bench,
    path: Path,
    feeds: Mapping[str, Feed],
    provider: Provider,
    cuda_options: Mapping[str, str],
    threads: int = 0,
) -> Bench:
    """Return the facts about a model with those that a profile shows: ops, memory and odd channels.

    Args:
        facts: what is known without a profile.
        path: the file of the model.
        feeds: arrays by input name.
        provider: where to run it.
        cuda_options: options of the CUDA provider.
        threads: as for :func:`~onnxamp._runtime.sessions.session.make_session`.

    Raises:
        RuntimeFailure: the model does not run, an input is not a tensor, or the process ends without a profile.
    """
    events, memory = profiled_run(
        path, feeds, provider, cuda_options=cuda_options, threads=threads
    )
    return replace(
        facts,
        ops=op_times(events),
        memory=memory,
        odd=odd_channels(events),
    )


def op_times(events: Sequence[Mapping[str, Any]]) -> tuple[OpTime, ...]:
    """Return the nodes of a profile by op, provider and type, slowest first.

    Control flow is left out: its time is that of the nodes in its bodies, which are listed.
    """
    untold = is_dispatch_only(events)
    seconds = times_of(events)
    kinds = dict[str, tuple[str, str, str]]()
    for name, event in node_events(events):
        args = event["args"]
        if args["op_name"] in op_facts().control_flow:
            continue
        # A graph that an engine compiles is skipped: its kernels are listed instead.
        if untold or name in seconds:
            provider = short_provider(args["provider"])
            kinds.setdefault(name, (args["op_name"], provider, _dtype(args)))
    for event in engine_kernels(events):
        kinds.setdefault(event["name"].partition("::")[2], _kernel_kind(event["args"]))
    spent = defaultdict[tuple[str, str, str], float](float)
    counts = Counter(kinds.values())
    for name, kind in kinds.items():
        spent[kind] += seconds.get(name, 0.0)
    rows = [
        OpTime(*kind, counts[kind], None if untold else total)
        for kind, total in spent.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), row.op)))


def _kernel_kind(args: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return op, provider and type of a kernel that a compiling engine lists."""
    provider = str(args.get("ep", ""))
    words = executed().kernels.get(provider, {})
    dtype = str(args.get(words.get("kernel", ""), "")).rpartition("_")[2]
    return (
        str(args.get(words.get("op", ""), "?")),
        short_provider(provider),
        words.get("types", {}).get(dtype, "no floats"),
    )


def odd_channels(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count low-precision convolutions and matrix products whose channels are not a multiple of 8, by op type.

    Such shapes are slow on tensor cores, or cannot use them.
    """
    odd = dict[str, str]()
    for name, event in node_events(events):
        args = event["args"]
        axis = executed().channels.get(args["op_name"])
        if axis is None or _dtype(args) not in FORMATS:
            continue
        entries = (
            *args.get("input_type_shape", ())[:1],
            *args.get("output_type_shape", ()),
        )
        shapes = chain.from_iterable(entry.values() for entry in entries)
        if any(len(shape) > max(axis, 0) and shape[axis] % 8 for shape in shapes):
            odd[name] = args["op_name"]
    return dict(Counter(odd.values()))


def _dtype(args: Mapping[str, Any]) -> str:
    """Return the lowest float type that a node reads or writes."""
    ports = (*args.get("input_type_shape", ()), *args.get("output_type_shape", ()))
    types = set().union(*ports)  # each port is a dict of one type and its shape
    lowest = next((name for name in _LOWEST if name in types), "no floats")
    return _NAMES.get(lowest, lowest)


_CAST_SHARE: Final = 0.03
"""Share of the time from which on Casts are worth a sentence."""
_SEARCH: Final = 20.0
_SEARCH_TIME: Final = 0.1
"""A first run this many times as long as the others, and longer than this many seconds, means that cuDNN searched for
algorithms.
"""
_LAUNCH: Final = 8e-6
"""Seconds per kernel below which launches are the bottleneck: a launch takes 3 to 5 microseconds on the host."""
_SHOWN: Final = 6
"""The maximum number of op types in a sentence."""

Said: TypeAlias = Iterator[tuple[str, str, str]]
"""Kind, text and action of each cause."""


class Evidence(NamedTuple):
    """A model with its timings, and the original."""

    original: Bench
    model: Bench
    timings: Sequence[Timing]
    on_cuda: bool


def find_slowdowns(evidence: Evidence) -> tuple[Slowdown, ...]:
    """Return the causes of a slowdown; see the table of the module. Complexity: linear in the number of op types."""
    # On the CPU, float16 is computed in float32, and is slow for other reasons than on a GPU.
    is_emulated = not evidence.on_cuda and evidence.model.lowest != "float32"
    if is_emulated or not evidence.model.ops:
        return ()
    rules = (_casts, _fallbacks, _fusions, _layout, _channels, _search, _launches)
    reasons = chain.from_iterable(rule(evidence) for rule in rules)
    return tuple(Slowdown(evidence.model.model, *reason) for reason in reasons)


def _casts(e: Evidence) -> Said:
    count, seconds = _sum(e.model.ops, _is_float_cast)
    before, _ = _sum(e.original.ops, _is_float_cast)
    share = seconds / (sum(row.seconds or 0.0 for row in e.model.ops) or 1e-12)
    if count > before and share > _CAST_SHARE:
        time = f"{seconds * 1e3:.3g} ms, {100 * share:.0f} % of the time"
        text = f"{count} Casts ({before} in the original) take {time}"
        action = "Lower the nodes between them (--lists fast, --level O3), or the inputs and outputs (--io-types low)."
        yield "casts", text, action


def _is_float_cast(row: OpTime) -> bool:
    return row.op == "Cast" and row.dtype != "no floats"


def _fallbacks(e: Evidence) -> Said:
    if not e.on_cuda:
        return
    on_cpu = [row for row in e.model.ops if _is_fallback(row)]
    rows = [row for row in on_cpu if row.op not in executed().copies]
    before = {row.op: row.nodes for row in e.original.ops if _is_fallback(row)}
    new = [row for row in rows if row.nodes > before.get(row.op, 0)]
    copies, seconds = _sum(e.model.ops, lambda row: row.op in executed().copies)
    if new or (rows and copies):
        shown = sorted(new or rows, key=lambda row: -(row.seconds or 0.0))
        names = [f"{row.op} ×{row.nodes} ({row.dtype})" for row in shown[:_SHOWN]]
        kinds = ", ".join(names) + (", ..." if len(shown) > _SHOWN else "")
        more = "" if new else ", as in the original"
        moved = f"{copies} copies between host and device take {seconds * 1e3:.3g} ms"
        text = f"on the CPU{more}: {kinds}; {moved}"
        action = "onnxamp check MODEL names the reason for each node, and what would bring it back."
        yield "fallback", text, action


def _is_fallback(row: OpTime) -> bool:
    """Return whether nodes with floats run on the CPU; shape arithmetic belongs there."""
    return row.provider == "CPU" and row.dtype != "no floats"


def _fusions(e: Evidence) -> Said:
    kept = _ran(e.model)  # made by ONNX Runtime, or part of the model
    for op, fused in executed().standard.items():
        kept[fused] += kept[op]
    lost = fused_ops(e.original) - kept  # Counters drop what is not positive
    softmax = sum(
        row.nodes
        for row in e.model.ops
        if row.op == "Softmax" and row.dtype == "float32"
    )
    attention = [op for op in lost if op in executed().attentions]
    if attention and softmax and e.model.lowest != "float32":
        text = f"{lost.pop(attention[0])} attentions are not fused, because {softmax} Softmax are in float32"
        action = "--lists fast also lowers Softmax, whose kernel still accumulates in float32."
        yield "softmax", text, action
    convs = [op for op in lost if op in executed().conv_activations]
    if convs and e.model.lowest != "float32":
        count = sum(lost.pop(op) for op in convs)
        text = f"{count} activations no longer run inside their Conv, because FusedConv exists only in float32"
        action = "No option restores that fusion. Its loss costs one pass over each of these outputs."
        yield "fused conv", text, action
    if lost:
        kinds = ", ".join(f"{op} ×{count}" for op, count in lost.items())
        text = f"fusions that only the original gets: {kinds}"
        action = "Convert with --fold, or use 'onnxamp inspect' to find Casts inside the pattern."
        yield "fusion", text, action


def _layout(e: Evidence) -> Said:
    count, seconds = _sum(
        e.model.ops,
        lambda row: row.op in executed().convolutions and row.dtype in FORMATS,
    )
    if e.on_cuda and count and e.model.options.get("prefer_nhwc") != "1":
        text = f"{count} low-precision convolutions ({seconds * 1e3:.3g} ms) run in NCHW; tensor cores want NHWC"
        action = "Try the provider option prefer_nhwc=1 (onnxamp bench --nhwc)."
        yield "layout", text, action


def _channels(e: Evidence) -> Said:
    if e.on_cuda and e.model.odd:
        kinds = ", ".join(f"{op} ×{count}" for op, count in e.model.odd.items())
        text = f"channels that are not a multiple of 8: {kinds}; tensor cores are slow on such shapes, or cannot run them"
        action = "Pad them in the model, or keep these nodes in float32 (--keep-fp32)."
        yield "channels", text, action


def _search(e: Evidence) -> Said:
    times = [timing.latency for timing in e.timings]
    slow = [
        one.first
        for one in times
        if one.first > max(_SEARCH * one.median, _SEARCH_TIME)
    ]
    convolves = any("Conv" in row.op for row in e.model.ops)
    if e.on_cuda and slow and convolves:
        first = max(slow)
        text = f"the first run at a new shape takes up to {first:.2g} s, because cuDNN tries its algorithms"
        action = "Warm up every shape once, or set cudnn_conv_algo_search=HEURISTIC."
        yield "search", text, action


def _launches(e: Evidence) -> Said:
    kernels = sum(row.nodes for row in e.model.ops if row.provider == "CUDA")
    bound = [t for t in e.timings if kernels and t.latency.median < _LAUNCH * kernels]
    if e.on_cuda and bound and e.model.options.get("enable_cuda_graph") != "1":
        fastest = min(t.latency.median for t in bound)
        text = f"{kernels} kernels in {fastest * 1e3:.3g} ms: launching them takes longer than running them"
        action = "Use a larger batch, or a CUDA graph (onnxamp bench --cuda-graph)."
        yield "launches", text, action


def fused_ops(bench: Bench) -> Counter[str]:
    """Count nodes that ran but are not in the model, by op type: these come from fusions of ONNX Runtime."""
    own = Counter[str]()
    for op, count in (bench.kinds or {}).items():
        own[op.rpartition("::")[2]] = count  # profiles name ops without domains
    fused = _ran(bench) - own
    for op in executed().glue | executed().copies:
        fused.pop(op, None)
    return fused


def _ran(bench: Bench) -> Counter[str]:
    """Return the number of nodes that ran, by op type."""
    ran = Counter[str]()
    for row in bench.ops:
        ran[row.op] += row.nodes
    return ran


def _sum(
    rows: Sequence[OpTime], wanted: Callable[[OpTime], bool]
) -> tuple[int, float]:
    """Return the total nodes and seconds of the wanted rows; unreported times count as zero."""
    nodes = 0
    seconds = 0.0
    for row in filter(wanted, rows):
        nodes += row.nodes
        seconds += row.seconds or 0.0
    return nodes, seconds
