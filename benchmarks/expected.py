"""The errors that are expected before anything runs low, beside those that are measured.

python benchmarks/expected.py [--shared FOLDER] [--quick] [--check]

Every model of the repository, of a folder beside it and of the tests' corpus (at the newest opset), at level O3, in
float16 and bfloat16, on 128 inputs: real ones where an .npz of the model's name lies beside it. The error that is
expected is a root mean square, so it is compared with that of all inputs together. On one input, n numbers deviate from
it by chance: the sum of their squares has about a chi-square distribution, which is shown beside how many are near.
Models whose outputs have no gradient are counted apart: where a node selects by value, where one has no gradient, and
where nothing could be measured. Writes benchmarks/results/expected.json and docs/expected.svg, unless ``--quick`` asks
for the repository's models alone.
"""

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import log10
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto
from scipy.stats import chi2

import onnxamp
from onnxamp import OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._runtime.engines import on_cpu
from onnxamp._runtime.run import Run
from onnxamp._tuning.errors.expected import QUANTILE
from onnxamp._tuning.errors.foreseen import expected_errors, judging_engine

ROOT: Final = Path(__file__).resolve().parent.parent
FACTOR, SHARE = 1.5, 0.9
"""How far expected and measured errors may be apart, and the share of models that must hold this."""
SAMPLES: Final = 128
KINDS: Final = ("differentiable", "no gradient", "selects", "does not run")
SIZES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 16, 64)
"""Numbers of an output, of which chance decides the less the more there are."""

Facts = Mapping[str, Any]


def models(shared: Path | None, *, quick: bool) -> Iterator[tuple[str, ModelProto, Path | None]]:
    """Name, model, and the file of its inputs."""
    folders = [ROOT / "models", *([shared] if shared else [])]
    for path in (path for folder in folders for path in sorted(folder.glob("*.onnx"))):
        inputs = path.with_suffix(".npz")
        yield path.stem, onnx.load(path), inputs if inputs.exists() else None
    if quick:
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from graphs import CASES  # noqa: PLC0415 - found on the line above

    newest = {re.sub(r"_opset\d+$", "", name): name for name in CASES}
    for name in newest.values():
        yield f"graphs/{name}", CASES[name].build(), None


def measured(model: ModelProto, inputs: Path | None, dtype: Any) -> dict[str, Any]:
    """What is expected of a conversion, and what its error is."""
    try:
        samples = onnxamp.load_samples(inputs) if inputs else onnxamp.random_samples(model, SAMPLES)
        plan = onnxamp.plan_model(model, "O3", dtype=dtype)
        errors, low = expected_errors(Model.of(model), plan, Run(inputs=samples, provider="cpu"))
        result = onnxamp.apply_plan(model, plan)
        engine = judging_engine("cpu", plan.target)
        pairs = [on_cpu(Model.of(model)), engine.open(Model.of(result))]
        runs = [[one.run(sample) for sample in samples] for one in pairs]
    except OnnxAmpError as error:
        return {"kind": "does not run", "why": str(error)}
    made = {name for node in model.graph.node for name in node.output}
    arrays = {name: array for name, array in runs[0][0].items() if name in made and hasattr(array, "dtype")}
    floats = [name for name, array in arrays.items() if array.dtype == np.float32]
    if not floats:
        return {"kind": "does not run", "why": "no output holds floats that are computed"}
    told = errors.foreseen(low)
    kind = "selects" if told.jumps else "no gradient" if told.spread else "differentiable"
    return {"kind": kind, **_worst(floats, errors.squares(low), *runs)}


def _worst(
    floats: Sequence[str], squares: Sequence[Any], originals: Sequence[Any], results: Sequence[Any]
) -> dict[str, Any]:
    """Of the output with the largest expected error: this, the measured one, and their ratio on each input."""
    found = list[dict[str, Any]]()
    for place, name in enumerate(floats):
        pairs = [(one[name].astype(np.float64), other[name]) for one, other in zip(originals, results, strict=True)]
        pairs = [(one, other if one.shape == other.shape else np.zeros_like(one)) for one, other in pairs]
        finite = [np.isfinite(one) for one, _ in pairs]
        norms = np.array([np.sum(one[held] ** 2) for (one, _), held in zip(pairs, finite, strict=True)])
        off = np.array([np.sum((other - one)[held] ** 2) for (one, other), held in zip(pairs, finite, strict=True)])
        foreseen = np.array([own[place % len(own)] for own in squares]) * norms
        found.append(
            {
                "numbers": min(one.size for one, _ in pairs),
                "effective": [round(_effective(one[held]), 2) for (one, _), held in zip(pairs, finite, strict=True)],
                "expected": _root(foreseen.sum(), norms.sum()),
                "measured": _root(off.sum(), norms.sum()),
                "ratios": [
                    round(_root(one, other), 4)
                    for one, other in zip(off, foreseen, strict=True)
                    if other and np.isfinite(one)
                ],
            }
        )
    return max(found, key=lambda row: float(row["expected"]))


def _effective(numbers: Any) -> float:
    """Return how many equal numbers would scatter as these do, if errors are in proportion to them."""
    squares = np.square(numbers / (np.abs(numbers).max(initial=0.0) or 1.0))
    return float(squares.sum() ** 2 / (np.square(squares).sum() or 1.0)) or 1.0


def _root(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole and np.isfinite(part) else 0.0


def ratio(row: Facts) -> float | None:
    """The measured error over the expected one; None where nothing is rounded, or all is lost."""
    if not row.get("expected") or not 0 < row["measured"] < 1:
        return None
    return float(row["measured"] / row["expected"])


def near(one: float) -> bool:
    """Return whether a ratio of measured to expected error is within the factor."""
    return 1 / FACTOR <= one <= FACTOR


def summary(rows: Sequence[Facts]) -> dict[str, Any]:
    """By kind: how many there are, how many have an error, and how many errors are near, and within the bound."""
    found = dict[str, Any]()
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        ratios = [one for one in map(ratio, mine) if one is not None]
        found[kind] = {
            "conversions": len(mine),
            "with an error": len(ratios),
            "near": sum(map(near, ratios)),
            "within the bound": sum(one <= QUANTILE for one in ratios),
        }
    return found


def by_size(rows: Sequence[Facts]) -> dict[str, Any]:
    """By how many numbers an output has: how many single inputs are near, and how many are by chance alone."""
    found = dict[str, Any]()
    for least, beyond in pairwise((*SIZES, 1 << 60)):
        mine = [row for row in rows if row["kind"] == KINDS[0] and ratio(row) and least <= row["numbers"] < beyond]
        ratios = [one for row in mine for one in row["ratios"]]
        if ratios:
            counts = np.concatenate([row["effective"] for row in mine])
            low, high = (chi2.cdf(counts * end, counts) for end in (FACTOR**-2, FACTOR**2))
            found[str(least)] = {
                "conversions": len(mine),
                "inputs": len(ratios),
                "near": round(sum(map(near, ratios)) / len(ratios), 3),
                "near by chance": round(float(np.mean(high - low)), 3),
            }
    return found


# --- the picture ------------------------------------------------------------------------------------------------

SIZE, LEFT, TOP = 520, 70, 20
"""Pixels: the square of both axes, and the space left of it and above."""
FIRST, LAST = -6, 0
"""Powers of ten at the ends of both axes."""
FONT = 'font-family="sans-serif"'
STYLE = """
    text { fill: #1f2937; font-size: 13px } .dim { fill: #64748b } .axis { stroke: #cbd5e1 }
    .near { fill: #2563eb; opacity: 0.08 } .equal { stroke: #2563eb } .bound { stroke: #b91c1c; stroke-dasharray: 5 4 }
    .differentiable { fill: #2563eb } .no { fill: #d97706 } .selects { fill: #b91c1c }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb } .dim { fill: #94a3b8 } .axis { stroke: #475569 } .near { fill: #60a5fa }
    }
"""


def draw(rows: Sequence[Facts]) -> str:
    """A point for each conversion: the expected error to the right, the measured one upwards."""

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = ((min(max(log10(one), FIRST), LAST) - FIRST) / (LAST - FIRST) * SIZE for one in (x, y))
        return round(LEFT + across, 1), round(TOP + SIZE - up, 1)

    least, most, bound = 10.0**FIRST, 10.0**LAST, QUANTILE
    ends = [
        (least, least * FACTOR),
        (most / FACTOR, most),
        (most, most),
        (most, most / FACTOR),
        (least * FACTOR, least),
    ]
    area = " ".join(f"{x},{y}" for x, y in [at(least, least), *(at(*end) for end in ends)])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + LEFT + 190} {SIZE + TOP + 76}" {FONT}>',
        "<title>Errors that were measured, against those that were expected before</title>",
        f"<style>{STYLE}</style>",
        f'<polygon class="near" points="{area}"/>',
    ]
    for power in range(FIRST, LAST + 1):
        (x, low), (left, y) = at(10.0**power, least), at(least, 10.0**power)
        lines += [
            f'<line class="axis" x1="{x}" y1="{low}" x2="{x}" y2="{TOP}"/>',
            f'<line class="axis" x1="{left}" y1="{y}" x2="{LEFT + SIZE}" y2="{y}"/>',
            f'<text class="dim" x="{x}" y="{low + 18}" text-anchor="middle">1e{power}</text>',
            f'<text class="dim" x="{left - 8}" y="{y + 4}" text-anchor="end">1e{power}</text>',
        ]
    for name, start, end in (
        ("equal", (least, least), (most, most)),
        ("bound", (least, least * bound), (most / bound, most)),
    ):
        (a, b), (c, d) = at(*start), at(*end)
        lines.append(f'<line class="{name}" x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>')
    for row in rows:
        if ratio(row) is not None:
            x, y = at(row["expected"], row["measured"])
            lines.append(f'<circle class="{row["kind"].split()[0]}" cx="{x}" cy="{y}" r="3"/>')
    counts = Counter(row["kind"] for row in rows if ratio(row) is not None)
    for number, kind in enumerate(KINDS[:-1]):
        y = TOP + 24 + 22 * number
        lines.append(f'<circle class="{kind.split()[0]}" cx="{LEFT + SIZE + 20}" cy="{y - 4}" r="4"/>')
        lines.append(f'<text x="{LEFT + SIZE + 32}" y="{y}">{kind}: {counts[kind]}</text>')
    words = (
        "Relative L2 error: expected (horizontal) and measured (vertical)",
        f"Shaded: within {FACTOR:g} times. Dashed: the bound",
    )
    for number, line in enumerate(words):
        y = SIZE + TOP + 44 + 18 * number
        lines.append(f'<text class="dim" x="{LEFT}" y="{y}">{line}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    shared = "a folder with more models; their inputs may lie beside them as .npz files"
    parser.add_argument("--shared", type=Path, help=shared)
    parser.add_argument("--quick", action="store_true", help="the repository's models alone, and nothing is written")
    parser.add_argument("--check", action="store_true", help="exit code 1 if too few are near, or beyond the bound")
    options = parser.parse_args(arguments)
    rows = list[dict[str, Any]]()
    for name, model, inputs in models(options.shared, quick=options.quick):
        for dtype in ("float16", "bfloat16"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = measured(model, inputs, dtype)
            rows.append({"model": name, "dtype": dtype, **row})
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
    told = {**summary(rows), "single inputs": by_size(rows)}
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    if not options.quick:
        kept = [{key: value for key, value in row.items() if key not in ("effective", "ratios")} for row in rows]
        text = json.dumps({"summary": told, "rows": kept}, indent=1)
        (ROOT / "benchmarks" / "results" / "expected.json").write_text(text + "\n", encoding="utf-8")
        (ROOT / "docs" / "expected.svg").write_text(draw(rows), encoding="utf-8")
    found = told["differentiable"]
    if options.check and found["near"] < SHARE * found["with an error"]:
        raise SystemExit("Too few errors are near the expected ones.")
    if options.check and found["within the bound"] < found["with an error"]:
        raise SystemExit("An error is beyond its bound.")


if __name__ == "__main__":
    main()
