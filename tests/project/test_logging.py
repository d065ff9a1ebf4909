"""What the library tells a logger, where the user listens."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import onnxamp

MODEL = Path(__file__).parents[2] / "models" / "classifier.onnx"


def test_stages_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onnxamp"):
        onnxamp.convert_file(MODEL, tmp_path / "low.onnx", validate=False)
        onnxamp.diff_models(MODEL, tmp_path / "low.onnx", provider="cpu")
    assert {record.name for record in caplog.records} == {"onnxamp"}
    told = [record.getMessage() for record in caplog.records]
    stages = ("read ", "decided at level O2: ", f"wrote {tmp_path / 'low.onnx'}: ", "read ", "read ", "compared ")
    assert [text[: len(stage)] for text, stage in zip(told, stages, strict=True)] == list(stages)


@pytest.mark.slow
def test_nothing_is_said_unless_asked() -> None:
    code = f"import onnxamp; onnxamp.diff_models({str(MODEL)!r}, onnxamp.convert_model({str(MODEL)!r}), provider='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
