"""Measure the share of values that is proven, and find overflow that random inputs do not show.

Each model is converted with one command, with and without inputs that are made to be hard, and the value with the least
headroom is looked at on a hundred random inputs. Planted networks stay below 20,000 on a thousand random inputs,
although some input brings them beyond float16. The results are written to ``results/verdict.json``.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
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
INPUTS = 100
PLANTED = 20
STEPS = 4
"""The default of ``--stress``."""
LARGEST = 20_000.0
"""The largest magnitude of a planted network on a thousand random inputs."""

Facts = dict[str, Any]


def generated(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield networks with the shapes of real ones."""
    makers = {
        "BERT-base": lambda path: encoder(path, layers=12, hidden=768, heads=12, length=128, vocabulary=30522),
        "decoder": lambda path: decoder(path, layers=4, hidden=512, heads=8, inner=1376, vocabulary=8192),
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
    """Return the row of a model."""
    plain, before = converted(path, 0, folder)
    found, after = converted(path, STEPS, folder)
    proof, headroom, cure = found["proof"], found["headroom"], found["cure"]
    row: Facts = {
        "model": name,
        "values": proof and proof["values"],
        "proven": proof and proof["proven"],
        "seconds": round(after, 2),
        "seconds without stress": round(before, 2),
        "repaired by stress alone": bool(cure) and not plain["cure"],
        "not run": [clause for clause in found["not_run"] if "hard" in clause],
    }
    if headroom:
        row |= {
            "value": headroom["value"],
            "largest, stressed": headroom["stressed"],
            f"largest of {INPUTS} random inputs": on_random_inputs(path, headroom["value"]),
        }
    return row


def summary(rows: Sequence[Facts]) -> Facts:
    """Return what the rows come to."""
    planted_rows = [row for row in rows if row["model"].startswith("planted")]
    others = [row for row in rows if row not in planted_rows]
    return {
        "planted": len(planted_rows),
        "planted, found": sum(row["repaired by stress alone"] for row in planted_rows),
        "others, repaired by stress alone": [row["model"] for row in others if row["repaired by stress alone"]],
        "others, processor time": round(
            sum(row["seconds"] for row in others) / sum(row["seconds without stress"] for row in others), 2
        ),
    }


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, help="a folder of further models")
    parser.add_argument("--only", default="", help="models whose name begins so; nothing is written then")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, path in models(folder, options.shared):
            if not name.startswith(options.only):
                continue
            rows.append(measured(name, path, folder))
            say(json.dumps(rows[-1]))
    if not options.only:
        text = json.dumps({"machine": machine(), "summary": summary(rows), "rows": rows}, indent=1)
        RESULTS.write_text(f"{text}\n", encoding="utf-8")
    say(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
