"""Real models with inputs: a folder beside the repository, or the one that the variable ONNXAMP_REAL_MODELS names.

They are no part of the repository: where one is missing, tests with it are skipped.
"""

import os
from pathlib import Path

import pytest
from repository import ROOT

FOLDER = Path(os.environ.get("ONNXAMP_REAL_MODELS") or ROOT.parent / "shared" / "models")
REAL_MODELS = sorted(FOLDER.glob("*.onnx"))


def real_model(name: str) -> Path:
    """The file of a model; its inputs are in the .npz of the same name."""
    return FOLDER / f"{name}.onnx"


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where the model or its inputs are missing."""
    path = real_model(name)
    there = path.is_file() and path.with_suffix(".npz").is_file()
    return pytest.mark.skipif(not there, reason=f"{path.name} with its inputs is not at hand")
