"""onnxamp on a CPU that computes in bfloat16, beside ONNX Runtime's float32 and OpenVINO's float32 and hints.

python benchmarks/cpu.py [--quick] [--check] [--threads N] [--limit SECONDS] [--only NAME ...] [--out FILE]

Generates the networks, converts and tunes each for OpenVINO, and times all of one network in turns on the same inputs,
at each batch. What is tuned has its weights rounded with compensation, on the samples of tuning. The error of each way
is the largest relative L2 error of an output against ONNX Runtime's float32 on two samples that tuning did not see. One
JSON file is written anew after each batch (benchmarks/results/cpu.json). Where the CPU lacks AMX and AVX512-BF16,
bfloat16 is no faster there: the figures say so, and are not held to the goals.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import measure
import onnx
from gpu import copied, sentence
from onnx import ModelProto
from shapes import CPU, CPU_QUICK, Shape

import onnxamp
from onnxamp import BenchOptions, bench_models, convert_model, tune_model
from onnxamp._report.formats import as_data
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.inputs.random_inputs import random_inputs
from onnxamp._runtime.sessions.session import choose_provider
from onnxamp._tuning.metric import make_metric

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("onnx", "onnxruntime", "onnxruntime-gpu", "onnxruntime-ep-openvino", "numpy")
REFERENCE: Final = "ONNX Runtime, float32"
OWN: Final = "OpenVINO's hint bf16"
TUNED: Final = "onnxamp, tuned, bfloat16"
SHARE: Final = 0.5
"""Error that a tuned model may have, over that of OpenVINO's own bfloat16."""
AIM: Final = 0.9
"""What is aimed at, over that: the error is judged on samples that tuning did not see."""
ROUNDED: Final = 1e-5
"""A smaller error is one of float32: the hint has no effect on this CPU, and the share is taken of that of O2."""
BEHIND: Final = 1.05
FASTER: Final = {"bert": 4.0, "resnet50": 3.5}
"""Times ONNX Runtime's float32."""
INSTRUCTIONS: Final = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a network: the model that is made of it, and the provider."""

    name: str
    provider: str
    model: str = "float32"


VARIANTS: Final = (
    Variant(REFERENCE, "cpu"),
    Variant("OpenVINO, float32", "openvino:f32"),
    Variant(OWN, "openvino:bf16"),
    Variant("OpenVINO's hint f16", "openvino:f16"),
    Variant("onnxamp O2, bfloat16", "openvino:dynamic", "O2"),
    Variant(TUNED, "openvino:dynamic", "tuned"),
)


@dataclass(slots=True)
class Made:
    """The models of a network with an open batch, what making them took and told, and why others are missing."""

    models: dict[str, ModelProto] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)


def fixed(model: ModelProto, batch: int, path: Path) -> Path:
    """The model as a file whose batch is fixed: engines compile better code for that."""
    model = copied(model)
    for entry in (*model.graph.input, *model.graph.output):
        if entry.type.tensor_type.shape.dim[0].dim_param:
            entry.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, path)
    return path


def physical_cores() -> int:
    """Cores that this process may use, counted without the second thread of each."""
    info, cores, found = Path("/proc/cpuinfo"), set(), {}
    for line in info.read_text().splitlines() if info.is_file() else []:
        key, _, value = line.partition(":")
        found[key.strip()] = value.strip()
        if not line.strip():
            cores.add((found.get("physical id"), found.get("core id")))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(len(cores) or usable, usable)


def instructions() -> list[str]:
    """Those of the CPU's that multiply bfloat16."""
    info = Path("/proc/cpuinfo")
    flags = (
        next((line for line in info.read_text().splitlines() if line.startswith("flags")), "") if info.is_file() else ""
    )
    return [name for name in INSTRUCTIONS if name in flags.split()]


@dataclass(frozen=True)
class Judge:
    """Samples, and what the float32 model makes of them on the CPU."""

    samples: Sequence[Mapping[str, Any]]
    expected: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, original: Path, seeds: range) -> "Judge":
        model, truth = onnx.load(original), engine_on("cpu").open(original, whole=True)
        samples = [random_inputs(model, seed=seed) for seed in seeds]
        return cls(samples, [truth.run(feeds) for feeds in samples])

    def error(self, path: Path, provider: str) -> float:
        """The largest relative L2 error of an output on any sample."""
        model, metric = engine_on(provider).open(path, whole=True), make_metric("rel-l2", 1.0, frozenset())
        return max(
            metric.error(right, model.run(feeds)) for feeds, right in zip(self.samples, self.expected, strict=True)
        )


def errors_of(shape: Shape, made: Made, judge: Judge, folder: Path) -> None:
    """Add the error of each variant, at the smallest batch, that has none yet."""
    batch = min(shape.batches)
    for variant in VARIANTS:
        if variant.model not in made.models or variant.name in made.errors:
            continue
        try:
            path = fixed(made.models[variant.model], batch, folder / "one.onnx")
            made.errors[variant.name] = judge.error(path, variant.provider)
        except onnxamp.RuntimeFailure as error:
            made.missing[variant.name] = sentence(error)


def aimed_at(made: Made, judge: Judge, batch: int, folder: Path) -> float:
    """The error to tune to: a share of OpenVINO's own on the same samples."""
    ways = ("float32", "openvino:bf16"), ("O2", "openvino:dynamic")
    own, other = (judge.error(fixed(made.models[name], batch, folder / "one.onnx"), place) for name, place in ways)
    return AIM * SHARE * (own if own > ROUNDED else other)


def make(shape: Shape, folder: Path, seconds: float, runs: int) -> Made:
    """Generate, convert, tune to half of OpenVINO's own error."""
    made, model, batch = Made(), shape.model(folder), min(shape.batches)
    made.models["float32"] = model
    start = time.perf_counter()
    made.models["O2"] = convert_model(model, dtype="bfloat16", target="openvino", keep_io_types=True)
    made.seconds["O2"] = time.perf_counter() - start
    original = fixed(model, batch, folder / "float32.onnx")
    unseen, seen = Judge.of(original, range(1000, 1002)), Judge.of(original, range(shape.samples))
    errors_of(shape, made, unseen, folder)
    start = time.perf_counter()
    try:
        tolerance = aimed_at(made, seen, batch, folder)
        made.models["tuned"], tuned = tune_model(
            model, tolerance, metric="rel-l2", samples=seen.samples, provider="openvino", device="Xeon-8480",
            dtype="bfloat16", target="openvino", rounding="compensated", times="measured", seconds=seconds, runs=runs,
            keep_io_types=True,
        )  # fmt: skip
        made.tuned = {
            "tolerance": tolerance, "error": tuned.error, "candidates": len(tuned.candidates), "samples": shape.samples,
            "nodes low": tuned.candidates[tuned.chosen].nodes, "nodes": tuned.units, "stopped": tuned.stopped,
            "times": tuned.times, "timed": dict(tuned.timed),
        }  # fmt: skip
    except onnxamp.OnnxAmpError as error:
        made.missing[TUNED] = sentence(error)
    made.seconds["tuned"] = time.perf_counter() - start
    errors_of(shape, made, unseen, folder)
    return made


def measured(shape: Shape, folder: Path, options: argparse.Namespace, until: float) -> Iterator[dict[str, Any]]:
    """All that is known of one network, anew after each batch, until the time is over."""
    begun = time.perf_counter()
    made = make(shape, folder, min(options.tuning, max(1.0, (until - begun) / 3)), options.runs)
    rows = [
        {"model": variant.name, "provider": variant.provider, "error": made.errors.get(variant.name), "timings": []}
        for variant in VARIANTS
        if variant.model in made.models and variant.name not in made.missing
    ]
    found = {"name": shape.name, "title": shape.title, "batches": shape.batches, "variants": rows,
             "conversion_seconds": made.seconds, "tuned": made.tuned, "missing": made.missing}  # fmt: skip
    yield found
    kept = [next(variant for variant in VARIANTS if variant.name == row["model"]) for row in rows]
    for batch in shape.batches:
        if time.perf_counter() > until:
            made.missing[f"batch {batch}"] = "not started: the time was over"
            continue
        files = {name: fixed(model, batch, folder / f"{name}-{batch}.onnx") for name, model in made.models.items()}
        each = [
            BenchOptions(provider=v.provider, threads=options.threads, seconds=options.seconds, profile=False)
            for v in kept
        ]
        report = bench_models(*(files[variant.model] for variant in kept), provider="cpu", options=each)
        for row, model, timing in zip(rows, report.models, report.timings, strict=True):
            facts = as_data(timing) | {"model": row["model"], "batch": batch}
            row["timings"].append(facts | {"throughput": batch / timing.latency.median, "load": model.load})
            row["ran_on"] = engine_on(row["provider"]).name()
        found["seconds"] = time.perf_counter() - begun
        yield found


def machine(threads: int) -> dict[str, Any]:
    """What ran it."""
    facts = measure.machine() | {"threads": threads, "instructions": instructions(), "packages": {}}
    for name in PACKAGES:
        try:
            facts["packages"][name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def goals(subjects: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is promised of each network at each batch, what was found, and whether it holds."""
    found: list[dict[str, Any]] = []

    def goal(text: str, value: float | None, limit: float, *, least: bool) -> None:
        holds = value is not None and (value >= limit if least else value <= limit)
        found.append({"goal": text, "found": value, "holds": holds})

    for subject in subjects:
        rows = {row["model"]: row for row in subject["variants"]}
        errors = [rows.get(name, {}).get("error") for name in (TUNED, OWN)]
        share = None if None in errors else errors[0] / max(errors[1], 1e-12)
        goal(f"{subject['name']}: at most {SHARE:g} of OpenVINO's own error", share, SHARE, least=False)
        for batch in subject["batches"]:
            mine, own, first = (median(rows.get(name), batch) for name in (TUNED, OWN, REFERENCE))
            behind = mine / own if mine and own else None
            goal(f"{subject['name']}, batch {batch}: OpenVINO's own time + 5 %", behind, BEHIND, least=False)
            if batch == min(subject["batches"]) and subject["name"] in FASTER:
                times, least = first / mine if mine and first else None, FASTER[subject["name"]]
                goal(f"{subject['name']}, batch {batch}: {least:g} times {REFERENCE}", times, least, least=True)
    return found


def median(row: Mapping[str, Any] | None, batch: int) -> float | None:
    """Seconds of a run at a batch."""
    timings = row["timings"] if row else ()
    return next((timing["latency"]["median"] for timing in timings if timing["batch"] == batch), None)


def table(subject: Mapping[str, Any]) -> str:
    """A network's figures as text."""
    lines = [f"{subject['title']}"]
    for row in subject["variants"]:
        times = "".join(f"{timing['latency']['median'] * 1e3:10.2f} ms" for timing in row["timings"])
        error = "-" if row["error"] is None else f"{row['error']:.2e}"
        lines.append(f"  {row['model']:28}{error:>10}{times}")
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in subject["missing"].items())])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="tiny networks: shows that it works, and nothing else")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    parser.add_argument("--only", nargs="+", choices=[shape.name for shape in CPU], help="FILE keeps the others")
    parser.add_argument("--threads", type=int, default=physical_cores(), help="of what is timed [the physical cores]")
    parser.add_argument("--seconds", type=float, default=0.4, help="timing of each variant at each batch [0.4]")
    parser.add_argument("--tuning", type=float, default=15.0, help="seconds to search in for each network [15]")
    parser.add_argument("--runs", type=int, default=12, help="runs that may measure sensitivities [12]")
    parser.add_argument("--limit", type=float, default=330.0, help="start nothing after so many seconds [330]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.json", help="the JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, judge. The file is written anew after each batch: what was measured stays, whatever comes."""
    options, start = options_of(arguments), time.perf_counter()
    os.environ["ONNXAMP_THREADS"] = str(physical_cores())
    try:
        choose_provider("openvino")
    except onnxamp.RuntimeFailure as error:
        sys.stderr.write(f"{error}\n")
        return 1
    kept = json.loads(options.out.read_text()) if options.only and options.out.is_file() else {"subjects": []}
    others = [one for one in kept["subjects"] if one["name"] not in options.only]
    facts: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "subjects": others, "failed": {}}
    facts["machine"] = machine(options.threads)
    sys.stderr.write(f"{facts['machine']['processor']}, {options.threads} threads (default: physical cores)\n")
    judged = bool(facts["machine"]["instructions"]) and not options.quick
    if not facts["machine"]["instructions"]:
        facts["note"] = "This CPU has neither AMX nor AVX512-BF16: bfloat16 is no faster than float32 here."
        sys.stderr.write(f"{facts['note']}\n")
    chosen = [shape for shape in (CPU_QUICK if options.quick else CPU) if shape.name in (options.only or [shape.name])]
    for number, shape in enumerate(chosen):
        passed = time.perf_counter() - start
        if passed > options.limit:
            facts["failed"][shape.name] = f"not started: {options.limit:g} s were over"
            continue
        until = start + passed + (options.limit - passed) / (len(chosen) - number)
        with tempfile.TemporaryDirectory(prefix="onnxamp-", ignore_cleanup_errors=True) as folder:
            try:
                for subject in measured(shape, Path(folder), options, until):
                    facts["subjects"] = [one for one in facts["subjects"] if one["name"] != shape.name] + [subject]
                    facts["goals"] = goals(facts["subjects"]) if judged else []
                    facts["seconds"] = time.perf_counter() - start
                    options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
                sys.stderr.write(f"{table(subject)}\n")
            except onnxamp.OnnxAmpError as error:
                facts["failed"][shape.name] = sentence(error)
        sys.stderr.write(
            f"{shape.name}: {facts['failed'].get(shape.name, 'done')}, {time.perf_counter() - start:.0f} s\n"
        )
    options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for goal in facts.get("goals", ()):
        sys.stderr.write(f"{'holds ' if goal['holds'] else 'MISSED'}  {goal['goal']}: {goal['found']}\n")
    missed = options.check and not all(goal["holds"] for goal in facts.get("goals", ()))
    return 1 if missed or facts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
