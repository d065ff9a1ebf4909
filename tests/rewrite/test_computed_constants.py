"""What nodes compute from constant numbers is stored in the precision in which it is read, as constants are."""

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from judge import inference_error
from judge_numbers import session
from onnx import ModelProto, numpy_helper

import onnxamp

POWER = """(float[2,8] x) => (float[2,8] y) <float base = {32.0}, float exponent = {-0.5}> {
    scale = Pow (base, exponent)  a = MatMul (x, w)  b = Mul (a, scale)  c = MatMul (b, w)  y = Mul (c, scale) }"""
CHAIN = """(float[2,8] x) => (float[2,8] y) {
    base = Constant <value = float {32.0}> ()  root = Sqrt (base)  scale = Reciprocal (root)
    a = MatMul (x, w)  b = Mul (a, scale)  c = MatMul (b, w)  y = Mul (c, scale) }"""
BRANCH = """(float[2,8] x, bool k) => (float[2,8] y) <float base = {32.0}, float exponent = {-0.5}> {
    y = If (k) <then_branch = t () => (float[2,8] p) { s = Pow (base, exponent)  a = MatMul (x, w)  p = Mul (a, s) },
                else_branch = e () => (float[2,8] q) { q = MatMul (x, w) }> }"""


def model_of(text: str, ir_version: int = 10) -> ModelProto:
    model = parse(text)
    add_weights(model, {"w": (8, 8)})
    model.ir_version = ir_version
    return model


def nodes_of(model: ModelProto) -> list[onnx.NodeProto]:
    kinds = onnx.AttributeProto.GRAPH
    bodies = [item.g for node in model.graph.node for item in node.attribute if item.type == kinds]
    return [node for graph in (model.graph, *bodies) for node in graph.node]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", [POWER, CHAIN, BRANCH])
def test_computed_numbers_need_no_cast(text: str, dtype: str) -> None:
    """The number is that of float32, rounded once, and what computed it is gone."""
    options = {"black_list": ["Pow", "Sqrt", "Reciprocal"], "target": "any", "dtype": dtype}
    result = onnxamp.convert_model(model_of(text), **options)
    assert inference_error(result) is None
    nodes = nodes_of(result)
    cast = {name for node in nodes if node.op_type == "Cast" for name in node.input}
    assert {"scale", "s"}.isdisjoint(cast)
    assert {"Pow", "Sqrt", "Reciprocal"}.isdisjoint(node.op_type for node in nodes)
    assert {"base", "exponent"}.isdisjoint(tensor.name for tensor in result.graph.initializer)
    (stored,) = [node.attribute[0].t for node in nodes if node.op_type == "Constant"]
    assert stored.data_type == onnx.TensorProto.DataType.Value(dtype.upper())
    assert float(numpy_helper.to_array(stored)) == pytest.approx(32**-0.5, rel=1e-2)
    assert onnxamp.convert_model(result, **options) == result


def test_results_agree() -> None:
    model = model_of(POWER, ir_version=8)
    result = onnxamp.convert_model(model)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    (mine,) = session(result).run(None, feeds)
    (theirs,) = session(model).run(None, feeds)
    assert np.allclose(mine, theirs, rtol=1e-2, atol=1e-2)


def test_what_callers_override_is_computed() -> None:
    """The default of an input is no constant."""
    text = POWER.replace("<float base = {32.0}, ", "<").replace("(float[2,8] x)", "(float[2,8] x, float base)")
    model = model_of(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array(32, np.float32), "base"))
    assert "Pow" in {node.op_type for node in nodes_of(onnxamp.convert_model(model))}


@pytest.mark.parametrize("keep_io_types", [True, False])
def test_a_returned_number(keep_io_types: bool) -> None:
    model = model_of(POWER.replace("(float[2,8] y)", "(float[2,8] y, float scale)"))
    result = onnxamp.convert_model(model, keep_io_types=keep_io_types)
    assert "Pow" not in {node.op_type for node in nodes_of(result)}
    kind = np.float32 if keep_io_types else np.float16
    feeds = {"x": np.ones((2, 8), kind)}
    assert session(result).run(["scale"], feeds)[0] == pytest.approx(32**-0.5, rel=1e-3)
    assert onnxamp.convert_model(result, keep_io_types=keep_io_types) == result


def test_level_o0_changes_nothing() -> None:
    model = model_of(POWER)
    assert onnxamp.convert_model(model, "O0") == model


@pytest.mark.parametrize("node", [True, False])
@pytest.mark.parametrize("largest", [3.0, 1e6])
def test_stored_doubles_are_weights(node: bool, largest: float) -> None:
    """Casts of them cost nothing, and numbers that low precision cannot hold keep their readers in float32."""
    numbers = np.linspace(-1, 1, 64 * 64).reshape(64, 64)
    numbers[3, 4] = largest
    weight = numpy_helper.from_array(numbers, "d")
    held = "d = Constant () " if node else ""
    model = parse(f"(float[2,64] x) => (float[2,64] y) {{ {held} w = Cast <to = 1> (d) y = MatMul (x, w) }}")
    if node:
        model.graph.node[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(weight)
    else:
        model.graph.initializer.append(weight)
    result = onnxamp.convert_model(model)
    feeds = {"x": np.ones((2, 64), np.float32)}
    (mine,) = session(result).run(None, feeds)
    (theirs,) = session(model).run(None, feeds)
    assert np.allclose(mine, theirs, rtol=1e-2, atol=1e-2)
    product = next(one for one in nodes_of(result) if one.op_type == "MatMul")
    stored = {one.output[0]: one.attribute[0].t.data_type for one in nodes_of(result) if one.op_type == "Constant"}
    is_low = stored.get(product.input[1]) == onnx.TensorProto.FLOAT16
    assert is_low == (largest < 65504)
    assert onnxamp.convert_model(result) == result
