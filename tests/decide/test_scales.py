"""Quantized networks: where scales become low precision, and which ones cannot."""

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conversions import count
from graphs.case import add_weights
from judge_kernels import typed_nodes
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxamp
from onnxamp._facts.dtypes import element_name, grids
from onnxamp._facts.signature import lookup
from onnxamp._facts.tables import target_names
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import prepare
from onnxamp._runtime.building import build_engine
from onnxamp._runtime.emulate import emulate

FEEDS = {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}
QUANTIZED = ("QuantizeLinear", "DequantizeLinear")
INTEGERS = {
    "int8": (TensorProto.INT8, TensorProto.INT8),
    "uint8": (TensorProto.UINT8, TensorProto.UINT8),
    "int4": (TensorProto.INT8, TensorProto.INT4),
    "int2": (TensorProto.INT8, getattr(TensorProto, "INT2", TensorProto.UNDEFINED)),  # since onnx 1.20
    "float8": (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FN),
    "float8e5m2": (TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2),
    "int16": (TensorProto.INT16, TensorProto.INT16),
}
"""Types of activations and of weights."""


def network(
    types: str = "int8", opset: int = 21, quantize: str = "", dequantize: str = "", **scales: float | np.ndarray
) -> ModelProto:
    """Two products with a quantized one between them; ``scales``: of inputs, weights and results."""
    active, stored = INTEGERS[types]
    if opset > onnx.defs.onnx_opset_version() or stored == TensorProto.UNDEFINED:
        pytest.skip(f"onnx {onnx.__version__} lacks opset {opset} or {types}")
    random = np.random.default_rng(0)
    weights = [dequantize, "axis = 0, block_size = 4" if stored == TensorProto.INT4 else "axis = 1"]
    model = onnx.parser.parse_model(
        f"""<ir_version: 11, opset_import: ["" : {opset}]> g (float[2,8] x) => (float[2,2] y) {{
        m = MatMul (x, k)
        a = QuantizeLinear <{quantize}> (m, s, z)
        b = DequantizeLinear <{dequantize}> (a, s, z)
        c = DequantizeLinear <{", ".join(filter(None, weights))}> (w, t)
        d = MatMul (b, c)
        e = Relu (d)
        f = QuantizeLinear <{quantize}> (e, r, z)
        g = DequantizeLinear <{dequantize}> (f, r, z)
        y = MatMul (g, v)
    }}""".replace("<>", "")
    )
    per_weight = np.full((2, 4) if stored == TensorProto.INT4 else 4, 0.1) * np.arange(1, 5)
    numbers = {"s": 0.03, "t": per_weight, "r": 0.1} | scales
    arrays = {name: np.asarray(array, np.float32) for name, array in numbers.items()}
    arrays |= {name: random.standard_normal(shape).astype(np.float32) for name, shape in (("k", (8, 8)), ("v", (4, 2)))}
    integers = random.integers(-2, 2, (8, 4)) if types != "uint8" else random.integers(0, 4, (8, 4))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    model.graph.initializer.append(helper.make_tensor("z", active, [], [0]))
    model.graph.initializer.append(helper.make_tensor("w", stored, [8, 4], integers.ravel().tolist()))
    return model


def scale_types(model: ModelProto) -> set[str]:
    """The types of the scales of all nodes that quantize or dequantize."""
    nodes = [one for one in typed_nodes(model) if one.node.op_type in QUANTIZED]
    assert nodes
    return {one.inputs[1] for one in nodes}


def outputs(model: ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # its fusions misread float8
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, FEEDS)[0])


def load(model: ModelProto) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def why(model: ModelProto, label: str, **wishes: Any) -> list[str]:
    """What keeps the node that makes a value float32."""
    plan = onnxamp.plan_model(model, **wishes)
    return [hazard.detail for hazard in plan.hazards if hazard.node == label and not hazard.low]


LOW_SCALES = {"cuda", "tensorrt", "webgpu"}


@pytest.mark.parametrize("target", target_names())
def test_scales_are_low_where_nothing_is_fused_in_float32(target: str) -> None:
    result = onnxamp.convert_model(network(), target=target)
    assert scale_types(result) == {"tensor(float16)" if target in LOW_SCALES else "tensor(float)"}
    load(result)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_scales_follow_the_products_between_them(level: str) -> None:
    result = onnxamp.convert_model(network(), level)
    assert scale_types(result) == {"tensor(float16)"}
    assert count(result) == 2
    kept = onnxamp.convert_model(network(), level, black_list=["MatMul", "Relu"])
    assert scale_types(kept) == {"tensor(float)"}
    assert count(kept) == 0


def test_an_upgrade_to_opset_19_pays_for_scales() -> None:
    result = onnxamp.convert_model(network(opset=13))
    assert result.opset_import[0].version == 19
    assert scale_types(result) == {"tensor(float16)"}
    kept = onnxamp.convert_model(network(opset=13), opset="keep")
    assert scale_types(kept) == {"tensor(float)"}


@pytest.mark.mostly_slow(fast=13)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("types", "opset"),
    [
        *((types, opset) for types in ("int8", "uint8", "float8", "float8e5m2") for opset in (19, 21, 23, 25)),
        *(("int4", opset) for opset in (21, 23, 25)),
        ("int2", 25),
    ],
)
def test_scales_of_every_type_and_opset_compute_the_same(types: str, opset: int, dtype: str) -> None:
    original = network(types, opset)
    result = onnxamp.convert_model(original, dtype=dtype, target="tensorrt")
    assert result.opset_import[0].version == opset
    assert scale_types(result) == {f"tensor({dtype})"}
    onnx.checker.check_model(result, full_check=True)
    error = np.linalg.norm(outputs(emulate(result)) - outputs(original)) / np.linalg.norm(outputs(original))
    assert error < {"float16": 4e-3, "bfloat16": 4e-2}[dtype]
    assert onnxamp.convert_model(result, dtype=dtype, target="tensorrt") == result


@pytest.mark.parametrize("opset", [23, 25])
def test_attributes_that_name_types_follow_the_scales(opset: int) -> None:
    result = onnxamp.convert_model(network("int8", opset, "precision = 1", "output_dtype = 1"))
    for one in typed_nodes(result):
        if one.node.op_type == "DequantizeLinear":
            assert one.outputs == ["tensor(float16)"]
        elif one.node.op_type == "QuantizeLinear":
            assert helper.get_node_attr_value(one.node, "precision") == TensorProto.FLOAT
    load(result)


CONCAT = """<ir_version: 10, opset_import: ["" : 21]> g (float[2,8] x) => (float[2,8] y)
    <float s = {0.1}, float r = {0.07}, float t = {0.3}, int8 z = {0}, int8 o = {3}> {
        a = MatMul (x, w) b = QuantizeLinear (a, s, z) c = DequantizeLinear (b, s, z)
        d = QuantizeLinear (x, r, o) e = DequantizeLinear (d, r, o)
        f = Concat <axis = 1> (c, e, c) g = QuantizeLinear (f, t, o) h = DequantizeLinear (g, t, o)
        y = MatMul (h, u) }"""
"""Dequantized numbers that are joined, and quantized again."""


def concatenated() -> ModelProto:
    random = np.random.default_rng(0)
    shapes = {"w": (8, 8), "u": (24, 8)}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return add_weights(onnx.parser.parse_model(CONCAT), weights)


def concat_types(model: ModelProto) -> set[str]:
    return {one.outputs[0] for one in typed_nodes(model) if one.node.op_type == "Concat"}


def test_concatenated_integers_are_loaded() -> None:
    """ONNX Runtime makes QLinearConcat of dequantized inputs, which reads float32 scales alone."""
    model = concatenated()
    for level in ("O2", "O3"):
        result = onnxamp.convert_model(model, level, target="tensorrt")
        assert scale_types(result) == {"tensor(float16)"}
        assert concat_types(result) == {"tensor(int8)"}
        load(result)
        np.testing.assert_allclose(outputs(emulate(result)), outputs(model), atol=0.5)
        assert onnxamp.convert_model(result, level, target="tensorrt") == result
    ready = prepare(Model.of(model), Options.of("O2", {"target": "tensorrt"}))
    np.testing.assert_array_equal(outputs(ready.graph.model), outputs(model))
    assert "Quantized the inputs of a Concat" in ready.notes[0]


@pytest.mark.parametrize("options", [{"target": "webgpu"}, {"black_list": ["Concat"]}, {"keep_nodes": ["f"]}])
def test_a_concat_stays_where_nothing_joins_integers_or_the_user_keeps_it(options: dict[str, Any]) -> None:
    result = onnxamp.convert_model(concatenated(), **{"target": "tensorrt", **options})
    assert concat_types(result) == {"tensor(float)"}
    load(result)


BRANCH = """<ir_version: 10, opset_import: ["" : 21]> g (uint8[1] q, bool k) => (uint8[2] y) <float s = {0.1}> {
    d = DequantizeLinear (q, s) c = Concat <axis = 0> (d, d)
    y = If (k) <then_branch = one () => (uint8[2] a) { a = QuantizeLinear (c, s) },
        else_branch = other () => (uint8[2] b) { b = Concat <axis = 0> (q, q) }> }"""
SCALE = """<ir_version: 10, opset_import: ["" : 21]> g (uint8[1] q, float[1] x) => (uint8[1] y) <float s = {0.1}> {
    d = DequantizeLinear (q, s) c = Concat <axis = 0> (d) y = QuantizeLinear (x, c) }"""


@pytest.mark.parametrize("text", [BRANCH, SCALE])
def test_a_concat_stays_that_is_quantized_elsewhere_or_is_a_scale(text: str) -> None:
    model = onnx.parser.parse_model(text)
    ready = prepare(Model.of(model), Options.of("O2", {"target": "cuda"}))
    assert not [note for note in ready.notes if note.startswith("Quantized")]
    onnx.checker.check_model(onnxamp.convert_model(model, target="cuda"), full_check=True)


SHARED = """<ir_version: 10, opset_import: ["" : 21]> g (float[2,8] x) => (float[2,8] y, float[2,8] w)
    <float s = {0.1}, float t = {0.3}, int8 z = {0}> {
        a = MatMul (x, k) q = QuantizeLinear (a, s, z) b = DequantizeLinear (q, s, z)
        c = Concat <axis = 1> (b, b) d = QuantizeLinear (c, t, z) e = DequantizeLinear (d, t, z)
        f = MatMul (b, k) w = Identity (f) y = MatMul (e, u) }"""
"""Dequantized numbers that a Concat reads in float32, and a product in low precision."""


def test_what_both_precisions_read_is_dequantized_twice() -> None:
    """A Cast between them would part the product from its integers."""
    model = onnx.parser.parse_model(SHARED)
    random = np.random.default_rng(0)
    weights = {"k": random.standard_normal((8, 8)), "u": random.standard_normal((16, 8))}
    arrays = (numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items())
    model.graph.initializer.extend(arrays)
    for target in ("tensorrt", "cuda"):
        result = onnxamp.convert_model(model, target=target, black_list=["Concat"])
        scales = [one.inputs[1] for one in typed_nodes(result) if one.node.op_type == "DequantizeLinear"]
        assert sorted(scales) == ["tensor(float)", "tensor(float16)", "tensor(float16)"]
        makers = {name: node.op_type for node in result.graph.node for name in node.output}
        products = [node for node in result.graph.node if node.op_type == "MatMul"]
        assert [makers.get(node.input[0], "") for node in products].count("DequantizeLinear") == 2
        onnx.checker.check_model(result, full_check=True)
        load(result)
        np.testing.assert_allclose(outputs(emulate(result)), outputs(model), atol=0.5)
        assert onnxamp.convert_model(result, target=target, black_list=["Concat"]) == result
    for target, options in (("tensorrt", {"keep_nodes": ["b"]}), ("cuda", {"dtype": "bfloat16"})):  # without a kernel
        held = onnxamp.convert_model(model, target=target, black_list=["Concat"], **options)
        assert not [one for one in onnxamp.audit_model(held, target).findings if one.severity == "error"]
    held = onnxamp.convert_model(model, target="tensorrt", keep_nodes=["b"])
    assert sum(node.op_type == "DequantizeLinear" for node in held.graph.node) == 2


def bounded(ops: str, returned: str = "") -> ModelProto:
    """What ops make of integers, as integers again."""
    more = f", float[2,8] {returned}" if returned else ""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[2,8] x) => (float[2,8] y{more})
        <float s = {{0.03}}, float t = {{0.0317}}, int8 z = {{0}}, float two = {{2}}> {{
            a = MatMul (x, k) b = QuantizeLinear (a, s, z) c = DequantizeLinear (b, s, z)
            {ops}
            e = QuantizeLinear (d, t, z) f = DequantizeLinear (e, t, z) y = MatMul (f, k) }}"""
    )
    numbers = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 4
    ones = np.ones(8, np.float32)
    model.graph.initializer.extend([numpy_helper.from_array(numbers, "k"), numpy_helper.from_array(ones, "one")])
    return model


@pytest.mark.parametrize(
    "ops", ["d = Softplus (c)", "d = Exp (c)", "d = Pow (c, two)", "d = BatchNormalization (c, one, one, one, one)"]
)
def test_lists_keep_nothing_between_integers_that_is_computed_number_by_number(ops: str) -> None:
    model = bounded(ops)
    result = onnxamp.convert_model(model, target="tensorrt")
    assert scale_types(result) == {"tensor(float16)"}
    assert sum(node.op_type == "Cast" for node in result.graph.node) == 2  # at the ends
    load(result)
    error = np.linalg.norm(outputs(emulate(result)) - outputs(model)) / np.linalg.norm(outputs(model))
    assert error < 0.05
    (op,) = {node.op_type for node in model.graph.node} - {"MatMul", *QUANTIZED}
    for kept in (
        onnxamp.convert_model(model, target="tensorrt", black_list=[op]),
        onnxamp.convert_model(bounded(ops, "d"), target="tensorrt"),  # its digits leave the model
        onnxamp.convert_model(model, target="openvino"),
    ):
        assert {one.outputs[0] for one in typed_nodes(kept) if one.node.op_type == op} == {"tensor(float)"}


def test_a_normalization_behind_a_product_of_integers_takes_its_precision() -> None:
    """TensorRT fuses both; a Cast between them would part the product from the scale behind it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[1,2,4,4] x) => (float[1,2,4,4] y)
        <float s = {0.03}, float[2] t = {0.01, 0.02}, int8 z = {0}, float[2] one = {1, 1.5}> {
            a = QuantizeLinear (x, s, z) b = DequantizeLinear (a, s, z) k = DequantizeLinear <axis = 0> (w, t)
            c = Conv (b, k) d = BatchNormalization (c, one, one, one, one) e = Relu (d)
            f = QuantizeLinear (e, s, z) h = DequantizeLinear (f, s, z) y = Conv (h, k) }""")
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.INT8, [2, 2, 1, 1], [90, -40, 30, 70]))
    for target, kind in (("tensorrt", "tensor(float16)"), ("openvino", "tensor(float)")):
        result = onnxamp.convert_model(model, target=target)
        kinds = {one.outputs[0] for one in typed_nodes(result) if one.node.op_type in ("Conv", "BatchNormalization")}
        assert kinds == {kind}
        load(result)
    black = onnxamp.convert_model(model, target="tensorrt", black_list=["BatchNormalization"])
    assert {one.outputs[0] for one in typed_nodes(black) if one.node.op_type == "BatchNormalization"} == {
        "tensor(float)"
    }


def test_a_concat_that_others_read_as_well_is_low_since_nothing_fuses_it() -> None:
    model = onnx.parser.parse_model(SHARED)
    model.graph.node[-1].input[0] = "c"
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8), np.float32), "k"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((16, 8), np.float32), "u"))
    result = onnxamp.convert_model(model, target="tensorrt")
    assert {one.outputs[0] for one in typed_nodes(result) if one.node.op_type == "Concat"} == {"tensor(float16)"}
    load(result)


# -- hazards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "scale", "dtype", "said"),
    [
        ("int8", 0.03, "float16", ""),
        ("int8", 1e-5, "float16", ""),
        ("int8", 1e-6, "float16", "rounding a scale of 1e-06 to float16 moves the end of its grid by up to 3.81 steps"),
        ("int8", 1e-8, "float16", "a scale of 1e-08 is 0 in float16"),
        ("int8", 1e-8, "bfloat16", ""),
        ("int8", 1e5, "float16", "a scale of 100000 is out of the range of float16"),
        ("int8", 600.0, "float16", "'b' has numbers up to 76800; float16 ends at 65504"),
        ("uint8", 0.03, "bfloat16", ""),
        ("int16", 0.03, "float16", "rounding a scale of 0.03 to float16 moves the end of its grid by up to 16 steps"),
        ("float8", 0.03, "float16", ""),
    ],
)
def test_scales_that_low_precision_cannot_hold_stay_float32(types: str, scale: float, dtype: str, said: str) -> None:
    model = network(types, s=scale)
    found = why(model, "b", dtype=dtype, target="tensorrt")
    assert said in found if said else found == []
    result = onnxamp.convert_model(model, dtype=dtype, target="tensorrt")
    kept = {one.inputs[1] for one in typed_nodes(result) if one.node.output[0] in ("a", "b")}
    assert kept == {"tensor(float)" if said else f"tensor({dtype})"}


def test_the_end_of_a_grid_tells_what_a_product_reaches() -> None:
    """The scale was chosen for results up to 128 * 1000, which float16 does not hold: product and Relu are float32."""
    plan = onnxamp.plan_model(network(r=1000.0))
    assert {hazard.node for hazard in plan.hazards} == {"d", "e", "f", "g", "y"}
    original = network(r=1000.0, s=500.0, t=20.0)
    numbers = outputs(emulate(onnxamp.convert_model(original)))
    np.testing.assert_allclose(numbers, outputs(original), rtol=1e-2)


def test_every_type_that_is_quantized_has_a_grid() -> None:
    for op, param in (("QuantizeLinear", "T3"), ("DequantizeLinear", "T1")):
        signature = lookup("", op, 25)
        assert signature is not None
        assert set(map(element_name, signature.params[param])) <= grids().keys()


def test_a_channel_of_tiny_weights_beside_others_keeps_a_scale_above_zero() -> None:
    """Its weights are nothing beside theirs, but engines take no scale of 0."""
    model = network(t=np.array([0.1, 0.2, 1e-6, 1e-30]))
    result = onnxamp.convert_model(model, target="tensorrt")
    assert scale_types(result) == {"tensor(float16)"}
    (scale,) = [tensor for tensor in result.graph.initializer if tensor.name.startswith("t")]
    assert numpy_helper.to_array(scale)[2:].tolist() == [np.float16(1e-6), 2.0**-24]
    np.testing.assert_allclose(outputs(emulate(result)), outputs(model), rtol=5e-3)


def test_tiny_scales_of_sums_stay_float32_since_their_integers_may_be_large() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]> g (float[2,8] x) => (float[2,2] y)
        <float[2] s = {0.001, 0.0000001}, int32[2] b = {1000, 9000000}> {
            c = DequantizeLinear <axis = 0> (b, s) m = MatMul (x, k) y = Add (m, c) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 2), np.float32), "k"))
    assert "rounding a scale of 1e-07" in why(model, "c", target="tensorrt")[0]


@pytest.mark.tensorrt
@pytest.mark.parametrize("scale", [0.03, 1e-8])
def test_an_engine_is_built_with_low_scales_and_without_zero_ones(scale: float) -> None:
    model = network(t=np.array([0.1, 0.1, 0.1, scale]))
    result = onnxamp.convert_model(model, target="tensorrt")
    assert build_engine(Model.of(result), FEEDS).refusals == ()


@pytest.mark.parametrize(("scales", "is_low"), [([0.1, 1e-9], True), ([0.1, 0.0], True), ([1e-9, 1e-9], False)])
def test_four_bit_products_stay_float32_where_all_their_scales_vanish(scales: list[float], is_low: bool) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[2,16] x) => (float[2,2] y) {
            h = Relu (x) y = com.microsoft.MatMulNBits <K = 16, N = 2, bits = 4, block_size = 16> (h, w, s) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((2, 1, 8), np.uint8), "w"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(scales, np.float32), "s"))
    (product,) = [one for one in typed_nodes(onnxamp.convert_model(model)) if one.node.op_type == "MatMulNBits"]
    assert (product.inputs[2] == "tensor(float16)") is is_low


def test_check_names_scales_that_a_conversion_made_zero() -> None:
    broken = onnxamp.convert_model(network(t=1e-8), hazards=False)
    texts = [one.text for one in onnxamp.audit_model(broken).findings if one.kind == "hazard"]
    assert "its scale does not suit float16: a scale is 0" in texts
