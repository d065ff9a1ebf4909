"""Level auto on models and options that strangers tried."""

from pathlib import Path

import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

NETWORK = "(float[8,64] x) => (float[8,64] OUT) { h = MatMul (x, w) t = Tanh (h) g = MatMul (t, v) OUT = Exp (g) }"


def network(output: str = "y") -> ModelProto:
    return add_weights(parse(NETWORK.replace("OUT", output), 17), {"w": (64, 64), "v": (64, 64)})


def test_a_state_of_other_types_of_outputs_is_refused(tmp_path: Path) -> None:
    onnxamp.tune_model(network(), 1e-1, state=tmp_path / "state", allow_slower=True)
    with pytest.raises(onnxamp.ArgumentError, match="the options changed"):
        onnxamp.tune_model(network(), 1e-1, state=tmp_path / "state", keep_io_types=False, allow_slower=True)


@pytest.mark.parametrize(("metric", "text"), [
    ("kl", NETWORK.replace("OUT", "y")),
    ("top1", "(float[8,64] x) => (float y) { h = MatMul (x, w) y = ReduceSum <keepdims = 0> (h) }"),
])  # fmt: skip
def test_a_metric_of_no_output_is_refused(metric: str, text: str) -> None:
    model = add_weights(parse(text, 17), {"w": (64, 64), "v": (64, 64)})
    with pytest.raises(onnxamp.ArgumentError, match=f"No output of the model can be measured by '{metric}'"):
        onnxamp.tune_model(model, 1e-2, metric=metric, allow_slower=True)


def test_divergence_of_logits() -> None:
    assert onnxamp.tune_model(network("logits"), 1e-2, metric="kl", allow_slower=True).tuned.held


@pytest.mark.parametrize("mode", ["edge", "reflect", "wrap"])
def test_pads_that_crop(mode: str) -> None:
    text = f"""(float[8,64] x) => (float[8,64] y) <int64[4] q = {{0, 2, 0, -1}}, int64[2] size = {{8, 65}}> {{
        h = MatMul (x, w) p = Pad <mode = "{mode}"> (h, q) s = Slice (p, a, b, c) y = MatMul (s, v) }}"""
    text = text.replace("int64[2] size = {8, 65}", "int64[1] a = {0}, int64[1] b = {64}, int64[1] c = {1}")
    model = add_weights(parse(text, 19, ir=9), {"w": (64, 64), "v": (64, 64)})
    assert onnxamp.tune_model(model, 1e-2, allow_slower=True).tuned.held


def test_weights_of_two_loops_have_one_name() -> None:
    def loop(number: int, source: str) -> str:
        body = f"""body = b{number} (int64 i{number}, bool go{number}, float[8,64] s{number})
            => (bool went{number}, float[8,64] t{number}) <float[1] k = {{1.{number}}}> {{
            went{number} = Identity (go{number}) m{number} = Mul (s{number}, k) t{number} = Tanh (m{number}) }}"""
        return f"r{number} = Loop <{body}> (trips, first, {source})"

    text = f"""(float[8,64] x) => (float[8,64] y) <int64 trips = {{2}}, bool first = {{1}}> {{
        h = MatMul (x, w) {loop(1, "h")} {loop(2, "r1")} y = MatMul (r2, v) }}"""
    model = add_weights(parse(text, 17), {"w": (64, 64), "v": (64, 64)})
    assert onnxamp.tune_model(model, 1e-2, allow_slower=True).tuned.held


QUANTIZED = """(float[8,64] x) => (float[8,64] y) <float s = {0.1}, int8 z = {0}> {
    a = MatMul (x, w) q = QuantizeLinear (a, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, v) }"""


@pytest.mark.parametrize("asked", [0.01, 0.0101])
def test_a_tolerance_that_is_asked_for_is_not_widened(asked: float) -> None:
    model = add_weights(parse(QUANTIZED, 17), {"w": (64, 64), "v": (64, 64)})
    usual = onnxamp.tune_model(model, count=1).tuned
    assert usual.tolerance == 0.01 + usual.coarse > 0.02
    tuned = onnxamp.tune_model(model, asked, count=1).tuned
    assert (tuned.tolerance, tuned.coarse) == (asked, 0)


def test_a_result_that_meets_the_cosine_passes_validation(tmp_path: Path) -> None:
    """A distance of 0.01, the default, is a relative error of 0.14."""
    text = """(float[256,256] x) => (float[256,256] y) <float k = {200}> {
        a = MatMul (x, w) b = Add (a, k) c = Relu (b) d = Sub (c, k) y = MatMul (d, v) }"""
    onnx.save(add_weights(parse(text, 17), {"w": (256, 256), "v": (256, 256)}), tmp_path / "model.onnx")
    low = tmp_path / "low.onnx"
    told = onnxamp.convert_file(tmp_path / "model.onnx", low, "auto", metric="cosine", keep_io_types=False)
    assert told.validation is not None
    assert (told.validation.passed, told.validation.cure) == (True, None)
    assert told.validation.outputs[0].rel_l2 > 0.01


def test_a_state_of_a_metric_whose_code_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "def error(reference, result):\n    return {}\n"
    Path("judge.py").write_text(code.format("0.1"), encoding="utf-8")
    onnxamp.tune_model(network(), 0.5, metric="judge.py:error", state="state", count=1)
    onnxamp.tune_model(network(), 0.5, metric="judge.py:error", state="state", count=1)
    Path("judge.py").write_text(code.format("0.9"), encoding="utf-8")
    with pytest.raises(onnxamp.ArgumentError, match="the metric changed"):
        onnxamp.tune_model(network(), 0.5, metric="judge.py:error", state="state", count=1)


@pytest.mark.parametrize(
    "given",
    [{"tolerance": "0.01"}, {"seconds": "60"}, {"pick": "1"}, {"device": 3}, {"jobs": "2"}, {"budget": "1"},
     {"seconds": float("nan")}, {"pick": -1}],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_runs(given: dict[str, object]) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it runs")

    with pytest.raises((onnxamp.ArgumentError, onnxamp.ArgumentTypeError)):
        onnxamp.tune_model(network(), count=1, progress=never, **given)  # type: ignore[arg-type] # they are wrong
