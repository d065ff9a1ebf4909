"""Measure the share of values that is proven, and find overflow and errors that random inputs do not show.

Each model is converted with one command, with and without inputs that are made to be hard, and the value with the least
headroom is looked at on a hundred random inputs. ``planted.py`` makes networks that overflow although no random input
shows it, and ``false_alarms.py`` asks what random samples need of what stays in float32. The models are those of the
repository, of ``--shared``, generated ones, and those of ``verdict.toml``. Times are processor times of one thread, so
that a busy machine does not matter. ``corpora.py`` converts many small models, and ``large_bounds.py`` looks at what
bounds of a large one take.

Each row is written to ``results/verdict.json`` at once. The same command continues where it stopped; ``--seconds``
starts no model after that time, ``--again`` measures models that have a row as well, and ``--times`` only their times;
``--before`` names a checkout of a commit without stress, with which wall times on all cores are compared.
``--page`` writes the tables of ``docs/explain/verdict.md`` from the results.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from corpora import corpora, measured_corpus
from false_alarms import false_alarms, reason_of, samples_of
from large_bounds import ORIGINAL, large_bounds
from measure import engine_commit, machine
from numpy.typing import NDArray
from onnx import ModelProto
from planted import Planted, planted_networks
from scoreboard import source, subjects
from subjects import decoder, encoder, unet
from verdict_page import write_page
from verdict_sums import FLOAT16_MAX, MOST_LISTED, by_headroom, is_planted, summary

import onnxamp

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "verdict.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnxamp-benchmarks"
LISTED = Path(__file__).with_name("verdict.toml")
GENERATED: Sequence[tuple[str, Callable[..., ModelProto], Mapping[str, int]]] = (
    ("BERT-base", encoder, {"layers": 12, "hidden": 768, "heads": 12, "length": 128, "vocabulary": 30522}),
    ("generated decoder", decoder, {"layers": 4, "hidden": 512, "heads": 8, "inner": 1376, "vocabulary": 8192}),
    ("U-Net", unet, {"width": 32, "depth": 3, "size": 64}),
)
INPUTS = 100
STEPS = 4
"""The default of ``--stress``."""
RUNS = 4
"""Runs of which the least wall time counts."""
CURE_SECONDS = 600
"""For a repair, so that a busy machine finds what an idle one does."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ONNXAMP_THREADS": "1"}

COMMAND = f"""
from onnxamp._numerics.unseen import rooms
from onnxamp.__main__ import main
rooms.{MOST_LISTED} = 1 << 30
main()
"""
"""The command onnxamp, which lists all values by their headroom."""

Facts = dict[str, Any]


def generated(folder: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Yield networks with the shapes of real ones."""

    def saved(name: str, make: Callable[..., ModelProto], sizes: Mapping[str, int]) -> Path:
        path = folder / f"{name}.onnx"
        onnx.save(make(path, **sizes), path)
        return path

    for name, make, sizes in GENERATED:
        yield name, partial(saved, name, make, sizes)


def models(folder: Path, shared: Path | None, cache: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Yield the models of the repository, those that are given, generated ones, and those of wheels and exports."""
    for path in (*sorted((ROOT / "models").glob("*.onnx")), *sorted((shared or folder).glob("*.onnx"))):
        yield path.stem, partial(Path, path)
    yield from generated(folder)
    with LISTED.open("rb") as file:
        listed = tomllib.load(file)
    known_rows = subjects()
    for row in (*(known_rows[name] for name in listed["scoreboard"]), *listed["exports"]):
        yield row["name"], partial(source, row, cache)


def converted(path: Path, steps: int, out: Path) -> tuple[Facts, float]:
    """Return what one command says, and its processor time in seconds."""
    command = [sys.executable, "-c", COMMAND, "convert", str(path), "-o", str(out), "--format", "json"]
    environment = {**os.environ, **ONE_THREAD}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command += ["--stress", str(steps), "--cure-time", str(CURE_SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: Facts = json.loads(done.stdout)
    return found["validation"], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def on_random_inputs(path: Path, value: str) -> float | None:
    """Return the largest magnitude of a value on random inputs, or ``None`` for values of bodies and functions."""
    model = onnx.load(path)
    if not any(value in node.output for node in model.graph.node):
        return None
    model.graph.output.append(onnx.ValueInfoProto(name=value))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    largest = 0.0
    for sample in samples_of(path, INPUTS, 1):
        found: NDArray[Any] = session.run([value], sample)[0]
        largest = max(largest, float(np.abs(found).max(initial=0.0)))
    return largest


def timed(path: Path, folder: Path) -> tuple[Facts, Facts]:
    """Return what a conversion says, and the processor times of one with stress and of one without."""
    found, after = converted(path, STEPS, folder / "low.onnx")
    _, before = converted(path, 0, folder / "unstressed.onnx")
    times = {"seconds": round(after, 2), "seconds without stress": round(before, 2), "timed at": engine_commit()}
    return found, times


def beside(path: Path, folder: Path, before: Path) -> Facts:
    """Return the wall times of the default command here and in another checkout: the least of several, in turns."""
    rows: dict[str, Facts] = {"": {}, " before": {}}
    for _ in range(RUNS):
        for name, root in (("", ROOT), (" before", before)):
            wall, found = _as_users_do(path, folder, root)
            least = min(wall, rows[name].get("wall", wall))
            rows[name] = {"wall": least, "samples": found["samples"], "repaired": bool(found["cure"])}
    facts = {f"{key}{name}": value for name, row in rows.items() for key, value in row.items()}
    return facts | {"before": _commit(before), "bytes": path.stat().st_size}


def _as_users_do(path: Path, folder: Path, root: Path) -> tuple[float, Facts]:
    """Return the wall time of the default command of a checkout on all cores, and its validation."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "onnxamp", "convert", str(path), "-o", str(folder / "user.onnx")]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--format", "json"], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    wall = round(time.perf_counter() - start, 2)
    found: Facts = json.loads(done.stdout)
    return wall, found["validation"]


def _commit(root: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measured(name: str, path: Path, folder: Path, seconds: float) -> Facts:
    """Return the row of a model; ``seconds`` is what its samples may take in the search for false alarms."""
    low = folder / "low.onnx"
    found, times = timed(path, folder)
    row = _row(name, found) | times
    if found["headroom"]:
        row["largest, random"] = on_random_inputs(path, row["value"])
    cure = found["cure"] or {"nodes": (), "failure": ""}
    row["false alarms"] = false_alarms(path, low, seconds, cured=cure["nodes"], reason=reason_of(cure["failure"]))
    return row


def planted_row(planted: Planted, folder: Path) -> Facts:
    """Return the row of a planted network."""
    low = folder / "low.onnx"
    found, _ = converted(planted.path, STEPS, low)
    right = onnxamp.diff_models(planted.path, low, [planted.worst], provider="cpu").passed
    facts = {"planted value": planted.value, "random": planted.random, "hardest": planted.hardest, "right": right}
    return _row(planted.name, found) | facts


def _row(name: str, found: Facts) -> Facts:
    """Return what a command says of a model."""
    proof, headroom, cure = found["proof"], found["headroom"], found["cure"]
    row: Facts = {
        "model": name,
        "commit": engine_commit(),
        "values": proof and proof["values"],
        "proven": proof and proof["proven"],
        "repaired by stress alone": bool(cure) and reason_of(cure["failure"]) == "stress",
        "not run": [clause for clause in found["not_run"] if "hard" in clause],
        "error, samples": _worst(found["outputs"]),
        "error, hard inputs": max((_worst(one["outputs"]) for one in found["extras"] if one["is_hard"]), default=None),
        "headroom": _by_headroom(found),
    }
    if headroom:
        row |= {"value": headroom["value"], "largest, stressed": headroom["stressed"]}
    return row


def _by_headroom(found: Facts) -> list[int]:
    rest = found["proof"]["values"] - found["proof"]["proven"] if found["proof"] else 0
    largest = [max(room["seen"] or 0.0, room["stressed"] or 0.0) for room in found["rooms"]]
    return by_headroom([reached / FLOAT16_MAX for reached in largest], rest)


def _worst(outputs: Sequence[Facts]) -> float:
    return max((one["rel_l2"] for one in outputs), default=0.0)


def known() -> Facts:
    """Return the results so far."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return {"corpora": [], "bounds": [], "rows": [], **found}


def noted(results: Facts) -> Facts:
    """Write the results, with what they were measured on."""
    versions = {"onnx": onnx.__version__, "ONNX Runtime": ort.__version__, "NumPy": np.__version__}
    rows = sorted(results["rows"], key=lambda row: (is_planted(row), row["model"]))
    results = {
        "machine": machine(),
        "versions": versions,
        "commit": engine_commit(),
        "summary": summary(rows),
        "corpora": results["corpora"],
        "bounds": results["bounds"],
        "rows": rows,
    }
    RESULTS.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
    return results


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that have no row yet, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, help="a folder of further models")
    parser.add_argument("--shared-cases", type=Path, help="a folder of models that once broke")
    parser.add_argument("--only", default="", help="models and corpora whose name begins so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after so long")
    parser.add_argument("--again", action="store_true", help="also measure what has a row")
    parser.add_argument("--times", action="store_true", help="only measure the times of models that have a row again")
    parser.add_argument("--before", type=Path, help="with --times: a checkout to compare wall times with")
    parser.add_argument("--samples-seconds", type=float, default=20.0, help="for the samples of a model")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models and environments are kept")
    parser.add_argument("--page", action="store_true", help="only sum up, and write the tables of the page")
    options = parser.parse_args(arguments)
    results = known()
    if options.page:
        results["summary"] = summary(results["rows"])
        RESULTS.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")
        write_page(results)
        return
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        for kind, row in _measured(options, results, Path(scratch)):
            results[kind] = [one for one in results[kind] if _name(one) != _name(row)] + [row]
            results = noted(results)
            say(json.dumps(row))
            if time.monotonic() > until:
                break
    say(json.dumps(results["summary"], indent=1))


def _name(row: Facts) -> str:
    name: str = row.get("model") or row["corpus"]
    return name


def _measured(options: argparse.Namespace, results: Facts, folder: Path) -> Iterator[tuple[str, Facts]]:
    """Yield rows that the results lack, each with its kind: models that took little time before come first."""
    rows = {_name(row): row for kind in ("rows", "corpora", "bounds") for row in results[kind]}

    def is_wanted(name: str) -> bool:
        return name.startswith(options.only) and (options.again or name not in rows)

    every = list(models(folder, options.shared, options.cache))
    every.sort(key=lambda one: rows.get(one[0], {}).get("seconds", 0.0))
    if options.times:
        for name, path in every:
            if name in rows and name.startswith(options.only):
                file = path()
                _, times = timed(file, folder)
                if options.before is not None:
                    times |= beside(file, folder, options.before)
                yield "rows", rows[name] | times
        return
    for name, path in every:
        if is_wanted(name):
            yield "rows", measured(name, path(), folder, options.samples_seconds)
    for name, make in planted_networks(folder):
        if is_wanted(name):
            yield "rows", planted_row(make(), folder)
    for corpus in corpora(options.shared, options.shared_cases):
        if is_wanted(corpus.name):
            yield "corpora", measured_corpus(corpus, folder, say)
    if is_wanted(ORIGINAL):
        yield from (("bounds", row) for row in large_bounds(folder))


if __name__ == "__main__":
    main()
