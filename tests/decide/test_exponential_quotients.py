"""Quotients of two numbers that grow with one exponential: both are infinite in float16 where exp(x) is."""

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

HEAD = "(float[4,64] x) => (float[4,64] y) <float one = {1}, int64[1] axis = {1}> { h = MatMul (x, w)"
KEPT = {
    "sigmoid": "e = Exp (h) d = Add (one, e) q = Div (e, d)",
    "sigmoid by an inverse": "e = Exp (h) d = Add (e, one) i = Reciprocal (d) q = Mul (i, e)",
    "tanh": "k = Add (h, h) e = Exp (k) n = Sub (e, one) d = Add (e, one) q = Div (n, d)",
    "tanh by two exponentials": """e = Exp (h) k = Neg (h) f = Exp (k) n = Sub (e, f) d = Add (e, f)
        q = Div (n, d)""",
    "Mish": """e = Exp (h) k = Add (e, one) s = Mul (k, k) n = Sub (s, one) d = Add (s, one) t = Div (n, d)
        q = Mul (h, t)""",
    "a weighted mean": """e = Exp (h) k = MatMul (x, v) p = Mul (e, k) n = ReduceSum (p, axis) d = ReduceSum (e, axis)
        m = Div (n, d) q = Add (m, h)""",
}  # fmt: skip
FREE = {
    "a sigmoid that ends at 0": "k = Neg (h) e = Exp (k) d = Add (e, one) q = Reciprocal (d)",
    "a Swish that ends at 0": "k = Neg (h) e = Exp (k) d = Add (e, one) q = Div (h, d)",
    "bounded": "t = Tanh (h) e = Exp (t) d = Add (e, one) q = Div (e, d)",
    "below the largest": """m = ReduceMax <axes = [1]> (h) k = Sub (h, m) e = Exp (k) p = Mul (e, h)
        n = ReduceSum (p, axis) d = ReduceSum (e, axis) r = Div (n, d) q = Add (r, h)""",
}  # fmt: skip


def model_of(body: str) -> ModelProto:
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((64, 64)).astype(np.float32) / 8 for name in "wv"}
    used = {name: array for name, array in weights.items() if f" {name})" in HEAD + body}
    return add_weights(parse(f"{HEAD} {body} y = MatMul (q, w) }}"), used)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", KEPT)
def test_what_two_infinite_numbers_make_is_kept(name: str, level: str) -> None:
    model = model_of(KEPT[name])
    x = 5 * np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    result = onnxamp.convert_model(model, level)
    (output,) = onnxamp.diff_models(model, result, samples=[{"x": x}]).outputs
    assert output.result_nan == 0
    assert output.rel_l2 < 0.01


@pytest.mark.parametrize("name", FREE)
def test_what_stays_in_range_is_free(name: str) -> None:
    hazards = onnxamp.plan_model(model_of(FREE[name])).hazards
    assert "decomposed pattern" not in {hazard.reason for hazard in hazards}


def test_bfloat16_has_the_range() -> None:
    assert not onnxamp.plan_model(model_of(KEPT["Mish"]), dtype="bfloat16").hazards
