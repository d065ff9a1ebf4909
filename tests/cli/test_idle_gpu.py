"""A GPU package of ONNX Runtime on a machine without a GPU: commands say on a terminal that the CPU ran the models."""

from pathlib import Path

import onnxruntime as ort
import pytest
from commands import run, small
from cuda_double import forgotten

from onnxamp._runtime.sessions import session

CUDA = "CUDAExecutionProvider"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onnxamp._cli.printing.is_screen", lambda _: True)
    monkeypatch.setattr(session, "device_present", lambda: False)
    monkeypatch.setattr(session, "runtime_package", lambda: "onnxruntime-gpu 1.31.1")


def told(monkeypatch: pytest.MonkeyPatch, providers: list[str], *arguments: object) -> str:
    """What a command says under its report."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: providers)
    with forgotten():
        called = run(*arguments)
    assert called.exit_code == 0, called.output
    return "\n".join(line for line in called.output.splitlines() if line.startswith("Note: "))


@pytest.mark.parametrize("command", ["convert", "diff", "check", "bench"])
def test_a_gpu_package_without_a_gpu(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    model = small()
    output = ("-o", "out.onnx") if command == "convert" else ()
    models = (model, model) if command == "diff" else (model,)
    said = told(monkeypatch, [CUDA, "CPUExecutionProvider"], command, *models, *output)
    assert said == "Note: onnxruntime-gpu 1.31.1 found no GPU, so models ran on the CPU."


def test_a_gpu_package_that_onnxamp_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch, ["DmlExecutionProvider", "CPUExecutionProvider"], "diff", small(), small())
    assert "DmlExecutionProvider" in said


@pytest.mark.parametrize("arguments", [(), ("--provider", "cpu"), ("-q",), ("--format", "json")])
def test_nothing_is_said_otherwise(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    providers = [CUDA, "CPUExecutionProvider"] if arguments else ["CPUExecutionProvider"]
    assert told(monkeypatch, providers, "diff", small(), small(), *arguments) == ""
