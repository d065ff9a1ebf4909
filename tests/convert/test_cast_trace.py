"""What ``onnxamp inspect --cast`` says: the step that put a Cast at a value, and what asked for its precisions."""

import json
import shlex
from pathlib import Path

import onnx
import pytest
from commands import run
from onnx import ModelProto, parser

import onnxamp
from onnxamp._facts.tables import read_table
from onnxamp._rewrite.prepare import PASSES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def traced(model: ModelProto | str, *values: str, options: tuple[str, ...] = ()) -> list[dict]:
    if isinstance(model, str):
        model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {model}')
    onnx.save(model, "model.onnx")
    words = [word for value in values for word in ("--cast", value)]
    done = run("inspect", "model.onnx", *words, *options, "--format", "json")
    return [row["trace"] for row in json.loads(done.output)["casts"]]


def steps(trace: dict) -> dict[str, str]:
    return {cast["cast"]: cast["step"] for cast in trace["casts"]}


PLAIN = """(float[4,4] x) => (float[4,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}> {
    a = MatMul (x, w) [kept] b = Add (a, w) c = Relu (b) y = MatMul (c, w) }"""
KEEP = ("--keep-fp32", "kept")


@pytest.mark.parametrize("name", ["a", "a_fp32", "a_fp32/Cast"])
def test_the_decision_and_the_pins_of_both_sides(name):
    (trace,) = traced(PLAIN, name, options=KEEP)
    assert trace["value"] == "a"
    assert steps(trace) == {"a_fp32": "decision"}
    assert (trace["made"]["precision"], trace["read"][0]["precision"]) == ("float16", "float32")
    assert trace["made"]["option"] == "--black MatMul, or --keep-fp32 a"
    assert "named in your options" in trace["read"][0]["why"]


def test_the_nearest_pin_explains_what_the_cut_decides():
    (trace,) = traced(PLAIN, "c", options=KEEP)
    assert trace["made"]["op"] == "Relu"
    assert trace["made"]["asked_by"].startswith(("kept: ", "y: "))


def test_a_weight_that_is_stored_twice_has_no_cast():
    (trace,) = traced(PLAIN, "w", options=KEEP)
    assert set(steps(trace).values()) == {"stored"}
    assert {side["precision"] for side in trace["read"]} == {"float16", "float32"}


def test_the_bound_of_a_mask():
    (trace,) = traced(
        """(float[2,4] q, float[4,4] k, float[2,4] mask) => (float[2,4] y) {
            s = MatMul (q, k) a = Add (s, mask) p = Softmax (a) y = MatMul (p, k) }""",
        "mask",
    )
    assert set(steps(trace).values()) == {"bounded"}


@pytest.mark.parametrize(("text", "value", "step"), [
    ("a = MatMul (x, w) c = Cast <to = 10> (a) d = Relu (c) y = Cast <to = 1> (d)", "a", "removed-low"),
    ("a = MatMul (x, w) c = Cast <to = 10> (a) d = Relu (c) y = Cast <to = 1> (d)", "d", "kept"),
    ("a = MatMul (x, w) b = Cast <to = 11> (a) c = Cast <to = 1> (b) y = MatMul (c, w)", "b", "casts"),
])  # fmt: skip
def test_casts_of_the_model(text, value, step):
    (trace,) = traced(f"(float[4,4] x, float[4,4] w) => (float[4,4] y) {{ {text} }}", value)
    assert set(steps(trace).values()) == {step}


def test_bodies():
    (outer, inner) = traced(
        """(bool c, float[2,4] x, float[4,4] w) => (float[2,4] y) { h = MatMul (x, w) y = If (c) <
            then_branch = t () => (float[2,4] u) { [kept] e = Exp (h) u = MatMul (e, w) },
            else_branch = f () => (float[2,4] v) { v = MatMul (h, w) }> }""",
        "h", "e", options=KEEP,
    )  # fmt: skip
    assert steps(outer) == {"h_fp32": "decision"}
    assert steps(inner) == {"e_fp16": "decision"}
    assert (outer["body"], inner["body"]) == ("", "y")


def test_the_output_of_a_body_is_none_of_the_model():
    (trace,) = traced(
        """(bool c, float[2,4] x, float[4,4] w) => (float[2,4] y) { h = MatMul (x, w) y = If (c) <
            then_branch = t () => (float[2,4] u) { u = MatMul (h, w) },
            else_branch = f () => (float[2,4] v) { v = Identity (h) }> }""",
        "u",
    )  # fmt: skip
    assert [side["op"] for side in trace["read"]] == ["body output"]
    assert "--io-types" not in trace["read"][0]["option"]


@pytest.mark.parametrize(("name", "said"), [("c", "conversions leave bool as it is"), ("d", "nothing reads it")])
def test_a_value_without_a_cast(name, said):
    model = "(float[2,4] x, bool[2,4] c) => (float[2,4] y) { d = Exp (x) y = Where (c, x, x) }"
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {model}'), "model.onnx")
    assert f"There is no Cast at this value: {said}." in run("inspect", "model.onnx", "--cast", name).output


def test_names_in_advice_are_patterns_that_a_shell_takes():
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {PLAIN}')
    model.graph.node[0].name = "layers.0(q+k)/Mat Mul"
    (trace,) = traced(model, "a", options=KEEP)
    pattern = shlex.split(trace["made"]["option"])[-1]
    (kept,) = traced(model, "a", options=(*KEEP, "--keep-fp32", pattern))
    assert kept["made"]["precision"] == "float32"


@pytest.mark.parametrize("apply", PASSES)
def test_every_pass_has_words(apply):
    assert read_table("cast_steps")[apply.__module__.rpartition(".")[2]]["text"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_converted_model_has_the_reasons_of_the_original(dtype):
    text = PLAIN.replace("Add (a, w)", "Softmax (a)")
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    converted = onnxamp.convert_model(model, dtype=dtype, black_list=["Softmax"])
    (trace,) = traced(converted, "a", options=("--black", "Softmax", "--dtype", dtype))
    assert set(steps(trace).values()) == {"converted"}
    assert trace["made"]["precision"] == dtype
    assert trace["made"]["why"] == "on the white list: MatMul"
    assert trace["read"][0]["why"] == "on the black list: Softmax"


def test_a_misspelled_value():
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {PLAIN}'), "model.onnx")
    done = run("inspect", "model.onnx", "--cast", "a_fp3")
    assert done.exit_code == 2
    assert "has a value 'a_fp3'" in done.output


def test_the_report():
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {PLAIN}'), "model.onnx")
    text = run("inspect", "model.onnx", "--cast", "a", *KEEP, "--level", "O1", "--level", "O2").output
    assert "a at level O1" in text
    assert "a at level O2" in text
    assert "The decision adds this Cast" in text


def test_raising_a_model_changes_its_casts():
    text = """(float[8,8] x, float16[8,8] w) => (float[8,8] z) {
        h = Cast <to = 10> (x) t = MatMul (h, w) u = Cast <to = 1> (t) z = Softmax (u) }"""
    (trace,) = traced(text, "x", options=("--from", "auto"))
    assert "raised" in steps(trace).values()
    assert "--opset" not in str(trace["casts"])
