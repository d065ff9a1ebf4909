"""The pass for Olive's workflows, run by Olive itself."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest
from doc_pages import blocks
from repository import ROOT

import onnxamp

if find_spec("olive.passes") is None:
    pytest.skip("Olive is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow
(WORKFLOW,) = (block.text for block in blocks(ROOT / "docs" / "how-to" / "olive.md") if block.kind == "json")


@pytest.fixture(scope="module")
def package() -> str:
    """Olive's package configuration with the pass."""
    return call("-m", "onnxamp.olive").stdout


@pytest.fixture(autouse=True)
def folder(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the models and the package configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")
    Path("models").symlink_to(ROOT / "models")
    Path("package.json").write_text(package, encoding="utf-8")


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def workflow(*passes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    named = {f"pass{number}": row for number, row in enumerate(passes)}
    return json.loads(WORKFLOW) | {"passes": named} | changes


def olive(config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    Path("workflow.json").write_text(json.dumps(config), encoding="utf-8")
    return call("-m", "olive", "run", "--config", "workflow.json", "--package-config", "package.json")


def test_a_workflow_writes_what_the_function_writes() -> None:
    done = olive(workflow({"type": "OnnxAmp", "level": "O3", "dtype": "bfloat16", "black_list": ["Softmax"]}))
    assert done.returncode == 0, done.stderr
    onnxamp.convert_file("models/encoder.onnx", "expected.onnx", "O3", dtype="bfloat16", black_list=["Softmax"])
    assert Path("converted/model.onnx").read_bytes() == Path("expected.onnx").read_bytes()


def test_the_workflow_of_the_page_runs() -> None:
    """With a pass of Olive's before it."""
    done = olive(json.loads(WORKFLOW))
    assert done.returncode == 0, done.stderr
    report = onnxamp.diff_models("models/encoder.onnx", "converted/model.onnx", tolerance=5e-3)
    assert report.passed
    assert report.lowest == "float16"


def test_weights_beside_the_model_stay_beside_it() -> None:
    model = onnx.load("models/encoder.onnx")
    onnx.save(model, "big.onnx", save_as_external_data=True, location="big.data", size_threshold=0)
    source = {"type": "OnnxModel", "model_path": "big.onnx"}
    done = olive(workflow({"type": "OnnxAmp"}, input_model=source))
    assert done.returncode == 0, done.stderr
    assert len(list(Path("converted").glob("*.data"))) == 1
    assert onnxamp.diff_models("models/encoder.onnx", "converted/model.onnx").passed


@pytest.mark.parametrize(
    ("accelerator", "target"),
    [
        ({"device": "gpu", "execution_providers": ["WebGpuExecutionProvider"]}, "webgpu"),
        ({"device": "cpu", "execution_providers": ["OpenVINOExecutionProvider"]}, "openvino"),
        ({"device": "npu", "execution_providers": ["QNNExecutionProvider"]}, "cuda"),
    ],
)
def test_the_target_is_that_of_the_provider(accelerator: dict[str, Any], target: str) -> None:
    from olive.hardware import AcceleratorSpec

    from onnxamp.olive import OnnxAmp

    spec = AcceleratorSpec(accelerator["device"], accelerator["execution_providers"][0])
    assert OnnxAmp.generate_config(spec, disable_search=True).target == target
    assert OnnxAmp.generate_config(spec, {"target": "cpu"}, disable_search=True).target == "cpu"


def test_what_is_wrong_with_an_option_is_said() -> None:
    done = olive(workflow({"type": "OnnxAmp", "level": "O7"}))
    assert done.returncode != 0
    assert "O7" in done.stderr + done.stdout
    assert not list(Path("converted").rglob("*.onnx"))
