"""What type checkers see of the public functions: misspelled arguments are errors, and results have exact types."""

import re
import sys
from functools import cache
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory

import pytest

pytestmark = pytest.mark.slow  # mypy reads all that onnxamp imports

ROOT = Path(__file__).parents[2]
CALLER = """\
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir
import onnxamp
from onnx import ModelProto, TensorProto


class SurgeonGraph:
    nodes: list[Any]

    def toposort(self) -> "SurgeonGraph":
        return self


def wrong(model: ModelProto) -> None:
    onnxamp.convert_model(model, "O4")  # level
    onnxamp.convert_model(model, dtype="float8")  # dtype
    onnxamp.convert_model(model, keep_hihg=["a"])  # keyword
    onnxamp.plan_model(model, "o2")  # level of a plan
    onnxamp.apply_plan(model, "plan.json")  # plan


def right(model: ModelProto, graph: SurgeonGraph, plan: onnxamp.Plan) -> None:
    reveal_type(onnxamp.convert_model(model))  # proto
    reveal_type(onnxamp.convert_model("model.onnx", "auto", tolerance=1e-3))  # str
    reveal_type(onnxamp.convert_model(Path("model.onnx"), "O1", dtype="bfloat16"))  # path
    reveal_type(onnxamp.convert_model(graph, "O3", keep_high=["a"]))  # graph
    reveal_type(onnxamp.convert_model(graph, dtype=np.float16))  # type of NumPy
    reveal_type(onnxamp.convert_model(graph, dtype=np.dtype("float16")))  # dtype of NumPy
    reveal_type(onnxamp.convert_model(graph, dtype=ml_dtypes.bfloat16))  # type of ml_dtypes
    reveal_type(onnxamp.convert_model(graph, dtype=TensorProto.FLOAT16))  # type of ONNX
    reveal_type(onnxamp.convert_model(graph, dtype=onnx_ir.DataType.BFLOAT16))  # type of onnx-ir
    reveal_type(onnxamp.apply_plan(model, plan))  # applied to a proto
    reveal_type(onnxamp.apply_plan(graph, plan))  # applied to a graph
    reveal_type(onnxamp.plan_model(graph, "O2", lists="fast"))  # planned
    reveal_type(onnxamp.convert_file("a.onnx", Path("b.onnx"), plan=plan))  # file
"""


@cache
def messages() -> dict[str, list[str]]:
    """What mypy says of each call, by the comment behind it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "caller.py"
        path.write_text(CALLER)
        command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "--no-pretty", "--no-color-output"]
        done = run(
            [*command, "--config-file", ROOT / "pyproject.toml", "--cache-dir", Path(folder) / "cache", path],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    said: dict[str, list[str]] = {}
    for line, kind, text in re.findall(r"caller\.py:(\d+): (error|note): (.*)", done.stdout):
        call = CALLER.splitlines()[int(line) - 1].partition("#")[2].strip()
        if kind == "error" or text.startswith("Revealed type"):
            said.setdefault(call, []).append(text)
    assert said, done.stdout + done.stderr
    return said


WRONG = {
    "level": r'No overload variant of "convert_model" matches argument types "ModelProto", "str"',
    "dtype": r'No overload variant of "convert_model" matches argument types "ModelProto", "str"',
    "keyword": r'Unexpected keyword argument "keep_hihg" .* did you mean "keep_high"',
    "level of a plan": r'Argument 2 to "plan_model" has incompatible type "Literal\[\'o2\'\]"',
    "plan": r'No overload variant of "apply_plan" matches argument types "ModelProto", "str"',
}
RIGHT = {
    "proto": "onnx.onnx_ml_pb2.ModelProto",
    "str": "onnx.onnx_ml_pb2.ModelProto",
    "path": "onnx.onnx_ml_pb2.ModelProto",
    "graph": "caller.SurgeonGraph",
    "type of NumPy": "caller.SurgeonGraph",
    "dtype of NumPy": "caller.SurgeonGraph",
    "type of ml_dtypes": "caller.SurgeonGraph",
    "type of ONNX": "caller.SurgeonGraph",
    "type of onnx-ir": "caller.SurgeonGraph",
    "applied to a proto": "onnx.onnx_ml_pb2.ModelProto",
    "applied to a graph": "caller.SurgeonGraph",
    "planned": "onnxamp._convert.plan.Plan",
    "file": "onnxamp._job.writing.Conversion",
}


@pytest.mark.parametrize("call", WRONG)
def test_misspelled_arguments_are_errors(call: str) -> None:
    assert re.search(WRONG[call], messages()[call][0])


@pytest.mark.parametrize("call", RIGHT)
def test_results_have_exact_types(call: str) -> None:
    assert messages()[call] == [f'Revealed type is "{RIGHT[call]}"']


def test_nothing_else_is_wrong() -> None:
    assert messages().keys() == WRONG.keys() | RIGHT.keys()
