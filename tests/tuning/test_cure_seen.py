"""Cures of a model that goes wrong on an engine: it is converted again for that engine, and checked there."""

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

pytestmark = pytest.mark.webgpu
LARGE = """(float[1, 2, 64, 64] x) => (float[1, 2, 1, 1] y) <float big = {300}> {
    b = Add (x, big) [pool] y = GlobalAveragePool (b) }"""
SMALL = """(float[1, 8, 30, 30] x) => (float[1, 4] y) <float gain = {100}, float less = {0.01}> {
    scaled = Mul (x, gain)
    [pool] pooled = GlobalAveragePool (scaled)
    [flat] f = Flatten (pooled)
    small = Mul (f, less)
    [head] y = MatMul (small, w)
}"""


def model_of(text: str) -> ModelProto:
    model = parse(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 4), np.float32), "w"))
    return model


def made_for_cuda(text: str) -> ModelProto:
    return onnxamp.convert_model(model_of(text), level="O3", target="cuda")


def test_the_target_is_offered_where_its_hazards_are_enough(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(made_for_cuda(LARGE), path)
    found = run("check", path, "--provider", "webgpu")
    assert found.exit_code == 1
    assert "Tried: converted for webgpu, it has no fault there. Convert the original with\n   --target webgpu\n" in (
        found.output
    )
    assert "Tried" not in run("check", path, "--provider", "webgpu", "--no-cure").output


def test_nodes_are_offered_where_they_are_not(tmp_path) -> None:
    """900 numbers of 100 give a sum that no static hazard expects."""
    path, inputs = tmp_path / "m.onnx", tmp_path / "x.npz"
    onnx.save(made_for_cuda(SMALL), path)
    np.savez(inputs, x=np.random.default_rng(0).random((1, 8, 30, 30)).astype(np.float32) + 0.8)
    found = run("check", path, "--provider", "webgpu", "--inputs", inputs)
    assert found.exit_code == 1
    assert "--target webgpu --keep-fp32 'pool|flat'" in found.output
    again = onnxamp.convert_model(model_of(SMALL), level="O3", target="webgpu", keep_high=["pool|flat"])
    assert onnxamp.check_run(again, inputs, provider="webgpu").first_bad is None


@pytest.mark.slow
def test_a_comparison_offers_the_target_of_its_engine(tmp_path) -> None:
    """Of what was made for CUDA, and compared on WebGPU."""
    source, low = tmp_path / "m.onnx", tmp_path / "low.onnx"
    onnx.save(model_of(LARGE), source)
    onnx.save(made_for_cuda(LARGE), low)
    arguments = ("diff", source, low, "--provider", "webgpu")
    found = " ".join(run(*arguments).output.split())
    assert "Tried: a conversion for webgpu with onnxamp's lists and hazards passes" in found
    assert "--target webgpu" in found
    assert "bfloat16" not in found
    late = run(*arguments, "--cure-time", "0")
    assert late.exit_code == 1
    told = " ".join(late.output.split())
    assert "No fix was found in 0 s. --target webgpu converts for its kernels and arithmetic." in told
    assert "Layers were compared on sample" in told
    for number, sample in enumerate(onnxamp.random_samples(source, 2)):
        np.savez(tmp_path / f"{number}.npz", **sample)
    given = " ".join(run(*arguments, "--inputs", tmp_path, "--cure-time", "0").output.split())
    assert "Layers were compared on 1 of 2 samples, in 0 s." in given
