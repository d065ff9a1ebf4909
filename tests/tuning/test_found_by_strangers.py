"""Level auto on models and options that strangers tried."""

from pathlib import Path

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
    with pytest.raises(onnxamp.ArgumentError, match=f"The metric '{metric}' is of no output"):
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
