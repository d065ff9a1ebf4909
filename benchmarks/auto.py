"""Level auto beside onnxconverter_common.auto_mixed_precision: same model, same inputs, same tolerance.

python benchmarks/auto.py [--tolerance 1e-3 ...] [--limit SECONDS] [--venv FOLDER] [MODEL ...]

Models are those of the zoo, a generated encoder of about 600 nodes, and whatever is named; inputs are made up, unless a
.npz of the model's name lies beside it. The other tool gets an environment of its own, made once in a cache folder. On
a CPU ONNX Runtime computes float16 nodes in float32, so that the other tool's own check sees less rounding than a GPU
would make; the error of its result, emulated, is reported, too, and "held" says whether that is within the tolerance.
Both run on this machine one after the other, up to three times while that takes less than 10 s, and the median counts:
only the ratio of their times means anything, and where others use the machine, too, that of the time that its
processors spent on them. Writes benchmarks/results/auto.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp import Samples, load_samples, random_samples, tune_model
from onnxamp._base.errors import OnnxAmpError
from onnxamp._graph.graph import Graph
from onnxamp._graph.work import work_of
from onnxamp._runtime.run import Run
from onnxamp._tuning.errors.foreseen import judging_engine
from onnxamp._tuning.metric import make_metric
from onnxamp._tuning.runs import converted_error

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("onnxconverter-common==1.16.0", "onnxruntime", "onnx", "numpy", "setuptools<81")
OTHER = """
import contextlib, io, json, sys, time
import numpy as np, onnx
from onnxconverter_common import auto_mixed_precision as amp
folder, tolerance = sys.argv[1], float(sys.argv[2])
runs, real = [], amp.get_tensor_values_using_ort
def counted(*args, **kwargs):
    runs.append(1)
    return real(*args, **kwargs)
amp.get_tensor_values_using_ort = counted
def validate(reference, result):
    worst = 0.0
    for a, b in zip(reference, result):
        if a.dtype == np.float32:
            worst = max(worst, np.linalg.norm(a.astype(float) - b) / max(np.linalg.norm(a.astype(float)), 1e-30))
    return bool(worst <= tolerance)
model, start, used = onnx.load(folder + "/model.onnx"), time.perf_counter(), time.process_time()
failure = None
with np.load(folder + "/feeds.npz") as feeds, contextlib.redirect_stdout(io.StringIO()):
    try:
        result = amp.auto_convert_mixed_precision(model, dict(feeds), validate, keep_io_types=True)
        onnx.save(result, folder + "/result.onnx")
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
times = {"seconds": time.perf_counter() - start, "processor seconds": time.process_time() - used}
print(json.dumps({"runs": len(runs), **times, "failure": failure}))
"""


def encoder(layers: int = 23, width: int = 64, length: int = 16) -> ModelProto:
    """A BERT-like encoder with activations in parts: 26 nodes a layer, with random weights.

    Norms are single nodes: in parts, the other tool leaves them in both types, and ONNX Runtime loads no such model.
    """
    rng, nodes = np.random.default_rng(0), []
    weights: dict[str, Any] = {}

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def weight(*shape: int) -> str:
        name = f"weight_{len(weights)}"
        weights[name] = rng.standard_normal(shape) / shape[0] ** 0.5
        return name

    def constant(value: float) -> str:
        name = f"weight_{len(weights)}"  # one for each use, as exporters do: the other tool cannot share them
        weights[name] = value
        return name

    def linear(x: str, inner: int, outer: int) -> str:
        return node("Add", node("MatMul", x, weight(inner, outer)), weight(outer))

    def norm(x: str) -> str:
        return node("LayerNormalization", x, weight(width), weight(width))

    x = "x"
    for _ in range(layers):
        query, key, value = (linear(x, width, width) for _ in range(3))
        scores = node("Div", node("MatMul", query, node("Transpose", key, perm=[0, 2, 1])), constant(width**0.5))
        attended = node("MatMul", node("Softmax", scores, axis=-1), value)
        x = norm(node("Add", x, linear(attended, width, width)))
        hidden = linear(x, width, 2 * width)
        gate = node("Add", node("Erf", node("Div", hidden, constant(2**0.5))), constant(1))
        x = norm(node("Add", x, linear(node("Mul", node("Mul", hidden, gate), constant(0.5)), 2 * width, width)))
    nodes[-1].output[0] = "y"
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, length, width]) for name in "xy"]
    tensors = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "encoder", ports[:1], ports[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def shares(original: ModelProto, result: ModelProto) -> dict[str, float]:
    """Shares of nodes, floating-point operations and float traffic of the original's nodes that are low."""
    names = {node.name for node in Graph.of(original).nodes for node in [node.proto] if node.op_type != "Cast"}
    view = Graph.of(result)
    types, shapes = view.types, view.shapes
    found = {"nodes": [0, 0], "flops": [0, 0], "bytes": [0, 0]}
    for node in view.nodes:
        kinds = {types[value] for value in node.outputs if value >= 0}
        low = bool(kinds & {"tensor(float16)"})
        if node.proto.name in names and (low or "tensor(float)" in kinds) and node.key != "Constant":
            work = work_of(node, shapes)
            for name, amount in (("nodes", 1), ("flops", work.flops), ("bytes", work.elements)):
                found[name][0] += amount if low else 0
                found[name][1] += amount
    return {name: low / (total or 1) for name, (low, total) in found.items()}


def median(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The run of the median time, of as many as there is time for."""
    found = [run()]
    while len(found) < 3 and sum(one.get("seconds", inf) for one in found) < 10:
        found.append(run())
    return sorted(found, key=lambda one: one.get("seconds", 0.0))[len(found) // 2]


def ours(model: ModelProto, samples: Samples, tolerance: float) -> dict[str, Any]:
    """What level auto takes, and reaches."""
    start, used = time.perf_counter(), time.process_time()
    result, tuned = tune_model(model, tolerance, samples=samples)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    low = shares(model, result)
    times = {"seconds": seconds, "processor seconds": used}
    return {"runs": tuned.runs, **times, "error": tuned.error, "held": tuned.held, "low": low}


def theirs(python: Path, model: ModelProto, samples: Samples, tolerance: float, limit: float) -> dict[str, Any]:
    """The same of the other tool; "failure" says why it has no result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model, folder / "model.onnx")
        np.savez(folder / "feeds.npz", **samples[0])
        command = [str(python), "-c", OTHER, name, str(tolerance)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"seconds": limit, "stopped": True, "failure": f"stopped after {limit:g} s"}
        except subprocess.CalledProcessError as error:
            return {"failure": error.stderr.strip().splitlines()[-1][:300]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if found["failure"] is None:
            result = onnx.load(folder / "result.onnx")
            found["low"] = shares(model, result)
            try:
                found["error"] = converted_error(
                    model, result, Run(inputs=samples), make_metric("rel-l2", tolerance), judging_engine("cpu")
                )
                found["held"] = found["error"] <= tolerance
            except OnnxAmpError as error:
                found["error"], found["held"] = str(error), False
        return found


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """How many times faster level auto is, and whether as much is low, where the other tool has a result that holds."""
    mine, other = row["auto"], row.get("onnxconverter_common", {})
    facts: dict[str, Any] = {}
    if other.get("failure", "") is None or other.get("stopped"):
        for name in ("seconds", "processor seconds"):
            if name in other:
                text = f"times fewer {name}" + (", at least" if other.get("stopped") else "")
                facts[text] = other[name] / mine[name]
    if other.get("held"):
        facts["as much is low"] = all(mine["low"][name] >= other["low"][name] for name in ("flops", "bytes"))
    return facts


def prepared(folder: Path) -> Path | None:
    """The Python of an environment with the other tool; None where it cannot be made."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", *NEEDED], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(f"onnxconverter-common cannot be installed, and is skipped: {done.stderr.strip()[-300:]}\n")
        return None
    return python


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", type=Path, help="further models")
    parser.add_argument("--tolerance", type=float, nargs="+", default=[1e-2, 1e-3, 3e-4, 2e-4, 1e-4])
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that the other tool may take per model")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--venv", type=Path, default=cache / "onnxamp-benchmarks" / "onnxconverter-common")
    options = parser.parse_args(arguments)
    paths = [*sorted((ROOT / "models").glob("*.onnx")), *options.models]
    models = {path.stem: onnx.load(path) for path in paths}
    generated = encoder()
    models[f"generated encoder, {len(generated.graph.node)} nodes"] = generated
    python, rows = prepared(options.venv), []
    inputs = {path.stem: path.with_suffix(".npz") for path in paths if path.with_suffix(".npz").exists()}
    for name, tolerance in product(models, options.tolerance):
        samples = load_samples(inputs[name]) if name in inputs else random_samples(models[name], 1)
        mine = partial(ours, models[name], samples, tolerance)
        row = {"model": name, "tolerance": tolerance, "auto": median(mine)}
        if python is not None:
            other = partial(theirs, python, models[name], samples, tolerance, options.limit)
            row["onnxconverter_common"] = median(other)
        rows.append(row | {"compared": compared(row)})
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    libraries = {name: version(name) for name in ("onnxamp", "onnx", "numpy")}
    libraries["onnxruntime"] = onnxruntime.__version__
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
               "system": platform.platform(), "python": platform.python_version()}  # fmt: skip
    versions = {**libraries, "others": list(NEEDED)}
    facts = {"metric": "rel-l2", "machine": machine, "versions": versions, "results": rows}
    target = ROOT / "benchmarks" / "results" / "auto.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
