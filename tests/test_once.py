"""What happens once: a command reads a file once, and asks each analysis of a graph once. Counted from outside."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from graphs.case import parse

SCRIPT = """
import collections, json, os, sys
from click.testing import CliRunner
from onnxamp._cli import group

opened, called = collections.Counter(), collections.Counter()

def hear(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".onnx") and arguments[1] in ("r", "rb", None):
        opened[os.path.basename(arguments[0])] += 1

def watch(frame, event, _):
    name = (frame.f_globals.get("__name__", "").rpartition(".")[2], frame.f_code.co_name)
    if event == "call" and name in WATCHED:
        called[" ".join(name)] += 1

WATCHED = {("shape_inference", "infer_shapes"), ("analysis", "analyse"), ("problem", "find_problem"),
           ("hazards", "find_hazards"), ("wellformed", "check_wellformed")}
sys.addaudithook(hear)
sys.setprofile(watch)
result = CliRunner().invoke(group, sys.argv[1:])
sys.setprofile(None)
assert result.exit_code in (0, 1), result.output
print(json.dumps({**opened, **called}))
"""


def counts(*arguments: object) -> dict[str, int]:
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A decomposed norm and products, of a size that only a run tells."""
    text = """(float[batch,4] x) => (float[batch,4] y)
        <float[4,4] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}, float two = {2}> {
        h = MatMul (x, w)  s = Pow (h, two)  m = ReduceMean <axes = [-1]> (s)
        r = Sqrt (m)  n = Div (h, r)  y = MatMul (n, w)
    }"""
    onnx.save(parse(text), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_converting_reads_and_analyses_once(model: Path) -> None:
    found = counts("convert", model, "-o", model.with_name("low.onnx"))
    assert found["model.onnx"] == 1
    assert found["low.onnx"] == 1, "the result is read for its validation alone"
    assert found["analysis analyse"] == found["problem find_problem"] == found["hazards find_hazards"] == 1
    assert found["shape_inference infer_shapes"] == 2, "the model's, and that of the run on the samples"
    assert found["wellformed check_wellformed"] == 2, "the model, and the result"


def test_converting_unseen_reads_no_result(model: Path) -> None:
    found = counts("convert", model, "-o", model.with_name("low.onnx"), "--no-validate")
    assert found["model.onnx"] == found["shape_inference infer_shapes"] == found["wellformed check_wellformed"] == 1
    assert "low.onnx" not in found


@pytest.mark.parametrize(
    "arguments", [("diff", "--no-cure"), ("check",), ("tune", "--samples", 1), ("inspect",)], ids=str
)
def test_every_command_reads_a_model_once(model: Path, arguments: tuple[object, ...]) -> None:
    low = model.with_name("low.onnx")
    onnx.save(onnx.load(model), low)
    command, *rest = arguments
    models = {"diff": (model, low), "tune": (model, "-o", low)}.get(str(command), (model,))
    assert counts(command, *models, *rest)["model.onnx"] == 1
