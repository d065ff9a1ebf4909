"""Why a model is slower than it could be, from what it executed beside what the original executed.

=============  =====================================================================================================
kind           what is looked for
=============  =====================================================================================================
casts          Casts between floats that take a notable share of the time, more than the original has
fallback       nodes with floats on the CPU, and the copies around them (Memcpy nodes)
fusion         fused nodes that ONNX Runtime made of the original, and not of this model
softmax        attention that is no longer fused, with a float32 Softmax in a low-precision model
fused conv     Conv and activation in one kernel, which ONNX Runtime has in float32 only
layout         low-precision convolutions in NCHW
channels       low-precision convolutions and products whose channels are not a multiple of 8
search         a first run at a new shape that takes much longer: cuDNN tries its algorithms
launches       a run that takes hardly longer than launching its kernels
=============  =====================================================================================================
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from onnxamp._bench.records import Bench, Cause, OpTime, Timing
from onnxamp._bench.timing import executed
from onnxamp._dtypes import FORMATS

_CAST_SHARE: Final = 0.03
_SEARCH: Final = 20.0
"""A first run this many times as long as the others tells that cuDNN searched."""
_LAUNCH: Final = 8e-6
"""Seconds per kernel below which launches are the bottleneck: one takes 3 to 5 microseconds on the host."""
_SHOWN: Final = 6
"""Op types that a sentence names at most."""

Said: TypeAlias = Iterator[tuple[str, str, str]]
"""Kind, text and action of each cause."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A model with its timings, and the original."""

    original: Bench
    model: Bench
    timings: Sequence[Timing]
    on_cuda: bool


def find_causes(evidence: Evidence) -> tuple[Cause, ...]:
    """What slows the model down, see the table of the module. Complexity: linear in op types."""
    if not evidence.model.ops or (not evidence.on_cuda and evidence.model.lowest != "float32"):
        return ()  # on CPU, float16 is computed in float32, and slow for other reasons than on a GPU
    rules = (_casts, _fallbacks, _fusions, _layout, _channels, _search, _launches)
    return tuple(Cause(evidence.model.model, *said) for rule in rules for said in rule(evidence))


def _casts(e: Evidence) -> Said:
    mine, theirs = (
        _sum(bench.ops, lambda row: row.op == "Cast" and row.dtype != "no floats")
        for bench in (e.model, e.original)
    )
    total = _sum(e.model.ops, lambda _: True)[1] or 1e-12
    if mine[0] > theirs[0] and mine[1] > _CAST_SHARE * total:
        share = f"{mine[1] * 1e3:.3g} ms, {100 * mine[1] / total:.0f} % of the time"
        text = f"{mine[0]} Casts ({theirs[0]} in the original) take {share}"
        yield (
            "casts",
            text,
            "Lower what is between them: --lists fast, --level O3, or --io-types low at the borders.",
        )


def _fallbacks(e: Evidence) -> Said:
    if not e.on_cuda:
        return
    rows = [
        row
        for row in e.model.ops
        if row.provider == "CPU" and row.dtype != "no floats" and row.op not in executed().copies
    ]
    before = {
        row.op: row.nodes
        for row in e.original.ops
        if row.provider == "CPU" and row.dtype != "no floats"
    }
    new = [row for row in rows if row.nodes > before.get(row.op, 0)]
    copies = _sum(e.model.ops, lambda row: row.op in executed().copies)
    if new or (rows and copies[0]):
        shown = sorted(new or rows, key=lambda row: -(row.seconds or 0.0))
        kinds = ", ".join(f"{row.op} ×{row.nodes} ({row.dtype})" for row in shown[:_SHOWN])
        kinds += ", ..." if len(shown) > _SHOWN else ""
        more = "" if new else ", as in the original"
        text = f"on CPU{more}: {kinds}; {copies[0]} copies between host and device take {copies[1] * 1e3:.3g} ms"
        yield (
            "fallback",
            text,
            "onnxamp check MODEL says why, node by node, and what would bring it back.",
        )


def _fusions(e: Evidence) -> Said:
    kept = _ran(e.model)  # made by ONNX Runtime, or part of the model
    for op, fused in executed().standard.items():
        kept[fused] += kept[op]
    lost = {op: count - kept[op] for op, count in fused_ops(e.original).items() if count > kept[op]}
    softmax = _sum(e.model.ops, lambda row: row.op == "Softmax" and row.dtype == "float32")[0]
    attention = [op for op in lost if op in executed().attentions]
    if attention and softmax and e.model.lowest != "float32":
        text = f"{lost.pop(attention[0])} attentions are not fused: {softmax} Softmax in float32 are in the way"
        yield (
            "softmax",
            text,
            "--lists fast lowers Softmax, too; its kernel accumulates in float32 all the same.",
        )
    convs = [op for op in lost if op in executed().conv_activations]
    if convs and e.model.lowest != "float32":
        count = sum(lost.pop(op) for op in convs)
        text = f"{count} activations no longer run inside their Conv: FusedConv is float32 only"
        yield (
            "fused conv",
            text,
            "Nothing brings that back; it costs one pass over each such output.",
        )
    if lost:
        text = "fusions that the original gets and this model does not: " + ", ".join(
            f"{op} ×{n}" for op, n in lost.items()
        )
        yield (
            "fusion",
            text,
            "Convert with --fold, or look with 'onnxamp inspect' for Casts inside the pattern.",
        )


def _layout(e: Evidence) -> Said:
    count, seconds = _sum(
        e.model.ops, lambda row: row.op in executed().convolutions and row.dtype in FORMATS
    )
    if e.on_cuda and count and e.model.options.get("prefer_nhwc") != "1":
        text = f"{count} low-precision convolutions ({seconds * 1e3:.3g} ms) run in NCHW; tensor cores want NHWC"
        yield "layout", text, "Try the provider option prefer_nhwc=1 (onnxamp bench --nhwc)."


def _channels(e: Evidence) -> Said:
    if e.on_cuda and e.model.odd:
        kinds = ", ".join(f"{op} ×{count}" for op, count in e.model.odd.items())
        text = f"channels that are not a multiple of 8: {kinds}; tensor cores are slow on such shapes, or cannot run them"
        yield (
            "channels",
            text,
            "Pad them in the model, or keep these nodes in float32 (--keep-fp32).",
        )


def _search(e: Evidence) -> Said:
    slow = [
        t
        for t in e.timings
        if t.latency.first > _SEARCH * t.latency.median and t.latency.first > 0.1
    ]
    convolves = any("Conv" in row.op for row in e.model.ops)
    if e.on_cuda and slow and convolves:
        first = max(t.latency.first for t in slow)
        text = f"the first run at a new shape takes up to {first:.2g} s: cuDNN tries its algorithms"
        yield "search", text, "Warm up every shape once, or set cudnn_conv_algo_search=HEURISTIC."


def _launches(e: Evidence) -> Said:
    kernels = sum(row.nodes for row in e.model.ops if row.provider == "CUDA")
    bound = [t for t in e.timings if kernels and t.latency.median < _LAUNCH * kernels]
    if e.on_cuda and bound and e.model.options.get("enable_cuda_graph") != "1":
        fastest = min(t.latency.median for t in bound)
        text = f"{kernels} kernels in {fastest * 1e3:.3g} ms: launching them takes longer than running them"
        yield "launches", text, "A larger batch, or a CUDA graph (onnxamp bench --cuda-graph)."


def fused_ops(bench: Bench) -> Counter[str]:
    """Op types of which more nodes ran than the model has: what ONNX Runtime's fusions made."""
    own = {op.rpartition("::")[2]: count for op, count in (bench.kinds or {}).items()}
    extra = {
        op: count - own.get(op, 0)
        for op, count in _ran(bench).items()
        if op not in executed().glue | executed().copies
    }
    return Counter({op: count for op, count in extra.items() if count > 0})


def _ran(bench: Bench) -> Counter[str]:
    """Nodes that ran, by op type."""
    ran = Counter[str]()
    for row in bench.ops:
        ran[row.op] += row.nodes
    return ran


def _sum(rows: Sequence[OpTime], wanted: Callable[[OpTime], bool]) -> tuple[int, float]:
    """Nodes and seconds of the wanted rows together; those that the engine does not tell count as none."""
    chosen = [row for row in rows if wanted(row)]
    return sum(row.nodes for row in chosen), sum(row.seconds or 0.0 for row in chosen)
