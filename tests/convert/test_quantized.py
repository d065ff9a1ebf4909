"""Networks that other tools quantized get a low-precision rest, run, and lose little beside what integers lose."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import report_of, run
from conversions import count
from graphs.case import add_weights, parse
from judge_kernels import is_low, typed_nodes
from onnx import ModelProto, TensorProto, numpy_helper
from quantized import TOOLS, float_network, images, quantized

import onnxamp
from onnxamp._model.model import Model
from onnxamp._runtime.building import build_engine
from onnxamp._runtime.emulate import emulate

FEEDS = images(3, seed=7)
PRODUCTS = {"Conv", "MatMul", "Gemm", "MatMulNBits"}
UNKNOWN = {"tensorrt": {"MatMulNBits"}}
"""What a target has no kernel for."""
INTEGER = {"operators": "QLinear", "dynamic": "MatMulInteger"}
"""Tools whose products are of integers alone."""
REFUSED = {*INTEGER, "nbits", "qdq with biases", "torchao weights"}
"""Tools whose results TensorRT does not take in any precision: integers that nothing dequantizes, or int32 ones."""


def outputs(model: ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not any(node.op_type.startswith("QLinear") for node in model.graph.node):  # it has no kernels for those then
        options.add_session_config_entry("session.x64quantprecision", "1")  # products saturate on CPUs without VNNI
    if any(tensor.data_type == TensorProto.FLOAT8E4M3FN for tensor in model.graph.initializer):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # its fusions misread float8
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, feeds)[0] for feeds in FEEDS])


def error(result: ModelProto, reference: ModelProto) -> float:
    expected = outputs(reference)
    return float(np.linalg.norm(outputs(result) - expected) / np.linalg.norm(expected))


@pytest.mark.mostly_slow(fast=6)
@pytest.mark.parametrize("target", ["cuda", "tensorrt", "webgpu"])
@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_rest_of_a_quantized_network_is_low(tool: str, opset: int, target: str) -> None:
    original = quantized(tool, opset)
    result = onnxamp.convert_model(original, target=target)
    if not any(node.domain for node in original.graph.node) and tool not in INTEGER:
        onnx.checker.check_model(result, full_check=True)
    nodes = typed_nodes(result)
    products = [one for one in nodes if one.node.op_type in PRODUCTS - UNKNOWN.get(target, set())]
    low = [one for one in products if is_low(one.outputs[0])]
    assert products or tool in INTEGER
    assert len(low) == len(products)
    outputs(result)  # it loads
    assert error(emulate(result), float_network()) < 1.1 * error(original, float_network()) + 2e-3


@pytest.mark.parametrize("tool", ["qdq", "qdq with biases", "operators", "dynamic", "nncf"])
def test_the_cpu_keeps_its_integer_kernels(tool: str) -> None:
    original = quantized(tool)
    result = onnxamp.convert_model(original, target="cpu")
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in original.graph.node]
    assert count(result) == count(original)
    assert np.array_equal(outputs(result), outputs(original))


def test_a_second_conversion_changes_nothing() -> None:
    for tool in TOOLS:
        once = onnxamp.convert_model(quantized(tool), target="tensorrt")
        assert onnxamp.convert_model(once, target="tensorrt") == once


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.tensorrt
@pytest.mark.parametrize("tool", sorted(TOOLS.keys() - REFUSED))
def test_tensorrt_builds_what_it_built_before(tool: str) -> None:
    for model in (quantized(tool), onnxamp.convert_model(quantized(tool), target="tensorrt")):
        assert build_engine(Model.of(model), FEEDS[0]).refusals == ()


# -- validation --------------------------------------------------------------------------------------------------------


COARSE = """(float[4,16] x) => (float[4,4] y) <float s = {0.2}, float t = {0.5}, int8 z = {0}> {
    a = QuantizeLinear (x, s, z) b = DequantizeLinear (a, s, z) w = DequantizeLinear (wq, r, z) c = MatMul (b, w)
    d = QuantizeLinear (c, t, z) m = Flatten (d) e = DequantizeLinear (m, t, z) y = MatMul (e, v) }"""
"""Steps of a fifth and a half of what is usual: rounding to them costs some percent."""
OPERATORS = """(float[4,16] x) => (float[4,4] y) <float s = {0.2}, float t = {0.5}, int8 z = {0}> {
    a = QuantizeLinear (x, s, z) d = QLinearMatMul (a, s, z, wq, r, z, t, z)
    m = Flatten (d) e = DequantizeLinear (m, t, z) y = MatMul (e, v) }"""
"""The same in ops on integers."""
FORMS = [(COARSE, 21), (OPERATORS, 21), (OPERATORS, 11)]


def coarse(text: str = COARSE, opset: int = 21) -> ModelProto:
    random = np.random.default_rng(0)
    weight = random.standard_normal((16, 16))
    weights = {
        "wq": np.round(weight / 0.03).astype(np.int8),
        "r": np.float32(0.03),
        "v": random.standard_normal((16, 4)).astype(np.float32),
    }
    return add_weights(parse(text, opset), {name: np.asarray(array) for name, array in weights.items()})


def changed(model: ModelProto, factor: float) -> ModelProto:
    """The network in float16, the scale of whose weight is off by a factor."""
    result = onnxamp.convert_model(model, target="tensorrt")
    (tensor,) = [tensor for tensor in result.graph.initializer if tensor.name.removesuffix("_fp16") == "r"]
    array = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((array * factor).astype(array.dtype), tensor.name))
    return result


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize(("factor", "passes"), [(1.01, True), (1.2, False)])
@pytest.mark.parametrize(("text", "opset"), FORMS)
def test_results_may_be_off_by_what_integers_cost(text: str, opset: int, factor: float, passes: bool) -> None:
    model = coarse(text, opset)
    report = onnxamp.diff_models(model, changed(model, factor), provider="cpu")
    (judged,) = report.judgements
    assert judged.found > 1e-2
    assert 2e-2 < judged.limit <= 0.11
    assert report.passed is passes
    assert any("rounds values to integers" in note for note in report.notes)
    strict = onnxamp.diff_models(model, changed(model, factor), provider="cpu", tolerance=1e-2)
    assert [one.limit for one in strict.judgements] == [1e-2]
    assert not strict.passed


@pytest.mark.parametrize("moved", ["ScatterND (d, i, d)", "Where (p, d, d)", "Concat <axis = 1> (d)"])
def test_integers_that_move_together_have_floats_that_do(moved: str) -> None:
    """Every one of several inputs with numbers becomes a float."""
    more = "uint8 z = {128}, int64[4,1] i = {0, 1, 2, 3}, bool[1] p = {1}>"  # Where has no kernel for int8 before 1.31
    text = COARSE.replace("int8 z = {0}>", more).replace("(wq, r, z)", "(wq, r)")
    model = coarse(text.replace("Flatten (d)", moved))
    (judged,) = onnxamp.diff_models(model, changed(model, 1.01), provider="cpu").judgements
    (usual,) = onnxamp.diff_models(coarse(), changed(coarse(), 1.01), provider="cpu").judgements
    assert judged.limit == pytest.approx(usual.limit, rel=0.01)


def test_the_allowance_for_integers_is_the_same_in_every_form() -> None:
    limits = set()
    for text, opset in FORMS:
        model = coarse(text, opset)
        (judged,) = onnxamp.diff_models(model, changed(model, 1.01), provider="cpu").judgements
        limits.add(round(judged.limit, 4))
    assert len(limits) == 1


def test_a_conversion_is_not_cured_of_what_integers_cost(tmp_path: Path) -> None:
    source, target = tmp_path / "model.onnx", tmp_path / "low.onnx"
    onnx.save(quantized("qdq"), source)
    written = onnxamp.convert_file(source, target, target="tensorrt", samples=FEEDS, provider="cpu")
    assert written.validation is not None
    assert written.validation.passed
    assert written.plan.level == "O2"


@pytest.mark.slow
def test_healing_ends_where_a_quantized_network_overflows(tmp_path: Path) -> None:
    """Nothing tells before it runs that a product of dequantized weights overflows."""
    source, target = tmp_path / "model.onnx", tmp_path / "low.onnx"
    model = quantized("nbits in qdq", is_large=True)
    onnx.save(model, source)
    refused = onnxamp.diff_models(model, onnxamp.convert_model(model), FEEDS, provider="cpu")
    assert refused.outputs[0].bad is not None
    written = onnxamp.convert_file(source, target, samples=FEEDS, provider="cpu")
    assert written.validation is not None
    assert written.validation.passed
    assert written.validation.cure is not None
    assert written.validation.cure.confirmed
    assert any(written.plan.of_nodes().values())
    assert np.isfinite(outputs(emulate(onnx.load(target)))).all()


@pytest.mark.slow
def test_the_original_tells_what_quantization_and_precision_cost(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{name}.onnx") for name in ("int8", "low", "original", "wrong")]
    models = quantized("qdq"), onnxamp.convert_model(quantized("qdq"), target="tensorrt"), float_network()
    for model, name in zip(models, names, strict=False):
        onnx.save(model, name)
    report = onnxamp.diff_models(*names[:2], FEEDS, provider="cpu", original=names[2])
    (cost,) = report.costs
    assert cost.output == "scores"  # errors are those of the worst sample
    assert cost.quantized == pytest.approx(error(models[0], models[2]), rel=0.2)
    assert cost.result == pytest.approx(error(emulate(models[1]), models[2]), rel=0.2)
    assert report.passed is cost.passed is (cost.result <= 1.1 * cost.quantized + 2e-3)
    saved = tmp_path / "saved.json"
    told = run("diff", *names[:2], "--original", names[2], "--save", str(saved), "-v")
    assert "Cost of quantization" in told.output
    assert "Cost of quantization" in run("diff", str(saved), "-v").output
    onnx.save(onnxamp.convert_model(changed(coarse(), 1.01)), names[3])
    onnx.save(coarse(), names[0])
    onnx.save(coarse(), names[2])
    wrong = onnxamp.diff_models(names[0], names[3], provider="cpu", original=names[2])
    assert [one.limit for one in wrong.costs] == [2e-3]  # nothing was quantized
    assert all(one.passed for one in wrong.judgements)
    assert not wrong.passed


def test_a_network_without_integers_keeps_its_limit() -> None:
    original = float_network()
    result = onnxamp.convert_model(original)
    for tensor in result.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16 and tensor.name.startswith("w2"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float16(1.02), tensor.name))
    report = onnxamp.diff_models(original, result, samples=FEEDS, provider="cpu")
    assert not report.passed
    assert {one.limit for one in report.judgements} == {1e-2}


# -- reports -----------------------------------------------------------------------------------------------------------

PARTS = {
    "qdq": {("int8", "scales"): 26, ("int8", "products"): 4},
    "qdq with biases": {("int8", "scales"): 26, ("int32", "scales"): 3, ("int8", "products"): 4},
    "operators": {("int8", "scales"): 8, ("int8", "integers"): 5},
    "dynamic": {("uint8", "integers"): 4},
    "nbits": {("int4", "integers"): 1},
    "nbits in qdq": {("int4", "scales"): 1, ("int4", "products"): 1},
    "nncf": {
        ("int8", "scales"): 6,
        ("int8", "products"): 1,
        ("uint8", "scales"): 6,
        ("uint8 and int8", "products"): 3,
    },
    "modelopt int8": {("int8", "scales"): 16, ("int8", "products"): 4},
    "modelopt fp8": {("float8e4m3fn", "scales"): 16, ("float8e4m3fn", "products"): 4},
    "modelopt awq": {("int4", "scales"): 2, ("int4", "products"): 2},
    "torchao": {("int8", "scales"): 12, ("int8", "products"): 4},
    "torchao weights": {},  # a Cast and a Mul tell nobody that they dequantize
}
"""Nodes by type and role."""


def parts(plan: onnxamp.Plan) -> dict[tuple[str, str], int]:
    return {(part.type, part.role): sum(part.ops.values()) for part in plan.quantized if part.role != "rest"}


@pytest.mark.parametrize("tool", TOOLS)
def test_plans_count_quantized_nodes_by_type(tool: str, tmp_path: Path) -> None:
    plan = onnxamp.plan_model(quantized(tool), target="tensorrt")
    assert parts(plan) == PARTS[tool]
    for part in plan.quantized:
        assert part.low + len(part.float32) <= sum(part.ops.values())
    plan.save(tmp_path / "plan.json")
    assert onnxamp.load_plan(tmp_path / "plan.json") == plan


def test_plans_count_the_units_between_integers() -> None:
    """Those alike are one row, with the type of each scale."""
    plan = onnxamp.plan_model(quantized("qdq"), target="tensorrt", keep_nodes=["c2"])
    (relu,) = [unit for unit in plan.units if unit.ops == {"float16": {"Relu": 1}}]
    assert (relu.count, relu.dequantized, relu.quantized) == (3, {"int8 float16": 1}, {"int8 float16": 1})
    (kept,) = [unit for unit in plan.units if "float32" in unit.ops]
    assert kept.ops == {"float32": {"Conv": 1}, "float16": {"Add": 1}}
    assert kept.dequantized == {"int8 float16": 2, "int8 float32": 1}
    assert kept.quantized == {"int8 float16": 1, "int8 float32": 1}
    assert sum(unit.count for unit in plan.units) == 9


def test_a_float_network_has_no_quantized_nodes(tmp_path: Path) -> None:
    plan = onnxamp.plan_model(float_network())
    plan.save(tmp_path / "plan.json")
    assert plan.quantized == ()
    assert "quantized" not in (tmp_path / "plan.json").read_text()
    assert not any(node.quantized for node in onnxamp.audit_model(float_network()).nodes)


def test_reports_name_what_stays_float32_beside_integers(tmp_path: Path) -> None:
    source, target = tmp_path / "int8.onnx", tmp_path / "low.onnx"
    onnx.save(quantized("qdq"), source)
    plan = onnxamp.plan_model(source, target="tensorrt", keep_nodes=["c2"])
    (kept,) = [part for part in plan.quantized if part.role == "products"]
    assert kept.float32.keys() == {"c2"}
    assert kept.low == 3
    options = "--target", "tensorrt", "--keep-node", "c2", "--no-validate"
    told = run("convert", source, "-o", target, *options, "-v").output
    assert re.search(r"int8 +multiply dequantized numbers +4 +3 +1 +Conv ×2, MatMul, Gemm", told)
    assert re.search(r"Float32 beside integers\n(.*\n)* • 1 node: Named in your options: Conv.\n   c2: ", told)
    table = run("convert", source, "-o", target, *options, "--format", "markdown").output
    assert "| int8 | multiply dequantized numbers | 4 | 3 | 1 |" in table
    facts = report_of(run("convert", source, "-o", target, *options, "--format", "json"))
    (product,) = [part for part in facts["plan"]["quantized"] if part["role"] == "products"]
    assert product["float32"] == {"c2": "named in your options: keep_nodes (--keep-node) 'c2'"}
    unit = r"int8 float16 ×2, int8 float32 → Conv \(float32\) \+ Add \(float16\) → int8 float32, int8 float16"
    assert re.search(f"1 +{unit}", told)
    levels = run("inspect", source, "--target", "tensorrt").output
    assert re.search(r"O2 +3 +int8 float16 → Relu \(float16\) → int8 float16", levels)
    assert re.search(r"O2 +int8 +multiply dequantized numbers +4 +4 +0", levels)
    assert "4 int8 products" in run("check", target, "--static").output
