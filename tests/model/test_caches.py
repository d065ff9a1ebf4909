"""Models where others keep them: in caches of links, beside copies of them, with weights in unusual places."""

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from stored import answers, external, inline

import onnxamp
from onnxamp import convert_file

pytestmark = pytest.mark.usefixtures("all_threads")


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A model in a cache that keeps files under hashes, and links with their names."""
    external(tmp_path)
    blobs, shown = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    shown.mkdir(parents=True)
    for number, name in enumerate(("model.onnx", "weights.bin")):
        (tmp_path / name).rename(blobs / f"{number:040x}")
        (shown / name).symlink_to(Path("..") / ".." / "blobs" / f"{number:040x}")
    return shown / "model.onnx"


@pytest.mark.parametrize("external_data", ["always", "never"])
def test_a_model_in_a_cache_of_links(cached: Path, tmp_path: Path, external_data: str) -> None:
    target = tmp_path / "low.onnx"
    convert_file(cached, target, external_data=external_data, validate=False)
    np.testing.assert_allclose(answers(target), answers(cached), rtol=2e-2, atol=2e-3)
    assert onnxamp.diff_models(cached, target).passed


def test_a_link_to_a_file_elsewhere_is_refused(cached: Path, tmp_path: Path) -> None:
    """Only the folder of the model file itself counts, not that of any link."""
    moved = tmp_path / "elsewhere.bin"
    weights = cached.with_name("weights.bin")
    weights.resolve().rename(moved)
    weights.unlink()
    weights.symlink_to(moved)
    with pytest.raises(onnxamp.ExternalDataError, match="outside the model's folder"):
        onnxamp.convert_model(cached)


def test_a_copy_of_a_result_keeps_its_weights(tmp_path: Path) -> None:
    source, target = external(tmp_path), tmp_path / "low.onnx"
    convert_file(source, target, external_data="always", validate=False)
    copy = tmp_path / "low.onnx.bak"
    shutil.copy(target, copy)
    before = answers(copy)
    other = inline()
    for tensor in other.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))
    onnx.save(other, tmp_path / "other.onnx")
    convert_file(tmp_path / "other.onnx", target, external_data="always", validate=False)
    np.testing.assert_array_equal(answers(copy), before)


def test_a_default_of_a_function_keeps_its_weights(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    (tmp_path / "w.bin").write_bytes(weight.tobytes())
    stored = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=weight.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(weight.nbytes))):
        stored.external_data.add(key=key, value=value)
    nodes = [helper.make_node("Constant", [], ["c"]), helper.make_node("MatMul", ["x", "c"], ["y"])]
    nodes[0].attribute.add(name="value", type=AttributeProto.TENSOR, ref_attr_name="w")
    function = helper.make_function("my", "F", ["x"], ["y"], nodes, [helper.make_opsetid("", 21)])
    function.attribute_proto.add(name="w", type=AttributeProto.TENSOR).t.CopyFrom(stored)
    model = parse("(float[1,64] x) => (float[1,64] y) { z = my.F (x) y = Relu (z) }", 21, ir=10)
    model.opset_import.append(helper.make_opsetid("my", 1))
    model.functions.append(function)
    onnx.save(model, tmp_path / "model.onnx")
    options = {"keep_functions": True, "external_data": "never", "validate": False}
    convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", **options)
    (held,) = onnx.load(tmp_path / "low.onnx").functions[0].attribute_proto
    np.testing.assert_array_equal(numpy_helper.to_array(held.t), weight)


def test_weights_of_half_a_byte_have_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "(float[1,64] x) => (float[1,64] y) <float s = {0.1}> { w = DequantizeLinear (q, s) y = MatMul (x, w) }"
    model = parse(text, 21, ir=10)
    numbers = np.random.default_rng(0).integers(-8, 8, (64, 64)).astype(ml_dtypes.int4)
    model.graph.initializer.append(numpy_helper.from_array(numbers, "q"))
    onnx.save(model, "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=1000)
    for _ in range(2):
        done = run("check", "m.onnx", "--state", "state")
        assert done.exit_code == 0, done.output
