"""The pre-commit hooks and the GitHub Action are gates: a good model passes, and a bad one does not."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import yaml
from commands import run, saved
from doc_pages import blocks
from graphs.case import parse
from repository import ROOT

import onnxamp

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}
PAGE = [yaml.safe_load(block.text) for block in blocks(ROOT / "docs" / "how-to" / "gate.md") if block.kind == "yaml"]
EXPRESSION = re.compile(r"\$\{\{ *([\w.]+) *\}\}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a float32 model, a good and a bad conversion of it, and a model that does not load."""
    monkeypatch.chdir(tmp_path)
    text = (
        "(float[1,4] X) => (float[1,4] Y) <float[4] w = {300, 300, 300, 300}> { [mul] m = Mul (X, w) Y = Mul (m, w) }"
    )
    original = parse(text)
    saved(original, "original.onnx")
    Path("models").mkdir()
    saved(onnxamp.convert_model(original), "models/good one.onnx")
    saved(onnxamp.convert_model(original, "O3", dtype="bfloat16"), "models/poor.onnx")
    saved("(float16[2] X) => (float[2] Y) <float[2] w = {1, 2}> { [add] Y = Add (X, w) }", "broken.onnx")
    return tmp_path


# --- the Action ---------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """How the last step of the action ended, and the summary of the job."""

    code: int
    output: str
    summary: str


def act(steps: Sequence[dict[str, Any]], values: Mapping[str, str], environment: Mapping[str, str]) -> Done:
    """Run steps of the action as GitHub runs them: each is a script of bash, and expressions are only in ``env``."""
    known = {f"inputs.{name}": row.get("default", "") for name, row in ACTION["inputs"].items()} | values
    files = {name: Path(f"{name.lower()}.txt").absolute() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("", encoding="utf-8")
    fixed = {"GITHUB_ACTION_PATH": str(ROOT), "RUNNER_TEMP": str(Path.cwd())}
    fixed |= {name: str(file) for name, file in files.items()}
    done = None
    for step in steps:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an input must not become a part of a script"
        given = {name: EXPRESSION.sub(lambda found: known[found[1]], text) for name, text in step["env"].items()}
        Path("step.sh").write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
            env={**os.environ, **environment, **fixed, **given}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            break
        for line in files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            known[f"steps.{step.get('id')}.outputs.{name}"] = value
    assert done is not None
    return Done(done.returncode, done.stdout + done.stderr, files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8"))


def inputs(**given: str) -> dict[str, str]:
    return {f"inputs.{name}": value for name, value in given.items()}


def gate(**given: str) -> Done:
    """Run the action with the onnxamp of this checkout."""
    program = Path("program").absolute()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m onnxamp "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    values = {**inputs(**given), "steps.install.outputs.program": str(program)}
    return act(ACTION["runs"]["steps"][1:], values, {"PYTHONPATH": str(ROOT)})


@pytest.mark.usefixtures("folder")
class TestAction:
    @pytest.mark.slow
    def test_good_models_pass(self) -> None:
        done = gate(models="models/*.onnx\noriginal.onnx\n")
        assert done.code == 0, done.output
        assert done.summary.count("### ✅ Nothing breaks.") == 3
        assert "**models/good one.onnx**" in done.summary
        assert done.summary in done.output

    @pytest.mark.slow
    def test_a_bad_model_fails_and_the_summary_says_why(self) -> None:
        done = gate(models="**/*.onnx", args="--static")
        assert done.code == 1, done.output
        assert "### ❌ The model fails to load or is known to break.\n\n**broken.onnx**" in done.summary

    @pytest.mark.slow
    def test_each_model_is_compared_with_the_original(self) -> None:
        done = gate(
            command="diff", original="original.onnx", models="models/*.onnx", args="--tolerance '1e-3' --seed 1"
        )
        assert done.code == 1, done.output
        assert "### ✅ The models agree" in done.summary
        assert "### ❌ The models differ by more than the limits allow." in done.summary
        assert "random inputs (seed 1)" in done.summary
        assert gate(command="diff", original="original.onnx", models="models/good one.onnx").code == 0

    @pytest.mark.slow
    def test_inputs_are_data(self) -> None:
        text = "'; touch owned; $(touch owned)`touch owned`"
        for name in ("models", "command", "original"):
            done = gate(**{"models": "original.onnx", "command": "diff", name: text})
            assert done.code == 2, done.output
        assert gate(models="original.onnx", args="--static $(touch owned) '`touch owned`; touch owned'").code != 0
        assert not Path("owned").exists()

    @pytest.mark.slow
    def test_what_cannot_be_read_is_in_the_summary(self) -> None:
        done = gate(models="nothing.onnx")
        assert done.code == 1
        assert done.summary.startswith("### ❌ Cannot read 'nothing.onnx'")

    def test_no_model_and_no_such_command_are_errors(self) -> None:
        assert "::error::No file matches" in gate(models="nothing/*.onnx").output
        assert "choose check or diff" in gate(models="original.onnx", command="convert").output


@pytest.mark.slow
@pytest.mark.usefixtures("folder", "index")
def test_the_action_installs_what_it_runs(tmp_path: Path) -> None:
    """First the checkout of the action, then the version that is asked for, from an index that has it."""
    steps, environment = ACTION["runs"]["steps"], {"PYTHONPATH": "", "PIP_FIND_LINKS": str(tmp_path)}
    done = act(steps, inputs(models="models/*.onnx"), environment)
    assert done.code == 0, done.output
    assert done.summary.count("### ✅") == 2
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    done = act(steps, inputs(models="broken.onnx", version=onnxamp.__version__), environment)
    assert done.code == 1, done.output
    assert done.summary.startswith("### ❌")


# --- the hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_hooks_run_commands_that_exist() -> None:
    def hook(name: str, *arguments: str) -> int:
        program, *words = shlex.split(HOOKS[name]["entry"])
        assert program == "onnxamp"
        return run(*words, *HOOKS[name].get("args", []), *arguments).exit_code

    assert hook("onnxamp-check", "original.onnx", "models/good one.onnx") == 0
    assert hook("onnxamp-check", "original.onnx", "broken.onnx") == 1
    assert hook("onnxamp-diff", "original.onnx", "models/good one.onnx") == 0
    assert hook("onnxamp-diff", "original.onnx", "models/poor.onnx", "--tolerance", "1e-3") == 1


@pytest.fixture
def index(tmp_path: Path) -> None:
    """A package index from which environments are built."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(tmp_path), "click"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index")


@pytest.mark.slow
@pytest.mark.usefixtures("index")
def test_pre_commit_runs_the_hook(folder: Path) -> None:
    """pre-commit builds an environment from this repository, and runs the hook there."""
    pytest.importorskip("pre_commit", reason="pre-commit is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    command = [sys.executable, "-m", "pre_commit", "try-repo", str(ROOT), "onnxamp-check", "--all-files"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^onnxamp check\.+Failed$", done.stdout, re.MULTILINE), done.stdout + done.stderr
    marks = {line.partition(": ")[0] for line in done.stdout.splitlines() if ".onnx: " in line}
    assert marks == {"? original.onnx", "? models/good one.onnx", "? models/poor.onnx", "✘ broken.onnx"}


# --- files and pages ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_fit_their_schemas(tmp_path: Path) -> None:
    """Those of GitHub and pre-commit, for the files of this repository and those that the page shows."""
    schema = (sys.executable, "-m", "check_jsonschema", "--builtin-schema")
    if subprocess.run([*schema[:3], "--version"], check=False, capture_output=True).returncode:
        pytest.skip("check-jsonschema is not installed, or not for this version of click")
    clientlib = pytest.importorskip("pre_commit.clientlib", reason="pre-commit is not installed")
    clientlib.load_manifest(ROOT / ".pre-commit-hooks.yaml")
    clientlib.load_config(ROOT / ".pre-commit-config.yaml")
    workflow, config = PAGE
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    clientlib.load_config(tmp_path / "config.yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    files = {
        "vendor.github-actions": [ROOT / "action.yml"],
        "vendor.github-workflows": [ROOT / ".github" / "workflows" / "ci.yml"],
        "vendor.github-issue-config": [path for path in forms if path.stem == "config"],
        "vendor.github-issue-forms": [path for path in forms if path.stem != "config"],
        "vendor.citation-file-format": [ROOT / "CITATION.cff"],
    }
    for name, paths in files.items():
        subprocess.run([*schema, name, *paths], check=True, capture_output=True)
    words = {"on" if key is True else key: value for key, value in workflow.items()}  # in YAML 1.1, "on" is true
    (tmp_path / "workflow.yml").write_text(yaml.safe_dump(words))
    subprocess.run([*schema, "vendor.github-workflows", tmp_path / "workflow.yml"], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_workflow_and_the_hooks_of_the_page_pass() -> None:
    workflow, config = PAGE
    original = onnx.load(ROOT / "models" / "encoder.onnx")
    saved(original, "models/encoder.onnx")
    saved(onnxamp.convert_model(original), "models/encoder_fp16.onnx")
    Path("samples").mkdir()
    np.savez("samples/first.npz", **onnxamp.random_samples(original)[0])
    steps = [step["with"] for step in workflow["jobs"]["gate"]["steps"] if step["uses"] == "./tools/onnxamp"]
    assert [step.get("command", "check") for step in steps] == ["check", "diff"]
    for step in steps:
        done = gate(**step)
        assert done.code == 0, done.output
        assert done.summary.count("### ✅") == 1
    (repository,) = config["repos"]
    assert repository["rev"] == f"v{onnxamp.__version__}"
    for hook in repository["hooks"]:
        _, *words = shlex.split(HOOKS[hook["id"]]["entry"])
        arguments = hook.get("args", [*HOOKS[hook["id"]].get("args", []), "models/encoder_fp16.onnx"])
        result = run(*words, *arguments)
        assert result.exit_code == 0, result.output
