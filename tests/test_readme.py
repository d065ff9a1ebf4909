"""The README's commands and code blocks do what it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]


@pytest.fixture
def checkout(tmp_path):
    """What the blocks need of the repository, in a place where they may write."""
    shutil.copytree(ROOT / "models", tmp_path / "models")
    shutil.copy(ROOT / "models" / "classifier.onnx", tmp_path / "model.onnx")
    return tmp_path


def test_blocks_are_what_is_tested_here():
    assert [kind for kind, _ in BLOCKS] == ["", "", "python", "python"]
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("onnxamp")])
def test_command(command, checkout):
    convert_model("model.onnx", checkout)  # what the commands behind the first one read
    done = onnxamp(shlex.split(command)[1:], checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def onnxamp(arguments, folder):
    return subprocess.run(
        [sys.executable, "-m", "onnxamp", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def convert_model(name, folder):
    assert onnxamp(["convert", name, "-q", "--no-validate"], folder).returncode == 0


@pytest.mark.parametrize(
    ("block", "printed", "written"),
    [(0, "O2 float16 for cuda", "encoder_fp16.onnx"), (1, "'decoder/0/attention/norm/square:0'", "decoder.xlsx")],
)
def test_python_block(block, printed, written, checkout):
    text = [text for kind, text in BLOCKS if kind == "python"][block]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert (checkout / written).is_file()


def test_setup_commands_exist_and_ci_runs_the_second():
    demo, suite = (c for c in COMMANDS if c.startswith("python3"))
    for command in (demo, suite):
        assert (ROOT / command.split()[1]).is_file()
    assert suite in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
