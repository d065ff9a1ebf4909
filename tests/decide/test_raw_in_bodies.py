"""What bodies do to inputs of the model counts as it does outside: squares, scales, differences, quotients."""

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

V = "float[4,64]"
NUMBERS = """<float cents = {1e-5}, float two = {2}, float one = {1}, int64[1] zero = {0}, int64 once = {1},
    int64[1] axis = {1}, int64[1] first = {0}, int64[1] next = {1}, int64[1] last = {63}, int64[1] end = {64}>"""
STEPS = "l = Abs (V) now = Slice (l, next, end, axis) then = Slice (l, first, last, axis) k = Div (now, then)"

LARGE = {
    "squared": ("q = Mul (V, V) r = MatMul (q, tiny)", 2000),
    "powers": ("q = Pow (V, two) h = Div (q, two) r = MatMul (h, tiny)", 2000),
    "scaled": ("s = Mul (V, cents) r = MatMul (s, w)", 2e6),
    "restored": ("""p = Abs (V) k = ReduceMean <axes = [1]> (p) m = Add (k, one) s = Div (V, m) h = MatMul (s, w)
        g = Mul (h, m) i = Relu (g) r = Div (i, m)""", 1e6),
}  # fmt: skip
"""Name -> what is done to a value V that is an input, and the size of numbers that it may well read."""

CLOSE = {
    "ratio": f"{STEPS} d = Log (k) r = MatMul (d, v)",
    "return": f"{STEPS} d = Sub (k, one) r = MatMul (d, v)",
    "from the mean": "m = ReduceMean <axes = [1]> (V) k = Div (V, m) d = Sub (k, one) r = MatMul (d, w)",
    "a mean in a bias": "h = Gemm (V, w, b) r = Relu (h)",
    "normalized": """m = ReduceMean <axes = [1]> (V) d = Sub (V, m) q = Mul (d, d) s = ReduceMean <axes = [1]> (q)
        t = Sqrt (s) k = Div (d, t) r = MatMul (k, w)""",
}
"""Name -> what loses the digits of nearly equal numbers."""

IF = "n = Size (x) some = Greater (n, once) y = If (some)"
ELSE = f"else_branch = e () => ({V} o) {{ o = Neg (x) }}>"
LOOP = f"int64 turn, bool go, {V} u) => (bool on"
WAYS = {
    "in a branch": (f"{IF} <then_branch = t () => ({V} r) {{ BODY }}, {ELSE}", "x"),
    "behind a branch": (f"""n = Size (x) some = Greater (n, once)
        u = If (some) <then_branch = t () => ({V} s0) {{ s0 = Identity (x) }}, {ELSE} BODY y = Identity (r)""", "u"),
    "in a loop": (f"y = Loop (once, , x) <body = b ({LOOP}, {V} r) {{ on = Identity (go) BODY }}>", "u"),
    "listed by a loop": (f"""s1, all = Loop (once, , x) <
        body = b ({LOOP}, {V} same, {V} r) {{ on = Identity (go) same = Identity (u) BODY }}>
        y = Squeeze (all, zero)""", "u"),
    "in a scan": (f"""rows = Unsqueeze (x, zero)
        all = Scan <num_scan_inputs = 1, body = b ({V} u) => ({V} r) {{ BODY }}> (rows)
        y = Squeeze (all, zero)""", "u"),
    "nested": (f"""n = Size (x) some = Greater (n, once) y = Loop (once, , x) <
        body = b ({LOOP}, {V} z) {{ on = Identity (go) z = If (some) <
            then_branch = t () => ({V} r) {{ BODY }}, else_branch = e () => ({V} o) {{ o = Neg (u) }}> }}>""", "u"),
}  # fmt: skip
"""Name -> where BODY is, and what V is there."""

LEAVING = {
    "a branch": (f"""n = Size (x) some = Greater (n, once)
        q = If (some) <then_branch = t () => ({V} s0) {{ s0 = Mul (x, x) }}, {ELSE}
        g = Mul (q, two) y = MatMul (g, tiny)"""),
    "a loop": (f"""q = Loop (once, , x) <body = b ({LOOP}, {V} s0) {{ on = Identity (go) s0 = Mul (u, u) }}>
        g = Relu (q) y = MatMul (g, tiny)"""),
    "entering": f"""q = Mul (x, x) y = Loop (once, , q) <
        body = b ({LOOP}, {V} r) {{ on = Identity (go) g = Mul (u, two) r = MatMul (g, tiny) }}>""",
}  # fmt: skip


def model_of(text: str) -> ModelProto:
    draw = np.random.default_rng(0)
    w = draw.standard_normal((64, 64)).astype(np.float32) / 8
    weights = {"w": w, "v": w[:63], "tiny": w * np.float32(1e-6), "b": -4000 * w.sum(0)}
    used = {name: array for name, array in weights.items() if f" {name})" in text or f" {name}," in text}
    return add_weights(parse(f"({V} x) => ({V} y) {NUMBERS} {{ {text} }}"), used)


def placed(body: str, way: str) -> ModelProto:
    text, value = WAYS[way]
    return model_of(text.replace("BODY", body.replace("V,", f"{value},").replace("V)", f"{value})")))


def error_of(model: ModelProto, x: np.ndarray, level: str, dtype: str = "float16") -> float:
    result = onnxamp.convert_model(model, level, dtype=dtype)
    return onnxamp.diff_models(model, result, samples=[{"x": x.astype(np.float32)}]).outputs[0].rel_l2


def large(size: float) -> np.ndarray:
    return size * (1 + np.random.default_rng(1).random((4, 64)))


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LARGE)
def test_inputs_may_be_large_in_bodies(name: str, way: str) -> None:
    body, size = LARGE[name]
    for level in ("O2", "O3"):
        assert error_of(placed(body, way), large(size), level) < 0.01


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLOSE)
def test_numbers_stay_apart_in_bodies(name: str, way: str) -> None:
    x = 4000 * (1 + 0.01 * np.random.default_rng(1).standard_normal((4, 64)))
    for level in ("O2", "O3"):
        assert error_of(placed(CLOSE[name], way), x, level) < 0.01


@pytest.mark.parametrize("name", LEAVING)
def test_squares_may_leave_and_enter_bodies(name: str) -> None:
    for level in ("O2", "O3"):
        assert error_of(model_of(LEAVING[name]), large(2000), level) < 0.01


@pytest.mark.parametrize("is_kept", [False, True])
def test_functions_count_as_well(is_kept: bool) -> None:
    inner = parse(f"({V} x) => ({V} y) {{ y = Mul (x, x) }}").graph.node
    square = onnx.helper.make_function("local", "Square", ["x"], ["y"], list(inner), [onnx.helper.make_opsetid("", 17)])
    model = model_of("q = Mul (x, x) y = MatMul (q, tiny)")
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Square", ["x"], ["q"], domain="local"))
    model.functions.append(square)
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    result = onnxamp.convert_model(model, keep_functions=is_kept)
    assert result.functions or not is_kept
    found = onnxamp.diff_models(model, result, samples=[{"x": large(2000).astype(np.float32)}])
    assert found.outputs[0].rel_l2 < 0.01


TURNS = f"""p, q = Loop (turns, , none, x) <body = b (
    int64 turn, bool go, {V} a, {V} c) => (bool on, {V} a1, {V} c1) {{
        on = Identity (go) h = Mul (a, half) s = Mul (h, h) r = MatMul (s, tiny) a1 = Identity (c) c1 = Add (r, a) }}>
    y = Add (p, q)"""
"""The second state is the input, and becomes the first one for the next turn."""


def test_states_that_change_places_are_inputs_in_the_next_turn() -> None:
    text = f"k = MatMul (x, w) t = Tanh (k) none = Sub (t, t) {TURNS}"
    model = model_of(text.replace("(turns,", "(three,"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(3), "three"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    for level in ("O2", "O3"):
        assert error_of(model, large(2000), level) < 0.01


def test_states_that_a_body_computes_are_no_inputs() -> None:
    body = f"""h = Loop (once, , x) <body = b ({LOOP}, {V} r) {{ on = Identity (go) m = MatMul (u, w) r = Tanh (m) }}>
        q = Mul (h, h) y = MatMul (q, w)"""
    plan = onnxamp.plan_model(model_of(body), "O3")
    assert all(row.low for row in plan.rows if row.op == "Mul")


INTEGERS = {
    "samples": ("(int16[4,64] x) => (float[4,64] y) { f = Cast <to = 1> (x) h = MatMul (f, w)", 30000),
    "moved": ("(int16[64,4] x) => (float[4,64] y) { t = Transpose (x) f = Cast <to = 1> (t) h = Gemm (f, w)", 30000),
    "counts": ("(int32[4,64] x) => (float[4,64] y) { f = Cast <to = 1> (x) h = MatMul (f, w)", 1e6),
    "features": ("(int64[4,64] x) => (float[4,64] y) { f = Cast <to = 1> (x) h = MatMul (f, w)", 1e9),
    "amounts": (f"""(int64[4,64] x, {V} z) => (float[4,64] y) {{ f = Cast <to = 1> (x) k = MatMul (z, w)
        p = Softmax (k) h = Mul (p, f)""", 1e7),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_are_summed_up_may_be_large(name: str) -> None:
    text, size = INTEGERS[name]
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    small = np.array([10 / size], np.float32)
    model = add_weights(parse(f"{text} g = Mul (h, small) r = Relu (g) y = MatMul (r, w) }}"), {"w": w, "small": small})
    draw = np.random.default_rng(1)
    feeds = {
        entry.name: (
            draw.standard_normal((4, 64)).astype(np.float32)
            if entry.name == "z"
            else draw.integers(size // 2, size, [dim.dim_value for dim in entry.type.tensor_type.shape.dim]).astype(
                onnx.helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
            )
        )
        for entry in model.graph.input
    }
    for level in ("O1", "O2", "O3"):
        result = onnxamp.convert_model(model, level)
        assert onnxamp.diff_models(model, result, samples=[feeds]).outputs[0].rel_l2 < 0.01


def test_masks_flags_and_stated_ranges_stay_low_before_weights() -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    for kind, name, ranges in (
        ("int64", "attention_mask", {}),
        ("int64", "token_type_ids", {}),
        ("uint8", "x", {}),
        ("int64", "x", {"x": (0.0, 100.0)}),
    ):
        text = f"({kind}[4,64] {name}) => ({V} y) {{ f = Cast <to = 1> ({name}) h = MatMul (f, w) y = Relu (h) }}"
        plan = onnxamp.plan_model(add_weights(parse(text), {"w": w}), "O2", input_ranges=ranges)
        assert all(row.low for row in plan.rows if row.op == "MatMul")


def test_masks_and_pixels_stay_low() -> None:
    for kind, name in (("int64", "attention_mask"), ("uint8", "x")):
        text = f"""({kind}[4,64] {name}, {V} z) => ({V} y) {{ f = Cast <to = 1> ({name}) k = MatMul (z, w)
            h = Mul (k, f) y = MatMul (h, w) }}"""
        w = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
        plan = onnxamp.plan_model(add_weights(parse(text), {"w": w}), "O2")
        assert all(row.low for row in plan.rows if row.op == "Mul")
