"""Hazards in forms that exporters write less often: the same numbers as in the usual ones, and the same outcome."""

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

RNG = np.random.default_rng(0)
LARGE = (300 * RNG.standard_normal((4, 16))).astype(np.float32)
ZEROS = np.concatenate([np.zeros((1, 16)), RNG.standard_normal((3, 16))]).astype(np.float32)
NUMBERS = """<int64 two = {2}, int64[1] ax = {1}, int64[1] end = {2}, float tiny = {1e-12}, float one = {1},
    float large = {100000}>"""
FORMS = {
    "an integer exponent": ("q = Pow (x, two) m = ReduceSum (q, ax) r = Sqrt (m) z = Div (x, r)", LARGE),
    "a contraction of a value with itself": (
        'm = Einsum <equation = "ij,ij->i"> (x, x) u = Unsqueeze (m, ax) r = Sqrt (u) z = Div (x, r)',
        LARGE,
    ),
    "a product with itself": (
        "u = Unsqueeze (x,ax) v = Unsqueeze (x,end) q = MatMul (u, v) m = Squeeze (q, end) r = Sqrt (m) z = Div (x, r)",
        LARGE,
    ),
    "greater or equal": (
        "s = Abs (x) l = GreaterOrEqual (s, tiny) t = Where (l, s, one) z = Div (x, t)",
        ZEROS,
    ),
    "less or equal": (
        "s = Abs (x) l = LessOrEqual (s, tiny) t = Where (l, one, s) z = Div (x, t)",
        ZEROS,
    ),
}  # fmt: skip


def between_products(nodes: str) -> ModelProto:
    """A model that does something between two products that change nothing."""
    text = f"(float[4,16] x0) => (float[4,16] y) {NUMBERS} {{ x = MatMul (x0, w) {nodes} y = MatMul (z, w) }}"
    model = add_weights(parse(text, 18), {"w": (16, 16)})
    weight = next(one for one in model.graph.initializer if one.name == "w")
    weight.raw_data = np.eye(16, dtype=np.float32).tobytes()
    return model


@pytest.mark.parametrize("name", FORMS)
def test_results_are_right(name: str) -> None:
    nodes, x = FORMS[name]
    model = between_products(nodes)
    low = onnxamp.convert_model(model)
    assert onnxamp.diff_models(model, low, {"x0": x}).passed


def test_a_negated_mask_keeps_rows_that_it_leaves_nothing_of() -> None:
    text = f"""(float[4,16] x0, bool[4,16] m) => (float[4,16] y) {NUMBERS} {{ x = MatMul (x0, w)
        q = Not (m) c = Cast <to = 1> (q) b = Mul (c, large) n = Neg (b) s = Add (x, n)
        z = Softmax (s) y = MatMul (z, w) }}"""
    model = add_weights(parse(text, 18), {"w": (16, 16)})
    mask = np.ones((4, 16), bool)
    mask[1] = False
    low = onnxamp.convert_model(model)
    assert onnxamp.diff_models(model, low, {"x0": LARGE / 300, "m": mask}).passed


@pytest.mark.parametrize("first", [0, 1])
def test_casts_that_saturate_and_others_are_not_the_same(first: int) -> None:
    casts = ["Cast <to = 17, saturate = 0> (x)", "Cast <to = 17> (x)"]
    a, b = casts[first], casts[1 - first]
    model = parse(
        f"(float[8] x) => (float[8] y, float[8] z) {{ a = {a} b = {b} y = Cast <to = 1> (a) z = Cast <to = 1> (b) }}",
        19,
    )
    left = onnxamp.remove_redundant_casts(model)
    assert len(left.graph.node) == len(model.graph.node)


@pytest.mark.parametrize("squares", [
    "a = ReduceL2 (x, ax) aa = Mul (a, a) b = ReduceL2 (p, ax) bb = Pow (b, two)",
    "a = Mul (x, x) aa = ReduceSum (a, ax) b = Pow (p, two) bb = ReduceSum (b, ax)",
])  # fmt: skip
def test_expanded_distances(squares: str) -> None:
    text = f"""(float[4,16] x0, float[4,16] p0) => (float[4,4] y) {NUMBERS} {{ x = MatMul (x0, w) p = MatMul (p0, w)
        {squares} bt = Transpose (bb) s = Add (aa, bt) t = Transpose (p) m = MatMul (x, t) n = Mul (m, double)
        y = Sub (s, n) }}"""
    text = text.replace("float one = {1},", "float one = {1}, float double = {2},")
    plan = onnxamp.plan_model(add_weights(parse(text, 18), {"w": (16, 16)}))
    assert {row.node for row in plan.rows if row.low and row.op != "initializer"} == {"x", "p"}
