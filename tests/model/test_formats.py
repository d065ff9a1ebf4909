"""Files in other forms: models in text are read, and what is no model is called by its name."""

import warnings
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from repository import MODELS

import onnxamp
from onnxamp import ModelError

CLASSIFIER = next(path for path in MODELS if path.stem == "classifier")
OTHERS = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n": "Git LFS pointer.*'git lfs pull'",
    b"\n <!DOCTYPE html><html></html>": "HTML page.*'resolve' instead of 'blob'",
    b"<HTML><body>404</body></HTML>": "HTML page",
    b"\x18\0\0\0ORTM" + bytes(50): "ORT format.*the .onnx file",
    b"\x1c\0\0\0TFL3" + bytes(50): "TensorFlow Lite.*tf2onnx",
    (12).to_bytes(8, "little") + b'{"a":[1,2]} ': "safetensors",
    b"GGUF\x03\0\0\0": "GGUF",
    b"\x89HDF\r\n\x1a\n": "Keras.*tf2onnx",
    b"PK\x03\x04\0\0": r"ZIP archive.*torch\.onnx\.export",
    b"\x80\x02}q\x00.": r"pickle.*torch\.onnx\.export",
    b"<?xml version='1.0'?><net/>": "OpenVINO",
    b"\x0a\x20\x0a\x05input\x12\x0bPlaceholder": "TensorFlow graph.*tf2onnx",
    b"": "empty.*export it again",
    b'{"layers": []}': "cannot be parsed",
    b'{"graph": ': "cannot be parsed",
    b"[1, 2]": "cannot be parsed",
    b"graph { node { op_type: ": "cannot be parsed",
    b"ir_version: 8": "cannot be parsed",
    b"<ir_version: 8, opset_import: [": "cannot be parsed",
    b"just words\n": "cannot be parsed",
    b"{" * 100_000: "cannot be parsed",
    b"graph {" * 100_000: "cannot be parsed",
}


@pytest.mark.parametrize(("data", "told"), OTHERS.items(), ids=range(len(OTHERS)))
def test_what_is_no_model_is_named(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"(?s)model.onnx' is .*{told}"):
        onnxamp.convert_model(path)


@pytest.mark.parametrize(
    ("member", "told"),
    [("net/model.onnx", "with an ONNX model in it: unpack it"), ("archive/data.pkl", r"torch\.onnx\.export")],
)
def test_archives_with_models_are_told_from_others(member: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "made by torch.onnx.symbolic")
    with pytest.raises(ModelError, match=told):
        onnxamp.convert_model(path)


@pytest.fixture(params=["textproto", "json"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"model.{request.param}"
    onnx.save(onnx.load(CLASSIFIER), path, format=request.param)
    return path


def test_models_in_text_are_read(text: Path) -> None:
    assert onnxamp.convert_model(text) == onnxamp.convert_model(CLASSIFIER)


def test_models_in_text_run(text: Path) -> None:
    report = onnxamp.diff_models(CLASSIFIER, text, provider="cpu")
    assert report.passed
    assert all(output.max_abs == 0 for output in report.outputs)
    feeds = onnxamp.random_samples(text)[0]
    one, other = (onnxamp.InferenceSession(str(path)).run(None, feeds)[0] for path in (text, CLASSIFIER))
    np.testing.assert_array_equal(one, other)


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_results_are_binary(text: Path, level: str, tmp_path: Path) -> None:
    """Also if nothing changes, when a file would be copied as it is."""
    result = run("convert", text, "-o", tmp_path / "out.onnx", "--level", level)
    assert result.exit_code == 0, result.output
    assert onnx.load(tmp_path / "out.onnx") == onnxamp.convert_model(CLASSIFIER, level)


def test_the_syntax_of_onnx_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnxtxt"
    path.write_text('<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu (x) }')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [node.op_type for node in onnxamp.convert_model(path, "O3").graph.node] == ["Cast", "Relu", "Cast"]
    assert onnxamp.check_run(path, provider="cpu").skipped is None
