"""Every door leads to the same pipeline: what a function, the command and a folder write is the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run, saved
from graphs.case import parse
from onnx import TensorProto
from repository import MODELS

import onnxamp

ENCODER = next(path for path in MODELS if path.stem == "encoder").resolve()
SQUARES = """(float[4] X) => (float[4] Y) {
    [first] a = LeakyRelu (X) [square] s = Mul (a, a) [root] r = Sqrt (s) [last] Y = Relu (r)
}"""
LARGE = {"X": np.float32([300, 1, 2, 3])}
"""Its square is beyond float16."""


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written_by_command(*arguments: str) -> bytes:
    result = run("convert", ENCODER, "-o", "command.onnx", "-q", *arguments)
    assert result.exit_code == 0, result.output
    return Path("command.onnx").read_bytes()


OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"level": "O3", "dtype": "bfloat16"}, ["--level", "O3", "--dtype", "bfloat16"]),
    ({"rescale": True, "data_max": 100.0}, ["--rescale", "--data-max", "100"]),
    ({"rounding": "compensated"}, ["--rounding", "compensated"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "arguments"), OPTIONS, ids=["default", "bfloat16", "ranges", "rounding"])
def test_function_command_and_folder_write_the_same(options: dict[str, Any], arguments: list[str]) -> None:
    wanted = written_by_command(*arguments)
    onnxamp.convert_file(ENCODER, "function.onnx", **options)
    assert Path("function.onnx").read_bytes() == wanted
    Path("models").mkdir()
    Path("models/encoder.onnx").write_bytes(ENCODER.read_bytes())
    report = onnxamp.convert_folder("models", "results", jobs=1, **options)
    assert report.count("converted") == 1
    assert Path("results/encoder.onnx").read_bytes() == wanted


def test_a_file_is_validated_by_default() -> None:
    conversion = onnxamp.convert_file(ENCODER, "low.onnx")
    assert conversion.validation is not None
    assert conversion.validation.passed
    assert "match the original" in repr(conversion)
    assert onnxamp.convert_file(ENCODER, "unseen.onnx", validate=False).validation is None
    assert Path("low.onnx").read_bytes() == Path("unseen.onnx").read_bytes()


def test_a_file_whose_result_fails_is_healed() -> None:
    conversion = onnxamp.convert_file(saved(SQUARES), "low.onnx", "O3", samples=LARGE)
    validation = conversion.validation
    assert validation is not None
    assert validation.passed
    assert validation.cure is not None
    assert validation.cure.applied
    assert "square" in validation.cure.nodes
    assert onnxamp.diff_models("model.onnx", "low.onnx", samples=LARGE).passed
    onnxamp.convert_file("model.onnx", "unseen.onnx", "O3", samples=LARGE, validate=False, data_max=1e30)
    assert not onnxamp.diff_models("model.onnx", "unseen.onnx", samples=LARGE).passed


@pytest.mark.slow
def test_the_tolerance_of_a_file_is_the_limit_of_its_validation() -> None:
    strict = onnxamp.convert_file(ENCODER, "strict.onnx", tolerance=1e-7)
    assert strict.validation is not None
    assert strict.validation.passed
    assert strict.validation.cure is not None
    proto = onnx.load("strict.onnx")
    assert all(tensor.data_type != TensorProto.FLOAT16 for tensor in proto.graph.initializer)


def test_a_file_that_does_not_run_is_written_unseen() -> None:
    model = parse("(float[4,4] X) => (float[4,4] Y) { a = MatMul (X, X) Y = com.example.Unknown (a) }")
    saved(model)
    conversion = onnxamp.convert_file("model.onnx", "low.onnx")
    assert conversion.validation is not None
    assert conversion.validation.skipped
    assert Path("low.onnx").exists()


def test_the_provider_of_a_file_is_checked_before_anything_is_written() -> None:
    with pytest.raises(onnxamp.OnnxAmpError, match="onnxruntime-ep-nowhere"):
        onnxamp.convert_file(ENCODER, "low.onnx", provider="onnxruntime-ep-nowhere")
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_level_auto_is_the_same_by_function_and_command() -> None:
    wanted = written_by_command("--level", "auto", "--tolerance", "3e-3", "--format", "json")
    conversion = onnxamp.convert_file(ENCODER, "function.onnx", "auto", tolerance=3e-3)
    assert Path("function.onnx").read_bytes() == wanted
    assert conversion.plan.level == "auto"


@pytest.mark.slow
def test_a_plan_is_repeated_and_validated() -> None:
    onnxamp.convert_file(ENCODER, "first.onnx", "O1").plan.save("plan.json")
    again = onnxamp.convert_file(ENCODER, "again.onnx", plan=onnxamp.load_plan("plan.json"))
    assert Path("first.onnx").read_bytes() == Path("again.onnx").read_bytes()
    assert again.validation is not None
    assert again.validation.passed
    assert json.loads(Path("plan.json").read_text())["options"]["level"] == "O1"


BOXES = """(float[3,5] x) => (float[3,4] best, float[3] top)
    <int64[1] k = {3}, int64[2] parts = {4, 1}, int64[1] last = {-1}> {
    boxes, columns = Split <axis = 1> (x, parts)
    scores = Squeeze (columns, last)
    top, index = TopK <axis = 0> (scores, k)
    best = Gather <axis = 0> (boxes, index)
}"""
TIED = {"x": np.array([[0, 0, 1, 1, 0.5], [4, 4, 6, 6, 0.5001], [8, 0, 9, 2, 0.9]], np.float32)}
"""Two of the scores are equal in bfloat16, so that their rows change places."""


@pytest.mark.parametrize("metric", ["auto", "detections", "elements"])
def test_functions_validate_with_the_requested_metric(metric: str) -> None:
    path = saved(BOXES)
    lowered = {"level": "O3", "dtype": "bfloat16", "target": "any", "hazards": False}
    result = onnxamp.convert_file(path, "low.onnx", metric=metric, samples=TIED, provider="cpu", **lowered)
    assert result.validation is not None
    assert (result.validation.cure is None) == (metric != "elements")
    with pytest.raises(onnxamp.ArgumentError, match="metric 'cosine' is only for level 'auto'"):
        onnxamp.convert_file(path, "low.onnx", metric="cosine")
    with pytest.raises(onnxamp.ArgumentError, match="metric is only for level 'auto', not for 'O2' without"):
        onnxamp.convert_file(path, "low.onnx", metric="elements", validate=False)
