"""A file that is truncated while it is memory-mapped, in native code too: one sentence, and nothing is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells what is mapped")

SIZE = 1500
"""Of a matrix of 9 MB, which is mapped; with two of them, weights stay in their file."""
START = """
import os, sys, numpy, onnxruntime
left = {turns}
def truncate():
    global left
    left -= 1
    if left == 0:
        os.truncate({file!r}, {size})
"""
"""Runs in every process as it starts."""
MOMENTS = {
    "numpy": """
class Mapped(numpy.memmap):
    def __new__(cls, *arguments, **options):
        made = super().__new__(cls, *arguments, **options)
        truncate()
        return made
numpy.memmap = Mapped
""",
    "engine": """
plain = onnxruntime.InferenceSession.run_with_ort_values
def run_with_ort_values(self, *arguments):
    truncate()
    return plain(self, *arguments)
onnxruntime.InferenceSession.run_with_ort_values = run_with_ort_values
""",
    "bound": """
plain = onnxruntime.InferenceSession.run_with_iobinding
def run_with_iobinding(self, *arguments):
    truncate()
    return plain(self, *arguments)
onnxruntime.InferenceSession.run_with_iobinding = run_with_iobinding
""",
}
"""When the file is truncated: once its weights are mapped, before NumPy or ONNX Runtime reads them."""


def network() -> ModelProto:
    """A product, and the rows of a table, which ONNX Runtime does not copy."""
    text = f"""(float[1,{SIZE}] X, int64[3] I) => (float[1,{SIZE}] Y, float[3,{SIZE}] R) {{
        h = MatMul (X, w) Y = Softmax (h) R = Gather (table, I)
    }}"""
    return add_weights(parse(text), {"w": (SIZE, SIZE), "table": (SIZE, SIZE)})


def stored(folder: Path, kind: str) -> Path:
    """The file with the weights of ``model.onnx``."""
    is_external = kind == "external"
    onnx.save(network(), folder / "model.onnx", save_as_external_data=is_external, location="model.bin")
    np.savez(folder / "in.npz", X=np.ones((1, SIZE), np.float32), I=np.array([0, 7, SIZE - 1]))
    return folder / ("model.bin" if is_external else "model.onnx")


def started(folder: Path, *arguments: str, start: str) -> "subprocess.CompletedProcess[str]":
    """The end of a command in whose processes ``start`` runs first."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(start)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "onnxamp", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "ONNXAMP_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


CONVERT = ("convert", "model.onnx", "-o", "out/low.onnx", "--html", "page.html", "--inputs", "in.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "turns"), [("inline", "engine", 1), ("external", "numpy", 3), ("external", "engine", 1)]
)
def test_a_conversion(tmp_path: Path, kind: str, moment: str, turns: int) -> None:
    file = stored(tmp_path, kind)
    (tmp_path / "out").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    start = START.format(file=str(file), size=9000, turns=turns) + MOMENTS[moment]
    ended = started(tmp_path, *CONVERT, start=start)
    assert ended.returncode == 1, ended.stderr
    (said,) = ended.stderr.strip().splitlines()
    assert said == f"Error: '{file}' changed while onnxamp read it: run again when nothing else writes to it."
    assert ended.stdout == ""
    assert file.stat().st_size == 9000
    assert {path.name for path in tmp_path.iterdir()} == before | {"site"}
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_the_weights_that_onnx_runtime_maps_itself(tmp_path: Path) -> None:
    file = stored(tmp_path, "external")
    start = START.format(file=str(file), size=0, turns=1) + MOMENTS["bound"]
    command = ("bench", "model.onnx", "--provider", "cpu", "--no-profile", "--seconds", "0.01", "--inputs", "in.npz")
    ended = started(tmp_path, *command, "--format", "json", start=start)
    assert (ended.returncode, ended.stderr) == (1, "")
    error = json.loads(ended.stdout)
    assert error["kind"] == "SourceChangedError"
    assert f"{file}' changed while onnxamp read it" in error["message"]


@pytest.mark.slow
def test_a_model_of_a_folder(tmp_path: Path) -> None:
    """The worker lives on, and says what happened."""
    (tmp_path / "in").mkdir()
    file = stored(tmp_path / "in", "external")
    start = START.format(file=str(file), size=0, turns=1) + MOMENTS["numpy"]
    ended = started(tmp_path, "convert", "in", "-o", "out", "--jobs", "2", "--format", "json", start=start)
    assert ended.returncode == 1, ended.stderr
    (row,) = json.loads(ended.stdout)["report"]["rows"]
    assert row["outcome"] == "failed"
    assert "model.bin' changed while onnxamp read it" in row["message"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".onnx"]
