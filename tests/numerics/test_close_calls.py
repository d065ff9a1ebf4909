"""Choices that depend on values: how many are closer than the error of what they compare, and how many differ."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import run, saved
from graphs.case import add_weights, parse

import onnxamp

DRAW = np.random.default_rng(0)
WEIGHT = (DRAW.standard_normal((64, 64)) / 8).astype(np.float32)
CHOICES = {
    "ArgMax": "(float[N,64] X) => (int64[N] Y) { a = MatMul (X, w) [pick] Y = ArgMax <axis = 1, keepdims = 0> (a) }",
    "ArgMin": "(float[N,64] X) => (int64[64] Y) { a = MatMul (X, w) [pick] Y = ArgMin <axis = 0, keepdims = 0> (a) }",
    "TopK": """(float[N,64] X) => (float[N,5] Y, int64[N,5] at) <int64[1] k = {5}> {
        a = MatMul (X, w) b = Tanh (a) [pick] Y, at = TopK (b, k) }""",
    "smallest": """(float[N,64] X) => (float[N,5] Y, int64[N,5] at) <int64[1] k = {5}> {
        a = MatMul (X, w) [pick] Y, at = TopK <largest = 0> (a, k) }""",
    "Where": """(float[N,64] X) => (float[N,64] Y) <float t = {0.5}, float k = {1.01}> {
        a = MatMul (X, w) [pick] g = Greater (a, t) n = Not (g) b = Mul (a, k)
        c = Where (n, a, b) Y = MatMul (c, w) }""",
    "LessOrEqual": """(float[N,64] X) => (bool[N,64] Y) {
        a = MatMul (X, w) b = MatMul (a, w) [pick] Y = LessOrEqual (a, b) }""",
    "Floor": "(float[N,64] X) => (float[N,64] Y) { a = MatMul (X, w) [pick] f = Floor (a) Y = MatMul (f, w) }",
    "Round": "(float[N,64] X) => (float[N,64] Y) { a = MatMul (X, w) [pick] f = Round (a) Y = MatMul (f, w) }",
    "Cast": "(float[N,64] X) => (int64[N,64] Y) { a = MatMul (X, w) [pick] Y = Cast <to = 7> (a) }",
}
SAMPLE = {"X": DRAW.standard_normal((500, 64)).astype(np.float32)}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compared(text, dtype="float16", sample=SAMPLE):
    model = add_weights(parse(text, 18), {"w": WEIGHT})
    low = onnxamp.convert_model(model, "O3", dtype=dtype, hazards=False)
    (calls,) = onnxamp.diff_models(model, low, sample, provider="cpu").choices
    return calls


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CHOICES)
def test_close_choices_are_counted(name, dtype):
    calls = compared(CHOICES[name], dtype)
    assert calls.node == "pick"
    rows = 64 if name == "ArgMin" else 500
    assert calls.choices == (rows if name in ("ArgMax", "ArgMin", "TopK", "smallest") else 500 * 64)
    assert calls.close < calls.choices / (2 if dtype == "bfloat16" else 10)
    assert calls.differ <= calls.close
    if dtype == "bfloat16":
        assert 0 < calls.differ < calls.close


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin", "LessOrEqual", "Cast"])
def test_choices_that_differ_are_those_of_the_outputs(name, seed):
    x = np.random.default_rng(seed).standard_normal((200, 64)).astype(np.float32)
    model = add_weights(parse(CHOICES[name], 18), {"w": WEIGHT})
    low = onnxamp.convert_model(model, "O3", dtype="bfloat16", hazards=False)
    report = onnxamp.diff_models(model, low, {"X": x}, provider="cpu")
    (output,) = report.outputs
    assert report.choices[0].differ == round(output.differing * output.size)


def test_a_number_that_is_exact_is_no_close_call():
    """A Relu makes zeros, which low precision does not move."""
    calls = compared("""(float[N,64] X) => (float[N,64] Y) <float zero = {0}> {
        a = MatMul (X, w) r = Relu (a) [pick] g = Greater (r, zero) b = MatMul (r, w) Y = Where (g, b, r) }""")
    assert calls.choices == 500 * 64
    assert calls.close < 20


def test_choices_that_low_precision_does_not_reach_are_left_out():
    model = add_weights(
        parse("""(float[N,64] X) => (float[N,64] Y) {
        g = Less (X, w) f = Cast <to = 1> (g) Y = MatMul (f, w) }"""),
        {"w": WEIGHT},
    )
    low = onnxamp.convert_model(model)
    sample = {"X": SAMPLE["X"][:64]}
    assert onnxamp.diff_models(model, low, sample, provider="cpu").choices == ()


def test_boxes_that_nearly_tie_are_counted():
    """Of each pair of boxes that overlap, one is kept; low precision makes both scores equal, and keeps the first."""
    text = """(float[1,40,4] B, float[1,1,40] S) => (int64[M,3] Y)
        <int64 most = {100}, float overlap = {0.5}, float least = {0.25}> {
        p = Sigmoid (S) b = Add (B, B) [nms] Y = NonMaxSuppression (b, p, most, overlap, least) }"""
    left = np.arange(20, dtype=np.float32).repeat(2) * 20
    boxes = np.stack([left, left, left + 10, left + 10], -1)[None]
    scores = np.ones((1, 1, 40), np.float32)
    scores[..., 1::2] += np.float32(1e-5)  # the second of each pair is better
    scores[..., :10] = np.log(np.float32(1 / 3)) + 1e-5  # near the least score
    model = parse(text)
    low = onnxamp.convert_model(model, "O3", hazards=False)
    (calls,) = onnxamp.diff_models(model, low, {"B": boxes, "S": scores}, provider="cpu").choices
    assert calls.choices == 40
    assert calls.close >= 20
    assert calls.differ >= 20


def test_validation_tells_close_choices_and_does_not_fail():
    model = saved(add_weights(parse(CHOICES["Where"], 18), {"w": WEIGHT}))
    asked = ("convert", model, "-o", "low.onnx", "--level", "O3", "--no-hazards", "--dim", "N=500")
    found = json.loads(run(*asked, "--format", "json").stdout)
    assert found["verdict"] == "passed"
    (calls,) = found["validation"]["choices"]
    assert (calls["op"], calls["choices"]) == ("Greater", 500 * 64)
    assert 0 < calls["differ"] < calls["close"]
    hard = [one for extra in found["validation"]["extras"] if extra["is_hard"] for one in extra["choices"]]
    assert {one["node"] for one in hard} == {"pick"}
    told = (
        f"{calls['close']} of 32,000 choices of Greater node 'pick' are closer than the error; {calls['differ']} differ"
    )
    page = Path("page.html")
    text = " ".join(run(*asked, "-v", "--html", page).stdout.split())
    assert told in text
    assert "made to be hard" in text
    assert told.replace("'", "&#39;") in page.read_text(encoding="utf-8")
    assert "closer than the error" not in run(*asked).stdout


@pytest.mark.parametrize(
    "text",
    [CHOICES["ArgMax"], CHOICES["smallest"], CHOICES["TopK"].replace("Tanh", "Sigmoid")],
    ids=["ArgMax", "smallest", "TopK"],
)
def test_an_input_near_a_tie_is_found(text):
    model = saved(add_weights(parse(text, 18), {"w": WEIGHT}))
    asked = ("convert", model, "-o", "low.onnx", "--level", "O3", "--no-hazards", "--dim", "N=2", "--format", "json")
    found = json.loads(run(*asked).stdout)
    assert found["verdict"] == "passed"
    (tie,) = [one for one in found["validation"]["extras"] if "near a tie of 'pick'" in one["what"]]
    assert tie["choices"][0]["close"] == 1
    assert found["validation"]["choices"][0]["close"] == 0
    assert all(
        "tie" not in one["what"] for one in json.loads(run(*asked, "--stress", "0").stdout)["validation"]["extras"]
    )


def test_old_versions_of_ops_are_counted():
    """Before opset 10, an attribute says how many elements TopK chooses."""
    top = "(float[N,64] X) => (float[N,5] Y, int64[N,5] at) { a = MatMul (X, w) [pick] Y, at = TopK <k = 5> (a) }"
    model = add_weights(parse(top, 9), {"w": WEIGHT})
    low = onnxamp.convert_model(model, "O3", hazards=False)
    (calls,) = onnxamp.diff_models(model, low, SAMPLE, provider="cpu").choices
    assert calls.choices == 500


SHARED = pytest.param({"jobs": 2}, marks=pytest.mark.slow, id="jobs")


@pytest.mark.parametrize("settings", [SHARED, pytest.param({"state": "run.json"}, id="state")])
def test_choices_of_several_samples_add_up(settings):
    model = add_weights(parse(CHOICES["ArgMax"], 18), {"w": WEIGHT})
    low = onnxamp.convert_model(model, "O3", dtype="bfloat16", hazards=False)
    samples = [{"X": SAMPLE["X"][start : start + 100]} for start in range(0, 500, 100)]
    found = [onnxamp.diff_models(model, low, samples, provider="cpu", **settings).choices for _ in range(2)]
    (whole,) = onnxamp.diff_models(model, low, SAMPLE, provider="cpu").choices
    assert found[0] == found[1]
    assert (found[0][0].choices, found[0][0].differ) == (500, whole.differ)


PICK = "b = MatMul (s, w) [pick] i = ArgMax <axis = 1, keepdims = 0> (b)"
BODIES = {
    "If": f"""(float[N,64] X) => (int64[N] Y) {{
        s = MatMul (X, w) t = ReduceSum <keepdims = 0> (s) c = Equal (t, t)
        Y = If (c) <then_branch: graph = yes () => (int64[N] i) {{ {PICK} }},
                    else_branch: graph = no () => (int64[N] j) {{ j = ArgMin <axis = 1, keepdims = 0> (s) }}> }}""",
    "Loop": f"""(float[N,64] X) => (float[N,64] Z, int64[M,N] Y) <int64 n = {{3}}, bool on = {{1}}> {{
        a = MatMul (X, w) Z, Y = Loop (n, on, a) <body: graph = turn (int64 k, bool g, float[N,64] s)
            => (bool go, float[N,64] u, int64[N] i) {{ go = Identity (g) {PICK} u = Tanh (b) }}> }}""",
    "Scan": f"""(float[N,64] X) => (int64[3,M] Y) <int64[3] sizes = {{3, -1, 64}}> {{
        a = Reshape (X, sizes)
        Y = Scan <num_scan_inputs = 1, body = turn (float[M,64] s) => (int64[M] i) {{ {PICK} }}> (a)
    }}""",
    "nested": f"""(float[N,64] X) => (float[N,64] Z, int64[M,N] Y) <int64 n = {{3}}, bool on = {{1}}> {{
        a = MatMul (X, w) Z, Y = Loop (n, on, a) <body: graph = turn (int64 k, bool g, float[N,64] s)
            => (bool go, float[N,64] u, int64[N] v) {{
            go = Identity (g) u = Tanh (s) t = ReduceSum <keepdims = 0> (s) c = Equal (t, t)
            v = If (c) <then_branch: graph = yes () => (int64[N] i) {{ {PICK} }},
                        else_branch: graph = no () => (int64[N] j) {{ j = ArgMin <axis = 1, keepdims = 0> (s) }}>
        }}> }}""",
    "function": """(float[N,64] X) => (float[N,64] Z, int64[M,N] Y) <int64 n = {3}, bool on = {1}> {
        a = MatMul (X, w) Z, Y = Loop (n, on, a) <body: graph = turn (int64 k, bool g, float[N,64] s)
            => (bool go, float[N,64] u, int64[N] v) {
            go = Identity (g) u = Tanh (s) b = MatMul (s, w) v = own.Pick (b) }> }
        <domain: "own", opset_import: ["" : 18]> Pick (x) => (i) {
            [pick] i = ArgMax <axis = 1, keepdims = 0> (x) }""",
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BODIES)
def test_choices_in_bodies_are_counted(name, dtype):
    """Each turn makes its own, and they differ as the outputs do."""
    domains = {"own": 1} if name == "function" else {}
    model = add_weights(parse(BODIES[name], 18, domains=domains), {"w": WEIGHT})
    low = onnxamp.convert_model(model, "O3", dtype=dtype, hazards=False)
    sample = {"X": SAMPLE["X"][:99]}
    report = onnxamp.diff_models(model, low, sample, provider="cpu")
    (calls,) = (one for one in report.choices if one.op == "ArgMax")
    assert name == "function" or calls.node == "pick"
    assert calls.choices == 99 * (3 if name in ("Loop", "nested", "function") else 1)
    output = report.outputs[-1]
    assert calls.differ == round(output.differing * output.size)
    assert calls.differ <= calls.close < calls.choices / 5
