"""What a conversion gains: the head says what it loses, and names the options that do better."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto

import onnxamp


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in an empty folder."""
    monkeypatch.chdir(tmp_path)


def pooled(pool: str, size: int = 64, channels: int = 64) -> ModelProto:
    """A network of convolutions whose maps are averaged, by a node that a test chooses."""
    text = f"""(float[8,3,{size},{size}] X) => (float[8,10] Y)
            <int64[2] axes = {{2, 3}}, int64[2] flat = {{8, {channels}}}> {{
        a = Conv <pads = [1, 1, 1, 1]> (X, v) b = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (b, w) d = Relu (c)
        {pool} f = Reshape (e, flat) Y = MatMul (f, u) }}"""
    shapes = {"v": (channels, 3, 3, 3), "w": (channels, channels, 3, 3), "u": (channels, 10)}
    return add_weights(parse(text, opset=18), shapes)


MEAN = "[mean] e = ReduceMean (d, axes)"


@pytest.mark.parametrize("target", ["cuda", "tensorrt", "openvino"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mean_of_low_maps_is_low_where_kernels_sum_up_in_float32(target: str, dtype: str) -> None:
    plan = onnxamp.plan_model(pooled(MEAN), target=target, dtype=dtype)
    trusted = (target, dtype) != ("openvino", "bfloat16")
    assert ("mean" not in plan.float32_nodes) == trusted


@pytest.mark.parametrize(("lists", "target"), [("conservative", "cuda"), ("default", "webgpu"), ("default", "any")])
def test_other_lists_and_targets_keep_it(lists: Any, target: str) -> None:
    assert "mean" in onnxamp.plan_model(pooled(MEAN), lists=lists, target=target).float32_nodes


@pytest.mark.parametrize("source", ["q = Pow (d, two)", "q = Exp (d)"])
def test_a_mean_of_float32_values_stays_with_them(source: str) -> None:
    """What is averaged may overflow although its mean does not."""
    model = pooled(f"two = Constant <value = float {{2}}> () {source} [mean] e = ReduceMean (q, axes)")
    assert "mean" in onnxamp.plan_model(model).float32_nodes


def converted(model: ModelProto, *options: object) -> dict[str, Any]:
    onnx.save(model, "model.onnx")
    result = run("convert", "model.onnx", "-o", "low.onnx", *options, "--format", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_what_is_slower_is_headed_so_and_the_better_choice_named() -> None:
    """Two Casts around one mean cost more than the rest gains."""
    text = """(float[1,64] X) => (float[1,64] Y) <int64[1] axes = {1}> {
        a = MatMul (X, w) m = ReduceMean (a, axes) Y = Add (a, m) }"""
    model = add_weights(parse(text, opset=18), {"w": (64, 64)})
    found = converted(model, "--lists", "conservative")
    assert found["speed_up"]["after"] > found["speed_up"]["before"]
    assert found["verdict"] == "passed"
    factor = found["speed_up"]["before"] / found["speed_up"]["after"]
    assert found["drawback"] == f"but slower by the estimate ({factor:.2f}×)"
    assert "--weights-only" in [option for option, _ in found["better"]]
    assert found["better"][-1][0] == "--level auto"
    result = run("convert", "model.onnx", "-o", "low.onnx", "--lists", "conservative")
    assert result.exit_code == 0
    assert result.stdout.startswith("! Converted to float16, but slower by the estimate")
    assert "Better: " in result.stdout


@pytest.mark.slow
def test_the_proposed_white_list_is_faster_and_does_not_warn() -> None:
    """Two Casts around the mean cost more than the convolutions gain."""
    before = converted(pooled(MEAN, size=36), "--lists", "conservative")
    assert before["drawback"]
    option, effect = before["better"][0]
    assert option == "--white ReduceMean"
    after = converted(pooled(MEAN, size=36), "--lists", "conservative", *option.split())
    gain = after["speed_up"]["before"] / after["speed_up"]["after"]
    assert effect == f"{gain:.2f}×"
    assert gain > 1
    assert not after["drawback"]
    assert not after["plan"]["warnings"]


def test_a_model_without_weights_is_converted_without_validation() -> None:
    """Where nothing ran, weights stand for files, and there may be none."""
    model = parse("(float[4] X) => (float[4] Y) { s = Sigmoid (X) Y = Relu (s) }")
    found = converted(model, "--no-validate", "--level", "O3")
    assert found["better"][-1][0] == "--level auto"


def test_an_estimate_is_for_the_target() -> None:
    devices = {}
    for target in ("cuda", "tensorrt", "webgpu", "openvino", "cpu"):
        made = converted(pooled(MEAN), "--target", target, "--no-validate")["speed_up"]
        devices[target] = None if made is None else made["device"]
    assert devices == {
        "cuda": "A100", "tensorrt": "A100", "webgpu": "Iris-Xe", "openvino": "Xeon-8480", "cpu": None,
    }  # fmt: skip


@pytest.mark.slow
def test_a_result_that_gains_has_a_check_mark() -> None:
    onnx.save(pooled(MEAN), "model.onnx")
    result = run("convert", "model.onnx", "-o", "low.onnx")
    assert result.stdout.startswith("✔ Converted to float16; ")
    assert len(result.stdout.splitlines()) <= 12
    weights = onnx.load("low.onnx").graph.initializer
    assert TensorProto.FLOAT not in {tensor.data_type for tensor in weights}
