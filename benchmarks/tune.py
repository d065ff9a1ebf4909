"""What ``onnxamp tune`` takes for a decoder of 2 GB: time, and memory beside the model.

python benchmarks/tune.py [--quick] [--tolerance 1e-2 ...] [--samples 3] [--check] [--cache FOLDER]

The decoder is the one of ``subjects.py``, with 20 layers of 1408 and weights in a data file. Each run is a process of
its own, watched from outside; "peak" is the most memory that it held, mapped pages of files included, "anonymous" the
most that cannot be reclaimed. Writes benchmarks/results/tune.json, unless ``--quick`` asks for a small decoder.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import machine, warm, watched
from subjects import Spec, decoder

HERE = Path(__file__).resolve().parent
LARGE = Spec(
    "decoder-2gb", "2 GB decoder", decoder,
    {"layers": 20, "hidden": 1408, "heads": 22, "inner": 3776, "vocabulary": 32000}, external=True,
)  # fmt: skip
SMALL = Spec(
    "decoder-small", "decoder, small", decoder,
    {"layers": 2, "hidden": 64, "heads": 4, "inner": 96, "vocabulary": 100}, external=True,
)  # fmt: skip
MOST_SECONDS, MOST_MEMORY = 120, 1.5
"""What a tuning of the 2 GB decoder may take: seconds, and multiples of the model's size."""

CHILD = """
import json, resource, sys, time
import onnxamp
from onnxamp._cli.command import group
start, used = time.perf_counter(), time.process_time()
group.main(["tune", *sys.argv[1:], "--quiet"], standalone_mode=False)
seconds, used = time.perf_counter() - start, time.process_time() - used
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "processor seconds": used, "peak": peak}))
"""


def measured(model: Path, tolerance: float, samples: int, limit: float) -> dict[str, Any]:
    """What one tuning takes, and reaches."""
    for file in (model, model.with_suffix(".data")):
        warm(file)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        command = [
            sys.executable, "-c", CHILD, str(model), "-o", str(Path(folder, "low.onnx")), "--samples", str(samples),
            "--tolerance", str(tolerance), "--save-plan", str(plan), "--allow-slower",
        ]  # fmt: skip
        found = watched(command, limit=limit, memory=32 << 30, environment=os.environ)
        if plan.exists():
            rows = json.loads(plan.read_text())["rows"]
            found["low"] = sum(row["low"] for row in rows) / len(rows)
    size = sum(file.stat().st_size for file in (model, model.with_suffix(".data")))
    facts = {"tolerance": tolerance, "samples": samples, "bytes": size, **found}
    return facts if "failure" in facts else facts | {"times the model": facts["peak"] / size}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tolerance", type=float, nargs="+", default=[1e-2, 3e-4])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which a run is stopped")
    parser.add_argument("--quick", action="store_true", help="a small decoder, and nothing is written")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a run takes more than it may")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--cache", type=Path, default=cache / "onnxamp-benchmarks")
    options = parser.parse_args(arguments)
    model = (SMALL if options.quick else LARGE).file(options.cache / "models")
    runs = [measured(model, tolerance, options.samples, options.limit) for tolerance in options.tolerance]
    sys.stdout.write(json.dumps(runs, indent=1) + "\n")
    if not options.quick:
        facts = {"machine": machine(), "runs": runs}
        (HERE / "results" / "tune.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    good = (
        "failure" not in run and run["seconds"] <= MOST_SECONDS and run["times the model"] <= MOST_MEMORY
        for run in runs
    )
    if options.check and not options.quick and not all(good):
        raise SystemExit("A run took more than it may.")


if __name__ == "__main__":
    main()
