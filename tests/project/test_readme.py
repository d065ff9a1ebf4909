"""The README's commands and code blocks do what it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from commands import run
from repository import ROOT

BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What the blocks need of the repository, and what the commands behind the first one read, where they may write."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "models", folder / "models")
    shutil.copy(ROOT / "models" / "classifier.onnx", folder / "model.onnx")
    assert run("convert", folder / "model.onnx", "-q", "--no-validate").exit_code == 0
    return folder


def test_blocks_are_what_is_tested_here():
    assert [kind for kind, _ in BLOCKS] == ["", "text", "", "python", ""]
    assert len(COMMANDS) == 8


def test_it_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000


def test_shown_output_is_what_the_command_prints(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("COLUMNS", "100")
    printed = run(*shlex.split(COMMANDS[0])[1:]).stdout
    (shown,) = (text for kind, text in BLOCKS if kind == "text")
    version = re.compile(r"ONNX Runtime [\d.]+")
    assert version.sub("ONNX Runtime", shown) in version.sub("ONNX Runtime", printed)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("onnxamp")])
def test_command(command, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    done = run(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()
    assert "Traceback" not in done.output


def test_a_command_in_a_process_of_its_own(checkout):
    done = subprocess.run(
        [sys.executable, "-m", "onnxamp", "lists", "default"],
        cwd=checkout, capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == run("lists", "default").stdout


def test_python_block(checkout):
    (text,) = (text for kind, text in BLOCKS if kind == "python")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "O2 float16 for cuda" in done.stdout
    assert (checkout / "encoder_fp16.onnx").is_file()


def test_setup_commands_exist_and_ci_runs_the_second():
    demo, suite = (c for c in COMMANDS if c.startswith("python3"))
    for command in (demo, suite):
        assert (ROOT / command.split()[1]).is_file()
    assert suite in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
