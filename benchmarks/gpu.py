"""onnxamp on a GPU: float32 with and without TF32, its levels in float16 and bfloat16, and other converters' float16.

python benchmarks/gpu.py [--provider cuda|cpu] [--quick] [--check] [--limit SECONDS] [--only NAME ...] [--out FILE]

Generates the networks, converts each, times all of one network in turns on the same inputs, which are on the device,
and writes one JSON file (benchmarks/results/gpu.json) and a picture (docs/gpu.svg). Of the headline variant it also
keeps the time per op type and the error against float32, both run whole. --check holds the results to the goals. With
--provider cpu --quick the same code runs anywhere, on tiny shapes: that shows that it works, and nothing else.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Any, Final

import gpu_picture
import onnx
from onnx import ModelProto
from shapes import FULL, QUICK, Shape

import onnxamp
from onnxamp import BenchReport, bench_models, convert_model, diff_models
from onnxamp._numerics.speed.bench import BenchOptions
from onnxamp._report.formats import as_data
from onnxamp._runtime.sessions.session import choose_provider

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = (
    "onnx", "onnxruntime-gpu", "onnxruntime", "numpy", "onnxconverter-common", "nvidia-modelopt",
    "nvidia-cuda-runtime", "nvidia-cublas", "nvidia-cudnn-cu13",
)  # fmt: skip
REFERENCE: Final = "float32, TF32 off"
TF32: Final = "float32, TF32 on"
HEADLINE: Final = "O2, float16"
TOLERANCE: Final = 1e-3
"""What level auto is held to: less than O2 of BERT-base is off."""

Convert = Callable[[ModelProto], ModelProto]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a network; ``peer`` says that another tool made it."""

    name: str
    convert: Convert | None
    tf32: bool = True
    peer: bool = False


def by_onnxamp(**wishes: Any) -> Convert:
    return lambda model: convert_model(model, **wishes)


def by_tuning(shape: Shape) -> Convert:
    def tuned(model: ModelProto) -> ModelProto:
        samples = onnxamp.random_samples(model, 1, dims=shape.dims)
        return onnxamp.tune_model(model, TOLERANCE, samples=samples).model

    return tuned


def by_onnxruntime(model: ModelProto) -> ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415 - it may be missing

    return convert_float_to_float16(copied(model), keep_io_types=True)


def by_converter_common(model: ModelProto) -> ModelProto:
    from onnxconverter_common import float16  # noqa: PLC0415 - it may be missing

    return float16.convert_float_to_float16(copied(model), keep_io_types=True)


def by_modelopt(model: ModelProto) -> ModelProto:
    from modelopt.onnx.autocast import convert_to_mixed_precision  # noqa: PLC0415 - it may be missing

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path)
        return convert_to_mixed_precision(str(path), keep_io_types=True)


def copied(model: ModelProto) -> ModelProto:
    result = ModelProto()
    result.CopyFrom(model)
    return result


def variants(shape: Shape) -> Iterator[Variant]:
    """All ways, the reference first."""
    yield Variant(REFERENCE, None, tf32=False)
    yield Variant(TF32, None)
    for dtype in ("float16", "bfloat16"):
        for level in ("O1", "O2", "O3"):
            yield Variant(f"{level}, {dtype}", by_onnxamp(level=level, dtype=dtype))
    yield Variant("O2, conservative lists", by_onnxamp(lists="conservative"))
    yield Variant("O2, everything folded", by_onnxamp(fold=True))
    yield Variant("O2, low in and out", by_onnxamp(keep_io_types=False))
    yield Variant(f"auto at {TOLERANCE:g}", by_tuning(shape))
    for name, convert in (
        ("onnxruntime.transformers", by_onnxruntime),
        ("onnxconverter-common", by_converter_common),
        ("NVIDIA AutoCast", by_modelopt),
    ):
        yield Variant(name, convert, peer=True)


@dataclass(slots=True)
class Made:
    """The variants of a network as files, and why others are missing."""

    files: dict[Variant, Path] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """What converting took."""


def make(shape: Shape, folder: Path) -> Made:
    """Generate and convert."""
    model, made = shape.model(folder), Made()
    original = folder / "float32.onnx"
    onnx.save(model, original)
    for number, variant in enumerate(variants(shape)):
        if variant.convert is None:
            made.files[variant] = original
            continue
        start = time.perf_counter()
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # some peers print
                converted = variant.convert(model)
        except Exception as error:  # noqa: BLE001 - peers raise whatever they like, and may not be installed
            made.missing[variant.name] = sentence(error)
            continue
        made.seconds[variant.name] = time.perf_counter() - start
        made.files[variant] = folder / f"{number}.onnx"
        onnx.save(converted, made.files[variant])
    return made


def sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def timed(shape: Shape, made: Made, provider: str, seconds: float) -> BenchReport:
    """Time all variants in turns; those that do not load or run are taken out, and noted."""
    profiled = {REFERENCE, HEADLINE}
    while True:
        names = [variant.name for variant in made.files]
        options = [BenchOptions(tf32=v.tf32, seconds=seconds, profile=v.name in profiled) for v in made.files]
        try:
            return bench_models(
                *made.files.values(), provider=provider, batches=shape.batches, dims=shape.dims, options=options
            )
        except onnxamp.RuntimeFailure as error:
            broken = {name: why for name in names if (why := trouble(shape, made, name, provider))}
            if REFERENCE in broken or not (broken or profiled):
                raise
            if not broken:  # each runs by itself: it was profiling that failed
                made.missing["time per op"], profiled = sentence(error), set()
            made.missing |= broken
            made.files = {variant: path for variant, path in made.files.items() if variant.name not in broken}


def trouble(shape: Shape, made: Made, name: str, provider: str) -> str | None:
    """Why a variant does not load and run by itself."""
    path = next(path for variant, path in made.files.items() if variant.name == name)
    try:
        bench_models(
            path, provider=provider, batches=shape.batches[:1], dims=shape.dims,
            options=BenchOptions(seconds=0.001, profile=False),
        )  # fmt: skip
    except onnxamp.RuntimeFailure as error:
        return sentence(error)
    return None


def measure(shape: Shape, folder: Path, provider: str, seconds: float) -> dict[str, Any]:
    """All that is known of one network."""
    made = make(shape, folder)
    report = timed(shape, made, provider, seconds)
    label = {model.model: variant for model, variant in zip(report.models, made.files, strict=True)}
    rows = []
    for model in report.models:
        variant = label[model.model]
        timings = [
            as_data(timing) | {"model": variant.name} for timing in report.timings if timing.model == model.model
        ]
        facts = as_data(model) | {"model": variant.name, "peer": variant.peer, "timings": timings}
        del facts["kinds"]
        rows.append(facts)
    causes = [as_data(cause) | {"model": label[cause.model].name} for cause in report.causes]
    found = {"name": shape.name, "title": shape.title, "batches": shape.batches, "dims": dict(shape.dims)}
    found["date"] = datetime.now(UTC).date().isoformat()
    found |= {
        "ran_on": report.ran_on,
        "variants": rows,
        "causes": causes,
        "missing": made.missing,
        "conversion_seconds": made.seconds,
    }
    return found | {"error": error_of(made, shape, provider)}


def error_of(made: Made, shape: Shape, provider: str) -> dict[str, Any] | None:
    """The headline variant against float32, both whole on CUDA (on CPU emulated), at the smallest batch."""
    path = next((path for variant, path in made.files.items() if variant.name == HEADLINE), None)
    if path is None:
        return None
    samples = onnxamp.random_samples(onnx.load(made.files[next(iter(made.files))]), dims=shape.dims)
    found = diff_models(made.files[next(iter(made.files))], path, samples, provider=provider)
    worst = max((diff.rel_l2 for diff in found.outputs if diff.is_float), default=0.0)
    return as_data({
        "variant": HEADLINE, "ran_on": found.ran_on, "rel_l2": worst, "noise": found.noise, "passed": found.passed,
        "failure": found.failure or found.skipped,
    })  # fmt: skip


def machine(ran_on: str) -> dict[str, Any]:
    """What ran it."""
    facts: dict[str, Any] = {"ran_on": ran_on, "platform": platform.platform(), "python": platform.python_version()}
    facts["packages"] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts["packages"][name] = version(name)
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        facts["nvidia_smi"] = dict(zip(query.split(","), done.stdout.strip().split(", "), strict=False))
    return facts


def speed(row: dict[str, Any], batch: int) -> dict[str, Any] | None:
    """The timing at a batch."""
    return next((timing for timing in row["timings"] if timing["batch"] == batch), None)


def goals(subjects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is promised, what was found, and whether it holds."""
    found: list[dict[str, Any]] = []

    def goal(text: str, value: Any, holds: bool) -> None:
        found.append({"goal": text, "found": value, "holds": bool(holds)})

    bert = next((subject for subject in subjects if subject["name"] == "bert"), None)
    if bert is None:
        goal("BERT-base is measured", None, holds=False)
        return found
    rows = {row["model"]: row for row in bert["variants"]}
    if HEADLINE not in rows:
        goal(f"{HEADLINE} runs", bert["missing"].get(HEADLINE), holds=False)
        return found
    batch = max(bert["batches"])
    mine = speed(rows[HEADLINE], batch)["latency"]["median"]
    for name, least in ((REFERENCE, 3.0), (TF32, 1.5)):
        times = speed(rows[name], batch)["latency"]["median"] / mine
        goal(f"BERT-base at batch {batch}, {HEADLINE}: at least {least} times {name}", times, times >= least)
    for row in (row for row in bert["variants"] if row["peer"]):
        times = speed(row, batch)["latency"]["median"] / mine
        goal(f"... and not behind {row['model']} (2 % are noise)", times, times >= 0.98)
    on_cpu = {row["op"]: row["nodes"] for row in rows[HEADLINE]["ops"] if row["provider"] == "CPU"
              and row["dtype"] != "no floats"}  # fmt: skip
    goal("... and no node with floats on CPU", on_cpu, not on_cpu)
    for subject in subjects:
        error = subject["error"]
        goal(f"{subject['name']}: {HEADLINE} is within its tolerance", error, error is not None and error["passed"])
    return found


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--provider", choices=["cuda", "cpu"], default="cuda", help="where to run [cuda]")
    parser.add_argument("--quick", action="store_true", help="tiny networks")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed (on CUDA only)")
    parser.add_argument("--only", nargs="+", choices=[shape.name for shape in FULL], help="only these networks")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing of each variant at each batch [0.3]")
    parser.add_argument("--limit", type=float, default=300.0, help="start no network after so many seconds [300]")
    parser.add_argument("--out", type=Path, help="the JSON file, the picture beside it [benchmarks/results/gpu.json]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, judge. The file is written anew after each network: what was measured stays, whatever comes."""
    options, start = options_of(arguments), time.perf_counter()
    try:
        choose_provider(options.provider)
    except onnxamp.RuntimeFailure as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.provider == "cpu" and options.out is None:
        sys.stderr.write("Results of a CPU say nothing of a GPU: name a file with --out to keep them.\n")
        return 2
    out = options.out or ROOT / "benchmarks" / "results" / "gpu.json"
    picture = out.with_suffix(".svg") if options.out else ROOT / "docs" / "gpu.svg"
    facts: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "subjects": [], "failed": {}}
    for shape in QUICK if options.quick else FULL:
        if options.only and shape.name not in options.only:
            continue
        if time.perf_counter() - start > options.limit:
            facts["failed"][shape.name] = f"not started: {options.limit:g} s were over"
            continue
        with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder:
            try:
                facts["subjects"].append(measure(shape, Path(folder), options.provider, options.seconds))
            except onnxamp.OnnxAmpError as error:
                facts["failed"][shape.name] = sentence(error)
        passed = time.perf_counter() - start
        sys.stderr.write(f"{shape.name}: {facts['failed'].get(shape.name, 'done')}, {passed:.0f} s\n")
        if facts["subjects"]:
            facts["machine"] = machine(facts["subjects"][0]["ran_on"])
        facts["goals"] = goals(facts["subjects"]) if options.provider == "cuda" and not options.quick else []
        facts["seconds"] = passed
        out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if facts["subjects"]:
        picture.write_text(gpu_picture.draw(facts, REFERENCE), encoding="utf-8")
    for goal in facts["goals"]:
        sys.stderr.write(f"{'holds ' if goal['holds'] else 'MISSED'}  {goal['goal']}: {goal['found']}\n")
    missed = options.check and not all(goal["holds"] for goal in facts["goals"])
    return 1 if missed or facts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
