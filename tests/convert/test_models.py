"""The model zoo: reproducible, valid, runnable, and as awkward for lower precision as it is meant to be."""

import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from repository import MODELS, ROOT, feeds

CPU = ["CPUExecutionProvider"]


@pytest.mark.slow
def test_regenerates_the_same_bytes(tmp_path):
    script = ROOT / "scripts" / "make_models.py"
    done = subprocess.run([sys.executable, script, "--out", tmp_path], check=True, capture_output=True, text=True)
    speech = sorted((ROOT / "models" / "speech").glob("*.onnx"))
    assert len(done.stdout.splitlines()) == len(MODELS) + len(speech) == 6 + 3
    for path in (*MODELS, *speech):
        assert (tmp_path / path.relative_to(ROOT / "models")).read_bytes() == path.read_bytes(), path.name


def test_folder_is_small():
    assert sum(path.stat().st_size for path in (ROOT / "models").rglob("*")) <= 2_000_000


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_valid_and_finite(path):
    onnx.checker.check_model(path, full_check=True)
    session = ort.InferenceSession(path, providers=CPU)
    for inputs in feeds(path.stem):
        for value, output in zip(session.run(None, inputs), session.get_outputs(), strict=True):
            assert value.size, output.name
            assert np.isfinite(value).all(), output.name


def test_onnxruntime_fuses_the_encoder(tmp_path):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3  # it warns that such a file is for this machine only
    ort.InferenceSession(ROOT / "models" / "encoder.onnx", options, providers=CPU)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert sum("LayerNormalization" in kind for kind in kinds) == 5
    assert sum("Gelu" in kind for kind in kinds) == 2
    assert "Erf" not in kinds


def test_decoder_squares_overflow_float16():
    model = onnx.load(ROOT / "models" / "decoder.onnx")
    squares = [node.output[0] for node in model.graph.node if node.op_type == "Pow"]
    for name in squares:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    for square in session.run(squares, feeds("decoder")[0]):
        assert square.max() > np.finfo(np.float16).max
