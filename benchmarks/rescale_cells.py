"""What is measured of one model that overflows, in cells: each is a process, with a limit, that leaves files behind.

python benchmarks/rescale_cells.py FOLDER MODEL CELL

Prints one line of JSON. Cells are named by what they do, for which target or provider, and of which way to convert:
"make", "convert cuda rescaled", "bits", "emulated islands", "run webgpu float32". Those before make the files for those
behind, in the folder.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from float16_device import run_on_device
from numpy.typing import NDArray
from onnx import ModelProto
from overflowing import MODELS, REAL
from rescale_picture import MOST

import onnxamp
from onnxamp._convert.estimate import LAUNCH_US, Estimate, bound_shapes
from onnxamp._facts.devices import device_called
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._options.values import Rescaling, Unfit
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.session import bind, make_session
from onnxamp._tuning.ranges import largest_magnitudes

WAYS: Final = ("rescaled", "islands", "folded", "small", "plain")
"""Ways to convert, what matters most first. "folded" is "islands" with norms folded into one op, as "rescaled" does."""
TARGETS: Final = {"emulated": "cuda", "cuda": "cuda", "webgpu": "webgpu"}
"""Where a model runs -> the target that it is converted for."""
SECONDS: Final = 1.0
"""How long a model is timed; it runs three times at least, and 200 times at most."""

_SOFTWARE: Final = "software"
"""What the name of a device says where none runs: times there say nothing."""

Feeds = Mapping[str, NDArray[Any]]


def prepared(places: Sequence[str]) -> Iterator[list[str]]:
    """The cells of a model, apart from those that take times; those of a stage need only earlier stages."""
    yield ["make"]
    yield [f"convert {target} {way}" for target in dict.fromkeys(TARGETS[place] for place in places) for way in WAYS]
    if "emulated" in places:
        yield ["bits", *(f"emulated {way}" for way in WAYS)]


def timed(places: Sequence[str]) -> list[str]:
    """The cells that take times."""
    known = (place for place in places if place in _UNCONVERTED)
    return [f"run {place} {way}" for place in known for way in (*_UNCONVERTED[place], *WAYS)]


_UNCONVERTED: Final = {"cuda": ("float32", "tf32"), "webgpu": ("float32",)}
"""Where a model runs -> ways to run it as it is."""


def needs(cell: str) -> tuple[str, ...]:
    """The cells whose files a cell takes."""
    kind, *where = cell.split()
    if kind == "make":
        return ()
    if kind == "convert":
        return ("make",)
    target, way = ("cuda", "rescaled") if kind == "bits" else (TARGETS[where[0] if kind == "run" else kind], where[-1])
    return ("make",) if way in ("float32", "tf32") else ("make", f"convert {target} {way}")


def measure(folder: Path, model: str, cell: str) -> dict[str, Any]:
    """What a cell finds out: a part of the row of the model."""
    kind, *where = cell.split()
    if kind == "make":
        return make(folder, model)
    if kind == "bits":
        return bits(folder)
    way = where[-1]
    if kind == "convert":
        return {way: convert(folder, *where)}
    return {way: emulated(folder, way) if kind == "emulated" else run(folder, *where)}


# --- cells ----------------------------------------------------------------------------------------------------------


def make(folder: Path, name: str) -> dict[str, Any]:
    """The model and one whose values fit, their inputs, what they compute, and the range of every value."""
    generate, reach, small = {**MODELS, **REAL}[name]
    nodes = 0
    for file, size in (("float32", reach), ("small", small)):
        model, feeds = generate(size)
        nodes = len(model.graph.node)
        onnx.save(model, folder / f"{file}.onnx")
        del model
        np.savez(folder / f"{file}.npz", **feeds)
        model = engine_on("cpu").open(folder / f"{file}.onnx", whole=True)
        np.savez(folder / f"{file}_out.npz", **model.run(feeds))
    found = ranges(folder / "float32.onnx", _held(folder, "float32"))
    (folder / "ranges.json").write_text(json.dumps(found))
    return {"nodes": nodes, "ranges": [[size, None] for size in found.values()]}


def convert(folder: Path, target: str, way: str) -> dict[str, Any]:
    """Convert the model for a target, and say what came out; "cuda" is what the figures of other devices are beside."""
    source, result = folder / f"{_original(way)}.onnx", folder / f"{target} {way}.onnx"
    feeds = _held(folder, _original(way))
    before = time.perf_counter()
    conversion = onnxamp.convert_file(source, result, "O3", target=target, **_options(folder, way), validate=False)
    seconds = time.perf_counter() - before
    plan, model = conversion.plan, onnx.load(result)
    casts = sum(node.op_type == "Cast" for node in model.graph.node)
    if target != "cuda":
        return {target: {"casts": casts}}
    found = plan.options.rescaling
    if way == "rescaled":
        assert found is not None
        (folder / "rescaling.json").write_text(json.dumps(found.as_json()))
    rows = [row for row in plan.rows if row.op != "initializer"]
    return {
        "casts": casts,
        "float32": sorted({row.node for row in rows if not row.low}),
        "seconds": round(seconds, 2),
        "estimate_us": round(estimated(model, feeds), 1),
        "exponents": {row.value: row.exponent for row in found.scaled} if found is not None else {},
    }


def _options(folder: Path, way: str) -> dict[str, Any]:
    if way == "rescaled":
        return {"rescale": True, "samples": _held(folder, "float32")}
    if way in ("islands", "folded"):
        sizes = json.loads((folder / "ranges.json").read_text())
        over = (Unfit(value, size, "out of range on the samples") for value, size in sizes.items() if size > MOST)
        return {"rescaling": Rescaling(unfit=tuple(over)), "fold": way == "folded"}
    return {}


def bits(folder: Path) -> dict[str, Any]:
    """Whether folds and exponents alone give the bits of folds alone, optimizations off; and every range then."""
    source, feeds = onnx.load(folder / "float32.onnx"), _held(folder, "float32")
    found = Rescaling.from_json(json.loads((folder / "rescaling.json").read_text()))
    rescaled = in_float32(source, {"rescale": True, "rescaling": found})
    after = ranges(rescaled, feeds)
    same = same_bits(in_float32(source, {"fold": True}), rescaled, feeds)
    before = json.loads((folder / "ranges.json").read_text())
    return {"bits": same, "ranges": [[size, after.get(value)] for value, size in before.items()]}


def emulated(folder: Path, way: str) -> dict[str, Any]:
    """Errors of the emulated model, and on a device that computes all in float16 and whose overflow is NaN."""
    source, result = folder / f"{_original(way)}.onnx", folder / f"cuda {way}.onnx"
    feeds = _held(folder, _original(way))
    report = onnxamp.diff_models(source, result, samples=feeds, provider="cpu")
    found = run_on_device(onnx.load(result), feeds)
    device = worst(_run(onnx.load(source), feeds), found)
    return {"error": _finite(max(output.rel_l2 for output in report.outputs)), "device": device}


def run(folder: Path, provider: str, way: str) -> dict[str, Any]:
    """The error of the model against float32 on the CPU, and the median time of its runs where a device runs it.

    Inputs are on the device where that is CUDA, and so are outputs.
    """
    converted = way in WAYS
    path = folder / (f"{TARGETS[provider]} {way}.onnx" if converted else "float32.onnx")
    feeds, exact = _held(folder, _original(way)), _held(folder, f"{_original(way)}_out")
    before = time.perf_counter()
    session = make_session(path, provider, cuda_options={"use_tf32": "0" if way == "float32" else "1"})
    names = [item.name for item in session.get_outputs()]
    error = worst([exact[name] for name in names], session.run(names, dict(feeds)))
    first, times, place = time.perf_counter() - before, list[float](), engine_on(provider).name()
    if _SOFTWARE in place:
        return {provider: {"error": error, "on": place}}
    again = bind(session, feeds)
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < 200):
        before = time.perf_counter()
        again()
        times.append(time.perf_counter() - before)
    return {provider: {"error": error, "milliseconds": float(f"{1e3 * np.median(times):.3g}"), "runs": len(times),
                       "first": round(first, 1), "on": place}}  # fmt: skip


# --- parts ----------------------------------------------------------------------------------------------------------


def _original(way: str) -> str:
    return "small" if way == "small" else "float32"


def _held(folder: Path, name: str) -> dict[str, NDArray[Any]]:
    with np.load(folder / f"{name}.npz") as held:
        return dict(held)


def _finite(error: float) -> float | None:
    return error if isfinite(error) else None


def worst(exact: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> float | None:
    """The largest relative L2 error; None for NaN and Inf."""
    pairs = zip(exact, found, strict=True)
    return _finite(max(float(np.linalg.norm(other - one) / np.linalg.norm(one)) for one, other in pairs))


def estimated(model: ModelProto, feeds: Feeds) -> float:
    """Microseconds that the model takes on an A100, as tuning estimates them: launches, Casts, bytes and arithmetic."""
    graph = Graph.of(model)
    estimate = Estimate(graph, device_called("A100"), bound_shapes(graph, feeds))
    total = 0.0
    for node in graph.nodes:
        types = {graph.types[value] for value in (*node.inputs, *node.outputs) if value != ABSENT}
        total += estimate.launches(node) * LAUNCH_US
        if estimate.launches(node):
            low = FLOAT16 if FLOAT16.tensor in types else None
            total += estimate.work(node).time(estimate.device, low=low)
    return total


def ranges(source: ModelProto | Path, feeds: Feeds) -> dict[str, float]:
    """The largest magnitude of each value of a float32 model."""
    model = Model.of(source)
    found = largest_magnitudes(model, Run(inputs=as_samples(feeds, model), provider="cpu"))
    names = (name for node in model.proto.graph.node for name in node.output)
    return {name: float(f"{found[name]:.3g}") for name in names if found.get(name)}


def in_float32(model: ModelProto, options: Mapping[str, Any]) -> ModelProto:
    """The model with folds and exponents, and nothing low."""
    kept = sorted({node.op_type for node in model.graph.node} | {"RMSNormalization"})
    return onnxamp.convert_model(model, "O1", black_list=kept, **options)


def same_bits(one: ModelProto, other: ModelProto, feeds: Feeds) -> bool:
    """Whether two models give the same, optimizations off."""
    return all(np.array_equal(a, b) for a, b in zip(_run(one, feeds), _run(other, feeds), strict=True))


def _run(model: ModelProto, feeds: Feeds) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(f"\n{json.dumps(measure(Path(sys.argv[1]), *sys.argv[2:]))}\n")
