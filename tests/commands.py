"""What the tests of the command line share: calling it in this process, and small models on disk."""

import json
from pathlib import Path
from typing import Any

import onnx
from click.testing import CliRunner, Result
from graphs.case import parse
from onnx import ModelProto
from repository import MODELS

from onnxamp._cli.command import group

CLASSIFIER = next(path for path in MODELS if path.stem == "classifier")
NORM = """(float[1,4] X) => (float[1,4] Y) <float[4,4] w = {700, 0, 0, 0, 0, 700, 0, 0, 0, 0, 700, 0, 0, 0, 0, 700},
    float two = {2}, float eps = {1e-6}> {
    [project] h = MatMul (X, w)
    [square] q = Pow (h, two)
    [mean] m = ReduceMean <axes = [-1]> (q)
    [plus] e = Add (m, eps)
    [root] r = Sqrt (e)
    [divide] Y = Div (h, r)
}"""
"""Squares of values in the hundreds overflow float16, and what is divided by infinity vanishes."""


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(group, [str(argument) for argument in arguments])


def saved(model: ModelProto | str, name: str = "model.onnx") -> Path:
    path = Path(name)
    onnx.save(parse(model) if isinstance(model, str) else model, path)
    return path


def small() -> Path:
    """A model that converts and validates in no time."""
    return saved("(float[1,2] X) => (float[1,2] Y) <float[2,2] w = {1, 2, 3, 4}> { [first] Y = MatMul (X, w) }")


def report_of(result: Result) -> dict[str, Any]:
    """The JSON on standard output, whatever follows it on standard error."""
    return json.JSONDecoder().raw_decode(result.output)[0]


def is_one_sentence(result: Result) -> bool:
    text = result.output
    return text.startswith("Error: ") and text.count("\n") == 1 and text.endswith(".\n") and "Traceback" not in text
