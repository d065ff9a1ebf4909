"""Measure the share of values that is proven, and find overflow and errors that random inputs do not show.

Each model is converted with one command, with and without inputs that are made to be hard, and the value with the least
headroom is looked at on a hundred random inputs. ``planted.py`` makes networks that overflow although no random input
shows it, and ``false_alarms.py`` asks what random samples need of what stays in float32. The models are those of the
repository, of ``--shared``, generated ones, and those of ``verdict.toml``. Times are processor times of one thread, so
that a busy machine does not matter.

Each row is written to ``results/verdict.json`` at once. The same command continues where it stopped; ``--seconds``
starts no model after that time, and ``--again`` measures all models again. ``--page`` writes the tables of
``docs/explain/verdict.md`` from the results.
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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from false_alarms import false_alarms
from measure import machine
from numpy.typing import NDArray
from onnx import ModelProto
from planted import Planted, planted_networks
from scoreboard import source, subjects
from subjects import decoder, encoder, unet

import onnxamp

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "verdict.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnxamp-benchmarks"
PAGE = ROOT / "docs" / "explain" / "verdict.md"
START, END = "<!-- written by benchmarks/verdict.py -->", "<!-- end -->"
"""What the tables of the page stand between."""
LISTED = Path(__file__).with_name("verdict.toml")
GENERATED: Sequence[tuple[str, Callable[..., ModelProto], Mapping[str, int]]] = (
    ("BERT-base", encoder, {"layers": 12, "hidden": 768, "heads": 12, "length": 128, "vocabulary": 30522}),
    ("generated decoder", decoder, {"layers": 4, "hidden": 512, "heads": 8, "inner": 1376, "vocabulary": 8192}),
    ("U-Net", unet, {"width": 32, "depth": 3, "size": 64}),
)
INPUTS = 100
FLOAT16_MAX = 65_504.0
STEPS = 4
"""The default of ``--stress``."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ONNXAMP_THREADS": "1"}

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
    command = [sys.executable, "-m", "onnxamp", "convert", str(path), "-o", str(out), "--format", "json"]
    environment = {**os.environ, **ONE_THREAD}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--stress", str(steps)], capture_output=True, text=True, check=False, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: Facts = json.loads(done.stdout)
    return found["validation"], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def on_random_inputs(path: Path, value: str) -> float:
    """Return the largest magnitude of a value on random inputs."""
    model = onnx.load(path)
    model.graph.output.append(onnx.ValueInfoProto(name=value))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    largest = 0.0
    for sample in onnxamp.random_samples(path, INPUTS, seed=1):
        found: NDArray[Any] = session.run([value], sample)[0]
        largest = max(largest, float(np.abs(found).max(initial=0.0)))
    return largest


def measured(name: str, path: Path, folder: Path, seconds: float) -> Facts:
    """Return the row of a model; ``seconds`` is what its samples may take in the search for false alarms."""
    low = folder / "low.onnx"
    found, after = converted(path, STEPS, low)
    _, before = converted(path, 0, folder / "unstressed.onnx")
    row = _row(name, found) | {"seconds": round(after, 2), "seconds without stress": round(before, 2)}
    if found["headroom"]:
        row["largest, random"] = on_random_inputs(path, row["value"])
    row["false alarms"] = false_alarms(path, low, seconds, by_stress=row["repaired by stress alone"])
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
        "commit": commit(),
        "values": proof and proof["values"],
        "proven": proof and proof["proven"],
        "repaired by stress alone": bool(cure) and "made to be hard" in cure["failure"],
        "not run": [clause for clause in found["not_run"] if "hard" in clause],
        "error, samples": _worst(found["outputs"]),
        "error, hard inputs": max((_worst(one["outputs"]) for one in found["extras"] if one["is_hard"]), default=None),
        "rooms": [max(room["seen"] or 0.0, room["stressed"] or 0.0) / FLOAT16_MAX for room in found["rooms"]],
    }
    if headroom:
        row |= {"value": headroom["value"], "largest, stressed": headroom["stressed"]}
    return row


def _worst(outputs: Sequence[Facts]) -> float:
    return max((one["rel_l2"] for one in outputs), default=0.0)


def summary(rows: Sequence[Facts]) -> Facts:
    """Return what the rows come to."""
    planted_rows = [row for row in rows if "hardest" in row]
    others = [row for row in rows if "hardest" not in row]
    before = sum(row["seconds without stress"] for row in others)
    proven = [row["proven"] / row["values"] for row in others if row["values"]]
    alarms = [row["false alarms"] for row in others]
    return {
        "planted": len(planted_rows),
        "planted, found": sum(row["repaired by stress alone"] for row in planted_rows),
        "planted, right on the worst input": sum(row["right"] for row in planted_rows),
        "others": len(others),
        "others, mean share proven": sum(proven) / max(len(proven), 1),
        "others, repaired by stress alone": [row["model"] for row in others if row["repaired by stress alone"]],
        "others, processor time": round(sum(row["seconds"] for row in others) / before, 2) if before else None,
        "false alarms, stress": sum(map(of_stress, alarms)) / max(len(alarms), 1),
        "false alarms, validation": sum(map(of_validation, alarms)) / max(len(alarms), 1),
        "false alarms, hazards": sum(map(of_hazards, alarms)) / max(len(alarms), 1),
        "kept for hazards": sum(sum(row["share"] for row in one["hazards"]) for one in alarms) / max(len(alarms), 1),
    }


def of_stress(alarms: Facts) -> float:
    """Return the share of traffic that stress alone keeps in float32, and no sample needs."""
    kept = alarms["validation"]
    return kept["share"] if kept and kept["reason"] == "stress" and not kept["fails"] else 0.0


def of_validation(alarms: Facts) -> float:
    """Return the share of traffic that validation keeps in float32 in any way, and no sample needs."""
    kept = alarms["validation"]
    return kept["share"] if kept and not kept["fails"] else 0.0


def of_hazards(alarms: Facts) -> float:
    """Return the share of traffic that hazards keep in float32, and no sample needs."""
    return sum(row["share"] for row in alarms["hazards"] if row["share"] > 0 and not row["fails"])


def tables(results: Facts) -> str:
    """Return the tables of the page."""
    facts = results["summary"]
    rows = results["rows"]
    return "\n".join((*_planted_table(facts, rows), "", *_value_table(facts, rows), "", *_alarm_table(facts, rows)))


def _planted_table(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    kinds = dict[str, list[Facts]]()
    for row in rows:
        if "hardest" in row:
            kinds.setdefault(row["model"].split()[1], []).append(row)
    lines = [
        f"{facts['planted']} networks stay below 20,000 on 1,000 random inputs, although a long search finds an input"
        " within the range of",
        f"the sample that brings a value beyond 65,504. {STEPS} steps find this in {facts['planted, found']} of them, and"
        " the result is repaired;",
        f"{facts['planted, right on the worst input']} results are right on the worst input of the long search.",
        "",
        "| planted | networks | random inputs | worst input | found | right on the worst input |",
        "|---|---|---|---|---|---|",
    ]
    for kind, found in kinds.items():
        worst = [row["hardest"] for row in found]
        ends = f"{_short(min(worst))} to {_short(max(worst))}"
        counts = (sum(row[key] for row in found) for key in ("repaired by stress alone", "right"))
        cells = kind, str(len(found)), _short(max(row["random"] for row in found)), ends, *map(str, counts)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _value_table(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    titles = "model", "proven", "value", "random inputs", "hard inputs", "error", "error, hard", "time"
    lines = [
        "Of other models, the value with the least headroom, and the processor time of a validated conversion with stress",
        f"beside one without. Stress alone repaired {len(facts['others, repaired by stress alone'])} of"
        f" {facts['others']}; all of them take {facts['others, processor time']} times as long.",
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
    ]
    for row in rows:
        if "hardest" in row:
            continue
        value = f"`{row['value']}`" if "value" in row else "none"
        sizes = [_short(row.get(name)) for name in ("largest, random", "largest, stressed")]
        errors = [_short(row[name]) for name in ("error, samples", "error, hard inputs")]
        proven = f"{row['proven']} of {row['values']}" if row["values"] else "none"
        took = f"{row['seconds'] / row['seconds without stress']:.2f}"
        lines.append(f"| {' | '.join((row['model'], proven, value, *sizes, *errors, took))} |")
    return lines


def _alarm_table(facts: Facts, rows: Sequence[Facts]) -> list[str]:
    lines = [
        "What stays in float32, as a share of the float traffic, and whether random samples need it: each of these sets of"
        " nodes is",
        "lowered by itself. False alarms are those that no sample needs:",
        f"{_share(facts['false alarms, stress'])} of the traffic for stress,"
        f" {_share(facts['false alarms, validation'])} for validation as a whole, and"
        f" {_share(facts['false alarms, hazards'])} for hazards,",
        "on the mean of the models.",
        "",
        "| model | kept for | nodes | traffic | needed | samples |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "hardest" in row:
            continue
        alarms = row["false alarms"]
        kept = [(one["hazard"], str(one["nodes"]), one) for one in alarms["hazards"] if one["share"] > 0]
        if alarms["validation"]:
            kept.append((f"validation, {alarms['validation']['reason']}", "", alarms["validation"]))
        for what, nodes, one in kept:
            needed = "yes" if one["fails"] else "no"
            cells = row["model"], what, nodes, _share(one["share"]), needed, str(one["samples"])
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _share(number: float) -> str:
    return f"{100 * number:.2g} %"


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def write_page(results: Facts) -> None:
    """Write the tables of the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{tables(results)}\n\n{END}{after}", encoding="utf-8")


def known() -> Facts:
    """Return the results so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"rows": []}


def commit() -> str:
    """Return the last commit of this repository."""
    git = ["git", "rev-parse", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def noted(rows: Sequence[Facts]) -> Facts:
    """Write the results, with what they were measured on."""
    versions = {"onnx": onnx.__version__, "ONNX Runtime": ort.__version__, "NumPy": np.__version__}
    ordered = sorted(rows, key=lambda row: ("hardest" in row, row["model"]))
    results = {
        "machine": machine(),
        "versions": versions,
        "commit": commit(),
        "summary": summary(ordered),
        "rows": ordered,
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
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after so long")
    parser.add_argument("--again", action="store_true", help="measure all models again")
    parser.add_argument("--samples-seconds", type=float, default=20.0, help="for the samples of a model")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models and environments are kept")
    parser.add_argument("--page", action="store_true", help="only write the tables of the page")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(known())
        return
    rows = [] if options.again else known()["rows"]
    done = {row["model"] for row in rows}
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for row in _rows(options, done, folder):
            rows.append(row)
            noted(rows)
            say(json.dumps(row))
            if time.monotonic() > until:
                break
    say(json.dumps(summary(rows), indent=1))


def _rows(options: argparse.Namespace, done: Container[str], folder: Path) -> Iterator[Facts]:
    """Yield rows of the models that have none yet."""
    for name, path in models(folder, options.shared, options.cache):
        if name not in done and name.startswith(options.only):
            yield measured(name, path(), folder, options.samples_seconds)
    for name, make in planted_networks(folder):
        if name not in done and name.startswith(options.only):
            yield planted_row(make(), folder)


if __name__ == "__main__":
    main()
