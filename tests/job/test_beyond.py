"""What validation looks at beyond the samples: other branches, larger sizes, parts of outputs, and more samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run, saved
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.limits import Limits
from onnxamp._runtime.run import Run

RNG = np.random.default_rng(0)
WEIGHT = (RNG.standard_normal((64, 64)) / 8).astype(np.float32)
OVERFLOWING = "p = Mul (a, k) [square] q = Mul (p, p) r = Sqrt (q)"
"""Nodes whose square of a few thousands is beyond float16."""
EASY = "then_branch: graph = easy () => (float[N,64] e) { e = Add (a, a) }"
HARD = f"else_branch: graph = hard () => (float[N,64] h) {{ {OVERFLOWING} h = Div (r, k) }}"


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_of(text: str, opset: int = 18) -> ModelProto:
    return add_weights(parse(text, opset, ir=10), {"w": WEIGHT})


def converted(model: ModelProto, *arguments: str, code: int = 0) -> dict[str, Any]:
    result = run("convert", saved(model), "-o", "low.onnx", "--format", "json", "--stress", "0", *arguments)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


FLAG = f"""(float[N,64] X, bool c) => (float[N,64] Y) <float k = {{3000}}> {{
    m = MatMul (X, w) a = Tanh (m) f = If (c) <{EASY}, {HARD}> Y = MatMul (f, w)
}}"""
SIZE = f"""(float[N,64] X) => (float[N,64] Y) <float k = {{3000}}, int64[1] most = {{5000}}> {{
    m = MatMul (X, w) a = Tanh (m) s = Shape <end = 1> (X) c = Less (s, most)
    f = If (c) <{EASY}, {HARD}> Y = MatMul (f, w)
}}"""
NESTED = f"""(float[N,64] X, bool c, bool d) => (float[N,64] Y) <float k = {{3000}}> {{
    m = MatMul (X, w) a = Tanh (m)
    f = If (c) <{EASY}, else_branch: graph = outer () => (float[N,64] o) {{
        o = If (d) <then_branch: graph = easy2 () => (float[N,64] e2) {{ e2 = Neg (a) }}, {HARD}>
    }}>
    Y = MatMul (f, w)
}}"""
LOOPED = f"""(float[4,64] X, int64 n) => (float[4,64] Y) <float k = {{3000}}, bool on = {{1}}, int64 most = {{100}}> {{
    x = MatMul (X, w)
    t = Loop (n, on, x) <body: graph = trip (int64 i, bool go, float[4,64] a) => (bool goes, float[4,64] u) {{
        goes = Identity (go) c = Less (i, most) f = If (c) <{EASY}, {HARD}> u = Tanh (f)
    }}>
    Y = MatMul (t, w)
}}"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [FLAG, SIZE, NESTED, LOOPED], ids=["flag", "size", "nested", "looped"])
def test_a_branch_that_no_sample_takes_is_validated(text: str) -> None:
    found = converted(model_of(text), "--seed", "0")
    validation = found["validation"]
    assert found["verdict"] == "passed"
    assert "the else branch of If " in validation["cure"]["failure"]
    assert any("the else branch of If " in extra["what"] for extra in validation["extras"])
    assert validation["not_run"] == []
    if text == FLAG:
        inputs = {"X": RNG.standard_normal((20, 64)).astype(np.float32), "c": np.array(False)}
        assert onnxamp.diff_models("model.onnx", "low.onnx", inputs, provider="cpu").passed


def test_the_inputs_of_the_user_are_the_values_at_hand() -> None:
    np.savez("in.npz", X=RNG.standard_normal((3, 64)).astype(np.float32), c=np.array(True))
    validation = converted(model_of(FLAG), "--inputs", "in.npz")["validation"]
    assert validation["cure"]["failure"].startswith("With the else branch of If 'f': ")
    assert [extra["what"] for extra in validation["extras"]] == ["the else branch of If 'f'"]


def test_branches_that_only_move_data_are_left_out() -> None:
    text = """(float[N,64] X, bool c) => (float[M,64] Y) {
        a = MatMul (X, w)
        f = If (c) <then_branch: graph = some () => (float[M,64] g) { g = Identity (a) },
                    else_branch: graph = none () => (float[M,64] h) { h = Concat <axis = 0> (a, a) }>
        Y = Relu (f)
    }"""
    validation = converted(model_of(text), "--dim", "N=2")["validation"]
    assert validation["extras"] == []
    assert validation["not_run"] == []


UNSUITED = """(float[2,64] X, bool c) => (float[M,64] Y) <int64[2] seven = {7, 64}> {
    a = MatMul (X, w)
    f = If (c) <then_branch: graph = some () => (float[M,64] g) { g = Add (a, a) },
                else_branch: graph = none () => (float[M,64] h) { v = Reshape (a, seven) h = Exp (v) }>
    Y = MatMul (f, w)
}"""
ENDLESS = """(float[4,64] X, bool c) => (float[4,64] Y) <float k = {3}, bool on = {1}, float top = {50}> {
    x = MatMul (X, w)
    t = Loop (, on, x) <body: graph = trip (int64 i, bool go, float[4,64] s) => (bool goes, float[4,64] u) {
        u = If (c) <then_branch: graph = up () => (float[4,64] g) { g = Mul (s, k) },
                    else_branch: graph = down () => (float[4,64] h) { h = Mul (s, top) }>
        m = ReduceMax <keepdims = 0> (u) goes = Less (m, top)
    }>
    Y = MatMul (t, w)
}"""
IDLE = """(float[4,64] X, int64 n) => (float[4,64] Y) <bool on = {1}, int64 nine = {9}> {
    x = MatMul (X, w) trips = Sub (n, nine)
    t = Loop (trips, on, x) <body: graph = trip (int64 i, bool go, float[4,64] s) => (bool goes, float[4,64] u) {
        goes = Identity (go) u = Tanh (s)
    }>
    Y = MatMul (t, w)
}"""
NOT_RUN = [
    (UNSUITED, "the else branch of If 'f' (the values at hand do not suit it"),
    (ENDLESS, "the then branch of If 'u' (the loop around it might not end)"),
    (IDLE, "the body of Loop 't' (no sample makes it run)"),
]


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize(("text", "what"), NOT_RUN, ids=["unsuited", "endless", "idle"])
def test_what_was_not_run_is_said_everywhere(text: str, what: str) -> None:
    rows = 2 if text == UNSUITED else 4
    inputs = {"X": np.ones((rows, 64), np.float32), "c": np.array(True), "n": np.array(5)}
    names = [entry.name for entry in model_of(text).graph.input]
    np.savez("in.npz", **{name: inputs[name] for name in names})
    found = converted(model_of(text), "--inputs", "in.npz", "--html", "page.html")
    assert any(one.startswith(what) for one in found["validation"]["not_run"])
    assert found["verdict"] == "passed"
    assert "Not run: " in Path("page.html").read_text(encoding="utf-8")
    checked = json.loads(run("check", "model.onnx", "--inputs", "in.npz", "--format", "json").stdout)
    name = what.partition(" (")[0]
    assert name in [one.partition(" (")[0] for one in checked["run"]["not_run"]]
    told = " ".join(run("check", "model.onnx", "--inputs", "in.npz").stdout.split())
    assert name in told.partition("Not run: ")[2]
    for form in ([], ["--format", "markdown"]):
        result = run("convert", "model.onnx", "-o", "again.onnx", "--inputs", "in.npz", *form)
        assert "Not run: " in result.stdout


def test_a_comparison_names_the_branches_that_its_samples_do_not_take() -> None:
    np.savez("in.npz", X=np.ones((3, 64), np.float32), c=np.array(True))
    result = run("diff", saved(model_of(FLAG)), "model.onnx", "--inputs", "in.npz")
    assert result.exit_code == 0
    assert "Not run: the else branch of If 'f' (no sample takes it)." in result.stdout


COUNTED = """(float[4,64] X, int64 n) => (float[4,64] Y) <float k = {3000}, bool on = {1}> {
    x = MatMul (X, w) a = Mul (x, k)
    t = Loop (n, on, a) <body: graph = trip (int64 i, bool go, float[4,64] s) => (bool goes, float[4,64] u) {
        goes = Identity (go) u = BODY
    }>
    d = Div (t, k) Y = MatMul (d, w)
}"""


def test_loops_run_no_trip_one_and_many() -> None:
    """Five trips stay in float16's range; 64 do not."""
    low = ("--no-hazards", "--level", "O3")
    found = converted(model_of(COUNTED.replace("BODY", "Add (s, a)")), *low)["validation"]
    assert found["cure"]["failure"].startswith("With n=64: Output 'Y': NaN")
    assert [extra["what"] for extra in found["extras"]] == ["n=0", "n=1", "n=64"]
    assert found["not_run"] == []


def test_a_loop_that_grows_faster_than_its_trips_says_so() -> None:
    found = converted(model_of(COUNTED.replace("BODY", "Add (s, s)")))["validation"]
    assert [extra["what"] for extra in found["extras"]] == ["n=0", "n=1"]
    clause = "more than 4 trips of the loops that 'n' counts (values grow faster than the number of trips)"
    assert found["not_run"] == [clause]


def test_an_empty_batch_is_validated_where_the_model_takes_one() -> None:
    plain = "(float[N,64] X) => (float[N,64] Y) { a = MatMul (X, w) Y = Tanh (a) }"
    found = converted(model_of(plain))["validation"]
    assert [extra["what"] for extra in found["extras"]] == ["N=2048", "N=0"]
    assert converted(model_of(plain), "--dim", "N=8")["validation"]["extras"] == []
    for reduced in ("ReduceMax", "ReduceMean"):  # refused, and not a number
        text = f"""(float[N,64] X) => (float[64] Y) <int64[1] rows = {{0}}> {{
            a = MatMul (X, w) Y = {reduced} <keepdims = 0> (a, rows) }}"""
        found = converted(model_of(text))["validation"]
        assert [extra["what"] for extra in found["extras"]] == ["N=2048"]


MASKED = """(float[1,8,64] X, int64[1,8] attention_mask) => (float[1,8,64] Y)
    <float k = {0.2}, float one = {1}, float big = {-10000}, int64[1] middle = {1}> {
    q = MatMul (X, w) t = Transpose <perm = [0, 2, 1]> (q) p = MatMul (q, t) s = Mul (p, k)
    m = Cast <to = 1> (attention_mask) i = Sub (one, m) b = Mul (i, big) c = Unsqueeze (b, middle)
    z = Add (s, c) o = Softmax <axis = -1> (z) Y = MatMul (o, q) }"""


def test_masks_keep_some_all_and_none_of_a_row() -> None:
    extras = converted(model_of(MASKED))["validation"]["extras"]
    told = [extra["what"] for extra in extras]
    assert told[-1] == "none of each row kept by 'attention_mask'"
    assert set(told) <= {told[-1], "all of each row kept by 'attention_mask'"}
    several = MASKED.replace("[1,8", "[4,8")
    extras = converted(model_of(several))["validation"]["extras"]
    assert [extra["what"] for extra in extras] == told[-1:]


def test_masks_on_which_the_original_does_not_run_are_named() -> None:
    """Lengths are indices here, as those of GroupQueryAttention: that of padding alone is out of range."""
    rows = """n = ReduceSum (attention_mask, middle) last = Sub (n, nine) r = Gather (seen, last)
        y = Add (s, r) z = Add (y, c)"""
    more = "float[8] seen = {0, 0, 0, 0, 0, 0, 0, 0}, int64 nine = {9}, int64[1] middle"
    text = MASKED.replace("z = Add (s, c)", rows).replace("int64[1] middle", more)
    found = converted(model_of(text))["validation"]
    [clause] = found["not_run"]
    assert clause.startswith("none of each row kept by 'attention_mask' (the values at hand do not suit it: ")


def test_sequences_of_padding_alone_are_only_asked_for_nan() -> None:
    """Beside float32's lowest number, scores leave no trace: float32 averages all tokens, and float16 weighs some."""
    text = MASKED.replace("k = {0.2}", "k = {3}").replace("-10000", "-3.4e38")
    found = converted(model_of(text))["validation"]
    last = found["extras"][-1]
    assert last["is_empty"]
    assert last["outputs"][0]["rel_l2"] > 0.01
    assert last["judgements"] == []
    assert found["cure"] is None


def test_masks_with_a_row_for_each_query_are_judged_where_they_keep_nothing() -> None:
    text = MASKED.replace("int64[1,8] attention_mask", "int64[1,1,8] attention_mask")
    text = text.replace("c = Unsqueeze (b, middle)", "c = Identity (b)")
    last = converted(model_of(text))["validation"]["extras"][-1]
    assert last["what"].startswith("none")
    assert not last["is_empty"]
    assert last["judgements"]


GRAM = """(float[N,64] X) => (float[64,64] Y) <float six = {6}> {
    x = Mul (X, six) t = Transpose <perm = [1, 0]> (x) g = MatMul (t, x) l = Sqrt (six) h = Div (g, l) Y = Tanh (h)
}"""


def test_dynamic_sizes_are_validated_at_a_large_one() -> None:
    """Sums of 2,048 squares leave float16; those of 8 do not."""
    text = """(float[N,64] X) => (float[64] Y) <float six = {6}, int64[1] rows = {0}> {
        x = Mul (X, six) q = Mul (x, x) s = ReduceSum <keepdims = 0> (q, rows) r = Sqrt (s) Y = Div (r, six)
    }"""
    validation = converted(parse(text, 18, ir=10), "--no-hazards", "--level", "O3")["validation"]
    assert validation["cure"]["failure"].startswith("With N=2048: Output 'Y': Inf")
    fixed = converted(parse(text, 18, ir=10), "--no-hazards", "--level", "O3", "--dim", "N=8")["validation"]
    assert (fixed["cure"], fixed["extras"]) == (None, [])


def test_a_size_that_the_model_refuses_gives_way_to_a_smaller_one() -> None:
    text = """(float[2,N] X) => (float[2,64] Y) <int64[2] whole = {2, -1}, float[2,40] table> {
        n = Shape <start = 1> (X) z = Sub (n, n) end = Add (n, z) ax = Constant <value = int64[1] {1}> ()
        part = Slice (table, z, end, ax) sum = Add (X, part) m = ReduceSum <keepdims = 1> (sum, ax) Y = Add (m, row)
    }"""
    model = add_weights(parse(text, 18, ir=10), {"table": (2, 40), "row": (1, 64)})
    extras = converted(model)["validation"]["extras"]
    assert [extra["what"] for extra in extras] == ["N=32"]


@pytest.mark.parametrize(
    "join",
    [
        "Y = Concat <axis = 1> (p, q)",
        "j = Concat <axis = 0> (q, p) Y = Transpose <perm = [1, 0]> (j)",
        "m = Concat <axis = 1> (x, p) j = Concat <axis = 1> (m, q) i = Identity (j) Y = Neg (i)",
    ],
    ids=["concat", "moved", "nested"],
)
def test_each_part_of_an_output_is_validated(join: str) -> None:
    """What is lost of a small part does not show in the norm of the whole."""
    text = f"""(float[4,64] X) => (float[A,B] Y) <float k = {{1000}}> {{
        h = MatMul (X, w) x = MatMul (h, w) p = Mul (x, k) b = Add (x, k) c = Relu (b) q = Sub (c, k) {join}
    }}"""
    found = converted(model_of(text))
    failure = found["validation"]["cure"]["failure"]
    assert failure.startswith("Output 'Y': relative L2 error of its part 'q' is 0.1"), failure
    assert found["validation"]["outputs"][0]["part"]["rel_l2"] < 0.01


CLOSE = "(float[4,64] X) => (float[4,64] Y) <float k = {16}> { b = Add (X, k) c = Relu (b) Y = Sub (c, k) }"


def test_a_verdict_that_is_close_takes_more_samples() -> None:
    found = converted(parse(CLOSE, 18, ir=10), "--level", "O3", "--no-hazards")["validation"]
    assert (found["samples"], found["redrawn"]) == (4, True)
    assert {"usual_rel_l2", "rel_l2", "typical_rel_l2"} == {one["metric"] for one in found["judgements"]}
    asked = converted(parse(CLOSE, 18, ir=10), "--level", "O3", "--no-hazards", "--samples", "1")["validation"]
    assert (asked["samples"], asked["redrawn"]) == (1, False)


def scattered(width: int, k: int) -> ModelProto:
    """Return a model with few numbers, whose relative error differs from input to input."""
    text = f"""(float[1,64] X) => (float[1,{width}] Y) <float k = {{{k}}}> {{
        a = MatMul (X, v) b = Add (a, k) c = Relu (b) d = Sub (c, k) Y = Neg (d)
    }}"""
    weight = np.random.default_rng(1).standard_normal((64, width)) / 8
    return add_weights(parse(text, 18, ir=10), {"v": weight.astype(np.float32)})


def test_a_typical_error_beyond_the_usual_limit_is_told() -> None:
    model = scattered(1, 16)
    found = converted(model, "--level", "O3", "--no-hazards")["validation"]
    limits = {one["metric"]: (one["found"] <= 0.01, one["limit"]) for one in found["judgements"]}
    assert limits == {"usual_rel_l2": (True, 0.01), "rel_l2": (False, 0.03), "typical_rel_l2": (False, 0.015)}
    arguments = ("convert", "model.onnx", "-o", "low.onnx", "--level", "O3", "--no-hazards", "--stress", "0", "-v")
    text = " ".join(run(*arguments).stdout.split())
    assert "the output matches the original, with a typical error of 0.0101 (usual limit 0.01)." in text
    assert "8 random inputs were compared: their typical error may be 1.5 times the limit, a single one 3 times" in text


def test_no_sample_exceeds_a_stated_tolerance_far() -> None:
    """The default limit allows a single sample of eight three times as much, a stated one twice."""
    usual = converted(scattered(2, 4), "--level", "O3", "--no-hazards")["validation"]
    assert usual["cure"] is None
    assert usual["outputs"][0]["rel_l2"] > 0.02
    asked = converted(scattered(2, 4), "--level", "O3", "--no-hazards", "--tolerance", "0.01")["validation"]
    assert asked["cure"]["failure"] == "Output 'Y': relative L2 error is 0.027; the limit is 0.02."
    assert asked["outputs"][0]["rel_l2"] < 0.01


def test_a_repair_is_measured_on_as_many_samples_as_are_compared() -> None:
    cure = converted(scattered(2, 8), "--level", "O3", "--no-hazards", "--tolerance", "0.01")["validation"]["cure"]
    assert cure["failure"].startswith("Output 'Y': typical relative L2 error of the samples is ")
    assert cure["level"] == "auto"
    assert cure["command"].endswith("--samples 8")


def test_further_results_have_to_meet_the_limit_of_the_first_samples() -> None:
    """A result that mends another one is compared on more samples from the beginning."""
    report = onnxamp.diff_models(scattered(1, 16), scattered(1, 16), provider="cpu")
    output = replace(report.outputs[0], rel_l2=0.012, typical_rel_l2=0.011, usual_rel_l2=0.012)
    judged = Limits().judge([output], "float16", redrawn=True)
    assert [(one.metric, one.limit) for one in judged if not one.passed] == [("usual_rel_l2", 0.01)]


def test_one_wrong_id_is_not_100_percent() -> None:
    saved(parse("(float[1,256] X) => (int64[1,256] Y) { Y = Cast <to = 7> (X) }", 18, ir=10), "ids.onnx")
    other = parse("(float[1,256] X) => (int64[1,256] Y) { s = Add (X, one) Y = Cast <to = 7> (s) }", 18, ir=10)
    one = np.zeros((1, 256), np.float32)
    one[0, 7] = 1
    saved(add_weights(other, {"one": one}), "other.onnx")
    np.savez("in.npz", X=np.arange(256, dtype=np.float32)[None])
    result = run("diff", "ids.onnx", "other.onnx", "--inputs", "in.npz")
    assert "99.61 %" in result.stdout
    assert "100 %" not in result.stdout
    assert "Output 'Y': 1 of 256 elements differs." in result.stdout


def test_the_state_of_a_loop_is_to_blame() -> None:
    text = """(int64 n, float[4,64] X) => (float[4,64] Y) <float zero = {0}, float k = {0.001}, bool on = {1}> {
        last = Loop (n, on, zero) <body: graph = trip (int64 i, bool go, float count) => (bool goes, float next) {
            goes = Identity (go) one = Constant <value = float {1}> () next = Add (count, one)
        }>
        q = MatMul (X, w) f = Mul (last, k) Y = Mul (q, f)
    }"""
    low = onnxamp.convert_model(model_of(text), hazards=False)
    inputs = {"n": np.array(5000), "X": np.ones((4, 64), np.float32)}
    report = onnxamp.diff_models(model_of(text), low, inputs, provider="cpu")
    assert report.first_bad is not None
    assert (report.first_bad.value, report.first_bad.op) == ("last", "Loop")
    assert report.first_bad.alarm.endswith("in the state 'count' that its body carries")


TWICE = """(float[4,64] X) => (float[4,64] Y, float[4,64] Z) <float k = {30000}> {
    [low] a = MatMul (X, w) b = Relu (a) Y = MatMul (b, w)
    c = Mul (X, k) [high] d = MatMul (c, w) Z = Div (d, k)
}"""


@pytest.mark.slow
def test_a_repaired_result_that_does_not_pay_gives_way_to_the_original() -> None:
    """Only one of two products can be low, so that the result holds their weight in both types."""
    model = model_of(TWICE)
    found = converted(model, "--level", "O1", "--no-hazards")
    assert found["kept_original"]
    assert found["not_worth"].startswith("The result takes 150 % of the original's bytes, and by the estimate")
    assert Path("low.onnx").read_bytes() == Path("model.onnx").read_bytes()
    assert found["verdict"] == "passed"
    result = run("convert", "model.onnx", "-o", "low.onnx", "--level", "O1", "--no-hazards")
    assert result.exit_code == 0
    assert "Not worth it: the original model was written as it is." in result.stdout


def test_a_result_that_does_not_pay_is_headed_so() -> None:
    found = converted(model_of(TWICE), "--level", "O1", "--keep-fp32", "high")
    assert not found["kept_original"]
    assert found["not_worth"]
    assert found["summary"]["nodes"]["low"]
    result = run("convert", "model.onnx", "-o", "low.onnx", "--level", "O1", "--keep-fp32", "high")
    assert "which is not worth it" in result.stdout


def test_a_loop_that_no_sample_runs_is_named_whichever_branches_they_take(tmp_path: Path) -> None:
    """One sample reaches the loop, which stops at once; the other takes the branch without one."""
    body = """body = b (int64 i, bool go, float[N,64] s) => (bool went, float[N,64] t) {
        went = Identity (go) t = Relu (s) }"""
    model = model_of(f"""(float[N,64] X, bool c, int64 n) => (float[N,64] Y) {{ m = MatMul (X, w) f = If (c) <
        then_branch: graph = t () => (float[N,64] r) {{ [turns] r = Loop <{body}> (n, , m) }},
        else_branch: graph = e () => (float[N,64] z) {{ z = Neg (m) }}> Y = MatMul (f, w) }}""")
    x = RNG.standard_normal((2, 64)).astype(np.float32)
    (tmp_path / "samples").mkdir()
    for takes in ((True, False), (False, True)):
        for number, one in enumerate(takes):
            np.savez(f"samples/{number}.npz", X=x, c=np.array(one), n=np.array(0))
        found = converted(model, "--inputs", "samples")["validation"]
        assert any("turns" in clause for clause in found["not_run"]), takes


def test_a_branch_that_fails_is_judged_by_its_own_numbers() -> None:
    """Branches that no sample takes are compared together first; of these, one is fine by itself."""
    second = EASY.replace("easy", "plain").replace(" e)", " u)").replace("e =", "u =")
    other = "else_branch: graph = fine () => (float[N,64] v) { v = Add (a, m) }"
    model = model_of(f"""(float[N,64] X, bool c, bool d) => (float[N,64] Y) <float k = {{3000}}> {{
        m = MatMul (X, w) a = Tanh (m) f = If (c) <{EASY}, {HARD}> g = If (d) <{second}, {other}>
        sum = Add (f, g) Y = MatMul (sum, w) }}""")
    x = RNG.standard_normal((2, 64)).astype(np.float32)
    np.savez("both.npz", X=x, c=np.array(True), d=np.array(True))
    options = ("--no-cure", "--no-hazards", "--level", "O3", "--inputs", "both.npz")
    found = converted(model, *options, code=1)["validation"]
    (extra,) = found["extras"]
    assert extra["what"] == "the else branch of If 'f'"


def test_the_error_of_a_result_does_not_widen_its_own_limit() -> None:
    """Integers of the original cost some error, which is allowed for: that of the original, not that of the result."""
    grid = "q = QuantizeLinear (x, step, zero) d = DequantizeLinear (q, step, zero) m = Mul (d, factor)"
    numbers = "<float step = {0.04}, int8 zero = {0}, float factor = {1.5}, int64[1] few = {8}, float off = {1.03},"
    numbers += " float one = {1}>"
    original = parse(f"(float[n] x) => (float[n] y) {numbers} {{ {grid} y = Identity (m) }}")
    result = parse(f"""(float[n] x) => (float[n] y) {numbers} {{ {grid} h = Cast <to = 10> (m) f = Cast <to = 1> (h)
        s = Shape (x) is_large = Greater (s, few) k = Where (is_large, off, one) y = Mul (f, k) }}""")
    samples = onnxamp.random_samples(original)
    comparison = Comparison.of(Model.of(original), Run(inputs=samples, provider="cpu"), beyond="compared")
    report = comparison.compare(Model.of(result), layers=False)
    (larger,) = report.extras
    assert not report.passed
    assert larger.judgements[0].found == pytest.approx(0.03, rel=0.01)
