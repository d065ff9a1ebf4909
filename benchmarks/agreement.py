"""How well emulation foretells an engine: the emulated error of converted models beside the one that is seen there.

python benchmarks/agreement.py PROVIDER [--target T] [--jobs N] [--limit SECONDS] [--each SECONDS] [--out FILE]
                               [MODEL.onnx ...]

Converts models/ and the graphs of the tests' corpus (and models given as files; with --only-files these alone) at O1,
O2 and O3 to float16 and bfloat16, and compares each distinct result that holds low precision with float32 twice, on the
same inputs: emulated, and run whole on the engine. The inputs of NAME.onnx are those of NAME.npz, or of the files in
a folder NAME, if there is one beside it; else random.

error     relative L2, as the root mean square over the samples, of the worst output. The error of one number is a
          random draw, there and in emulation, so that results whose smallest output holds few numbers are run on more
          samples: as many as make 64 numbers of it, from 4 up to 64. What is not finite or worse than 1 counts as 1.
agreement the larger error is at most twice the smaller one; or it is at most 1e-5, which passes as float32; or at
          most twice what float32 itself is off on the engine.
missed    a result that passes emulated on all samples and is beyond the default limit on the engine on one. Each sample
          is judged alone, so that few numbers pass emulated only with a part of that limit.

Models that draw random numbers are left out. Results that stay in float32 have no emulated error: their
number, and that of those that fail on the engine, are listed separately.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from math import ceil, sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import ModelProto

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import onnxamp  # noqa: E402 - beside the path to the corpus
from onnxamp._facts.ops import op_facts  # noqa: E402
from onnxamp._numerics.judging import apply_limits  # noqa: E402
from onnxamp._report.formats import as_data  # noqa: E402
from onnxamp._runtime import LEAST  # noqa: E402
from onnxamp._runtime.inputs.sample_counts import NUMBERS  # noqa: E402

LEVELS: Final = ("O1", "O2", "O3")
TYPES: Final = ("float16", "bfloat16")
FLOAT32: Final = 1e-5
"""The default tolerance of float32 models."""


def subjects(files: Sequence[str], *, only_files: bool) -> list[str]:
    """Names of all models: paths, and cases of the corpus."""
    from graphs import CASES  # noqa: PLC0415 - each worker finds it by itself

    return [*files] if only_files else [*map(str, sorted((ROOT / "models").glob("*.onnx"))), *files, *CASES]


def load(name: str) -> ModelProto:
    from graphs import CASES  # noqa: PLC0415

    return CASES[name].build() if name in CASES else onnx.load(name)


def compared(name: str, provider: str, target: str, each: float) -> list[dict[str, Any]]:
    """One row for each distinct result of converting a model."""
    warnings.simplefilter("ignore", onnxamp.OptionWarning)
    model = load(name)
    if any(node.op_type in op_facts().random for node in model.graph.node):  # they draw other numbers each time
        return []
    return [
        {"model": Path(name).stem, "level": level, "dtype": dtype}
        | errors(model, low, provider, target, each, inputs_beside(name))
        for level, dtype, low in results(model, target)
    ]


def inputs_beside(name: str) -> Path | None:
    """The inputs of a model that is a file, where there are any beside it."""
    if not name.endswith(".onnx"):
        return None
    places = (Path(name.removesuffix(".onnx") + suffix) for suffix in (".npz", ""))
    return next((path for path in places if path.exists()), None)


def results(model: ModelProto, target: str) -> Iterator[tuple[str, str, ModelProto]]:
    seen = set()
    for dtype in TYPES:
        for level in LEVELS:
            try:
                low = onnxamp.convert_model(model, level=level, dtype=dtype, target=target)
            except onnxamp.OnnxAmpError:  # what cannot be converted is no matter of numbers
                continue
            text = low.SerializeToString(deterministic=True)
            if text not in seen:
                seen.add(text)
                yield level, dtype, low


def errors(
    model: ModelProto, low: ModelProto, provider: str, target: str, each: float, inputs: Path | None
) -> dict[str, Any]:
    """Both errors, and both verdicts; no sample beyond the least number is taken once they took ``each`` seconds."""
    start, pairs = time.monotonic(), list[tuple[onnxamp.DiffReport, onnxamp.DiffReport]]()
    given = onnxamp.random_samples(model, NUMBERS) if inputs is None else onnxamp.load_samples(inputs)
    for reader in given.readers:
        how: Any = {"samples": replace(given, readers=[reader]), "layers": False}
        emulated = onnxamp.diff_models(model, low, provider="cpu", target=target, **how)
        pairs.append((emulated, onnxamp.diff_models(model, low, provider=provider, **how)))
        if len(pairs) >= wanted(pairs[0], least=time.monotonic() - start > each):
            break
    emulations, runs = zip(*pairs, strict=True)
    skipped = next((one.skipped or other.skipped for one, other in pairs if one.skipped or other.skipped), None)
    return {
        "emulated": error(emulations), "emulated_passes": all(found.passed for found in emulations),
        "real": error(runs), "real_passes": all(map(within_limit, runs)),
        "noise": max(found.noise or 0.0 for found in runs), "samples": len(pairs), "ran_on": runs[0].ran_on,
        "lowest": runs[0].lowest, "skipped": skipped,
        "failure": next((run.failure for run in runs if run.failure), None),
    }  # fmt: skip


def within_limit(found: onnxamp.DiffReport) -> bool:
    """Whether a comparison is within the whole default limit, however few numbers it shows."""
    return apply_limits(replace(found, drawn=False), onnxamp.Limits()).passed


def wanted(pair: tuple[onnxamp.DiffReport, onnxamp.DiffReport], *, least: bool) -> int:
    """How many samples to take, from the first one."""
    if any(found.skipped or found.failure for found in pair) or pair[1].lowest == "float32":
        return 1
    if least:
        return LEAST
    smallest = min((diff.size for diff in pair[1].outputs if diff.is_float and diff.size), default=NUMBERS)
    return max(LEAST, ceil(NUMBERS / smallest))


def error(found: Sequence[onnxamp.DiffReport]) -> float:
    """The root mean square over samples, of the worst output."""
    squares: dict[str, list[float]] = {}
    for report in found:
        for diff in report.outputs:
            if diff.is_float:
                squares.setdefault(diff.name, []).append(min(diff.rel_l2, 1.0) ** 2)
    return max((sqrt(sum(one) / len(one)) for one in squares.values()), default=0.0)


def agrees(row: Mapping[str, Any]) -> bool:
    small, large = sorted((row["emulated"], row["real"]))
    return bool(large <= max(2 * small, 2 * row["noise"], FLOAT32))


def is_missed(row: Mapping[str, Any]) -> bool:
    return bool(row["emulated_passes"] and not row["real_passes"])


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by low type, of results and of models all of whose results agree, and what is missed."""
    counted = [row for row in rows if not row["skipped"]]
    unchanged = [row for row in counted if row["lowest"] == "float32"]
    held = [row for row in counted if row["lowest"] != "float32"]
    found: dict[str, Any] = {"compared": len(held), "skipped": len(rows) - len(counted)}
    for dtype in TYPES:
        ones = [row for row in held if row["dtype"] == dtype]
        off = {row["model"] for row in ones if not agrees(row)}
        models = {row["model"] for row in ones}
        found[dtype] = {
            "compared": len(ones), "within a factor of 2": sum(map(agrees, ones)),
            "models": len(models), "models within a factor of 2": len(models - off),
        }  # fmt: skip
    found["float32"] = {"results": len(unchanged), "fail there": [named(row) for row in unchanged if is_missed(row)]}
    found["pass emulated, fail there"] = [named(row) for row in held if is_missed(row)]
    return found


def named(row: Mapping[str, Any]) -> str:
    return f"{row['model']} {row['level']} {row['dtype']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; exit code 1 if a model is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("provider", help="the engine, as --provider takes it")
    parser.add_argument("files", nargs="*", metavar="MODEL.onnx", help="further models")
    parser.add_argument("--target", help="what models are made for, and whose arithmetic is emulated [the provider's]")
    parser.add_argument("--jobs", type=int, default=2, help="processes [2]")
    parser.add_argument("--limit", type=float, default=3600.0, help="stop after so many seconds [3600]")
    parser.add_argument(
        "--each", type=float, default=60.0, help="seconds after which a result gets no sample more [60]"
    )
    parser.add_argument("--only-files", action="store_true", help="leave out models/ and the corpus")
    parser.add_argument("--out", type=Path, help="the JSON file [benchmarks/results/agreement-PROVIDER.json]")
    given = parser.parse_intermixed_args(arguments)
    start, rows, failed = time.monotonic(), [], {}
    job = partial(compared, provider=given.provider, target=given.target or given.provider, each=given.each)
    # an engine may mix up what it compiled for one model with the next one's: a process for each
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(job, name): name for name in subjects(given.files, only_files=given.only_files)}
        try:
            for done in as_completed(waiting, timeout=given.limit):
                if done.exception() is None:
                    rows += done.result()
                else:
                    failed[Path(waiting[done]).stem] = str(done.exception())[:300]
        except TimeoutError:
            pool.shutdown(wait=False, cancel_futures=True)
    found = summary(rows) | {"models": len(waiting), "failed": failed, "seconds": round(time.monotonic() - start)}
    found["ran_on"] = sorted({row["ran_on"] for row in rows if row["ran_on"]})
    out = given.out or ROOT / "benchmarks" / "results" / f"agreement-{given.provider}.json"
    rows.sort(key=lambda row: (row["model"], row["dtype"], row["level"]))
    off = [row for row in rows if not row["skipped"] and row["lowest"] != "float32" and not agrees(row)]
    out.write_text(json.dumps(as_data(found | {"disagree": off}), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["pass emulated, fail there"] else 0


if __name__ == "__main__":
    sys.exit(main())
