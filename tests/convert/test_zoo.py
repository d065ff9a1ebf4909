"""The models of the zoo, and the real ones where they are at hand, converted and validated as a user would."""

import collections

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from real_models import REAL_MODELS, needs, real_model
from repository import ROOT

import onnxamp
from onnxamp._numerics.diff_models import diff_models
from onnxamp._numerics.differences.metrics import TOLERANCES
from onnxamp._runtime.inputs.samples import load_samples

ZOO = sorted((ROOT / "models").glob("*.onnx"))
REORDERED = {("detector", "O3")}
"""TopK picks other boxes of equal score when everything is low: their order says nothing about accuracy."""


def optimised(model, tmp_path, level):
    """Op types of the graph that ONNX Runtime makes of the model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return collections.Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("path", [*ZOO, *REAL_MODELS], ids=lambda path: path.stem)
def test_converts_and_stays_accurate(path, level, dtype, tmp_path):
    result = tmp_path / "result.onnx"
    opset = {"opset": 13} if path.stem == "ultraface_rfb_320" and dtype == "bfloat16" else {}
    onnxamp.convert_file(path, result, level, dtype=dtype, **opset, validate=False)
    model = onnx.load(result)
    onnx.checker.check_model(model, full_check=True)
    given = path.with_suffix(".npz")
    found = diff_models(path, result, load_samples(given) if given.exists() else None, provider="cpu")
    assert found.skipped is None
    assert found.failure is None
    if (path.stem, level) not in REORDERED:
        assert max(diff.rel_l2 for diff in found.outputs) < TOLERANCES[dtype]
    assert onnxamp.convert_model(model, level, dtype=dtype, opset="keep") == model, "converting again changes nothing"


@pytest.mark.mostly_slow(fast=7)
@pytest.mark.parametrize("path", [*ZOO, *REAL_MODELS], ids=lambda path: path.stem)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_float16_loads_at_every_optimisation_level(path, level):
    model = onnxamp.convert_model(path, level)
    for optimisation in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, optimisation)
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("lists", ["default", "fast"])
def test_batch_normalizations_still_fold_into_convs(level, lists, tmp_path):
    model = onnxamp.convert_model(ROOT / "models" / "classifier.onnx", level, lists=lists)
    assert any(node.op_type == "BatchNormalization" for node in model.graph.node)
    assert not optimised(model, tmp_path, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)["BatchNormalization"]


def test_mindspore_keeps_batch_normalization_in_float32():
    model = onnxamp.convert_model(ROOT / "models" / "classifier.onnx", "O2", lists="mindspore")
    weights = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert norms
    assert {weights[name] for node in norms for name in node.input[1:]} == {onnx.TensorProto.FLOAT}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_layer_norms_still_fuse(level, tmp_path):
    path = ROOT / "models" / "encoder.onnx"
    everything = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    before = optimised(onnx.load(path), tmp_path, everything)
    after = optimised(onnxamp.convert_model(path, level), tmp_path, everything)
    assert after["LayerNormalization"] + after["SkipLayerNormalization"] == before["LayerNormalization"] == 5


@needs("magika")
def test_hazards_are_what_saves_the_classifier(tmp_path):
    """Its written-out LayerNorm overflows float16; without the hazards its answers are wrong."""
    path, result = real_model("magika"), tmp_path / "result.onnx"
    samples = load_samples(path.with_suffix(".npz"))
    plan = onnxamp.plan_model(path, "O3")
    assert {row.reason for row in plan.hazards} >= {"decomposed pattern"}
    errors = {}
    for hazards in (True, False):
        onnxamp.convert_file(path, result, "O3", hazards=hazards, validate=False)
        found = diff_models(path, result, samples, provider="cpu")
        errors[hazards] = max(diff.rel_l2 for diff in found.outputs)
    assert errors[True] < 1e-3
    assert errors[False] > 0.5


@pytest.mark.slow
def test_first_bad_value_is_named(tmp_path):
    path, result = ROOT / "models" / "decoder.onnx", tmp_path / "result.onnx"
    onnxamp.convert_file(path, result, "O3", hazards=False, validate=False)
    found = diff_models(path, result, provider="cpu")
    assert found.failure is not None
    assert found.first_bad is not None
    assert (found.first_bad.op, found.first_bad.value) == ("Pow", "decoder/0/attention/norm/square:0")
    assert np.isfinite(found.outputs[0].rel_l2)
