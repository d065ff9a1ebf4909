"""Overflow removed and overflow avoided: models whose values leave float16's range, converted in three ways.

python benchmarks/rescale.py [--real] [--webgpu] [--out FILE] [--check] [MODEL ...]

"plain" is O3 as it is, "islands" is O3 with float32 wherever a value is out of range on the samples, and "rescaled" is
O3 with exponents from the same samples. "small" is the same model with values that fit anyway. All run emulated on the
CPU, and on a device that computes everything in float16 and whose overflow is NaN (float16_device.py); --webgpu runs
them on ONNX Runtime's WebGPU provider, too, converted for it, and takes the time. --real takes models of real size, and
writes benchmarks/results/rescale_real.json. Writes benchmarks/results/rescale.json and docs/rescale.svg otherwise;
--check fails where a promise is broken.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from math import inf, isfinite, log2, nan
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from float16_device import run_on_device
from measure import machine
from onnx import ModelProto
from overflowing import MODELS, REAL

import onnxamp
from onnxamp._dtypes import FLOAT16
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._numerics.ranges import largest_magnitudes
from onnxamp._options.rescaling import Rescaling, Unfit
from onnxamp._runtime.engines import WholeModel
from onnxamp._runtime.samples import as_samples
from onnxamp._target.roofline import device_called
from onnxamp._tuning.estimate import LAUNCH_US, Estimate, bound_shapes

ROOT: Final = Path(__file__).parent.parent
MOST: Final = 65504.0
"""float16's largest finite number."""

Facts = Mapping[str, Any]


def measured(model: ModelProto, feeds: Facts, options: Facts, *, webgpu: bool = False) -> dict[str, Any]:
    """Convert a model, and say what came out."""
    before = time.perf_counter()
    plan = onnxamp.plan_model(model, "O3", **options)
    result = onnxamp.apply_plan(model, plan)
    seconds = time.perf_counter() - before
    report = onnxamp.diff_models(model, result, samples=feeds)
    rows = [row for row in plan.rows if row.op != "initializer"]
    worst = max(output.rel_l2 for output in report.outputs)
    rescaling = plan.options.rescaling
    return {
        "casts": sum(node.op_type == "Cast" for node in result.graph.node),
        "float32": sorted({row.node for row in rows if not row.low}),
        "error": None if worst == inf else worst,
        "seconds": round(seconds, 2),
        "device": device_error(model, result, feeds),
        "estimate_us": round(estimated(result, feeds), 1),
        **(seen(model, feeds, options) if webgpu else {}),
        "exponents": {row.value: row.exponent for row in rescaling.scaled} if rescaling is not None else {},
    }


def device_error(model: ModelProto, result: ModelProto, feeds: Facts) -> float | None:
    """The relative L2 error on a device whose overflow is NaN; None for NaN."""
    pairs = zip(_run(model, feeds), run_on_device(result, feeds), strict=True)
    worst = max(float(np.linalg.norm(found - exact) / np.linalg.norm(exact)) for exact, found in pairs)
    return worst if isfinite(worst) else None


def estimated(model: ModelProto, feeds: Facts) -> float:
    """Microseconds that the model takes on an A100, as tuning estimates them: launches, Casts, bytes and arithmetic."""
    graph = Graph.of(model)
    estimate = Estimate(graph, device_called("A100"), bound_shapes(graph, feeds))
    total = 0.0
    for node in graph.nodes:
        types = {graph.types[value] for value in (*node.inputs, *node.outputs) if value != ABSENT}
        total += estimate.launches(node) * LAUNCH_US
        total += (
            estimate.work(node).time(estimate.device, low=FLOAT16.tensor in types) if estimate.launches(node) else 0
        )
    return total


def seen(model: ModelProto, feeds: Facts, options: Facts) -> dict[str, Any]:
    """What the model comes to on WebGPU, converted for it: Casts, error, and the median time of three runs."""
    result = onnxamp.convert_model(model, "O3", target="webgpu", **options)
    report = onnxamp.diff_models(model, result, samples=feeds, provider="webgpu")
    worst = max(output.rel_l2 for output in report.outputs)
    running, times = WholeModel(result, "webgpu"), list[float]()
    running.run(feeds)
    for _ in range(3):
        before = time.perf_counter()
        running.run(feeds)
        times.append(time.perf_counter() - before)
    casts = sum(node.op_type == "Cast" for node in result.graph.node)
    return {"webgpu": {"casts": casts, "error": worst if isfinite(worst) else None, "on": report.ran_on,
                       "milliseconds": round(1e3 * sorted(times)[1], 1)}}  # fmt: skip


def ranges(model: ModelProto, feeds: Facts) -> dict[str, float]:
    """The largest magnitude of each value of a float32 model."""
    found = largest_magnitudes(Model.of(model), as_samples(feeds, model), "cpu")
    return {name: float(f"{found[name]:.3g}") for node in model.graph.node for name in node.output if found.get(name)}


def in_float32(model: ModelProto, options: Facts) -> ModelProto:
    """The model with folds and exponents, and nothing low."""
    kept = sorted({node.op_type for node in model.graph.node} | {"RMSNormalization"})
    return onnxamp.convert_model(model, "O1", black_list=kept, **options)


def same_bits(one: ModelProto, other: ModelProto, feeds: Facts) -> bool:
    """Whether two models give the same, optimisations off."""
    return all(np.array_equal(a, b) for a, b in zip(_run(one, feeds), _run(other, feeds), strict=True))


def _run(model: ModelProto, feeds: Facts) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def facts_of(name: str, *, webgpu: bool = False) -> dict[str, Any]:
    """All figures of one model."""
    make, reach, small = {**MODELS, **REAL}[name]
    model, feeds = make(reach)
    before = ranges(model, feeds)
    over = tuple(Unfit(value, size, "out of range on the samples") for value, size in before.items() if size > MOST)
    ways: dict[str, Facts] = {
        "plain": {},
        "islands": {"rescaling": Rescaling(unfit=over)},
        "rescaled": {"rescale": True, "samples": feeds},
    }
    found = onnxamp.plan_model(model, "O3", rescale=True, samples=feeds).options.rescaling
    assert found is not None
    rescaled = in_float32(model, {"rescale": True, "rescaling": found})
    after = ranges(rescaled, feeds)
    return {
        "model": name, "nodes": len(model.graph.node),
        "bits": same_bits(in_float32(model, {"fold": True}), rescaled, feeds),
        **{way: measured(model, feeds, options, webgpu=webgpu) for way, options in ways.items()},
        "small": measured(*make(small), {}, webgpu=webgpu),
        "ranges": [[size, after.get(value)] for value, size in before.items()],
    }  # fmt: skip


def broken(facts: Facts) -> list[str]:
    """Each promise that a model breaks, as a sentence."""
    rescaled, name = facts["rescaled"], facts["model"]
    checks = {
        "float32 islands are left": not rescaled["float32"],
        "the error is more than twice that of values that fit": rescaled["error"] <= 2 * facts["small"]["error"],
        "there are as many Casts as with islands": rescaled["casts"] < facts["islands"]["casts"],
        "float32 results differ": facts["bits"] or "mel" in name,  # behind a logarithm, they may by a rounding
        "NaN on a device that computes all in float16": rescaled["device"] is not None,
        "NaN or Inf on WebGPU": "webgpu" not in rescaled or rescaled["webgpu"]["error"] is not None,
    }
    return [f"{name}: {text}." for text, holds in checks.items() if not holds]


# --- the picture ----------------------------------------------------------------------------------------------------

WIDTH, PANEL, LEFT, GAP = 940, 150, 60, 36
"""Pixels: the picture, a model's panel, the space left of it, and that above."""
TOP, BOTTOM = 44, -20
"""Binary exponents at the edges of a panel."""
STYLE = """
    text { fill: #1f2937; font-size: 13px } .dim { fill: #64748b } .axis { stroke: #cbd5e1 }
    .fits { fill: #2563eb; opacity: 0.08 }
    .before { fill: #b91c1c } .after { fill: #2563eb } .strong { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb } .dim { fill: #94a3b8 } .axis { stroke: #475569 } .fits { fill: #60a5fa }
      .before { fill: #fca5a5 } .after { fill: #60a5fa }
    }
"""


def draw(rows: Sequence[Facts]) -> str:
    """The largest magnitude of every value, before and after, against what float16 holds."""
    height = len(rows) * (PANEL + GAP) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>The largest magnitude of every value, before and after rescaling, against float16's range</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, row in enumerate(rows):
        lines += _panel(row, number * (PANEL + GAP) + GAP)
    words = (
        "values in the order in which they are computed: red before, blue after; squares inside norms are folded away"
    )
    lines.append(f'<text class="dim" x="{LEFT}" y="{height - 10}">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(row: Facts, top: int) -> list[str]:
    def at(size: float) -> float:
        exponent = max(BOTTOM, min(TOP, log2(size)))
        return round(top + (TOP - exponent) / (TOP - BOTTOM) * PANEL, 1)

    right, step = WIDTH - 10, (WIDTH - LEFT - 30) / max(len(row["ranges"]) - 1, 1)
    islands, rescaled = row["islands"], row["rescaled"]
    text = (
        f"Casts: {islands['casts']} → {rescaled['casts']}, float32 nodes: {len(islands['float32'])} →"
        f" {len(rescaled['float32'])},"
        f" error {rescaled['error']:.1e}"
    )
    lines = [
        f'<text class="strong" x="{LEFT}" y="{top - 8}">{row["model"]}</text>',
        f'<text class="dim" x="{right}" y="{top - 8}" text-anchor="end">{text}</text>',
        f'<rect class="fits" x="{LEFT}" y="{at(MOST)}" width="{right - LEFT}" height="{at(2.0**-14) - at(MOST):.1f}"/>',
    ]
    for size, label in ((2.0**40, "1e12"), (MOST, "65504"), (1.0, "1"), (2.0**-14, "6e-5")):
        lines.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{at(size)}" y2="{at(size)}"/>')
        lines.append(f'<text class="dim" x="{LEFT - 8}" y="{at(size) + 4}" text-anchor="end">{label}</text>')
    for place, sizes in enumerate(row["ranges"]):
        x = round(LEFT + 10 + place * step, 1)
        for kind, size in zip(("before", "after"), sizes, strict=True):
            if size is not None and (kind == "after" or size > MOST):
                lines.append(f'<circle class="{kind}" cx="{x}" cy="{at(size)}" r="2.2"/>')
    return lines


def _written(rows: Sequence[Facts]) -> str:
    """The results as JSON, a figure of each model per line."""
    models = (",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in row.items()) for row in rows)
    body = ",\n".join(f" {{\n  {text}\n }}" for text in models)
    head = f'"machine": {json.dumps(machine())}, "onnxruntime": {json.dumps(onnxruntime.__version__)}'
    return f'{{{head}, "models": [\n{body}\n]}}\n'


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the results and the picture, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join((*MODELS, *REAL))}")
    parser.add_argument("--real", action="store_true", help="models of real size; it takes minutes and 8 GB of memory")
    parser.add_argument("--webgpu", action="store_true", help="see them on ONNX Runtime's WebGPU provider, too")
    parser.add_argument("--out", type=Path, help="where the results go [benchmarks/results/rescale.json]")
    parser.add_argument("--check", action="store_true", help="fail if a promise is broken")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore", onnxamp.OptionWarning)
    rows = [facts_of(name, webgpu=given.webgpu) for name in given.models or (REAL if given.real else MODELS)]
    for row in rows:
        bits = "bits equal" if row["bits"] else "rounded differently"
        _say(f"{row['model']}: {row['nodes']} nodes, float32 {bits}")
        for way in ("plain", "islands", "rescaled", "small"):
            one, error = row[way], row[way]["error"] or inf
            text = f"  {way:9}{one['casts']:4} Casts {len(one['float32']):4} float32 nodes   error {error:.2e}"
            text += f"   all in float16 {one['device'] or nan:.2e}   about {one['estimate_us']:,.0f} µs"
            if "webgpu" in one:
                web = one["webgpu"]
                text += f"   WebGPU {web['error'] or nan:.2e}, {web['casts']} Casts, {web['milliseconds']:,.0f} ms"
            _say(text)
    if given.out is not None or not given.models:
        out = given.out or ROOT / "benchmarks" / "results" / ("rescale_real.json" if given.real else "rescale.json")
        out.write_text(_written(rows))
    if not given.models and given.out is None and not given.real:
        (ROOT / "docs" / "rescale.svg").write_text(draw(rows), encoding="utf-8")
    problems = [text for row in rows for text in broken(row)]
    for text in problems:
        _say(f"BROKEN {text}")
    sys.exit(bool(problems) and given.check)


if __name__ == "__main__":
    main()
