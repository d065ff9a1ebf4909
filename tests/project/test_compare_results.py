"""The script that compares the results of two commits, in a small repository with a package of a few lines."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")]

PACKAGE = """
import os
import warnings
import onnx

def convert_model(model, level, **options):
    if level == "O3":
        raise ValueError("cannot")
    if options.get("strict"):
        warnings.warn("takes O2 literally")
    result = onnx.ModelProto.FromString(model.SerializeToString())
    result.doc_string = level
    return result

def plan_model(model, level, **options):
    return f"a plan for {level}"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of a repository that has it and the script in its only commit."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "compare_results.py", tmp_path / "scripts")
    path = tmp_path / "onnxamp.py"
    path.write_text(PACKAGE, encoding="utf-8")
    identity = ["-c", "user.name=name", "-c", "user.email=name@example.com"]
    for command in (["init"], ["add", "."], [*identity, "commit", "-m", "Add a package"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    return path


def compared(package: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit code, and the lines printed."""
    models = [str(ROOT / "models" / f"{name}.onnx") for name in ("recurrent", "unet")]
    command = [str(package.parent / "scripts" / "compare_results.py"), "--against", "HEAD", "--models", *models]
    done = subprocess.run([sys.executable, *command, *arguments], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def change(package: Path, old: str, new: str) -> None:
    text = package.read_text(encoding="utf-8")
    assert old in text
    package.write_text(text.replace(old, new), encoding="utf-8")


def aspects(lines: list[str]) -> set[str]:
    """What differs, without the keys of cases."""
    return {line.split("}: ", 1)[1] for line in lines}


def test_the_same_package_has_the_same_results(package: Path) -> None:
    code, (line,) = compared(package, "--jobs", "2")
    assert code == 0
    assert line.startswith("2 models, ")
    assert line.endswith(": 0 differences.")
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=package.parent, check=True, capture_output=True)
    assert len(worktrees.stdout.splitlines()) == 1, "the temporary worktree is gone"


def test_other_bytes_plans_warnings_and_errors_are_seen(package: Path) -> None:
    change(package, "doc_string = level", "doc_string = level.lower()")
    code, (*lines, total) = compared(package, "--all")
    assert code == 1
    assert total.endswith(f": {len(lines)} differences.")
    assert {line.split(": ")[2] for line in lines} >= {"bytes"}
    change(package, "doc_string = level.lower()", "doc_string = level")
    change(package, "a plan", "another plan")
    change(package, "literally", "seriously")
    change(package, '"cannot"', '"can not"')
    _, (*lines, total) = compared(package, "--all")
    found = aspects(lines)
    assert "error: 'ValueError: cannot' became 'ValueError: can not'" in found
    assert "warnings: 'UserWarning: takes O2 literally' became 'UserWarning: takes O2 seriously'" in found
    assert {text.split(":")[0] for text in found} == {"error", "warnings", "plan"}


def test_what_a_process_dies_of_is_a_result(package: Path) -> None:
    change(package, 'raise ValueError("cannot")', "os._exit(3)")
    code, (*lines, _) = compared(package, "--only", "unet")
    assert code == 1
    assert aspects(lines) == {"error: 'ValueError: cannot' became 'the process died, exit code 3: []'"}


def test_a_commit_is_converted_once(package: Path) -> None:
    compared(package, "--only", "unet")
    (store,) = (package.parent / "build" / "results").glob("*.json")
    stored = json.loads(store.read_text(encoding="utf-8"))
    for outcome in stored["outcomes"].values():
        outcome["warnings"] = "kept"
    store.write_text(json.dumps(stored), encoding="utf-8")
    _, (*lines, _) = compared(package, "--only", "unet")
    assert len(lines) == len(stored["outcomes"])
    assert all("warnings: 'kept' became" in line for line in lines)
