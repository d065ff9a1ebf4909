"""Shell completion, as the shells ask for it, and in a shell itself."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from doc_pages import blocks
from repository import ROOT

from onnxamp._cli.command import group
from onnxamp._cli.summary import COMMANDS
from onnxamp._facts.targets import targets
from onnxamp._options.command_line import option_rows

BASH, ZSH, FISH, SAVED = (
    block.text for block in blocks(ROOT / "docs" / "how-to" / "options.md") if "_ONNXAMP_COMPLETE" in block.text
)
"""What the page tells to put into startup files."""


def asked(shell: str, line: str) -> str:
    """What the program answers a shell; the last word of the line is to be completed."""
    words = line.split(" ")
    position = words[-1] if shell == "fish" else str(len(words) - 1)
    environment = {"_ONNXAMP_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": position}
    command = [sys.executable, "-m", "onnxamp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.stderr == ""
    return done.stdout


def offered(line: str) -> list[str]:
    """The words that a shell is offered; the type where it is to complete by itself."""
    _, *words, begun = line.split(" ")
    items = ShellComplete(group, {}, "onnxamp", "_ONNXAMP_COMPLETE").get_completions(words, begun)
    return [item.value if item.type == "plain" else item.type for item in items]


class TestWords:
    def test_commands(self) -> None:
        assert offered("onnxamp ") == list(COMMANDS)
        assert offered("onnxamp con") == ["convert"]
        assert offered("onnxamp --") == ["--version", "--help"]

    @pytest.mark.parametrize("command", COMMANDS)
    def test_all_options(self, command: str) -> None:
        """Those that --help leaves out as well."""
        flags = {
            flag
            for row in option_rows()
            if command in row.commands
            for flag in row.flags.replace("/", ", ").split(", ")
            if flag.startswith("--")
        }
        assert set(offered(f"onnxamp {command} --")) == flags | {"--help", "--help-all"}

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("convert m.onnx --level ", ["O0", "O1", "O2", "O3", "auto"]), ("train m.onnx --dtype b", ["bfloat16"]),
            ("convert --dtype=f", ["float16"]), ("convert m.onnx --target ", [*targets(), "auto"]),
            ("check --target w", ["webgpu"]), ("diff a.onnx b.onnx --provider c", ["cuda", "cpu"]),
            ("tune m.onnx --device H", ["H100", "H200"]), ("tune m.onnx --metric c", ["cosine"]),
            ("convert m.onnx --keep-fp32 a --preset ", ["transformers.js"]), ("lists p", ["paddle"]),
            ("convert --opset k", ["keep"]), ("convert m.onnx --keep-fp32 ", []),
            ("convert m.onnx --dim", ["--dim"]), ("convrt --he", ["--help"]),
            ("convert s3://bucket/m.onnx --resc", ["--rescale"]),
        ],
    )  # fmt: skip
    def test_values(self, line: str, words: list[str]) -> None:
        assert offered(f"onnxamp {line}") == words

    @pytest.mark.parametrize(
        "line",
        ["convert mod", "convert m.onnx -o mod", "diff a.onnx mod", "convert --custom-ops mod", "train --data mod"],
    )
    def test_files_are_left_to_the_shell(self, line: str) -> None:
        assert offered(f"onnxamp {line}") == ["file"]

    def test_values_are_not_checked_yet(self) -> None:
        """What is wrong is told when the command runs."""
        assert offered("onnxamp convert m.onnx --target nowhere --dtype int3 --opset x --dim y --tole") == [
            "--tolerance"
        ]


class TestShells:
    def test_bash_completes_files_itself(self) -> None:
        assert asked("bash", "onnxamp convert mod") == "file,mod\n"

    def test_zsh_and_fish_show_the_line_of_help(self) -> None:
        assert asked("zsh", "onnxamp convert --keep-fp") == "plain\n--keep-fp32\nKeep matching nodes in float32.\n"
        assert asked("fish", "onnxamp convert --keep-fp") == "plain,--keep-fp32\tKeep matching nodes in float32.\n"

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_scripts_name_the_program(self, shell: str) -> None:
        environment = os.environ | {"_ONNXAMP_COMPLETE": f"{shell}_source"}
        command = [sys.executable, "-m", "onnxamp"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert f"_ONNXAMP_COMPLETE={shell}_complete" in done.stdout
        assert "_onnxamp_completion" in done.stdout

    @pytest.fixture
    def program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The program, as a shell finds it."""
        path = tmp_path / "bin" / "onnxamp"
        path.parent.mkdir()
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m onnxamp "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
        return path

    @pytest.mark.mostly_slow(fast=2)
    @pytest.mark.usefixtures("program")
    @pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
    @pytest.mark.parametrize(
        ("words", "replies"),
        [(("con",), ["convert"]), (("check", "m.onnx", "--sta"), ["--static", "--state"]),
         (("convert", "m.onnx", "--dtype", ""), ["float16", "bfloat16"])],
    )  # fmt: skip
    @pytest.mark.parametrize("begin", [BASH, SAVED], ids=["evaluated", "saved"])
    def test_bash_completes(
        self, words: tuple[str, ...], replies: list[str], begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        script = f"""
            {begin}
            complete -p onnxamp
            COMP_WORDS=(onnxamp {shlex.join(words)}) COMP_CWORD={len(words)}
            _onnxamp_completion onnxamp
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
        registered, *lines = done.stdout.splitlines()
        assert registered.startswith("complete ")
        assert lines == replies

    @pytest.mark.usefixtures("program")
    @pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
    def test_fish_completes(self) -> None:
        script = f"{FISH} complete -C 'onnxamp convert m.onnx --dtype '"
        done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["bfloat16", "float16"]

    @pytest.mark.usefixtures("program")
    @pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
    def test_zsh_registers(self) -> None:
        script = f"autoload -Uz compinit; compinit -u; {ZSH} print $_comps[onnxamp]"
        done = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "_onnxamp_completion"


@pytest.mark.parametrize("line", ["onnxamp con", "onnxamp convert m.onnx --ta", "onnxamp convert m.onnx --target w"])
def test_no_numpy_is_imported(line: str) -> None:
    """Importing it takes longer than completion may."""
    report = "print({'numpy', 'onnx', 'rich'} & {*sys.modules})"
    code = f"import sys; from onnxamp.__main__ import main\ntry: main()\nfinally: {report}"
    words = str(len(line.split()) - 1)
    environment = {"_ONNXAMP_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": words}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    *completions, loaded = done.stdout.splitlines()
    assert len(completions) == 1
    assert loaded == "set()"
