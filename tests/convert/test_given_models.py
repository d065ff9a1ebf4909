"""Models in forms that tools leave: old IR versions, declarations of values that are gone, constants in any form."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import run
from graphs.case import parse
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxamp
from onnxamp import ArgumentError, ModelError

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 8)).astype(np.float32)
FEEDS = {"x": RNG.standard_normal((4, 8)).astype(np.float32)}
SHARED = "(float[N,8] x) => (float[N,8] y, float[8,8] z) { y = MatMul (x, w) z = Exp (w) }"


def with_weight(text: str, opset: int = 17, weight: np.ndarray = WEIGHT) -> ModelProto:
    model = parse(text, opset)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def agrees(model: ModelProto, result: ModelProto) -> None:
    onnx.checker.check_model(result, full_check=True)
    assert onnxamp.diff_models(model, result, FEEDS, provider="cpu").passed


def test_weights_of_an_old_version_may_be_read_in_both_precisions() -> None:
    """Before IR version 4, every weight is an input."""
    model = with_weight(SHARED, 8)
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [8, 8]))
    result = onnxamp.convert_model(model, freeze_defaults=False)
    assert {tensor.data_type for tensor in result.graph.initializer} == {TensorProto.FLOAT, TensorProto.FLOAT16}
    agrees(model, result)


def test_names_of_values_that_are_gone_are_taken() -> None:
    model = with_weight("(float[N,8] x) => (float[N,8] y) { h = MatMul (x, w) y = Exp (h) }")
    for name in ("x_fp16", "h_fp16", "y_fp16", "w_fp16"):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.INT64, [3]))
    result = onnxamp.convert_model(model)
    assert TensorProto.FLOAT16 in {tensor.data_type for tensor in result.graph.initializer}
    agrees(model, result)


def test_types_of_dequantized_numbers_are_those_of_their_scales() -> None:
    """ONNX Runtime does not load some models that state them."""
    text = """(float[4,8] x) => (float[4,8] y) <float s = {0.05}, int8 z = {0}> { q = QuantizeLinear (x, s, z)
        d = DequantizeLinear <output_dtype = 1> (q, s, z) y = MatMul (d, w) }"""
    model = with_weight(text, 23)
    model.ir_version = 10
    result = onnxamp.convert_model(model)
    (node,) = (one for one in result.graph.node if one.op_type == "DequantizeLinear")
    assert "output_dtype" not in {item.name for item in node.attribute}
    ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, FEEDS)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_frozen_defaults_are_frozen_whatever_is_lowered(level: str) -> None:
    model = with_weight("(float[N,8] x, float[8,8] w) => (float[N,8] y) { y = MatMul (x, w) }")
    result = onnxamp.convert_model(model, level, freeze_defaults=True, keep_nodes=["y"])
    assert [entry.name for entry in result.graph.input] == ["x"]


@pytest.mark.parametrize("number", ["value_float = 32.0", "value = float {32}"])
def test_arithmetic_of_constants_in_any_form(number: str) -> None:
    text = f"""(float[N,8] x) => (float[N,8] y) <float half = {{-0.5}}> {{ k = Constant <{number}> () p = Pow (k, half)
        h = MatMul (x, w) s = Mul (h, p) y = MatMul (s, w) }}"""
    result = onnxamp.convert_model(with_weight(text))
    assert [node.op_type for node in result.graph.node].count("Cast") == 2


def test_large_weights_of_one_name_that_differ_are_refused() -> None:
    """ONNX Runtime takes the first of them, and the last of small ones."""
    model = with_weight("(float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(WEIGHT, "w"))
    assert onnxamp.convert_model(model)
    model.graph.initializer.append(numpy_helper.from_array(2 * WEIGHT, "w"))
    with pytest.raises(ModelError, match="'w' is defined twice, with different numbers"):
        onnxamp.convert_model(model)


@pytest.mark.parametrize("suffix", [".json", ".textproto", ".onnxtxt"])
def test_results_are_not_written_under_the_name_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(with_weight("(float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }"), f"model{suffix}")
    before = Path(f"model{suffix}").read_bytes()
    for options in (("--in-place",), ("-o", f"low{suffix}")):
        done = run("convert", f"model{suffix}", *options)
        assert done.exit_code == 2
        assert "is the name of a model in text" in done.output
    with pytest.raises(ArgumentError, match="is the name of a model in text"):
        onnxamp.convert_file(f"model{suffix}", f"low{suffix}")
    assert Path(f"model{suffix}").read_bytes() == before
    assert [file.name for file in Path().iterdir()] == [f"model{suffix}"]


def test_a_plan_whose_result_fails_warns(tmp_path: Path) -> None:
    text = "(float[N,8] x) => (float[N,8] y) { h = MatMul (x, w) y = Mul (h, h) }"
    model = with_weight(text, weight=np.eye(8, dtype=np.float32) * 10_000)
    onnx.save(model, tmp_path / "model.onnx")
    plan = onnxamp.plan_model(model, "O3", hazards=False)
    with pytest.warns(UserWarning, match="failed validation and was written to .*low.failed.onnx, not to"):
        made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", plan=plan)
    assert (made.target.name, made.fault != "") == ("low.failed.onnx", True)
    with pytest.raises(TypeError, match="plan must be a Plan, not str"):
        onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", plan="plan.json")  # type: ignore[arg-type]


def test_a_metric_of_level_auto_is_named_at_other_levels(tmp_path: Path) -> None:
    onnx.save(with_weight(SHARED), tmp_path / "model.onnx")
    with pytest.raises(
        ArgumentError, match=r"metric 'top1' is only for level 'auto': .* one of auto, detections, elements"
    ):
        onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", metric="top1")
