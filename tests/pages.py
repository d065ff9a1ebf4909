"""Samples for the tests of the HTML report: measurements, comparisons, checks, audits and conversions of any size."""

from collections.abc import Sequence
from math import inf
from pathlib import Path

import numpy as np

from onnxamp._audit import Audit, Casts, Finding, NodeFacts
from onnxamp._convert.plan import HazardRow, Plan, PlanRow
from onnxamp._convert.summary import KeptWeight, Summary
from onnxamp._job.writing import Conversion
from onnxamp._model.weights import ConversionCounts
from onnxamp._numerics.differences.compare import compare
from onnxamp._numerics.differences.metrics import Measurement
from onnxamp._numerics.results import Cure, DiffReport, FirstBad, Judgement, LayerDiff, RunCheck, ValueCheck
from onnxamp._options.options import Options
from onnxamp._report.html import Page, conversion_page
from onnxamp._tuning.results import Candidate, KeptNode, Tuned

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "<!--<script>",
    "{{ 7 * 7 }}",
    "a\u202egnp.exe",
    "line\nbreak\x00\x1b[31m\x9b",
    "\u2028\u2029\ufeff",
    "&lt;b&gt;&amp;",
    "`${alert(1)}`",
    "]]>",
    "javascript:alert(1)",
)
"""Names that must be nothing but text wherever they stand."""
OPS = ("MatMul", "Add", "Softmax", "Mul", "LayerNormalization", "Gelu")


def measurement(error: float = 1e-3, largest: float = 10.0, least: float = 1e-3, broken: int = 0) -> Measurement:
    """A value of norm 1 with a relative L2 error of ``error``."""
    return Measurement(
        elements=100, error_sum=error, error_energy=error**2, error_max=error, reference_energy=1.0, found_energy=1.0,
        reference_max=largest, found_max=largest, reference_least=least, reference_nan=0, found_nan=0, reference_inf=0,
        found_inf=broken, reference_zero=0, found_zero=0, broken=broken, flushed=0, vanished=0,
    )  # fmt: skip


def label(number: int) -> str:
    return f"block/{number // 6}/{OPS[number % 6].lower()}_{number}"


def is_low(number: int) -> bool:
    return OPS[number % 6] not in ("Softmax", "LayerNormalization")


def layers(count: int) -> tuple[LayerDiff, ...]:
    """A chain whose error grows; every third value has no local error, and one op overflows half-way."""
    return tuple(
        LayerDiff(
            i, f"{label(i)}_out", label(i), OPS[i % 6], "float16" if is_low(i) else "float32",
            None if i % 3 == 2 else measurement(2e-4 if is_low(i) else 0.0),
            measurement(1e-4 * (1 + i) ** 0.5, 4.0 * (1 + i % 7), 2.0 ** -(10 + i % 17), 3 if i == count // 2 else 0),
        )
        for i in range(count)
    )  # fmt: skip


def diff(count: int = 30, **changes: object) -> DiffReport:
    """A comparison of ``count`` values in which nothing is said to be wrong."""
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    outputs = (compare("logits", x, x * np.float32(1.001)), compare("mask", x > 0, x > 0))
    judgements = (Judgement("logits", "rel_l2", outputs[0].rel_l2, 1e-2, passed=True),)
    facts = {
        "reference": "model.onnx", "result": "model_fp16.onnx", "ran_on": "CPU, emulated float16",
        "inputs": "random inputs (seed 0)", "samples": 2, "lowest": "float16", "outputs": outputs,
        "judgements": judgements, "layers": layers(count),
    }  # fmt: skip
    return DiffReport(**(facts | changes))


def failing(count: int = 30, **changes: object) -> DiffReport:
    """A comparison that fails half-way, with a cure."""
    bad = count // 2
    first = FirstBad(f"{label(bad)}_out", label(bad), OPS[bad % 6], "Inf in 3 of 100 elements")
    command = f"onnxamp convert model.onnx -o model_fp16.onnx --keep-fp32 '{label(bad)}'"
    cure = Cure(command, (label(bad),), "With it in float32 the outputs are off by 0.0008.", confirmed=True, trials=2)
    return diff(count, **({"failure": "Output 'logits': Inf in 3.", "first_bad": first, "cure": cure} | changes))


def audit(count: int = 30, findings: Sequence[Finding] = ()) -> Audit:
    """The nodes of :func:`layers`, with a Cast wherever the precision changes."""
    nodes, casts = [], 0
    for i in range(count):
        if i and is_low(i) != is_low(i - 1):
            nodes.append(NodeFacts(len(nodes), f"cast_{i}", "Cast", "", "mixed", "CUDA"))
            casts += 1
        precision = "float16" if is_low(i) else "float32"
        nodes.append(NodeFacts(len(nodes), label(i), OPS[i % 6], "", precision, "CPU" if i % 11 == 5 else "CUDA"))
    sizes = {"float16": 2_000_000, "float32": 300_000, "int64": 64}
    return Audit("cuda", {"": 17}, tuple(nodes), tuple(findings), Casts(casts, 4096 * casts, 2), sizes)


def conversion(count: int = 30, **changes: object) -> Conversion:
    """What a conversion of that chain would say."""
    rows = tuple(
        PlanRow(
            f"{label(i)}:T",
            "",
            label(i),
            "T",
            0,
            OPS[i % 6],
            is_low(i),
            *(("cut", "fewest Casts") if is_low(i) else ("black list", OPS[i % 6])),
        )
        for i in range(count)
    )
    hazard = HazardRow(label(2), OPS[2], low=False, reason="mask", detail="a sentinel lies before it")
    weight = PlanRow("w:value", "", "w", "value", 0, "initializer", low=True, reason="constant", detail="")
    plan = Plan(Options(), 17, (weight, *rows), (hazard,), 10, 1000, ("Nothing matches 'x.*'.",))
    low = sum(map(is_low, range(count)))
    summary = Summary(
        {"low": low, "float32": count - low},
        {"float32": count},
        {},
        1,
        10,
        0,
        0,
        4_000_000,
        (),
        ("my::Op",),
        ("w",),
        (KeptWeight("table", 300_000, False, {"lookup": "black list: Gather"}),),
    )
    weights = {"w": ConversionCounts(1000, 1, 20, 300), "v": ConversionCounts(10)}
    facts = {
        "source": Path("model.onnx"), "target": Path("model_fp16.onnx"), "plan": plan, "summary": summary,
        "notes": ("A note.",), "weights": weights, "bytes_before": 4_300_000, "bytes_after": 2_300_000,
    }  # fmt: skip
    return Conversion(**(facts | changes))


def tuned(**changes: object) -> Tuned:
    """A tuning with four candidates: two beyond the tolerance, one that was written, and nothing."""
    errors = ((10.0, 4e-2), (14.0, 2e-2), (20.0, 8e-3), (40.0, 0.0))
    candidates = tuple(
        Candidate(
            frozenset(map(str, range(30 - 10 * i))),
            30 - 10 * i,
            1.1 * error,
            error,
            time,
            1 - i / 3,
            1 - i / 3,
            verified=i >= 2,
        )
        for i, (time, error) in enumerate(errors)
    )
    kept = (
        KeptNode(label(2), OPS[2], "costs accuracy", "it would use 12.0 % of the squared error that is allowed"),
        KeptNode(label(4), OPS[4], "breaks on its own", "Inf in 3 of 100 elements"),
    )
    facts = {
        "plan": conversion().plan, "metric": "rel-l2", "tolerance": 1e-2, "inputs": "random inputs (seed 0)",
        "samples": 4, "noise": None, "device_noise": None,
        "error": 9e-3, "ran_on": "CPU, emulated float16", "runs": 48, "recalled": 0,
        "conversions": 1, "units": 30, "unseen": (), "candidates": candidates, "chosen": 2, "kept": kept,
        "device": "A100", "times": "estimates for A100", "held": True,
    }  # fmt: skip
    return Tuned(**(facts | changes))


def run_check(count: int = 30) -> RunCheck:
    """A run of the chain in which one op overflows, one flushes, and one passes the overflow on."""
    faults = {count // 2: "Inf", 3: "flushed"}
    values = tuple(
        ValueCheck(
            i, f"{label(i)}_out", label(i), OPS[i % 6], "float16" if is_low(i) else "float32",
            measurement(2e-4, broken=3 if faults.get(i) == "Inf" else 0), faults.get(i), i == count // 2 + 1,
        )
        for i in range(count)
    )  # fmt: skip
    bad = count // 2
    first = FirstBad(f"{label(bad)}_out", label(bad), OPS[bad % 6], "Inf in 3 of 100 elements")
    return RunCheck("CPU, emulated float16", "random inputs (seed 0)", 1, values, first)


def bare(value: str, node: str, op: str = "Relu", error: float = inf) -> DiffReport:
    """A comparison of one value whose names are given."""
    layer = LayerDiff(0, value, node, op, "float16", None, measurement(error), note=f"note on {value}")
    return diff(0, reference=f"{node}.onnx", result=f"{value}.onnx", layers=(layer,), inputs=node)


def everything(count: int = 30) -> Page:
    return conversion_page(conversion(count), failing(count), audit(count))
