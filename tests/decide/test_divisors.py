"""What is divided by stays in float32 if low precision may round it to zero."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

NUMBERS = "float one = {1}, float half = {0.5}, int64[1] last = {-1}"

KEPT = {
    "an exponential": "e = Exp (h) y = Div (one, e)",
    "a Softplus": "s = Softplus (h) y = Reciprocal (s)",
    "both vanish": "a = Softplus (h) b = Softplus (k) s = Add (a, b) y = Div (a, s)",
    "bells": """a = Mul (h, h) n = Neg (a) e = Exp (n) b = Mul (k, k) m = Neg (b) f = Exp (m)
        s = Add (e, f) y = Div (e, s)""",
    "a square": "t = Tanh (h) s = Mul (t, t) y = Div (k, s)",
    "a root of squares": "t = Tanh (h) s = Mul (t, t) r = ReduceSum (s, last) q = Sqrt (r) y = Div (k, q)",
    "a scaled one": "e = Exp (h) s = Mul (e, half) y = Div (k, s)",
}
FREE = {
    "a decomposed activation": "n = Neg (h) e = Exp (n) a = Add (one, e) y = Div (h, a)",
    "one plus a square": "s = Mul (h, h) a = Add (s, one) y = Div (k, a)",
    "a sum with something else": "e = Exp (h) a = Add (e, k) y = Div (h, a)",
    "a factor": "e = Exp (h) m = Mul (e, k) y = Div (m, half)",
    "the dividend alone": "e = Exp (h) y = Div (e, k)",
}


def model_of(text: str) -> ModelProto:
    """Numbers between -20 and 20, and what is computed from them."""
    scaled = "a0 = MatMul (x, w) b0 = Tanh (a0) h = MatMul (b0, u) a1 = MatMul (x, v) b1 = Tanh (a1) k = MatMul (b1, u)"
    model = parse(f"(float[4,8] x) => (float[4,N] z) <{NUMBERS}> {{ {scaled} {text} z = Identity (y) }}")
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((8, 8)) for name in "vw"} | {"u": 20 * np.eye(8)}
    return add_weights(model, {name: weight.astype(np.float32) for name, weight in weights.items()})


def reasons(model: ModelProto, **options: str) -> set[str]:
    plan = onnxamp.plan_model(model, "O3", **options)
    return {row.reason for row in plan.rows if not row.low}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_a_divisor_that_may_vanish_stays_in_float32(text: str) -> None:
    found = reasons(model_of(text))
    assert found & {"divisor", "decomposed pattern"}


@pytest.mark.parametrize("text", FREE.values(), ids=FREE)
def test_other_divisors_are_low(text: str) -> None:
    assert "divisor" not in reasons(model_of(text))


def test_bfloat16_holds_small_divisors() -> None:
    assert "divisor" not in reasons(model_of(KEPT["a Softplus"]), dtype="bfloat16")


def test_a_range_that_keeps_the_divisor_from_zero_lifts_the_hazard() -> None:
    text = "(float[4,8] x) => (float[4,8] y) { e = Exp (x) y = Reciprocal (e) }"
    assert "divisor" in reasons(parse(text))
    assert "divisor" not in reasons(parse(text), input_ranges={"x": (-5.0, 5.0)})


@pytest.mark.parametrize(("name", "size"), [("both vanish", 9.0), ("a square", 1e-4)])
def test_results_are_right_where_divisors_vanish(tmp_path: Path, name: str, size: float) -> None:
    """Random inputs show none of it: few numbers are small, and never both that are added."""
    onnx.save(model_of(KEPT[name]), tmp_path / "model.onnx")
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", level="O3")
    assert made.validation is not None
    assert made.validation.passed
    inputs = (size * np.random.default_rng(1).standard_normal((64, 4, 8))).astype(np.float32)
    samples = [{"x": one} for one in inputs]
    assert onnxamp.diff_models(tmp_path / "model.onnx", tmp_path / "low.onnx", samples, provider="cpu").failure is None
