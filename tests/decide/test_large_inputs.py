"""Inputs that the weights and the first nodes of a model show to be large or far from zero, and sums that grow."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from judge_numbers import emulated
from onnx import ModelProto, numpy_helper

import onnxamp

RNG = np.random.default_rng(0)
ROWS = "(float[N,8] x) => (float[N,8] y)"
CONSTANTS = """<float thousand = {1000}, float stabilizer = {0.375}, float spread = {150}, float quarter = {0.25},
    int64[1] axis = {1}, float center = {50}, float cents = {100}>"""


def model_of(text: str, **weights: Any) -> ModelProto:
    model = parse(text.replace("CONSTANTS", CONSTANTS), 17)
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
    return model


def product(size: int = 8, scale: float = 1.0) -> Any:
    return scale * RNG.standard_normal((size, 8)) / np.sqrt(size)


DEVIATIONS = np.array([18, 80000, 2500, 4, 0.5, 20, 15, 2])
MEANS = np.array([55, 250000, 7500, 140, 4.2, 98, 80, 13.5])
FOLDED = product() / DEVIATIONS[:, None]

INPUTS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "milliseconds": (
        f"{ROWS} CONSTANTS {{ s = Div (x, thousand) y = MatMul (s, w) }}",
        {"w": product()}, {"x": RNG.uniform(2e3, 3e5, (4, 8))},
    ),
    "cents": (
        "(int64[N,8] x) => (float[N,8] y) CONSTANTS { f = Cast <to = 1> (x) s = Div (f, cents) y = MatMul (s, w) }",
        {"w": product()}, {"x": RNG.integers(10_000, 1_000_000, (4, 8))},
    ),
    "the time since an event": (
        """(int64[N,1] now, int64[N,8] x) => (float[N,8] y) CONSTANTS {
            d = Sub (now, x) f = Cast <to = 1> (d) s = Div (f, thousand) y = MatMul (s, w) }""",
        {"w": product()},
        {"now": np.full((4, 1), 1_760_000_000), "x": 1_760_000_000 - RNG.integers(60, 2_000_000, (4, 8))},
    ),
    "a sum of a week": (
        """(float[N,7,8] x) => (float[N,8] y) CONSTANTS {
            t = ReduceSum <keepdims = 0> (x, axis) s = Div (t, thousand) y = MatMul (s, w) }""",
        {"w": product()}, {"x": RNG.uniform(8e3, 2e4, (4, 7, 8))},
    ),
    "photons": (
        f"{ROWS} CONSTANTS {{ a = Add (x, stabilizer) r = Sqrt (a) y = MatMul (r, w) }}",
        {"w": product()}, {"x": RNG.uniform(0, 1e5, (4, 8))},
    ),
    "intensities": (
        f"{ROWS} CONSTANTS {{ s = Div (x, spread) r = Asinh (s) y = MatMul (r, w) }}",
        {"w": product()}, {"x": RNG.uniform(0, 2.6e5, (4, 8))},
    ),
    "views": (
        f"{ROWS} CONSTANTS {{ r = Pow (x, quarter) y = MatMul (r, w) }}",
        {"w": product()}, {"x": RNG.uniform(0, 1e8, (4, 8))},
    ),
    "features of several units": (
        f"{ROWS} {{ h = Gemm (x, w, b) r = Relu (h) y = MatMul (r, v) }}",
        {"w": FOLDED, "b": -MEANS @ FOLDED, "v": product()}, {"x": RNG.normal(MEANS, DEVIATIONS, (4, 8))},
    ),
    "counts beside features": (
        """(float[N,4] x, int64[N,4] n) => (float[N,8] y) {
            f = Cast <to = 1> (n) c = Concat <axis = 1> (x, f) h = MatMul (c, w) r = Relu (h) y = MatMul (r, v) }""",
        {"w": np.concatenate([product(4), 1e-3 * product(4)]), "v": product()},
        {"x": RNG.standard_normal((4, 4)), "n": RNG.integers(0, 500_000, (4, 4))},
    ),
    "a frequency near 50": (
        f"{ROWS} CONSTANTS {{ d = Sub (x, center) h = MatMul (d, w) r = Relu (h) y = MatMul (r, v) }}",
        {"w": product(scale=60), "v": product()}, {"x": 50 + 0.015 * RNG.standard_normal((4, 8))},
    ),
    "a pulse on an offset": (
        "(float[N,1,64] x) => (float[N,8,62] y) { h = Conv (x, w, b) r = Relu (h) y = Conv <pads = [0, 0]> (r, v) }",
        {"w": (CONV := RNG.standard_normal((8, 1, 3)) / 200), "b": -50000 * CONV.sum((1, 2)),
         "v": RNG.standard_normal((8, 8, 1))},
        {"x": 50000 + 120 * np.sin(np.arange(256).reshape(4, 1, 64) / 5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_numbers_that_callers_feed(name: str) -> None:
    """Random samples are numbers of a few units, so that a comparison on them does not see it."""
    text, weights, feeds = INPUTS[name]
    model = model_of(text, **weights)
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.input}
    given = {key: np.asarray(array, np.float32 if kinds[key] == 1 else np.int64) for key, array in feeds.items()}
    low = onnxamp.convert_model(model)
    assert onnxamp.diff_models(model, low, given, provider="cpu").passed
    # Two layers after integers are large as well.
    is_all = name == "counts beside features"
    assert is_all != any(row.low for row in onnxamp.plan_model(model).rows if row.op in {"MatMul", "Conv"})


def test_masks_of_integers_are_not_large() -> None:
    """A mean over tokens multiplies by a mask, moved and cast; it stays low."""
    text = """(float[2,16,8] x, int64[2,16] attention_mask) => (float[2,8] y)
        <int64[1] last = {-1}, int64[1] axis = {1}> { h = MatMul (x, w) u = Unsqueeze (attention_mask, last)
        f = Cast <to = 1> (u) p = Mul (h, f) y = ReduceSum <keepdims = 0> (p, axis) }"""
    plan = onnxamp.plan_model(model_of(text, w=product()))
    assert {row.node for row in plan.rows if row.low} >= {"h", "p"}


SUMS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "a Gram matrix": (
        """(float[1,8,128,128] x0) => (float[1,8,8] y) <int64[3] s = {1, 8, -1}, float n = {131072}> {
            x1 = Conv (x0, w) x = Relu (x1) f = Reshape (x, s) t = Transpose <perm = [0, 2, 1]> (f) g = MatMul (f, t)
            y = Div (g, n) }""",
        {"w": 4 * RNG.standard_normal((8, 8, 1, 1))}, {"x0": RNG.standard_normal((1, 8, 128, 128))},
    ),
    "linear attention": (
        """(float[1,16384,8] x) => (float[1,16384,8] y) <int64[1] axis = {1}, float eps = {0.00001}> {
            a = MatMul (x, w1) b = MatMul (x, w2) v = MatMul (x, w3) q = Relu (a) k = Relu (b)
            kt = Transpose <perm = [0, 2, 1]> (k) kv = MatMul (kt, v) ks = ReduceSum (k, axis)
            kst = Transpose <perm = [0, 2, 1]> (ks) num = MatMul (q, kv) den = MatMul (q, kst) de = Add (den, eps)
            y = Div (num, de) }""",
        {"w1": 3 * product(), "w2": 3 * product(), "w3": product()}, {"x": RNG.standard_normal((1, 16384, 8))},
    ),
    "channel attention": (
        """(float[1,8,H,W] x0) => (float[1,8,8] y) <int64[3] s = {1, 8, -1}> {
            x = Conv (x0, w) q = Reshape (x, s) k = Transpose <perm = [0, 2, 1]> (q) e = MatMul (q, k)
            m = ReduceMax <axes = [-1]> (e) d = Sub (m, e) y = Softmax (d) }""",
        {"w": 4 * RNG.standard_normal((8, 8, 1, 1))}, {"x0": RNG.standard_normal((1, 8, 128, 128))},
    ),
    "attention that divides at last": (
        """(float[1,16,8] x) => (float[1,16,8] y) <int64[1] axis = {-1}> { q = MatMul (x, wq) k = MatMul (x, wk)
            v = MatMul (x, wv) kt = Transpose <perm = [0, 2, 1]> (k) s = MatMul (q, kt) e = Exp (s) n = MatMul (e, v)
            d = ReduceSum (e, axis) y = Div (n, d) }""",
        {"wq": 2 * product(), "wk": product(), "wv": product()}, {"x": RNG.standard_normal((1, 16, 8))},
    ),
    "a soft pooling": (
        """(float[1,8,8,8] x0) => (float[1,8,4,4] y) { x = Conv (x0, w) e = Exp (x) ex = Mul (e, x)
            s = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (e)
            t = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (ex) y = Div (t, s) }""",
        {"w": 2 * RNG.standard_normal((8, 8, 1, 1))}, {"x0": RNG.standard_normal((1, 8, 8, 8))},
    ),
    "a logarithm of summed exponentials": (
        "(float[4,8] x0) => (float[4,1] y) { x = MatMul (x0, w) e = Exp (x) s = MatMul (e, ones) y = Log (s) }",
        {"w": 8 * product(), "ones": np.ones((8, 1))}, {"x0": RNG.standard_normal((4, 8))},
    ),
    "a divisive normalization": (
        """(float[1,8,8,8] x0) => (float[1,8,8,8] y) { x = Conv (x0, w) q = Mul (x, x) c = Conv (q, g, b) s = Sqrt (c)
            y = Div (x, s) }""",
        {"w": 150 * RNG.standard_normal((8, 8, 1, 1)), "g": RNG.uniform(0.1, 1, (8, 8, 1, 1)), "b": np.ones(8)},
        {"x0": RNG.standard_normal((1, 8, 8, 8))},
    ),
    "a mean as a quotient": (
        """(float[1,8,88,88] x0) => (float[1,8,1,1] y) <int64[2] axes = {2, 3}, float n = {7744}> {
            x = Conv (x0, w) r = Relu (x) s = ReduceSum (r, axes) y = Div (s, n) }""",
        {"w": 8 * RNG.standard_normal((8, 8, 1, 1))}, {"x0": RNG.standard_normal((1, 8, 88, 88))},
    ),
    "deviations of a pooling": (
        """(float[1,8,16,16] x0) => (float[1,8,1,1] y) <int64[2] axes = {2, 3}> { x = Conv (x0, w)
            m = ReduceMean <axes = [2, 3]> (x) d = Sub (x, m) q = Mul (d, d) v = ReduceMean <axes = [2, 3]> (q)
            y = Sqrt (v) }""",
        {"w": 150 * RNG.standard_normal((8, 8, 1, 1))}, {"x0": RNG.standard_normal((1, 8, 16, 16))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_leave_the_range(name: str) -> None:
    text, weights, feeds = SUMS[name]
    model = model_of(text, **weights)
    given = {key: np.asarray(array, np.float32) for key, array in feeds.items()}
    assert onnxamp.diff_models(model, onnxamp.convert_model(model), given, provider="cpu").passed


@pytest.mark.parametrize("ending", [
    "a = Relu (h) o = MatMul (a, v) s = Mul (o, scale) y = Add (s, mean)", "a = Relu (h) y = Gemm (a, folded, mean)",
])  # fmt: skip
def test_channels_of_very_different_scale(ending: str) -> None:
    """Temperatures beside mixing ratios: the norm of all of them says nothing about the small ones."""
    scale, mean = np.array([12, 5, 6e-9, 2e-8]), np.array([285, 0, 5e-9, 6e-8])
    v = RNG.standard_normal((8, 4)) / 3
    weights = {"w": product(), "v": v, "folded": v * scale, "scale": scale, "mean": mean}
    model = model_of(f"(float[N,8] x) => (float[N,4] y) {{ h = MatMul (x, w) {ending} }}", **weights)
    used = {name for node in model.graph.node for name in node.input}
    unused = [tensor for tensor in model.graph.initializer if tensor.name not in used]
    for tensor in unused:
        model.graph.initializer.remove(tensor)
    x = {"x": RNG.standard_normal((32, 8)).astype(np.float32)}
    one, other = (emulated(each, x)[0] for each in (model, onnxamp.convert_model(model)))
    assert (np.abs(other - one) <= 1e-2 * np.abs(one).max(0)).all()


def test_a_temperature_is_no_mask() -> None:
    """Random inputs would be zero otherwise, and the logits infinite."""
    text = """(float[1,8] x, float[1] temperature) => (float[1,8] y) {
        h = MatMul (x, w) s = Div (h, temperature) y = Softmax (s) }"""
    model = model_of(text, w=product())
    assert onnxamp.diff_models(model, model, provider="cpu").passed


def test_weights_that_have_decayed_say_nothing_of_inputs() -> None:
    """Beside what is left of those of dead pixels, small weights are on their way."""
    left = np.ones(8)
    left[[3, 4]] = 1e-5, 1e-12
    weights = {"w": product() * left[:, None], "v": product()}
    text = f"{ROWS} {{ h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }}"
    assert not onnxamp.plan_model(model_of(text, **weights), "O2").hazards
    weights["w"][4] = weights["w"][5]
    assert onnxamp.plan_model(model_of(text, **weights), "O2").hazards


@pytest.mark.parametrize(("offset", "is_kept"), [(0.3, False), (1e-9, True)])
def test_a_dead_channel_beside_its_offset(offset: float, is_kept: bool) -> None:
    w = RNG.standard_normal((4, 3, 1, 1))
    w[1] *= 3e-7
    b = np.full(4, 0.5)
    b[1] = offset
    model = model_of("(float[1,3,8,8] x) => (float[1,4,8,8] y) { r = Relu (x) y = Conv (r, w, b) }", w=w, b=b)
    assert bool(onnxamp.plan_model(model, "O2").hazards) == is_kept


@pytest.mark.parametrize("divided", ["d = Div (f, n)", "d = Mul (f, m)"])
def test_products_of_what_was_divided_by_their_number(divided: str) -> None:
    """A non-local block, as PyTorch and older exporters write its shapes."""
    text = """(float[1,8,112,112] x) => (float[1,12544,8] y) <float n = {12544}, float m = {7.97e-5},
        int64[1] zero = {0}, int64[1] two = {2}, int64[1] rest = {-1}> {
        a0 = Conv (x, u) h = Shape (a0) s = Slice (h, zero, two) t = Concat <axis = 0> (s, rest) a = Reshape (a0, t)
        b = Transpose <perm = [0, 2, 1]> (a) f = MatMul (b, a) DIVIDED z = MatMul (d, b) y = Relu (z) }"""
    weights = {"u": RNG.standard_normal((8, 8, 1, 1)) / 3}
    assert not onnxamp.plan_model(model_of(text.replace("DIVIDED", divided), **weights)).hazards
    plan = onnxamp.plan_model(model_of(text.replace("DIVIDED", "d = Neg (f)"), **weights))
    assert ("z", "large reduction") in {(hazard.node, hazard.reason) for hazard in plan.hazards}


@pytest.mark.parametrize("batch", ["4", "N"])
def test_long_sums_beside_an_open_dimension(batch: str) -> None:
    text = "(float[BATCH,100000] x) => (float[BATCH,1] y) <int64[1] a = {1}> { r = Relu (x) y = ReduceSum (r, a) }"
    model = parse(text.replace("BATCH", batch))
    assert [hazard.node for hazard in onnxamp.plan_model(model, "O2").hazards] == ["y"]


MEAN = {
    "a list": "m = Constant <value_floats = [5000.0, 4000.0, 6000.0, 5500.0, 5000.0, 4500.0, 5200.0, 5100.0]> ()",
    "one number": "m = Constant <value_float = 5000.0> ()",
    "a fill": "m = ConstantOfShape <value = float[1] {5000}> (eight)",
    "a slice": "m = Slice (stack, zero, eight)",
    "a part": "m, rest = Split <num_outputs = 2> (stack)",
    "some": "m = Gather (stack, places)",
    "a new shape": "u = Unsqueeze (stack, zero) m, rest = Split <num_outputs = 2, axis = 1> (u)",
}


@pytest.mark.parametrize("name", MEAN)
def test_a_mean_in_any_form(name: str) -> None:
    text = f"""(float[N,8] x) => (float[N,8] y) <int64[1] zero = {{0}}, int64[1] eight = {{8}}, float ten = {{10}},
        int64[8] places = {{0, 1, 2, 3, 4, 5, 6, 7}}> {{
        {MEAN[name]} d = Sub (x, m) q = Div (d, ten) y = MatMul (q, w) }}"""
    stack = np.concatenate([np.full(8, 5000.0), np.arange(8)])
    model = parse(text, 18)
    held = {"w": product(), "stack": stack}
    used = {value for node in model.graph.node for value in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array, np.float32), key) for key, array in held.items() if key in used
    )
    x = {"x": (5000 + RNG.standard_normal((16, 8))).astype(np.float32)}
    assert onnxamp.diff_models(model, onnxamp.convert_model(model), x, provider="cpu").passed


def test_statistics_that_are_parts_of_one_tensor() -> None:
    text = """(float[N,8,4] x) => (float[N,8,4] y) <int64[5] sizes = {8, 8, 8, 8, 500}> {
        s, b, m, v, rest = Split (stack, sizes) y = BatchNormalization (x, s, b, m, v) }"""
    model = model_of(text, stack=np.ones(532))
    x = {"x": RNG.standard_normal((2, 8, 4)).astype(np.float32)}
    assert onnxamp.diff_models(model, onnxamp.convert_model(model), x, provider="cpu").passed


@pytest.mark.parametrize("order", ["s, c", "c, s"])
def test_a_mean_of_an_input_says_nothing_of_its_size(order: str) -> None:
    """A sum of many terms leaves the range, and is read by what makes a mean of it. The input does not."""
    text = f"""(float[2,4096,8] x) => (float[2,8] y) <int64[1] axis = {{1}}, float c = {{2.44140625e-4}}> {{
        r = Relu (x) s = ReduceSum <keepdims = 0> (r, axis) m = Mul ({order}) y = MatMul (m, w) }}"""
    plan = onnxamp.plan_model(model_of(text, w=product()), "O2")
    assert {(hazard.node, hazard.reason) for hazard in plan.hazards} == {
        ("s", "large reduction"), ("m", "large reduction")}  # fmt: skip


def test_a_factor_of_a_sum_is_no_mean() -> None:
    text = """(float[N,8] x) => (float[N,1] y) <int64[1] axis = {1}, float half = {0.5}> {
        h = MatMul (x, w) s = ReduceSum (h, axis) y = Mul (s, half) }"""
    plan = onnxamp.plan_model(model_of(text, w=np.ones((8, 2048)) / 8), "O2")
    assert not plan.hazards


@pytest.mark.parametrize("order", ["mask_len, t", "t, mask_len"])
def test_times_beside_a_flag(order: str) -> None:
    text = f"""(int32[N,8] mask_len, int32[N,8] t) => (float[N,8] y) {{
        d = Sub ({order}) f = Cast <to = 1> (d) y = MatMul (f, w) }}"""
    plan = onnxamp.plan_model(model_of(text, w=product()), "O2")
    assert {hazard.node for hazard in plan.hazards} == {"f", "y"}


def test_a_vector_along_the_width_is_no_offset_of_channels() -> None:
    text = """(float[N,2,4,4] x) => (float[N,4,4,4] y) { h = Conv (x, w) y = Add (h, b) }"""
    weights = {"w": RNG.standard_normal((4, 2, 1, 1)) / 2}
    for shape, kept in (((4,), set()), ((4, 1, 1), {"h", "y"}), ((1, 4, 1, 1), {"h", "y"})):
        plan = onnxamp.plan_model(model_of(text, **weights, b=np.full(shape, 300.0)), "O2")
        assert {hazard.node for hazard in plan.hazards} == kept


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_uniform_numbers_before_a_logarithm(level: str) -> None:
    """In float16, one of 4,096 is 1, and the logarithm of minus its logarithm infinite."""
    text = """(float[4,8] x0) => (float[4,8] y) { x = MatMul (x0, w) u = RandomUniformLike (x) l = Log (u) n = Neg (l)
        l2 = Log (n) g = Neg (l2) y = Add (x, g) }"""
    plan = onnxamp.plan_model(model_of(text, w=product()), level)
    assert {row.node for row in plan.rows if row.low}.isdisjoint({"u", "l"})
