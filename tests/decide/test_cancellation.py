"""Normalizations of an input whose mean is far larger than its deviations."""

from typing import Any

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

NUMBERS = """<float[3] s = {1, 1, 1}, float[3] b = {0, 0, 0}, float[3] two3 = {2, 2, 2},
    float[3] means = {20, 20, 20}, float[3] variances = {0.0001, 0.0001, 0.0001},
    float e = {1e-6}, float zero = {0}, float one = {1}, float two = {2}, float size = {64}, float twenty = {20},
    float little = {0.01}, float tenth = {0.1}, float hundred = {100}, float shift = {-2000},
    float[4] twice = {1, 1, 2, 2}, float[1,1,5] blur = {0.1, 0.2, 0.4, 0.2, 0.1}, float[1,1,3] box = {0.25, 0.5, 0.25},
    float[1,1,3] bend = {1, -2, 1}, int64[6] margin = {0, 0, 2, 0, 0, 2}, int64[4] flow = {2, 16, 16, 1},
    int64 along = {1}, int64[1] half = {32}, int64[1] axis = {1}, int64[1] first = {0}, int64[1] next = {1},
    int64[1] after = {2}, int64[1] last = {-1}, int64[1] end = {64}>"""
IMAGE = "(float[2,3,16,16] x) => (float[2,C,16,16] y)"
ROWS = "(float[4,64] x) => (float[4,64] y)"
SERIES = "(float[4,1,64] x) => (float[4,1,L] y)"
MEAN = "ReduceMean <axes = [1]>"

NORMS = {
    "InstanceNormalization": f"{IMAGE} {{ n = InstanceNormalization (x, s, b) y = Conv (n, c) }}",
    "moved": """(float[2,16,16,3] x) => (float[2,C,16,16] y) { t = Transpose <perm = [0, 3, 1, 2]> (x) i = Identity (t)
        n = InstanceNormalization (i, s, b) y = Conv (n, c) }""",
    "scaled and shifted": f"""{IMAGE} {{ k = Mul (x, two) l = Add (k, two) n = InstanceNormalization (l, s, b)
        y = Conv (n, c) }}""",
    "behind a Conv": f"{IMAGE} {{ f = Conv (x, c) n = InstanceNormalization (f, s, b) y = Conv (n, c) }}",
    "behind an activation": f"""{IMAGE} {{ f = Conv (x, c, b) r = Relu (f) n = InstanceNormalization (r, s, b)
        y = Conv (n, c) }}""",
    "decomposed behind a Conv": f"""{IMAGE} {{ f = Conv (x, c) m = ReduceMean <axes = [2, 3]> (f)
        d = Sub (f, m) q = Mul (d, d) v = ReduceMean <axes = [2, 3]> (q) a = Add (v, e) r = Sqrt (a)
        n = Div (d, r) y = Conv (n, c) }}""",
    "in training": f"""{IMAGE} {{ n, u, v = BatchNormalization <training_mode = 1> (x, s, b, b, s)
        y = Conv (n, c) }}""",
    "by stored moments": f"""{IMAGE} {{ n = BatchNormalization (x, s, b, means, variances) y = Conv (n, c) }}""",
    "MeanVarianceNormalization": f"{IMAGE} {{ n = MeanVarianceNormalization (x) y = Conv (n, c) }}",
    "LayerNormalization": f"{ROWS} {{ n = LayerNormalization (x, g) y = MatMul (n, w) }}",
    "decomposed": f"""{ROWS} {{ m = {MEAN} (x) d = Sub (x, m) q = Pow (d, two) v = {MEAN} (q) r = Sqrt (v)
        n = Div (d, r) y = MatMul (n, w) }}""",
    "centered": f"{ROWS} {{ m = {MEAN} (x) d = Sub (x, m) y = MatMul (d, w) }}",
    "centered by a pool": f"{IMAGE} {{ m = GlobalAveragePool (x) d = Sub (x, m) y = Conv (d, c) }}",
    "variance by two means": f"""(float[4,64] x) => (float[4,1] y) {{ q = Mul (x, x) a = {MEAN} (q) m = {MEAN} (x)
        p = Mul (m, m) y = Sub (a, p) }}""",
    "variance by two sums": """(float[4,64] x) => (float[4,1] y) { q = ReduceSumSquare <axes = [1]> (x)
        a = Div (q, size) t = ReduceSum (x, axis) p = Mul (t, t) f = Div (p, size) o = Div (f, size)
        y = Sub (a, o) }""",
    "variance by a negated square": f"""(float[4,64] x) => (float[4,1] y) {{ q = Pow (x, two) a = {MEAN} (q)
        m = {MEAN} (x) p = Mul (m, m) f = Neg (p) y = Add (f, a) }}""",
    "weighted variance": """(float[4,64] x, float[4,64] z) => (float[4,1] y) { k = Softmax (z) t = Mul (k, x)
        m = ReduceSum (t, axis) q = Mul (x, x) u = Mul (k, q) a = ReduceSum (u, axis) p = Mul (m, m)
        v = Sub (a, p) y = Relu (v) }""",
    "variance of a place": """(float[4,64] x, float[4,64] z) => (float[4,1] y) { k = Mul (z, hundred) p = Softmax (k)
        t = Mul (p, places) m = ReduceSum (t, axis) u = Mul (p, squares) a = ReduceSum (u, axis) q = Mul (m, m)
        y = Sub (a, q) }""",
    "covariance": f"""(float[4,64] x) => (float[4,1] y) {{ r = Mul (x, two) o = Relu (r) q = Mul (x, o) a = {MEAN} (q)
        m = {MEAN} (x) l = {MEAN} (o) p = Mul (m, l) y = Sub (a, p) }}""",
    "from the first": f"{ROWS} {{ f = Slice (x, first, next, axis) d = Sub (x, f) y = MatMul (d, w) }}",
    "steps": f"""{ROWS} {{ f = Slice (x, first, last, axis) o = Slice (x, next, end, axis) d = Sub (o, f)
        l = Slice (x, first, next, axis) t = Slice (x, next, after, axis) k = Sub (t, l) j = Concat <axis = 1> (d, k)
        y = MatMul (j, w) }}""",
    "from the smallest": f"{ROWS} {{ f = ReduceMin <axes = [1]> (x) d = Sub (x, f) y = MatMul (d, w) }}",
    "from a padded moving average": f"""{SERIES} {{ p = Pad <mode = "edge"> (x, margin)
        a = AveragePool <kernel_shape = [5], strides = [1]> (p) d = Sub (x, a) y = MatMul (d, w) }}""",
    "from a blur": f"""{SERIES} {{ p = Pad <mode = "reflect"> (x, margin) a = Conv (p, blur) d = Sub (x, a)
        y = MatMul (d, w) }}""",
    "from the padded ends": f"""{SERIES} {{ f = Slice (x, first, next, after) p = Concat <axis = 2> (f, x, f)
        a = Conv (p, box) d = Sub (x, a) y = MatMul (d, w) }}""",
    "between two averages": f"""{SERIES} {{ a = Conv <pads = [1, 1]> (x, blur) f = Conv (x, box) d = Sub (a, f)
        t = Slice (d, next, last, after) y = Relu (t) }}""",
    "from a smaller image": """(float[2,1,16,16] x) => (float[2,1,16,16] y) {
        a = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x) u = Resize <mode = "linear"> (a, , twice)
        d = Sub (x, u) y = Relu (d) }""",
    "a normalization of averages": """(float[2,3,16,16] x) => (float[2,C,8,8] y) {
        a = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x) n = InstanceNormalization (a, s, b)
        y = Conv (n, c) }""",
    "a ratio of averages": f"""{SERIES} {{ a = AveragePool <kernel_shape = [3], strides = [1]> (x)
        f = AveragePool <kernel_shape = [5], strides = [1], pads = [1, 1], count_include_pad = 0> (x)
        q = Div (a, f) d = Sub (q, one) t = Mul (d, hundred) y = Relu (t) }}""",
    "a sum divided by a count": """(float[4,64] x) => (float[4,64] y) { n = IsNaN (x) f = Where (n, zero, x)
        k = Not (n) o = Cast <to = 1> (k) t = ReduceSum (o, axis) u = ReduceSum (f, axis) m = Div (u, t) d = Sub (x, m)
        y = MatMul (d, w) }""",
    "a masked mean": """(float[4,64] x, float[4,64] z) => (float[4,64] y) { k = Greater (z, zero) m = Cast <to = 1> (k)
        t = Mul (x, m) u = ReduceSum (t, axis) o = ReduceSum (m, axis) l = Div (u, o) d = Sub (x, l)
        y = MatMul (d, w) }""",
    "a weighted mean": """(float[4,64] x, float[4,64] z) => (float[4,64] y) { k = Softmax (z) t = Mul (x, k)
        u = ReduceSum (t, axis) d = Sub (x, u) y = MatMul (d, w) }""",
    "a mean by attention": """(float[4,64] x, float[4,4] z) => (float[4,64] y) { k = Softmax (z) u = MatMul (k, x)
        d = Sub (x, u) y = MatMul (d, w) }""",
    "a running mean": """(float[4,64] x) => (float[4,64] y) { o = CumSum (x, along) m = Div (o, counts) d = Sub (x, m)
        y = MatMul (d, w) }""",
    "a mean of a window": """(float[4,64] x) => (float[4,63] y) { k = CumSum (x, along) f = Slice (k, next, end, axis)
        l = Slice (k, first, last, axis) u = Sub (f, l) m = Div (u, two) o = Slice (x, next, end, axis) d = Sub (o, m)
        y = Relu (d) }""",
    "from the median": f"""{ROWS} {{ v, i = TopK (x, half) m = Slice (v, last, end, axis) d = Sub (x, m)
        y = MatMul (d, w) }}""",
    "two means": """(float[4,64] x, float[4,64] z) => (float[4,1] y) { m = ReduceMean <axes = [1]> (x)
        k = Add (z, twenty) l = ReduceMean <axes = [1]> (k) d = Sub (m, l) y = Relu (d) }""",
    "the mean and the largest": """(float[2,3,16,16] x) => (float[2,3,1,1] y) { m = GlobalAveragePool (x)
        l = GlobalMaxPool (x) d = Sub (l, m) y = Relu (d) }""",
    "two sums": """(float[4,64] x, float[4,64] z) => (float[4,1] y) { m = ReduceSum (x, axis) k = Add (z, twenty)
        l = ReduceSum (k, axis) q = Div (m, l) d = Sub (q, one) y = Mul (d, hundred) }""",
    "a negated erosion": """(float[2,1,16,16] x) => (float[2,1,16,16] y) { n = Neg (x)
        l = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)
        m = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (n) d = Add (l, m) y = Relu (d) }""",
    "a moved image": """(float[2,1,16,16] x, float[2,1,16,16] z) => (float[2,1,16,16] y) {
        f = Reshape (z, flow) k = Concat <axis = 3> (f, f) m = GridSample (x, k)
        d = Sub (x, m) y = Relu (d) }""",
    "finite differences": f"{SERIES} {{ d = Conv (x, bend) y = Relu (d) }}",
    "a matrix that subtracts the mean": f"{ROWS} {{ d = MatMul (x, centering) y = MatMul (d, w) }}",
    "a matrix before rows": """(float[64,4] x) => (float[64,4] y) { d = MatMul (centering, x) y = Relu (d) }""",
    "two inputs": """(float[4,64] x, float[4,64] z) => (float[4,64] y) { k = Add (z, twenty) d = Sub (x, k)
        y = MatMul (d, w) }""",
    "parts": """(float[4,32] x, float[4,32] z) => (float[4,64] y) { k = Add (z, twenty) j = Concat <axis = 1> (x, k)
        n = LayerNormalization (j, g) y = MatMul (n, w) }""",
    "double": f"""(double[4,64] x) => (float[4,64] y) {{ f = Cast <to = 1> (x) m = {MEAN} (f) d = Sub (f, m)
        y = MatMul (d, w) }}""",
    "stored mean": f"{ROWS} {{ d = Sub (x, twenty) k = Div (d, little) y = MatMul (k, w) }}",
    "stored shift": f"{ROWS} {{ d = Mul (x, hundred) k = Add (shift, d) y = MatMul (k, w) }}",
}


def model_of(text: str) -> ModelProto:
    head, brace, body = text.partition("{")
    generator = np.random.default_rng(0)
    centered = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    weights = {
        "c": (0.1 + generator.random((3, 3, 1, 1))).astype(np.float32),
        "g": np.ones(64, np.float32),
        "centering": (np.eye(64) - 1 / 64).astype(np.float32),
        "counts": np.arange(1, 65, dtype=np.float32),
        "free": centered - centered.mean(0),
        "places": np.arange(64, dtype=np.float32),
        "squares": np.arange(64, dtype=np.float32) ** 2,
        "w": (generator.standard_normal((64, 64)) / 8).astype(np.float32),
    }
    model = parse(f"{head}{NUMBERS}{brace}{body}")
    return add_weights(
        model, {name: array for name, array in weights.items() if f"{name})" in text or f"{name}," in text}
    )


@pytest.mark.mostly_slow(fast=17)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_deviations_of_an_input_survive(name: str, dtype: str) -> None:
    model = model_of(NORMS[name])
    given = model.graph.input[0].type.tensor_type
    shape = [dim.dim_value for dim in given.shape.dim]
    # In float32, the variance by two means has few digits itself.
    deviation = 0.1 if "variance" in name else 0.01
    draws = np.random.default_rng(1).standard_normal((2, *shape))
    feeds = {"x": (20 + deviation * draws[0]).astype(onnx.helper.tensor_dtype_to_np_dtype(given.elem_type))}
    if len(model.graph.input) > 1:
        sizes = [dim.dim_value for dim in model.graph.input[1].type.tensor_type.shape.dim]
        feeds["z"] = (deviation * draws[1][: sizes[0], : sizes[1]]).astype(np.float32)
    for level in ("O2", "O3"):
        result = onnxamp.convert_model(model, level, dtype=dtype)
        report = onnxamp.diff_models(model, result, samples=[feeds])
        assert report.outputs[0].rel_l2 < 0.01, level


FREE = {
    "inside a network": f"{ROWS} {{ h = MatMul (x, w) t = Tanh (h) n = LayerNormalization (t, g) y = MatMul (n, w) }}",
    "over the columns of a product": f"{ROWS} {{ h = MatMul (x, w) n = LayerNormalization (h, g) y = MatMul (n, w) }}",
    "without a mean": f"{ROWS} {{ q = Relu (x) y = MatMul (q, w) }}",
    "behind two products": f"""{IMAGE} {{ f = Conv (x, c) k = Conv (f, c) n = InstanceNormalization (k, s, b)
        y = Conv (n, c) }}""",
    "colors": f"{ROWS} {{ d = Sub (x, two) k = Div (d, two) y = MatMul (k, w) }}",
    "a mask": f"{ROWS} {{ d = Sub (x, one) k = Mul (d, hundred) y = MatMul (k, w) }}",
    "inputs of products": """(float[4,64] x, float[4,64] z) => (float[4,64] y) { f = MatMul (x, w) o = MatMul (z, w)
        d = Sub (f, o) y = MatMul (d, w) }""",
    "by moments of a few units": f"{IMAGE} {{ n = BatchNormalization (x, s, two3, two3, s) y = Conv (n, c) }}",
    "a sigmoid": f"{ROWS} {{ m = Neg (x) f = Exp (m) a = Add (f, one) y = Div (x, a) }}",
    "an average": f"{SERIES} {{ a = Conv (x, blur) y = Relu (a) }}",
    "trained weights without their mean": f"{ROWS} {{ d = MatMul (x, free) y = MatMul (d, w) }}",
    "differences of a product": f"""{ROWS} {{ h = MatMul (x, w) d = MatMul (h, centering) y = Relu (d) }}""",
    "square of a sum": """(float[4,64] x) => (float[4,1] y) { h = MatMul (x, w) t = ReduceSum (h, axis) p = Mul (t, t)
        q = Mul (h, h) a = ReduceSum (q, axis) y = Sub (p, a) }""",
}


NEAR_ONE = {
    "log1p": "k = Mul (h, little) r = Relu (k) a = Add (r, one) y = Log (a)",
    "log1p, the other way": "k = Mul (h, little) r = Relu (k) a = Add (one, r) i = Identity (a) y = Log (i)",
    "log1p of a negative": "k = Mul (h, little) r = Relu (k) a = Sub (one, r) y = Log (a)",
    "expm1": "k = Mul (h, little) f = Exp (k) y = Sub (f, one)",
    "hyperbolic": "k = Mul (h, little) r = Relu (k) a = Add (r, one) m = Max (a, one) y = Acosh (m)",
    "versed sine": "k = Mul (h, tenth) f = Cos (k) y = Sub (one, f)",
    "root": "k = Mul (h, little) r = Abs (k) a = Add (r, one) f = Sqrt (a) y = Sub (f, one)",
    "power": "k = Mul (h, little) a = Add (k, one) f = Pow (a, two) y = Sub (f, one)",
    "reciprocal": "k = Mul (h, little) r = Relu (k) a = Add (r, one) f = Reciprocal (a) y = Sub (one, f)",
    "small power": "k = Softplus (h) f = Pow (k, little) y = Sub (f, one)",
    "opacity": "k = Mul (h, little) r = Relu (k) m = Neg (r) f = Exp (m) y = Sub (one, f)",
}


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NEAR_ONE)
def test_what_is_small_beside_one_survives(name: str, dtype: str) -> None:
    text = f"h = MatMul (x, w) {NEAR_ONE[name]} z = Mul (y, hundred)"
    model = model_of(f"(float[4,64] x) => (float[4,64] z) {{ {text} }}")
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32) / 4}
    for level in ("O1", "O2", "O3"):
        result = onnxamp.convert_model(model, level, dtype=dtype)
        report = onnxamp.diff_models(model, result, samples=[feeds])
        assert report.outputs[0].rel_l2 < 0.01, level


@pytest.mark.parametrize("name", FREE)
def test_other_normalizations_are_free(name: str) -> None:
    plan = onnxamp.plan_model(model_of(FREE[name]), "O3")
    assert [row.node for row in plan.rows if row.reason == "cancellation" and not row.low] == []
    assert all(
        row.low for row in plan.rows if row.op in ("Conv", "MatMul", "LayerNormalization", "InstanceNormalization")
    )


def test_the_cast_moves_behind_the_normalization() -> None:
    result = onnxamp.convert_model(model_of(NORMS["InstanceNormalization"]))
    assert [node.op_type for node in result.graph.node] == ["InstanceNormalization", "Cast", "Conv", "Cast"]


SCHEDULE = """(int64[1] t, float[4,64] x) => (float[4,64] y) <float one = {1}, int64[1] step = {1}> {
    a = Gather (shares, t) s = Sub (t, step) r = Gather (shares, s) q = Div (a, r) b = Sub (one, q) u = Sub (one, a)
    f = Div (b, u) m = Mul (x, f) y = MatMul (m, w) }"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{"level": "O2"}, {"level": "O3"}, {"weights_only": True}], ids=str)
def test_schedules_of_diffusion_keep_their_first_steps(dtype: str, options: dict[str, Any]) -> None:
    shares = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)).astype(np.float32)
    model = add_weights(parse(SCHEDULE, 17), {"shares": shares, "w": np.eye(64, dtype=np.float32)})
    result = onnxamp.convert_model(model, dtype=dtype, **options)
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    for step in (1, 20, 900):
        report = onnxamp.diff_models(model, result, samples=[{"t": np.array([step]), "x": x}])
        assert report.outputs[0].rel_l2 < 0.01, step


def test_a_matrix_of_steps_may_pass_the_first_number_on() -> None:
    """A step needs the digits of both numbers, whatever the result at the border is."""
    model = parse(f"{ROWS} {{ d = MatMul (x, steps) y = MatMul (d, w) }}")
    steps = np.eye(64, dtype=np.float32) - np.eye(64, k=1, dtype=np.float32)
    model = add_weights(model, {"steps": steps, "w": np.eye(64, dtype=np.float32)})
    kept = {row.node for row in onnxamp.plan_model(model).rows if row.reason == "cancellation" and not row.low}
    assert len(kept) == 1
