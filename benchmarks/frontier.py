"""Level auto at five tolerances: ten models or more, each of which must never get slower as its tolerance widens.

python benchmarks/frontier.py [--tolerance 3e-4 ...] [--device A100 T4] [--check] [--out FILE] [MODEL ...]

Models are those of the repository, four generated ones, and whatever is named; inputs are made up, unless a .npz of the
model's name lies beside it. Nothing is kept from one tolerance to the next. Times are estimated for an A100, on which
small models gain little, and for a T4, on which almost every choice matters. "time" is the estimate in microseconds of
what is written, "float32" that of the model as it was; "runs" counts samples whose sensitivities were measured and
models that were converted and judged. Writes benchmarks/results/frontier.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any, Final

import onnx
from auto import encoder
from measure import machine
from onnx import ModelProto
from subjects import Spec, decoder, unet
from subjects import encoder as bert

from onnxamp import Samples, load_samples, random_samples, tune_model

ROOT: Final = Path(__file__).resolve().parents[1]
GENERATED: Final = (
    Spec("bert", "BERT, 4 layers", bert, {"layers": 4, "hidden": 512, "heads": 8, "length": 256, "vocabulary": 1000}),
    Spec("decoder", "decoder with KV cache", decoder,
         {"layers": 4, "hidden": 512, "heads": 8, "inner": 1376, "vocabulary": 8000}),
    Spec("unet", "U-Net", unet, {"width": 32, "depth": 3, "size": 128}),
)  # fmt: skip


def subjects(paths: Sequence[Path]) -> Iterator[tuple[str, ModelProto, Samples]]:
    """Names, models and inputs."""
    for path in (*sorted((ROOT / "models").glob("*.onnx")), *paths):
        model, inputs = onnx.load(path), path.with_suffix(".npz")
        yield path.stem, model, load_samples(inputs) if inputs.exists() else random_samples(model, 1)
    generated = [(f"generated {spec.name}", spec.build(Path(), **spec.sizes)) for spec in GENERATED]
    for name, model in (*generated, ("generated encoder", encoder())):
        yield name, model, random_samples(model, 1)


def tuned(name: str, model: ModelProto, samples: Samples, tolerance: float, device: str) -> dict[str, Any]:
    """What one tuning chooses, and what it takes."""
    start, used = time.perf_counter(), time.process_time()
    _, found = tune_model(model, tolerance, samples=samples, device=device, provider="cpu")
    seconds, used = time.perf_counter() - start, time.process_time() - used
    chosen, float32 = found.candidates[found.chosen], found.candidates[-1]
    return {
        "model": name,
        "device": device,
        "tolerance": tolerance,
        "time": round(chosen.time, 2),
        "float32": round(float32.time, 2),
        "nodes": f"{chosen.nodes} of {found.units}",
        "runs": found.runs + found.conversions,
        "seconds": round(seconds, 2),
        "processor seconds": round(used, 2),
        "error": float(f"{found.error:.3g}"),
        "held": found.held,
    }


def is_monotone(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether a model's results on a device never get slower as the tolerance widens."""
    times = [row["time"] for row in sorted(rows, key=lambda row: float(row["tolerance"]))]
    return all(later <= earlier for earlier, later in pairwise(times))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What holds for all of them, and what they take together."""
    series = [list(group) for _, group in groupby(rows, lambda row: (row["model"], row["device"]))]
    return {
        "models": len({row["model"] for row in rows}),
        "not monotone": [f"{own[0]['model']} on {own[0]['device']}" for own in series if not is_monotone(own)],
        "missed": [f"{row['model']} on {row['device']} at {row['tolerance']:g}" for row in rows if not row["held"]],
        "runs": sum(row["runs"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "processor seconds": round(sum(row["processor seconds"] for row in rows), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", type=Path, help="further models")
    parser.add_argument("--tolerance", type=float, nargs="+", default=[3e-4, 6e-4, 1e-3, 3e-3, 1e-2])
    parser.add_argument("--device", nargs="+", default=["A100", "T4"], help="the devices that times are estimated for")
    parser.add_argument("--check", action="store_true", help="exit code 1 unless all are monotone and hold")
    results = ROOT / "benchmarks" / "results" / "frontier.json"
    parser.add_argument("--out", type=Path, default=results)
    options = parser.parse_args(arguments)
    rows = list[dict[str, Any]]()
    for name, model, samples in subjects(options.models):
        for device, tolerance in product(options.device, sorted(options.tolerance)):
            rows.append(tuned(name, model, samples, tolerance, device))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    told = summary(rows)
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    facts = {"metric": "rel-l2", "machine": machine(), "summary": told, "results": rows}
    options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if options.check and (told["not monotone"] or told["missed"]):
        raise SystemExit("A wider tolerance gives a slower model, or an error exceeds its tolerance.")


if __name__ == "__main__":
    main()
