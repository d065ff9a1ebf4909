"""Results for the CPU run on it before they are put in their place: a kernel may fail in a session that loads."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse

from onnxamp._job.validation import run_result
from onnxamp._model.model import Model

SCATTER = (
    """(KIND[4] x, int64[1,1] at, KIND[1] u) => (KIND[4] y) { [adds] y = ScatterND <reduction = "add"> (x, at, u) }"""
)
FEEDS = {"x": np.ones(4, np.float32), "at": np.int64([[1]]), "u": np.ones(1, np.float32)}


def saved(path: Path, kind: str) -> Model:
    onnx.save(parse(SCATTER.replace("KIND", kind), 18), path)
    return Model.of(path)


def test_a_kernel_that_fails_is_a_fault_of_the_result(tmp_path: Path) -> None:
    original, result = saved(tmp_path / "high.onnx", "float"), saved(tmp_path / "low.onnx", "float16")
    ran = run_result(result, original, FEEDS)
    assert ran.does == "run"
    assert "MLFloat16" in ran.fault
    assert "adds" in ran.fault, "the node is named, so that it can be cured"
    assert run_result(original, original, FEEDS).fault == ""


def test_what_the_original_cannot_do_is_no_fault(tmp_path: Path) -> None:
    low = saved(tmp_path / "low.onnx", "float16")
    assert run_result(low, low, FEEDS).fault == ""


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_sum_that_the_cpu_does_not_scatter_in_float16_is_converted_and_runs(tmp_path: Path, level: str) -> None:
    text = """(float[4] x, int64[1,1] at, float[1] u) => (float[2] z) <float[4,2] w = {1, 2, 3, 4, 1, 2, 3, 4}> {
        y = ScatterND <reduction = "add"> (x, at, u) z = MatMul (y, w) }"""
    onnx.save(parse(text, 18), tmp_path / "m.onnx")
    made = run("convert", tmp_path / "m.onnx", "-o", tmp_path / "low.onnx", "--target", "cpu", "--level", level)
    assert made.exit_code == 0, made.output
    assert run_result(Model.of(tmp_path / "low.onnx"), Model.of(tmp_path / "m.onnx"), FEEDS).fault == ""
