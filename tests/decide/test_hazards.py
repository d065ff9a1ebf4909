"""Hazards that real exporters produce: what must stay in float32, and what the result must then look like."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from norms import LAYER_NORM, RMS_NORM
from onnx import ModelProto, numpy_helper, parser

import onnxamp
from onnxamp._base.errors import ModelError


def parse(text: str, opset: int = 17, ir: int = 8, **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def precisions(model: ModelProto, level: str = "O2", **wishes: object) -> dict[str, set[bool]]:
    """First output of each node -> whether its variables are low."""
    found: dict[str, set[bool]] = {}
    for row in onnxamp.plan_model(model, level, **wishes).rows:
        found.setdefault(row.key.rpartition(":")[0].rpartition("/")[2], set()).add(row.low)
    return found


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_integer_products_keep_their_scaling(level):
    """An int32 sum above 65504 would be infinite in float16, and the runtime fuses these nodes into one kernel."""
    model = parse(
        """(float[2,8] x) => (float[2,8] y) <float ws = {0.01}, uint8 wz = {128}> {
            q, s, z = DynamicQuantizeLinear (x) acc = MatMulInteger (q, w8, z, wz) scale = Mul (s, ws)
            f = Cast <to = 1> (acc) o = Mul (f, scale) b = Add (o, bias) y = MatMul (b, w) }""",
        w8=np.full((8, 8), 130, np.uint8), bias=random(8), w=random(8, 8),
    )  # fmt: skip
    found = precisions(model, level)
    assert found["y"] == {True}
    assert found["f"] == found["o"] == found["b"] == found["scale"] == {False}


@pytest.mark.parametrize("first", ["h = Identity (x)", "h = MatMul (x, w)", "t = Relu (x) h = Neg (t)"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("keep_io", [True, False])
def test_no_cast_is_absorbed_by_the_layer_norm_fusion(first, level, keep_io):
    text = f"(float[2,8] x) => (float[2,8] y) <float two = {{2.0}}, float eps = {{1e-5}}> {{ {first} {LAYER_NORM} }}"
    model = onnxamp.convert_model(parse(text, w=random(8, 8), gain=random(8)), level, keep_io_types=keep_io)
    onnx.checker.check_model(model, full_check=True)
    for optimisation in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, optimisation)
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert onnxamp.convert_model(model, level, keep_io_types=keep_io) == model


@pytest.mark.parametrize(("dtype", "shields"), [("float16", 0), ("bfloat16", 1)])
def test_no_cast_is_absorbed_by_the_rms_norm_fusion(dtype, shields):
    """In bfloat16 no CUDA kernel takes a low input with a float32 scale: an op stands between Cast and norm."""
    text = f"""(float[2,8] x) => (float[2,8] y) <float two = {{2.0}}, float eps = {{1e-5}}> {{
        h = MatMul (x, w) {RMS_NORM} }}"""
    model = onnxamp.convert_model(parse(text, w=random(8, 8), gain=random(8)), dtype=dtype, fold=False)
    assert [node.op_type for node in model.graph.node].count("Max") == shields


BEHIND_A_PRODUCT = f"""(float[2,8] x) => (float[2,8] y) <float two = {{2.0}}, float eps = {{1e-5}}> {{
    h = MatMul (x, w) {LAYER_NORM} }}"""


@pytest.mark.parametrize(("target", "shields"), [("cuda", 0), ("cpu", 0), ("any", 0), ("webgpu", 1)])
def test_no_cast_is_absorbed_where_no_kernel_takes_two_types(target, shields):
    model = parse(BEHIND_A_PRODUCT, opset=13, w=random(8, 8), gain=random(8))
    model = onnxamp.convert_model(model, "O1", target=target, opset="keep")
    assert [node.op_type for node in model.graph.node].count("Max") == shields


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.webgpu
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("opset", [11, 13, 17])
def test_decomposed_norms_behind_products_run_on_webgpu(level, opset):
    model = parse(BEHIND_A_PRODUCT, opset=opset, w=random(8, 8), gain=random(8))
    low = onnxamp.convert_model(model, level, target="webgpu", opset="keep")
    found = onnxamp.diff_models(model, low, provider="webgpu", layers=False)
    assert found.passed, found.failure


@pytest.mark.parametrize(("gain", "low"), [("float[8] gain", False), ("float[2,1] gain", True)])
def test_a_gain_that_is_computed_belongs_to_the_norm_if_it_is_a_vector(gain, low):
    """ONNX Runtime fuses vectors alone, and with one in low precision no kernel takes the node."""
    text = f"""({gain}, float[2,8] x) => (float[2,8] y) <float two = {{2.0}}, float eps = {{1e-5}}> {{
        h = MatMul (x, w) {RMS_NORM} }}"""
    assert precisions(parse(text, w=random(8, 8)), keep_io_types=False, fold=False)["y"] == {low}


def test_a_norm_over_channels_pins_no_conv():
    """It is no LayerNormalization to the runtime: nothing is fused, and nothing is absorbed."""
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y) <float two = {2.0}, float eps = {1e-5}> { h = Conv (x, k)
        m = ReduceMean <axes = [1]> (h) d = Sub (h, m) p = Pow (d, two) v = ReduceMean <axes = [1]> (p)
        e = Add (v, eps) q = Sqrt (e) y = Div (d, q) }"""
    assert precisions(parse(text, k=random(4, 4, 1, 1)))["h"] == {True}


def test_frequencies_computed_in_the_graph_are_positions():
    text = """(float[1,n,64] x) => (float[1,n,64] y) <int64 zero = {0}, int64 one = {1}, int64 two = {2},
        int64 width = {64}, float k = {-0.14}, int64[1] axis = {1}> {
        s = Shape (x) n = Gather (s, one) r = Range (zero, n, one) f = Cast <to = 1> (r) p = Unsqueeze (f, axis)
        r2 = Range (zero, width, two) f2 = Cast <to = 1> (r2) m = Mul (f2, k) e = Exp (m) a = Mul (p, e)
        sn = Sin (a) cs = Cos (a) t = Concat <axis = -1> (sn, cs) w2 = MatMul (t, w) y = Add (x, w2) }"""
    found = precisions(parse(text, w=random(64, 64)))
    assert found["a"] == found["sn"] == found["cs"] == {False}
    assert found["w2"] == {True}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_carries_a_guarded_value_stays_float32(level):
    text = """(float[2,8] x) => (float[16] y) <float eps = {1e-10}, int64[1] flat = {-1}> {
        a = MatMul (x, w) s = Sigmoid (a) c = Add (s, eps) r = Reshape (c, flat) y = Log (r) }"""
    found = precisions(parse(text, w=random(8, 8)), level)
    assert found["c"] == found["r"] == found["y"] == {False}
    assert found["a"] == {True}


@pytest.mark.parametrize(("epsilon", "measured"), [(1e-10, False), (1e-7, True)], ids=["becomes 0", "loses digits"])
def test_auto_measures_no_epsilon_that_becomes_zero(epsilon, measured):
    """No sample need divide by zero for other inputs to do so."""
    text = f"""(float[2,8] x) => (float[2,8] y) <float eps = {{{epsilon}}}> {{
        a = MatMul (x, w) s = Sigmoid (a) c = Add (s, eps) q = Div (s, c) y = MatMul (q, w) }}"""
    rows = onnxamp.plan_model(parse(text, w=random(8, 8)), "auto").rows
    kept = {row.key.partition(":")[0] for row in rows if row.reason == "epsilon" and not row.low}
    assert kept == (set() if measured else {"c", "q"})


@pytest.mark.parametrize(
    ("bias", "reader", "is_low"),
    [
        (4e-5, "Conv (b, k)", True),
        (1e-10, "Conv (b, k)", False),
        (4e-5, "Div (x, b)", False),
        (4e-5, "Log (b)", False),
    ],
    ids=["a learned bias", "becomes 0", "guards a divisor", "guards a logarithm"],
)
def test_a_small_bias_that_guards_nothing_is_low(bias: float, reader: str, is_low: bool) -> None:
    """Its sum changes by less than half of the smallest float16, 3e-8."""
    text = f"""(float[1,2,4,4] x) => (float[1,2,4,4] y) <float bias = {{{bias}}}> {{
        c = Conv (x, k) b = Add (c, bias) r = {reader} y = Conv (r, k) }}"""
    assert precisions(parse(text, k=random(2, 2, 1, 1)))["b"] == {is_low}


def test_small_powers_in_front_of_a_guarded_logarithm():
    """A floor of 1e-10 says that such numbers occur: the mel product must not flush them."""
    text = """(float[1,8] re) => (float[1,8] y) <float floor = {1e-10}, float two = {2.0}> {
        p = Pow (re, two) mel = MatMul (p, w) c = Clip (mel, floor) y = Log (c) }"""
    assert precisions(parse(text, w=abs(random(8, 8))))["mel"] == {False}


def test_magnitudes_keep_their_squares():
    text = """(float[2,8] x, float[2,8] z) => (float[2,8] y) <float two = {2.0}> {
        a = MatMul (x, w) b = MatMul (z, w) p = Pow (a, two) q = Mul (b, b) s = Add (p, q) r = Sqrt (s)
        y = MatMul (r, w) }"""
    found = precisions(parse(text, w=random(8, 8)))
    assert found["p"] == found["q"] == found["s"] == found["r"] == {False}
    assert found["a"] == found["b"] == found["y"] == {True}


def test_a_sentinel_that_cannot_be_low_keeps_its_path():
    """ConstantOfShape-9 knows no bfloat16; cast down, its lowest float32 would be minus infinity."""
    text = """(float[1,4,8,16] q, int64[2] shape, float[8,8] tri) => (float[1,4,8,8] y) {
        full = ConstantOfShape <value = float[1] {-3.4028234663852886e+38}> (shape) b = Cast <to = 9> (tri)
        f = Cast <to = 1> (b) mask = Mul (full, f) k = Transpose <perm = [0, 1, 3, 2]> (q) s = MatMul (q, k)
        a = Add (s, mask) y = Softmax <axis = -1> (a) }"""
    found = precisions(parse(text, opset=14), "O3", dtype="bfloat16", opset="keep")
    assert found["mask"] == found["a"] == found["y"] == {False}
    assert found["s"] == {True}


def test_a_mean_over_very_many_elements_stays_float32():
    """CUDA sums up in the output's type before it divides."""
    text = "(float[1,100000] x) => (float[1,1] y) { h = Neg (x) y = ReduceMean <axes = [1]> (h) }"
    assert precisions(parse(text), "O3")["y"] == {False}
    assert precisions(parse(text.replace("100000", "100")), "O3")["y"] == {True}


FOLDED = """(float[1,4,8,8] x) => (float[1,4,8,8] y) {
    [conv] h = Conv (x, k) [bn] y = BatchNormalization (h, s, s, s, v) }"""


def test_a_fold_yields_to_a_wish():
    weights = {"k": random(4, 4, 1, 1), "s": random(4), "v": abs(random(4)) + 1}
    both = precisions(parse(FOLDED, **weights))
    assert both["conv"] == both["bn"] == {True}
    apart = precisions(parse(FOLDED, **weights), keep_high=["bn"])
    assert apart["conv"] == {True}
    assert apart["bn"] == {False}
    precisions(parse(FOLDED, **weights), keep_high=["bn"], force_low=["conv"])


def test_a_plan_repeats_the_upgrade():
    text = "(float[1,4] x) => (float[1,4] y) <float top = {6.0}> { h = MatMul (x, w) y = Clip (h, , top) }"
    model = parse(text, opset=11, ir=7, w=random(4, 4))
    plan = onnxamp.plan_model(model, opset=13)
    assert onnxamp.apply_plan(model, plan) == onnxamp.convert_model(model, opset=13)


@pytest.mark.parametrize("op", ["Exp (x)", "Where (x)", "CastLike (x)", "MatMulInteger (x)"])
def test_a_node_without_its_inputs_or_outputs_is_refused(op):
    model = parse(f"(float[2] x) => (float[2] y) {{ z = {op} y = Neg (x) }}")
    if op.startswith("Exp"):
        del model.graph.node[0].output[:]
    with pytest.raises(ModelError, match="its schema requires at least"):
        onnxamp.convert_model(model)


@pytest.mark.parametrize(("kind", "is_index"), [
    ("int8", False), ("uint8", False), ("int16", True), ("uint16", True), ("int32", True), ("uint32", True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_to_integers_that_low_precision_cannot_hold_are_index_paths(kind, is_index, dtype):
    """float16 holds integers up to 2,048 and bfloat16 up to 256: those of 8 bits are exact in both."""
    to = onnx.TensorProto.DataType.Value(kind.upper())
    model = parse(
        f"""(float[2,8] x, float[2,8] step) => ({kind}[2,8] y) {{
            m = MatMul (x, w) s = Mul (m, step) y = Cast <to = {to}> (s) }}""",
        w=random(8, 8),
    )
    plan = onnxamp.plan_model(model, "O3", target="any", dtype=dtype, keep_io_types=False)
    assert {row.node for row in plan.rows if not row.low} == ({"s", "y"} if is_index else set())
    assert {row.reason for row in plan.hazards} == ({"index path"} if is_index else set())


@pytest.mark.parametrize("kind", ["int16", "uint16"])
def test_short_integers_that_are_moved_into_floats_count(kind):
    model = parse(f"""({kind}[2,8] i, float[2,8] w) => (float[2,8] y) {{
        p = Cast <to = 1> (i) a = Mul (p, w) b = Mul (p, p) s = Sin (b) y = Add (a, s) }}""")
    found = precisions(model, "O3")
    assert found["b"] == found["s"] == {False}
    assert found["a"] == {True}


def test_an_image_that_becomes_bytes_lowers_all_that_computes_it():
    """The postprocessing of a super-resolution network: scaling, clipping and rounding before a Cast to uint8."""
    model = parse(
        """(float[1,3,8,8] x) => (uint8[1,3,6,6] y) <float full = {255}, float zero = {0}> {
            c = Conv (x, w) s = Mul (c, full) l = Clip (s, zero, full) r = Round (l) y = Cast <to = 2> (r) }""",
        w=random(3, 3, 3, 3),
    )  # fmt: skip
    assert {row.low for row in onnxamp.plan_model(model, "O2").rows} == {True}
