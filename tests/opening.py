"""Opening models as a user does first, with ONNX Runtime's default options, in a process that may die of it."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto

OPEN = """
import sys
import onnxruntime as ort
options = ort.SessionOptions()
options.log_severity_level = 4
for line in sys.stdin:
    try:
        ort.InferenceSession(line.strip(), options, providers=["CPUExecutionProvider"])
        print("opens", flush=True)
    except Exception as error:
        print(str(error).replace("\\n", " "), flush=True)
"""
"""What the process does with the path in each line of its input."""


def runtime_version() -> tuple[int, ...]:
    """Return the major and minor version of the installed ONNX Runtime."""
    return tuple(map(int, ort.__version__.split(".")[:2]))


def outcomes(models: Iterable[ModelProto]) -> list[str]:
    """Return for each model "opens", ONNX Runtime's error, or that the process died."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, model in enumerate(models):
            paths.append(str(Path(folder, f"{number}.onnx")))
            onnx.save(model, paths[-1])
        while len(found) < len(paths):
            given = "\n".join(paths[len(found) :])
            done = subprocess.run(
                [sys.executable, "-c", OPEN], input=given, capture_output=True, text=True, check=False
            )
            found += done.stdout.splitlines()
            if done.returncode:
                found.append("died")
    return found
