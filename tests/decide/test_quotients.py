"""Quotients of ordinary size whose operands leave the range: of one exponential, or parts of one product."""

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


CAMERA = np.float32([[1266, 0, 0], [0, 1266, 0], [816, 491, 1]])
"""Pixels for each meter aside, at a distance of a meter."""
CAMERAS = {
    "stored": """(float[9,3] x) => (float[9,8] y) { p = MatMul (x, camera) l = Slice (p, zero, two, axis)
        d = Slice (p, two, three, axis) e = Max (d, little) q = Div (l, e) n = Div (q, size) y = MatMul (n, v) }""",
    "given": """(float[9,3] x, float[3,3] camera) => (float[9,8] y) { p = MatMul (x, camera)
        l, d = Split <axis = 1> (p, parts) q = Div (l, d) n = Div (q, size) y = MatMul (n, v) }""",
}  # fmt: skip


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", CAMERAS)
def test_what_a_camera_divides_by_the_distance_is_kept(name: str, level: str) -> None:
    numbers = """<int64[1] zero = {0}, int64[1] two = {2}, int64[1] three = {3}, int64[1] axis = {1},
        float little = {1e-5}, int64[2] parts = {2, 1}, float[2] size = {1600, 900},
        float[2,8] v = {1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1}>"""
    model = parse(CAMERAS[name].replace("{", f"{numbers} {{", 1))
    feeds = {"x": np.random.default_rng(1).uniform(60, 120, (9, 3)).astype(np.float32)}
    if name == "given":
        feeds["camera"] = CAMERA
    else:
        add_weights(model, {"camera": CAMERA})
    result = onnxamp.convert_model(model, level)
    (output,) = onnxamp.diff_models(model, result, samples=[feeds]).outputs
    assert (output.result_nan, output.result_inf) == (0, 0)
    assert output.rel_l2 < 0.01


LINEAR = """(float[2,1024,16] x) => (float[2,1024,16] y) <int64[1] zero = {0}, int64[1] last = {-1},
    int64[1] end = {99}, int64[1] axis = {2}, float one = {1}, float little = {1e-6},
    int64[6] pads = {0, 0, 0, 0, 0, 1}> {
    k = Relu (x) t = Transpose <perm = [0, 2, 1]> (k) s = Pad (x, pads, one) [sum] m = MatMul (t, s)
    [sum] o = MatMul (k, m) l = Slice (o, zero, last, axis) d = Slice (o, last, end, axis) e = Add (d, little)
    [sum] q = Div (l, e) y = Neg (q) }"""


def test_sums_of_linear_attention_are_kept_where_a_column_of_ones_divides_them() -> None:
    rows = onnxamp.plan_model(parse(LINEAR), "O3").rows
    assert [row.low for row in rows if row.node.startswith("sum")] == [False] * 3


def test_bfloat16_has_the_range() -> None:
    assert not onnxamp.plan_model(model_of(KEPT["Mish"]), dtype="bfloat16").hazards
