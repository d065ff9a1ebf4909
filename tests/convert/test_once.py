"""What happens once: a command reads a file once, and asks each analysis of a graph once. Counted from outside."""

import json
import subprocess
import sys

import onnx
import pytest
from graphs.case import parse

SCRIPT = """
import collections, json, os, re, sys
from click.testing import CliRunner
from onnxamp._cli.command import group

opened, called = collections.Counter(), collections.Counter()

def hear(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".onnx") and arguments[1] in ("r", "rb", None):
        name = os.path.basename(arguments[0])
        opened[re.sub(r"[.][0-9a-f]{8}[.]onnx$", "", name)] += 1  # a result is read before it is put in its place

def watch(frame, event, _):
    if event == "call" and frame.f_code.co_name in WATCHED:
        module = frame.f_globals.get("__name__", "").rpartition(".")[2]
        called[f"{module} {frame.f_code.co_name}"] += 1

WATCHED = {"infer_shapes", "analyze", "find_problem", "find_hazards", "check_wellformed"}
sys.addaudithook(hear)
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    opened.clear(), called.clear()
    sys.setprofile(watch)
    result = CliRunner().invoke(group, arguments)
    sys.setprofile(None)
    assert result.exit_code in (0, 1), result.output
    found[name] = {**opened, **called}
print(json.dumps(found))
"""
COMMANDS = {
    "convert": ("convert", "model.onnx", "-o", "low.onnx"),
    "convert unseen": ("convert", "model.onnx", "-o", "unseen.onnx", "--no-validate"),
    "diff": ("diff", "model.onnx", "low.onnx", "--no-cure"),
    "check": ("check", "model.onnx"),
    "tune": ("tune", "model.onnx", "-o", "tuned.onnx", "--samples", "1", "--allow-slower"),
    "inspect": ("inspect", "model.onnx"),
    "view": ("view", "model.onnx"),
}
MODEL = """(float[batch,4] x) => (float[batch,4] y)
    <float[4,4] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}, float two = {2}> {
    h = MatMul (x, w)  s = Pow (h, two)  m = ReduceMean <axes = [-1]> (s)
    r = Sqrt (m)  n = Div (h, r)  y = MatMul (n, w)
}"""
"""A decomposed norm and products, of a size that only a run tells."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Of each command: how often it opens which model, and calls which function; all in one process of their own."""
    folder = tmp_path_factory.mktemp("once")
    onnx.save(parse(MODEL), folder / "model.onnx")
    command = [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_converting_reads_and_analyses_once(counts: dict[str, dict[str, int]]) -> None:
    found = counts["convert"]
    assert found["model.onnx"] == 1
    assert found["low.onnx"] == 1, "the result is read for its validation alone"
    assert found["kinds find_hazards"] == 1
    assert found["analysis analyze"] == found["problem find_problem"] == 2, (
        "once more for inputs in low precision, which may be faster"
    )
    assert found["shape_inference infer_shapes"] == 12, (
        "the model's, those of its run and the result's, an estimate's; for larger inputs: the work, both models;"
        " bounds of the result; for inputs made to be hard: the model that climbs, the result; for errors that are"
        " sought: the work, the model that descends"
    )
    assert found["wellformed check_wellformed"] == 2, "the model, and the result"


@pytest.mark.slow
def test_converting_unseen_reads_no_result(counts: dict[str, dict[str, int]]) -> None:
    found = counts["convert unseen"]
    assert found["model.onnx"] == found["shape_inference infer_shapes"] == found["wellformed check_wellformed"] == 1
    assert "unseen.onnx" not in found


@pytest.mark.slow
@pytest.mark.parametrize("command", ["diff", "check", "tune", "inspect", "view"])
def test_every_command_reads_a_model_once(command: str, counts: dict[str, dict[str, int]]) -> None:
    assert counts[command]["model.onnx"] == 1
