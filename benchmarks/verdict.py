"""Measure the share of values that is proven, and find overflow and errors that random inputs do not show.

Each model is converted with one command, with and without inputs that are made to be hard, and the value with the least
headroom is looked at on a hundred random inputs. Planted networks stay below 20,000 on a thousand random inputs,
although some input brings them beyond float16. Times are processor times, so that a busy machine does not matter.

Each row is written to ``results/verdict.json`` at once. The same command continues where it stopped; ``--seconds``
starts no model after that time, and ``--again`` measures all models again. ``--page`` writes the tables of
``docs/explain/verdict.md`` from the results.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from measure import machine
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from subjects import decoder, encoder, unet

import onnxamp

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "verdict.json"
PAGE = ROOT / "docs" / "explain" / "verdict.md"
START, END = "<!-- written by benchmarks/verdict.py -->", "<!-- end -->"
"""What the tables of the page stand between."""
INPUTS = 100
PLANTED = 12
STEPS = 4
"""The default of ``--stress``."""
LARGEST = 20_000.0
"""The largest magnitude of a planted network on a thousand random inputs."""

Facts = dict[str, Any]


def generated(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield networks with the shapes of real ones."""
    makers = {
        "BERT-base": lambda path: encoder(path, layers=12, hidden=768, heads=12, length=128, vocabulary=30522),
        "generated decoder": lambda path: decoder(path, layers=4, hidden=512, heads=8, inner=1376, vocabulary=8192),
        "U-Net": lambda path: unet(path, width=32, depth=3, size=64),
    }
    for name, make in makers.items():
        path = folder / f"{name}.onnx"
        onnx.save(make(path), path)
        yield name, path


def models(folder: Path, shared: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the models of the repository, those that are given, generated and planted ones."""
    for path in (*sorted((ROOT / "models").glob("*.onnx")), *sorted((shared or folder).glob("*.onnx"))):
        yield path.stem, path
    yield from generated(folder)
    for seed in range(PLANTED):
        path = folder / f"planted-{seed}.onnx"
        onnx.save(planted(seed), path)
        yield path.stem, path


def planted(seed: int) -> ModelProto:
    """Return a network of four layers, the last of which is as large as random inputs let it be."""
    draw = np.random.default_rng(seed)
    width = int(draw.choice([32, 64, 128]))
    weights = [draw.standard_normal((width, width)).astype(np.float32) / np.float32(width**0.5) for _ in range(4)]
    rows = draw.standard_normal((1000, width)).astype(np.float32)
    for weight in weights[:-1]:
        rows = np.maximum(rows @ weight, 0)
    weights[-1] *= np.float32(0.95 * LARGEST / np.abs(rows @ weights[-1]).max())
    is_conv = seed % 2 == 1
    nodes = []
    tensors = []
    name = "x"
    for number, weight in enumerate(weights):
        held = weight.T.reshape(width, width, 1, 1) if is_conv else weight
        tensors.append(numpy_helper.from_array(np.ascontiguousarray(held), f"w{number}"))
        op = "Conv" if is_conv else "MatMul"
        nodes.append(helper.make_node(op, [name, f"w{number}"], [f"h{number}"], name=f"layer{number}"))
        nodes.append(helper.make_node("Relu", [f"h{number}"], [f"r{number}"], name=f"relu{number}"))
        name = f"r{number}"
    tensors.append(numpy_helper.from_array(np.float32(1e-4), "small"))
    nodes.append(helper.make_node("Mul", [name, "small"], ["y"], name="scale"))
    shape = [1, width, 1, 1] if is_conv else [1, width]
    x, y = (helper.make_tensor_value_info(one, TensorProto.FLOAT, shape) for one in "xy")
    graph = helper.make_graph(nodes, "planted", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def converted(path: Path, steps: int, folder: Path) -> tuple[Facts, float]:
    """Return what one command says, and its processor time in seconds."""
    out = folder / "low.onnx"
    command = [sys.executable, "-m", "onnxamp", "convert", str(path), "-o", str(out), "--format", "json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = subprocess.run([*command, "--stress", str(steps)], capture_output=True, text=True, check=False).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    out.unlink(missing_ok=True)
    found: Facts = json.loads(text)
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


def measured(name: str, path: Path, folder: Path) -> Facts:
    """Return the row of a model. Planted networks are not timed."""
    found, after = converted(path, STEPS, folder)
    proof, headroom, cure = found["proof"], found["headroom"], found["cure"]
    row: Facts = {
        "model": name,
        "values": proof and proof["values"],
        "proven": proof and proof["proven"],
        "repaired by stress alone": bool(cure) and "made to be hard" in cure["failure"],
        "not run": [clause for clause in found["not_run"] if "hard" in clause],
        "error, samples": _worst(found["outputs"]),
        "error, hard inputs": max((_worst(one["outputs"]) for one in found["extras"] if one["is_hard"]), default=None),
    }
    if not name.startswith("planted"):
        _, before = converted(path, 0, folder)
        row |= {"seconds": round(after, 2), "seconds without stress": round(before, 2)}
    if headroom:
        row |= {
            "value": headroom["value"],
            "largest, stressed": headroom["stressed"],
            "largest, random": on_random_inputs(path, headroom["value"]),
        }
    return row


def _worst(outputs: Sequence[Facts]) -> float:
    return max((one["rel_l2"] for one in outputs), default=0.0)


def summary(rows: Sequence[Facts]) -> Facts:
    """Return what the rows come to."""
    planted_rows = [row for row in rows if row["model"].startswith("planted")]
    others = [row for row in rows if row not in planted_rows]
    before = sum(row["seconds without stress"] for row in others)
    return {
        "planted": len(planted_rows),
        "planted, found": sum(row["repaired by stress alone"] for row in planted_rows),
        "others, repaired by stress alone": [row["model"] for row in others if row["repaired by stress alone"]],
        "others, processor time": round(sum(row["seconds"] for row in others) / before, 2) if before else None,
    }


def tables(results: Facts) -> str:
    """Return the table of the page: what random inputs missed and this found."""
    facts = results["summary"]
    found = f"Of {facts['planted']} networks whose values stay below 20,000 on 1,000 random inputs, {STEPS} steps bring"
    found += f" {facts['planted, found']} beyond\nfloat16, and the results are repaired."
    found += " Of other models, the value with the least headroom:"
    titles = "model", "proven", "value", "random inputs", "hard inputs", "error", "error, hard"
    lines = [found, "", f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in results["rows"]:
        if row["model"].startswith("planted") or not row["values"]:
            continue
        value = f"`{row['value']}`" if "value" in row else "none"
        sizes = [_short(row.get(name)) for name in ("largest, random", "largest, stressed")]
        errors = [_short(row[name]) for name in ("error, samples", "error, hard inputs")]
        cells = row["model"], f"{row['proven']} of {row['values']}", value, *sizes, *errors
        lines.append(f"| {' | '.join(cells)} |")
    more = facts["others, processor time"]
    lines += [
        "",
        f"Validated conversions of these models take {more} times the processor time of those without stress.",
    ]
    return "\n".join(lines)


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


def noted(rows: Sequence[Facts]) -> Facts:
    """Write the results, with what they were measured on."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    versions = {"onnx": onnx.__version__, "ONNX Runtime": ort.__version__, "NumPy": np.__version__}
    ordered = sorted(rows, key=lambda row: (row["model"].startswith("planted"), row["model"]))
    results = {
        "machine": machine(),
        "versions": versions,
        "commit": commit.strip(),
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
        for name, path in models(folder, options.shared):
            if name in done or not name.startswith(options.only) or time.monotonic() > until:
                continue
            rows.append(measured(name, path, folder))
            noted(rows)
            say(json.dumps(rows[-1]))
    say(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
