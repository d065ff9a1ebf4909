"""What nodes compute from constants alone is stored in the precision in which it is read, as constants are."""

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
RAISED = """(float[2,8] x) => (float[2,8] y) <float base = {0.3}> {
    scale = Sqrt (base)  a = MatMul (x, w)  b = Mul (a, scale)  c = Relu (b)  d = Add (c, scale)
    y = MatMul (d, w) }"""
BRANCH = """(float[2,8] x, bool k) => (float[2,8] y) <float base = {32.0}, float exponent = {-0.5}> {
    y = If (k) <then_branch = t () => (float[2,8] p) { s = Pow (base, exponent)  a = MatMul (x, w)  p = Mul (a, s) },
                else_branch = e () => (float[2,8] q) { q = MatMul (x, w) }> }"""


def model_of(text: str, ir_version: int = 10) -> ModelProto:
    model = parse(text)
    add_weights(model, {"w": (8, 8)})
    model.ir_version = ir_version
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", [POWER, RAISED, BRANCH])
def test_computed_numbers_need_no_cast(text: str, dtype: str) -> None:
    """Only inputs and outputs are cast, and the numbers are those of float32, rounded once."""
    model = model_of(text)
    result = onnxamp.convert_model(model, black_list=["Pow", "Sqrt"], target="any", dtype=dtype)
    assert inference_error(result) is None
    bodies = [item.g for node in result.graph.node for item in node.attribute if item.type == onnx.AttributeProto.GRAPH]
    nodes = [node for graph in (result.graph, *bodies) for node in graph.node]
    cast = {name for node in nodes if node.op_type == "Cast" for name in node.input}
    assert {"scale", "s"}.isdisjoint(cast)
    stored = [node.attribute[0].t for node in nodes if node.op_type == "Constant"]
    wanted = np.sqrt(np.float32(0.3)) if text is RAISED else np.float32(32) ** np.float32(-0.5)
    assert [tensor.data_type for tensor in stored] == [onnx.TensorProto.DataType.Value(dtype.upper())]
    assert np.float32(numpy_helper.to_array(stored[0])) == pytest.approx(float(wanted), rel=1e-2)


def test_results_agree() -> None:
    model = model_of(POWER, ir_version=8)
    result = onnxamp.convert_model(model, black_list=["Pow"])
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    assert [node.op_type for node in result.graph.node] == [
        "Cast",
        "Constant",
        "MatMul",
        "Mul",
        "MatMul",
        "Mul",
        "Cast",
    ]
    assert [tensor.name for tensor in result.graph.initializer] == ["w"]
    (mine,) = session(result).run(None, feeds)
    (theirs,) = session(model).run(None, feeds)
    assert np.allclose(mine, theirs, rtol=1e-2, atol=1e-2)
    assert onnxamp.convert_model(result) == result


def test_what_callers_override_is_cast() -> None:
    """The default of an input is no constant."""
    text = POWER.replace("<float base = {32.0}, ", "<").replace("(float[2,8] x)", "(float[2,8] x, float base)")
    model = model_of(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array(32, np.float32), "base"))
    result = onnxamp.convert_model(model, black_list=["Pow"])
    assert "scale" in {node.input[0] for node in result.graph.node if node.op_type == "Cast"}
