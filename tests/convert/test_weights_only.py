"""Storing weights in low precision, and computing in float32."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from judge_kernels import is_low, typed_nodes
from judge_numbers import run_original
from onnx import ModelProto, TensorProto, numpy_helper
from repository import MODELS

import onnxamp
from onnxamp._base.errors import ContradictionError

RANDOM = np.random.default_rng(0)
TEXT = """(float[2,32] x) => (float[2,32] y) {
    [first] h = MatMul (x, w) [second] t = Add (h, b) [third] u = MatMul (t, v) [last] y = Add (u, m) }"""


def model() -> ModelProto:
    """A product with a weight, one with a weight that float16 does not hold, a bias, and a mask."""
    large = RANDOM.standard_normal((32, 32)).astype(np.float32)
    large[3, 3] = 1e6
    mask = np.zeros((2, 32), np.float32)
    arrays = {"w": RANDOM.standard_normal((32, 32)), "v": large, "b": np.ones(32), "m": mask}
    return add_weights(parse(TEXT, 18), {name: np.asarray(array, np.float32) for name, array in arrays.items()})


def weight_types(result: ModelProto) -> dict[str, int]:
    return {tensor.name.removesuffix("_fp16"): tensor.data_type for tensor in result.graph.initializer}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_weights_are_low_and_nodes_float32(level: Any) -> None:
    original = model()
    result = onnxamp.convert_model(original, level, weights_only=True)
    assert weight_types(result) == {
        "w": TensorProto.FLOAT16, "v": TensorProto.FLOAT, "b": TensorProto.FLOAT, "m": TensorProto.FLOAT
    }  # fmt: skip
    (cast,) = [node for node in result.graph.node if node.op_type == "Cast"]
    rest = [node.SerializeToString() for node in result.graph.node if node is not cast]
    assert len(rest) == len(original.graph.node)
    assert not any(is_low(kind) for one in typed_nodes(result) for kind in one.outputs)
    rounded = onnx.ModelProto()
    rounded.CopyFrom(original)
    (weight,) = [tensor for tensor in rounded.graph.initializer if tensor.name == "w"]
    numbers = numpy_helper.to_array(weight).astype(np.float16).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(numbers, "w"))
    feeds = {"x": RANDOM.standard_normal((2, 32)).astype(np.float32)}
    assert np.array_equal(run_original(result, feeds)[0], run_original(rounded, feeds)[0])


def test_a_second_conversion_changes_nothing() -> None:
    once = onnxamp.convert_model(model(), weights_only=True)
    assert onnxamp.convert_model(once, weights_only=True) == once


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_files_are_about_half_as_large(path: Path, dtype: Any, tmp_path: Path) -> None:
    made = onnxamp.convert_file(path, tmp_path / "small.onnx", weights_only=True, dtype=dtype, provider="cpu")
    assert made.validation is not None
    assert made.validation.passed
    assert (tmp_path / "small.onnx").stat().st_size < 0.68 * path.stat().st_size
    assert made.speed_up is None
    assert made.summary.nodes.get("low", 0) == 0
    before, after = (
        Counter(node.op_type for node in onnx.load(file).graph.node) for file in (path, tmp_path / "small.onnx")
    )
    assert (after - before).keys() == {"Cast"}
    assert before - after == Counter()


@pytest.mark.parametrize(
    "options",
    [{"level": "O0"}, {"force_low": ["first"]}, {"rule": lambda node: "low"}],
    ids=["O0", "force_low", "rule"],
)
def test_what_asks_for_something_else_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ContradictionError, match="--weights-only"):
        onnxamp.plan_model(model(), **({"weights_only": True} | options))


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(model(), source)
    told = run("convert", source, "-o", tmp_path / "small.onnx", "--weights-only", "-v").output
    assert "Stored weights in float16" in told
    assert "speed-up" not in told
    assert "its numbers do not fit low precision" in told


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_that_lose_the_result_stay(level: str, tmp_path: Path) -> None:
    weight = RANDOM.standard_normal((32, 32)).astype(np.float32)
    text = "(float[2,32] x) => (float[2,32] y) { h = MatMul (x, w) u = MatMul (x, v) y = Sub (h, u) }"
    source = tmp_path / "model.onnx"
    onnx.save(add_weights(parse(text, 18), {"w": weight, "v": weight * np.float32(1 + 1e-4)}), source)
    told = run("convert", source, "-o", tmp_path / "small.onnx", "--weights-only", "--level", level)
    assert told.exit_code == 0
    assert "stays in float32" in told.output
    assert onnx.load(tmp_path / "small.onnx").graph.initializer[0].data_type == TensorProto.FLOAT


def test_columns_of_a_large_image_stay() -> None:
    text = """(float[1,4000] x) => (float[1,4000] y) <float size = {4000}> {
        g = Add (x, grid) d = Div (g, size) y = Relu (d) }"""
    grid = np.arange(4000, dtype=np.float32)[None]
    result = onnxamp.convert_model(add_weights(parse(text, 18), {"grid": grid}), weights_only=True)
    assert weight_types(result)["grid"] == TensorProto.FLOAT
