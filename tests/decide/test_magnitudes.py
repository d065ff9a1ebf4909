"""Inputs that are larger than random samples, and numbers that differ by little: what models do to them shows it."""

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

NUMBERS = """<float cents = {1e-5}, float day = {86400}, float two = {2}, float three = {3}, float one = {1},
    float some = {8}, float hundred = {100}, float mean = {8.3}, float deviation = {0.01}, float least = {0.001},
    int64[1] axis = {1}, int64[1] first = {0}, int64[1] next = {1}, int64[1] last = {63}, int64[1] end = {64},
    int64[1] before = {-1}, float minus = {-2}>"""
ROWS = "(float[4,64] x) => (float[4,64] y)"
STEPS = "now = Slice (l, next, end, axis) then = Slice (l, first, last, axis)"

LARGE = {
    "scaled": (f"{ROWS} {{ s = Mul (x, cents) y = MatMul (s, w) }}", 2e6),
    "shifted and divided": (f"{ROWS} {{ k = Sub (x, hundred) s = Div (k, day) y = MatMul (s, w) }}", 4e5),
    "integers": ("""(int64[4,64] x) => (float[4,64] y) { f = Cast <to = 1> (x) s = Mul (f, cents)
        y = MatMul (s, w) }""", 2e6),
    "squared": (f"{ROWS} {{ q = Mul (x, x) y = MatMul (q, tiny) }}", 2000),
    "cubed": (f"{ROWS} {{ q = Pow (x, three) h = Div (q, two) y = MatMul (h, tiny) }}", 300),
    "exponential": (f"{ROWS} {{ e = Exp (x) y = MatMul (e, tiny) }}", 12),
    "products of columns": (f"""{ROWS} {{ i, j = Split <axis = 1> (x) p = Mul (i, j) k = Concat <axis = 1> (p, i)
        y = MatMul (k, tiny) }}""", 2000),
    "stored moments": (f"""{ROWS} {{ h = MatMul (x, positive)
        n = BatchNormalization (h, scales, shifts, means, variances) y = MatMul (n, w) }}""", 20000),
    "power of three": (f"{ROWS} {{ h = Div (x, two) e = Pow (three, h) r = Relu (e) y = MatMul (r, tiny) }}", 20),
    "squared after Casts": (f"""{ROWS} {{ h = Cast <to = 10> (x) k = Relu (h) f = Cast <to = 1> (k)
        g = Cast <to = 1> (k) q = Mul (f, g) y = MatMul (q, tiny) }}""", 2000),
    "magnitude": (f"""{ROWS} {{ i = Neg (x) q = Mul (x, x) r = Pow (i, two) p = Add (q, r) m = MatMul (p, positive)
        y = Log (m) }}""", 3000),
    "scaled by its mean": (f"""{ROWS} {{ p = Abs (x) k = ReduceMean <axes = [1]> (p) m = Add (k, one) s = Div (x, m)
        h = MatMul (s, w) g = Mul (h, m) i = Relu (g) y = Div (i, m) }}""", 1e6),
}  # fmt: skip
"""Name -> a model, and the size of numbers that it may well read."""

CLOSE = {
    "logarithms of steps": f"{ROWS} {{ k = Max (x, least) l = Log (k) {STEPS} d = Sub (now, then) y = MatMul (d, v) }}",
    "ratio of steps": f"{ROWS} {{ l = Relu (x) {STEPS} r = Div (now, then) d = Sub (r, one) y = MatMul (d, v) }}",
    "percent": f"""{ROWS} {{ l = Abs (x) {STEPS} r = Div (now, then) p = Mul (r, hundred) d = Sub (p, hundred)
        y = MatMul (d, v) }}""",
    "logarithm of a ratio": f"{ROWS} {{ l = Abs (x) {STEPS} r = Div (now, then) d = Log (r) y = MatMul (d, v) }}",
    "from its mean": f"""{ROWS} {{ m = ReduceMean <axes = [1]> (x) r = Div (x, m) d = Sub (r, one)
        y = MatMul (d, w) }}""",
    "roots": f"{ROWS} {{ k = Relu (x) l = Sqrt (k) {STEPS} d = Sub (now, then) y = MatMul (d, v) }}",
    "a logarithm by stored moments": f"""{ROWS} {{ l = Log (x) k = Sub (l, mean) s = Div (k, deviation)
        y = MatMul (s, w) }}""",
    "a mean in a bias": f"{ROWS} {{ h = Gemm (x, w, b) y = Relu (h) }}",
    "a mean in a sum": f"{ROWS} {{ k = MatMul (x, w) h = Add (b, k) y = Relu (h) }}",
    "k-means": f"""{ROWS} {{ q = ReduceSumSquare <axes = [1]> (x) p = Gemm <alpha = -2.0> (x, centers) k = Add (q, p)
        y = Add (squares, k) }}""",
    "a code book": f"""{ROWS} {{ q = Pow (x, two) s = ReduceSum (q, axis) p = MatMul (x, centers) t = Mul (p, two)
        k = Add (s, squares) d = Sub (k, t) r = Relu (d) y = Sqrt (r) }}""",
    "a cloud": """(float[1,64,3] x) => (float[1,64,64] y) { t = Transpose <perm = [0, 2, 1]> (x) p = MatMul (x, t)
        m = Mul (p, minus) q = Mul (x, x) s = ReduceSum (q, before) u = Transpose <perm = [0, 2, 1]> (s) k = Add (m, s)
        y = Add (k, u) }""",
}  # fmt: skip


def model_of(text: str) -> ModelProto:
    head, brace, body = text.partition("{")
    draw = np.random.default_rng(0)
    w = draw.standard_normal((64, 64)).astype(np.float32) / 8
    centers = (4000 + draw.standard_normal((64, 64))).astype(np.float32)
    weights = {
        "w": w,
        "v": w[:63],
        "tiny": w * np.float32(1e-6),
        "positive": np.abs(w),
        "b": -4000 * w.sum(0),
        "scales": np.ones(64, np.float32),
        "shifts": np.zeros(64, np.float32),
        "means": 30000 * np.abs(w).sum(0),
        "variances": np.full(64, 3e8, np.float32),
        "centers": centers,
        "squares": (centers.astype(np.float64) ** 2).sum(0, keepdims=True).astype(np.float32),
    }
    used = {
        name: array
        for name, array in weights.items()
        if f" {name})" in body or f" {name}," in body or f"({name}," in body
    }
    return add_weights(parse(f"{head}{NUMBERS}{brace}{body}"), used)


def error_of(model: ModelProto, x: np.ndarray, level: str, dtype: str = "float16") -> float:
    given = model.graph.input[0].type.tensor_type.elem_type
    feeds = {"x": x.astype(onnx.helper.tensor_dtype_to_np_dtype(given))}
    result = onnxamp.convert_model(model, level, dtype=dtype)
    return onnxamp.diff_models(model, result, samples=[feeds]).outputs[0].rel_l2


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", LARGE)
def test_inputs_may_be_as_large_as_what_scales_them_down_shows(name: str, level: str) -> None:
    text, size = LARGE[name]
    x = size * (1 + np.random.default_rng(1).random((4, 64)))
    assert error_of(model_of(text), x, level) < 0.01


@pytest.mark.mostly_slow(fast=16)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CLOSE)
def test_numbers_that_differ_by_little_stay_apart(name: str, dtype: str) -> None:
    model = model_of(CLOSE[name])
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    scale = 4000.0
    x = scale * (1 + 0.01 * np.random.default_rng(1).standard_normal(shape))
    for level in ("O2", "O3"):
        assert error_of(model, x, level, dtype) < (0.01 if dtype == "float16" else 0.05)


NEAR = {
    "normalized": """n = LpNormalization (p) o = LpNormalization (q) m = Mul (n, o) c = ReduceSum (m, axis)
        y = Sub (one, c)""",
    "divided": """k = ReduceL2 <axes = [1]> (p) l = Max (k, least) n = Div (p, l) o = LpNormalization (q) m = Mul (o, n)
        s = ReduceSum (m, axis) c = Neg (s) y = Add (c, one)""",
    "an angle": """n = LpNormalization (p) o = LpNormalization (q) m = Mul (n, o) c = ReduceSum (m, axis)
        d = Min (c, one) y = Acos (d)""",
    "divided at last": """k = ReduceL2 <axes = [1]> (p) l = ReduceL2 <axes = [1]> (q) e = Mul (k, l) f = Max (e, least)
        m = Mul (p, q) s = ReduceSum (m, axis) c = Div (s, f) g = Min (c, one) y = Sub (one, g)""",
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_distances_of_near_duplicates_survive(name: str) -> None:
    head = "(float[4,64] x, float[4,64] z) => (float[4,1] y) { p = MatMul (x, w) q = MatMul (z, w)"
    model = model_of(f"{head} {NEAR[name]} }}")
    draws = np.random.default_rng(1).standard_normal((2, 4, 64))
    feeds = {"x": draws[0].astype(np.float32), "z": (draws[0] + 0.05 * draws[1]).astype(np.float32)}
    for level in ("O2", "O3"):
        result = onnxamp.convert_model(model, level)
        assert onnxamp.diff_models(model, result, samples=[feeds]).outputs[0].rel_l2 < 0.03


FREE = {
    "colors from their mean": f"{ROWS} {{ d = Sub (x, hundred) y = MatMul (d, w) }}",
    "colors": f"{ROWS} {{ s = Div (x, hundred) y = MatMul (s, w) }}",
    "an ordinary bias": f"{ROWS} {{ h = Gemm (x, w, small) y = Relu (h) }}",
    "a square inside a network": f"{ROWS} {{ h = MatMul (x, w) t = Tanh (h) q = Mul (t, t) y = MatMul (q, w) }}",
    "features times scales": """(float[4,64] x, float[1,64] z) => (float[4,64] y) { k = Mul (x, z)
        y = MatMul (k, w) }""",
    "features times gates": """(float[4,64] x, float[4,64] gates) => (float[4,64] y) { k = Mul (gates, x)
        y = MatMul (k, w) }""",
    "an exponential inside a network": f"{ROWS} {{ h = MatMul (x, w) t = Tanh (h) e = Exp (t) y = MatMul (e, w) }}",
    "a softsign": f"{ROWS} {{ p = Abs (x) k = Add (p, one) s = Div (x, k) y = MatMul (s, w) }}",
    "a root that divides": f"{ROWS} {{ k = Max (x, least) r = Sqrt (k) s = Div (x, r) y = MatMul (s, w) }}",
    "squares beside a product": f"""{ROWS} {{ h = MatMul (x, w) t = Tanh (h) k = MatMul (t, w) q = Mul (t, t)
        s = ReduceSum (q, axis) r = Sqrt (s) y = Add (k, r) }}""",
}


@pytest.mark.parametrize("name", FREE)
def test_what_only_looks_like_it_is_no_hazard(name: str) -> None:
    model = add_weights(model_of(FREE[name]), {"small": np.full(64, 0.1, np.float32)} if "small" in FREE[name] else {})
    reasons = {hazard.reason for hazard in onnxamp.plan_model(model).hazards}
    assert reasons.isdisjoint({"cancellation", "input magnitude"})


def test_the_sum_of_an_input_and_a_correction_is_a_result_of_any_size() -> None:
    model = model_of(f"{ROWS} {{ h = MatMul (x, w) t = Tanh (h) k = MatMul (t, w) y = Add (x, k) }}")
    low = {row.key.partition(":")[0]: row.low for row in onnxamp.plan_model(model, "O3").rows}
    assert low["y"] is False
    assert low["k"] is True


def test_a_stated_range_is_no_magnitude() -> None:
    model = model_of(f"{ROWS} {{ q = Mul (x, x) y = MatMul (q, w) }}")
    assert {"input magnitude"} == {hazard.reason for hazard in onnxamp.plan_model(model).hazards}
    assert not onnxamp.plan_model(model, input_ranges={"x": (-1, 1)}).hazards
    assert not onnxamp.plan_model(model, dtype="bfloat16").hazards


@pytest.mark.parametrize("name", ["logarithms of steps", "a mean in a bias"])
def test_level_auto_does_not_measure_it_on_random_samples(name: str) -> None:
    plan = onnxamp.plan_model(model_of(CLOSE[name]), "auto")
    kept = [hazard for hazard in plan.hazards if hazard.reason == "cancellation"]
    assert kept
    assert not any(hazard.low for hazard in kept)


FORMS = {
    "a cosine divided at last": ("""(float[4,64] x, float[64,4] z) => (float[4,4] y) { s = MatMul (x, z)
        p = ReduceL2 <axes = [1]> (x) q = ReduceL2 <axes = [0]> (z) e = Mul (p, q) y = Div (s, e)""", 1000.0, 1000.0),
    "what is left divides": ("""(float[4,64] x) => (float[4,64] y) { h = Sub (x, most) q = Div (one, h)
        y = MatMul (q, w)""", 2049.0, 1.0),
    "kelvins from their mean": ("(float[4,64] x) => (float[4,64] y) { d = Sub (x, mean) y = MatMul (d, w)", 287.0, 2.0),
    "the sine of a layer": ("(float[4,64] x) => (float[4,64] y) { h = Gemm (x, w, half) s = Sin (h) y = MatMul (s, w)",
                            0.0, 4000.0),
    "opposite weights": ("(float[4,64] x) => (float[4,8] y) { h = MatMul (x, opposite) y = Log (h)", 5.0, 0.001),
    "opposite weights, bounded": ("""(float[4,64] x) => (float[4,8] y) { h = Gemm (x, opposite) r = Relu (h)
        y = Log (r)""", 5.0, 0.001),
    "a haversine": ("""(float[4,64] x, float[4,64] z) => (float[4,64] y) { d = Sub (x, z) h = Mul (d, half) s = Sin (h)
        q = Mul (s, s) c = Cos (x) t = Mul (c, q) a = Add (q, t) r = Sqrt (a) v = Asin (r) y = Mul (v, two)""", 1.0,
        0.0003),
}  # fmt: skip
"""Name -> a model, the least of its inputs, and how far they reach beyond it."""


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", FORMS)
def test_forms_that_need_the_digits_of_inputs(name: str, level: str) -> None:
    text, least, width = FORMS[name]
    opposite = np.zeros((64, 8), np.float32)
    opposite[:2] = [[1.0], [-0.999]]
    numbers = "<float one = {1}, float half = {0.5}, float two = {2}, float most = {2047.6}, float mean = {288}>"
    head, brace, body = text.partition("{")
    weights = {"opposite": opposite, "w": np.eye(64, dtype=np.float32)}
    used = {key: array for key, array in weights.items() if f" {key})" in body}
    model = add_weights(parse(f"{head}{numbers}{brace}{body} }}"), used)
    draw = np.random.default_rng(1)
    feeds = {}
    for entry in model.graph.input:
        shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        feeds[entry.name] = (least + width * draw.random(shape)).astype(np.float32)
    result = onnxamp.convert_model(model, level)
    assert onnxamp.diff_models(model, result, samples=[feeds]).outputs[0].rel_l2 < 0.005
