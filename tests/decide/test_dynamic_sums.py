"""Sums that grow with the size of an input stay in float32; means and attention do not."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

GRID = "float step = {0.05}, int8 origin = {0}"
AXES = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {-1}, int64 first = {0}, int64 second = {1}"
NUMBERS = f"<{GRID}, {AXES}, float n = {{70000}}, float tiny = {{1e-9}}, int64[3] rows = {{0, 8, -1}}>"

SCATTER = '[sum] s = ScatterND <reduction = "add"> (t, at, x)'
SCATTERED = f"""(float[8,8] t, int64[N,1] at, float[N,8] x) => (float[8,8] y) {{ {SCATTER} [sum] y = Div (s, n) }}"""
GROWING = {
    "Gram matrix": """(float[N,8] x) => (float[8,8] y) {
        t = Transpose (x) [sum] g = MatMul (t, x) [sum] y = Div (g, n) }""",
    "of a batch": """(float[B,N,8] x) => (float[B,8,8] y) {
        t = Transpose <perm = [0, 2, 1]> (x) [sum] g = MatMul (t, x) [sum] y = Div (g, n) }""",
    "of an image": """(float[B,8,H,W] x) => (float[B,8,8] y) {
        f = Reshape (x, rows) t = Transpose <perm = [0, 2, 1]> (f) [sum] g = MatMul (f, t) [sum] y = Div (g, n) }""",
    "Gemm": "(float[N,8] x) => (float[8,8] y) { [sum] g = Gemm <transA = 1> (x, x) [sum] y = Div (g, n) }",
    "Einsum": """(float[N,8] x) => (float[8,8] y) {
        [sum] g = Einsum <equation = "ni,nj->ij"> (x, x) [sum] y = Div (g, n) }""",
    "ReduceSum": "(float[N,8] x) => (float[1,8] y) { r = Relu (x) [sum] s = ReduceSum (r, zero) [sum] y = Div (s, n) }",
    "of all": "(float[N,8] x) => (float[1,1] y) { r = Relu (x) [sum] s = ReduceSum (r) [sum] y = Div (s, n) }",
    "ReduceSumSquare": """(float[N,8] x) => (float[1,8] y) {
        r = Relu (x) [sum] s = ReduceSumSquare <axes = [0]> (r) [sum] y = Div (s, n) }""",
    "product with ones": """(float[N,8] x) => (float[1,8] y) { r = Relu (x) h = Shape (x) e = Slice (h, zero, one)
        l = Concat <axis = 0> (one, e) o = ConstantOfShape <value = float[1] {1}> (l) [sum] s = MatMul (o, r)
        [sum] y = Div (s, n) }""",
    "CumSum": "(float[N,8] x) => (float[N,8] y) { r = Relu (x) [sum] s = CumSum (r, first) [sum] y = Div (s, n) }",
    "linear attention": """(float[B,N,8] x) => (float[B,N,8] y) { k = Abs (x) t = Transpose <perm = [0, 2, 1]> (k)
        [sum] s = MatMul (t, x) [sum] c = ReduceSum (k, one) [sum] u = Transpose <perm = [0, 2, 1]> (c)
        [sum] z = MatMul (k, u) [sum] o = MatMul (k, s) [sum] y = Div (o, z) }""",
    "returned, too": """(float[N,8] x) => (float[8,8] y, float[8,8] g) {
        t = Transpose (x) [sum] g = MatMul (t, x) q = QuantizeLinear (g, step, origin)
        y = DequantizeLinear (q, step, origin) }""",
    "of integers": """(float[N,8] x) => (float[8,8] y) { t = Transpose (x) [sum] g = MatMul (t, x)
        q = QuantizeLinear (g, step, origin) y = DequantizeLinear (q, step, origin) }""",
    "of integers that are moved": """(float[N,8] x) => (float[8,8] y) { t = Transpose (x) [sum] g = MatMul (t, x)
        [sum] r = Relu (g) [sum] u = Transpose (r) q = QuantizeLinear (u, step, origin)
        y = DequantizeLinear (q, step, origin) }""",
    "pooling": """(float[B,N,8] x) => (float[B,8] y) { m = Sign (x) k = Abs (m) a = Mul (x, k)
        [sum] s = ReduceSum <keepdims = 0> (a, one) [sum] c = ReduceSum <keepdims = 0> (k, one)
        [sum] d = Max (c, tiny) [sum] y = Div (s, d) }""",
}  # fmt: skip
BOUNDED = {
    "attention": """(float[B,N,8] x, float[B,8,M] k, float[B,M,8] v) => (float[B,N,8] y) {
        s = MatMul (x, k) p = Softmax (s) y = MatMul (p, v) }""",
    "with Dropout and a mask": """(float[B,N,8] x, float[B,8,M] k, float[B,M,8] v, float[B,N,M] mask)
        => (float[B,N,8] y) {
        s = MatMul (x, k) p = Softmax (s) d = Dropout (p) m = Mul (d, mask) y = MatMul (m, v) }""",
    "decomposed": """(float[B,N,8] x, float[B,8,M] k, float[B,M,8] v) => (float[B,N,8] y) {
        s = MatMul (x, k) e = Exp (s) t = ReduceSum (e, last) p = Div (e, t) y = MatMul (p, v) }""",
    "Einsum": """(float[N,H,8] x, float[M,H,8] k) => (float[N,H,8] y) {
        s = Einsum <equation = "nhd,mhd->hnm"> (x, k) p = Softmax (s)
        y = Einsum <equation = "hnm,mhd->nhd"> (p, k) }""",
    "a weighted mean": """(float[B,N,8] x, float[B,N,1] s) => (float[B,8] y) {
        p = Softmax <axis = 1> (s) a = Mul (x, p) y = ReduceSum <keepdims = 0> (a, one) }""",
    "with quantized weights": """(float[B,N,8] x, float[B,8,M] k, float[B,M,8] v) => (float[B,N,8] y) {
        a = MatMul (x, k) p = Softmax (a) q = QuantizeLinear (p, step, origin) d = DequantizeLinear (q, step, origin)
        y = MatMul (d, v) }""",
    "means": "(float[N,8] x) => (float[1,8] y) { y = ReduceMean <axes = [0]> (x) }",
    "other axes": "(float[N,8] x) => (float[N,1] y) { r = Relu (x) y = ReduceSum (r, one) }",
    "a few updates": f"(float[8,8] t, int64[16,1] at, float[16,8] x) => (float[8,8] y) {{ {SCATTER} y = Relu (s) }}",
    "copies": SCATTERED.replace('<reduction = "add">', ""),
    "weights": "(float[B,N,8] x) => (float[B,N,8] y) { y = MatMul (x, w) }",
    "behind a shape that is computed": """(float[B,N,8] x, float[B,M,8] k, float[B,M,8] v) => (float[B,N,8] y) {
        t = Transpose <perm = [0, 2, 1]> (k) a = MatMul (x, t) p = Softmax (a)
        h = Shape (x) b = Gather (h, first) u = Unsqueeze (b, zero) n1 = Gather (h, second) un = Unsqueeze (n1, zero)
        k1 = Shape (k) m1 = Gather (k1, second) um = Unsqueeze (m1, zero) l = Concat <axis = 0> (u, un, um)
        r = Reshape (p, l) y = MatMul (r, v) }""",
}  # fmt: skip


def model_of(text: str) -> ModelProto:
    head, brace, body = text.partition("{")
    model = parse(f"{head}{NUMBERS}{brace}{body}")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.name} {number}"
    return model


def kept_by(model: ModelProto, level: str, dtype: str = "float16") -> set[str]:
    plan = onnxamp.plan_model(model, level, dtype=dtype)
    return {row.node for row in plan.rows if row.reason == "dynamic sum" and not row.low}


@pytest.mark.parametrize("name", GROWING)
def test_sums_that_grow_stay_in_float32_until_they_are_divided(name: str) -> None:
    model = model_of(GROWING[name])
    sums = {node.name for node in model.graph.node if node.name.startswith("sum ")}
    for level in ("O1", "O2", "O3"):
        plan = onnxamp.plan_model(model, level)
        assert sums <= {row.node for row in plan.rows if not row.low}
    assert kept_by(model, "O2") <= sums
    assert kept_by(model, "O2", "bfloat16") == set()


def test_axes_that_a_body_captures_are_known() -> None:
    text = """(float[N,8] x, bool c) => (float[1,8] y) { r = Relu (x)
        y = If (c) <then_branch = a () => (float[1,8] u) { [in] s = ReduceSum (r, zero) [in] u = Div (s, n) },
        else_branch = b () => (float[1,8] v) { v = ReduceMax <axes = [0]> (r) }> }"""
    plan = onnxamp.plan_model(model_of(text), "O3")
    kept = {row.op for row in plan.rows if row.reason == "dynamic sum" and not row.low}
    assert kept == {"ReduceSum"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
def test_what_is_added_one_by_one_stays_in_float32(op: str, dtype: str) -> None:
    text = SCATTERED if op == "ScatterND" else SCATTERED.replace("ND", "Elements").replace("[N,1] at", "[N,8] at")
    model = model_of(text)
    sums = {node.name for node in model.graph.node if node.name.startswith("sum ")}
    for level in ("O1", "O2", "O3"):
        plan = onnxamp.plan_model(model, level, dtype=dtype)
        assert (sums if dtype == "float16" else {"sum 0"}) <= {row.node for row in plan.rows if not row.low}
    rng = np.random.default_rng(0)
    feeds = {"t": np.zeros((8, 8)), "x": rng.random((70_000 if dtype == "float16" else 700, 8)) * 8}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    at = rng.integers(0, 2, (len(feeds["x"]), 1 if op == "ScatterND" else 8))
    found = onnxamp.diff_models(model, onnxamp.convert_model(model, dtype=dtype), samples=[{**feeds, "at": at}])
    assert found.passed, found.failure


@pytest.mark.parametrize("name", ["Gram matrix", "ReduceSum", "linear attention", "pooling"])
def test_many_rows_are_right(name: str) -> None:
    model = model_of(GROWING[name])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N" if name in ("Gram matrix", "ReduceSum") else "B"
    shape = (1, 70_000, 8)[-len(model.graph.input[0].type.tensor_type.shape.dim) :]
    feeds = {"x": 1 + np.random.default_rng(0).random(shape, np.float32)}
    report = onnxamp.diff_models(model, onnxamp.convert_model(model, "O3"), samples=[feeds])
    assert report.passed
    assert report.outputs[0].rel_l2 < 2e-3


def test_a_residual_stream_is_in_range_again() -> None:
    """What one other value is added to may be as large. A stream goes on from sum to sum, as in a pre-norm decoder."""
    text = """(float[B,N,8] x, float[B,N,M] path) => (float[B,M,8] y) { t = Transpose <perm = [0, 2, 1]> (path)
        [sum] s = MatMul (t, x) [one] a = MatMul (s, w) [one] b = Add (s, a) [one] c = MatMul (b, w)
        [stream] d = Add (b, c) [stream] e = MatMul (d, w) [stream] f = Add (d, e) [stream] y = MatMul (f, w) }"""
    kept = kept_by(model_of(text), "O2")
    assert {name.partition(" ")[0] for name in kept} == {"sum", "one"}


def test_messages_that_degrees_normalize() -> None:
    """As in a graph convolution, whose sums grow with the root of the degree; the sum is exact nevertheless."""
    text = """(float[N,8] x, int64[E] source, int64[E,1] at, float[N,1] d0, float[E,1] ones, float[N,8] t) =>
        (float[N,8] y) { h = MatMul (x, w) [sum] d = ScatterND <reduction = "add"> (d0, at, ones) e = Add (d, n)
        r = Sqrt (e) q = Reciprocal (r) g = Gather (h, source) f = Gather (q, source) m = Mul (g, f)
        [sum] s = ScatterND <reduction = "add"> (t, at, m) a = Add (s, h) b = Relu (a) [next] y = MatMul (b, w) }"""
    plan = onnxamp.plan_model(model_of(text), "O2")
    low = {row.node.partition(" ")[0]: row.low for row in plan.rows}
    assert (low["sum"], low["next"]) == (False, True)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", BOUNDED)
def test_sums_that_do_not_grow_are_free(name: str, level: str) -> None:
    assert kept_by(model_of(BOUNDED[name]), level) == set()


@pytest.mark.parametrize("axis", [0, -1, 5])
def test_axes_that_a_tensor_lacks_end_no_conversion(axis: int) -> None:
    """No runtime takes such a model, and its faults are not for this to find."""
    text = f"(float X) => (float Y) <int64[1] axes = {{{axis}}}> {{ Y = ReduceSum <keepdims = 0> (X, axes) }}"
    assert onnxamp.convert_model(parse(text, 18)).graph.node[-1].op_type in ("ReduceSum", "Cast")
