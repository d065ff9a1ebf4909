"""Inputs and outputs without elements: an empty batch, and models that select nothing."""

from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto
from opening import runtime_version

import onnxamp

pytestmark = pytest.mark.skipif(
    runtime_version() < (1, 31),
    reason="ONNX Runtime 1.30 divides by zero in GatherND of an empty batch, which ends the process",
)

NMS = """(float[N,R,4] x, float[N,C,R] c) => (float[D,4] boxes, float[D] scores, int64[D] labels)
    <int64[1] most = {{10}}, float[1] iou = {{0.5}}, float[1] least = {{{least}}}, int64[2] box = {{0, 2}},
     int64 of = {{1}}> {{
    b = Abs (x) p = Sigmoid (c)
    found = NonMaxSuppression (b, p, most, iou, least)
    i = Gather <axis = 1> (found, box)
    boxes = GatherND (b, i)
    scores = GatherND (p, found)
    labels = Gather <axis = 1> (found, of) }}"""

MODELS = {
    "boxes, scores and labels": """(float[N,R,4] x, float[N,R] c) => (float[N,3,4] b, float[N,3] s, int64[N,3] l)
        <int64[1] k = {3}, int64[1] last = {-1}> {
        h = Abs (x) p = Sigmoid (c) s, l = TopK (p, k) i = Unsqueeze (l, last)
        b = GatherND <batch_dims = 1> (h, i) }""",
    "packed rows": """(float[N,R,6] x) => (float[N,3,6] y) <int64[1] k = {3}, int64 four = {4}, int64[1] last = {-1}> {
        h = Sigmoid (x) s = Gather <axis = 2> (h, four) t, l = TopK (s, k) i = Unsqueeze (l, last)
        y = GatherND <batch_dims = 1> (h, i) }""",
    "selected boxes": NMS.format(least=0),
    "classes": """(float[N,4] x) => (float[N,4] y, int64[N] a) {
        y = Softmax (x) a = ArgMax <axis = -1, keepdims = 0> (y) }""",
    "a sum over nothing": """(float[N,4] x) => (float[4] y, bool[N,4] b) <int64[1] first = {0}, float zero = {0}> {
        h = Relu (x) y = ReduceSum <keepdims = 0> (h, first) b = Greater (h, zero) }""",
    "a sequence": "(float[N,4] x) => (seq(float[N,4]) y) { h = Exp (x) y = SequenceConstruct (h, x) }",
    "no trips": """(float[N,4] x) => (float[T,N,4] y) <int64 none = {0}, bool go = {1}> {
        y = Loop (none, go) <body = b (int64 i, bool on) => (bool next, float[N,4] o) {
        next = Identity (on) o = Exp (x) }> }""",
}  # fmt: skip
SIZES = {"N": 0, "R": 8, "C": 2}


def feeds_of(model: ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Random inputs of these sizes."""
    generator = np.random.default_rng(0)
    return {
        entry.name: generator.standard_normal(
            [sizes.get(dim.dim_param, dim.dim_value) for dim in entry.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for entry in model.graph.input
    }


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("metric", ["auto", "detections"])
@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_is_converted_and_compared(name: str, metric: str) -> None:
    model = parse(MODELS[name])
    feeds = feeds_of(model, SIZES)
    for level in ("O2", "auto"):
        result = onnxamp.convert_model(model, level=level, samples=[feeds] if level == "auto" else None)
        report = onnxamp.diff_models(model, result, samples=[feeds], metric=metric, layers=True)
        assert report.passed
        assert all(one.error == 0 for one in report.detections)


def test_a_batch_without_a_detection() -> None:
    model = parse(NMS.format(least=2))
    feeds = feeds_of(model, SIZES | {"N": 2})
    report = onnxamp.diff_models(model, onnxamp.convert_model(model), samples=[feeds])
    assert report.passed
    assert [one.rows for one in report.detections] == [0]


@pytest.mark.parametrize("name", ["boxes, scores and labels", "packed rows"])
@pytest.mark.parametrize("command", ["convert", "auto", "tune", "diff", "check", "bench"])
def test_commands_take_an_empty_batch(command: str, name: str) -> None:
    model = parse(MODELS[name])
    onnx.save(model, "m.onnx")
    np.savez("s.npz", **feeds_of(model, SIZES))
    words = {
        "convert": ["convert", "m.onnx", "-o", "o.onnx"],
        "auto": ["convert", "m.onnx", "-o", "o.onnx", "--level", "auto"],
        "tune": ["tune", "m.onnx", "-o", "o.onnx"],
        "diff": ["diff", "m.onnx", "m.onnx", "--layers"],
        "check": ["check", "m.onnx"],
        "bench": ["bench", "m.onnx", "m.onnx", "--seconds", "0.01", "--no-profile"],
    }
    result = run(*words[command], "--inputs", "s.npz")
    assert result.exit_code == 0, result.output


def test_an_empty_batch_and_a_full_one() -> None:
    model = parse(MODELS["boxes, scores and labels"])
    samples = [feeds_of(model, SIZES), feeds_of(model, SIZES | {"N": 2})]
    report = onnxamp.diff_models(model, onnxamp.convert_model(model), samples=samples)
    assert report.passed
    assert [one.rows for one in report.detections] == [6]


STEPS = {
    "product": "{new} = MatMul ({old}, w)",
    "sum": "{new} = Add ({old}, v)",
    "unit": "{new} = Relu ({old})",
    "gelu": "{new} = Gelu ({old})",
    "softmax": "{new} = Softmax ({old})",
    "norm": "m{new} = ReduceMean ({old}, last) d{new} = Sub ({old}, m{new}) s{new} = Mul (d{new}, d{new})"
    " q{new} = ReduceMean (s{new}, last) e{new} = Add (q{new}, tiny) t{new} = Sqrt (e{new})"
    " {new} = Div (d{new}, t{new})",
    "turned twice": "r{new} = Transpose ({old}) {new} = Transpose (r{new})",
    "best first": "{new}, i{new} = TopK ({old}, eight)",
    "of the batch": "b{new} = ReduceMean <keepdims = 1> ({old}, first) {new} = Sub ({old}, b{new})",
}
"""Steps of random networks over the rows of a batch; the last one also looks across them."""


@pytest.mark.parametrize("seed", range(8))
def test_random_networks_take_empty_batches(seed: int) -> None:
    """In every type and at every level, beside a batch with rows."""
    rng = Random(seed)
    names = [f"h{number}" for number in range(rng.randint(2, 6))]
    steps = [STEPS[rng.choice(list(STEPS))].format(old=old, new=new) for old, new in pairwise(["x", *names])]
    text = f"""(float[N,8] x) => (float[N,8] y) <int64[1] last = {{-1}}, int64[1] first = {{0}}, int64[1] eight = {{8}},
        float tiny = {{1e-5}}> {{ {" ".join(steps)} y = Identity ({names[-1]}) }}"""
    model = parse(text, 21)
    add_weights(model, {"w": (8, 8), "v": (8,)})
    samples = [feeds_of(model, {"N": 0}), feeds_of(model, {"N": 3})]
    rng.shuffle(samples)
    options = {"level": rng.choice(["O1", "O2", "O3", "auto"]), "dtype": rng.choice(["float16", "bfloat16"])}
    given = samples if options["level"] == "auto" else None
    result = onnxamp.convert_model(model, samples=given, **options)
    report = onnxamp.diff_models(model, result, samples=samples, layers=True)
    assert report.passed, f"{options}: {text}: {report.failure}"
