"""How well emulation foretells an engine: the emulated error of converted models beside the one that is seen there.

python benchmarks/agreement.py PROVIDER [--target T] [--jobs N] [--limit SECONDS] [--out FILE] [MODEL.onnx ...]

Converts models/ and the graphs of the tests' corpus (and models given as files) at O1, O2 and O3 to float16 and
bfloat16, and compares each distinct result with float32 twice, on the same inputs: emulated, and run whole on the
engine. Errors are relative L2, the worst of the outputs. Two errors agree if they are within a factor of 2, or both
below what float32 itself is off on the engine; a model is missed if it passes emulated and fails on the engine.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import ModelProto

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import onnxamp  # noqa: E402 - beside the path to the corpus
from onnxamp._report.machine import as_data  # noqa: E402

LEVELS: Final = ("O1", "O2", "O3")
TYPES: Final = ("float16", "bfloat16")


def subjects(files: Sequence[str]) -> list[str]:
    """Names of all models: paths, and cases of the corpus."""
    from graphs import CASES  # noqa: PLC0415 - each worker finds it by itself

    return [*map(str, sorted((ROOT / "models").glob("*.onnx"))), *files, *CASES]


def load(name: str) -> ModelProto:
    from graphs import CASES  # noqa: PLC0415

    return CASES[name].build() if name in CASES else onnx.load(name)


def compared(name: str, provider: str, target: str) -> list[dict[str, Any]]:
    """One row for each distinct result of converting a model."""
    warnings.simplefilter("ignore", onnxamp.OptionWarning)
    model = load(name)
    return [
        {"model": Path(name).stem, "level": level, "dtype": dtype} | errors(model, low, provider, target)
        for level, dtype, low in results(model, target)
    ]


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


def errors(model: ModelProto, low: ModelProto, provider: str, target: str) -> dict[str, Any]:
    """Both errors, and both verdicts."""
    emulated = onnxamp.diff_models(model, low, provider="cpu", target=target, layers=False)
    real = onnxamp.diff_models(model, low, provider=provider, layers=False)
    return {
        "emulated": worst(emulated), "emulated_passes": emulated.passed and emulated.skipped is None,
        "real": worst(real), "real_passes": real.passed, "noise": real.noise, "ran_on": real.ran_on,
        "skipped": emulated.skipped or real.skipped, "failure": real.failure,
    }  # fmt: skip


def worst(found: onnxamp.DiffReport) -> float:
    return max((diff.rel_l2 for diff in found.outputs if diff.is_float), default=0.0)


def agrees(row: Mapping[str, Any]) -> bool:
    small, large = sorted((row["emulated"], row["real"]))
    return large <= 2 * small or large <= 2 * (row["noise"] or 0.0)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by low type, and the models that are missed."""
    counted = [row for row in rows if not row["skipped"]]
    found: dict[str, Any] = {"compared": len(counted), "skipped": len(rows) - len(counted)}
    for dtype in TYPES:
        ones = [row for row in counted if row["dtype"] == dtype]
        found[dtype] = {"compared": len(ones), "within a factor of 2": sum(map(agrees, ones))}
    missed = [row for row in counted if row["emulated_passes"] and not row["real_passes"]]
    found["pass emulated, fail there"] = [f"{row['model']} {row['level']} {row['dtype']}" for row in missed]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; exit code 1 if a model is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("provider", help="the engine, as --provider takes it")
    parser.add_argument("files", nargs="*", metavar="MODEL.onnx", help="further models")
    parser.add_argument("--target", help="what models are made for, and whose arithmetic is emulated [the provider's]")
    parser.add_argument("--jobs", type=int, default=2, help="processes [2]")
    parser.add_argument("--limit", type=float, default=3600.0, help="stop after so many seconds [3600]")
    parser.add_argument("--out", type=Path, help="the JSON file [benchmarks/results/agreement-PROVIDER.json]")
    given = parser.parse_args(arguments)
    start, rows, failed = time.monotonic(), [], {}
    job = partial(compared, provider=given.provider, target=given.target or given.provider)
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(job, name): name for name in subjects(given.files)}
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
    off = [row for row in rows if not row["skipped"] and not agrees(row)]
    out.write_text(json.dumps(as_data(found | {"disagree": off}), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["pass emulated, fail there"] else 0


if __name__ == "__main__":
    sys.exit(main())
