"""Options that other software wants, under one name."""

from pathlib import Path

import onnx
import pytest
from commands import run
from repository import ROOT

import onnxamp

ENCODER = ROOT / "models" / "encoder.onnx"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(ENCODER.read_bytes())
    return path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"model.onnx"}


@pytest.mark.slow
def test_files_are_as_transformers_js_reads_them(source: Path) -> None:
    """Names as in its getExternalDataChunkNames; made again with other numbers of files, none is left over."""
    for size, count in ((None, 1), ("20kB", 11), ("50kB", 4), (None, 1)):
        options = ("--shard-size", size) if size else ()
        made = run(
            "convert", source, "--preset", "transformers.js", "--external-data", "always", "--no-validate", *options
        )
        assert made.exit_code == 0, made.output
        chunks = {f"model_fp16.onnx_data{f'_{number}' if number else ''}" for number in range(count)}
        assert files(source.parent) == {"model_fp16.onnx"} | chunks
    model, original = onnx.load(source.with_name("model_fp16.onnx")), onnx.load(source)
    onnx.checker.check_model(model)
    for ports in ("input", "output"):
        kinds = [[entry.type.tensor_type.elem_type for entry in getattr(m.graph, ports)] for m in (model, original)]
        assert kinds[0] == kinds[1], "inputs and outputs keep their types"
    assert any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)


def test_options_that_are_given_replace_those_of_a_preset(source: Path, tmp_path: Path) -> None:
    targets = {}
    for name, options in (("preset", ()), ("given", ("--target", "cuda", "--data-names", "onnx"))):
        plan = tmp_path / f"{name}.json"
        made = run("convert", source, "-o", tmp_path / f"{name}.onnx", "--preset", "transformers.js", "--no-validate",
                   "--external-data", "always", "--save-plan", plan, *options)  # fmt: skip
        assert made.exit_code == 0, made.output
        targets[name] = onnxamp.load_plan(plan).target
    assert targets == {"preset": "webgpu", "given": "cuda"}
    assert {"preset.onnx_data", "given.onnx.data"} <= files(tmp_path)


def test_python_has_the_names_too(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "low.onnx"
    onnxamp.convert_file(source, target, external_data="always", data_names="transformers.js", validate=False)
    assert files(tmp_path) == {"low.onnx", "low.onnx_data"}
    with pytest.raises(
        onnxamp.ArgumentError, match=r"Unknown data_names 'safetensors': choose one of onnx, transformers\.js"
    ):
        onnxamp.convert_file(source, target, data_names="safetensors", validate=False)


def test_folders_get_the_names_of_the_preset(source: Path, tmp_path: Path) -> None:
    options = ("--preset", "transformers.js", "--external-data", "always", "--no-validate")
    made = run("convert", source.parent, "-o", tmp_path / "out", *options)
    assert made.exit_code == 0, made.output
    assert {"model.onnx", "model.onnx_data"} <= {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(onnxamp.ArgumentError, match="Unknown data_names 'safetensors'"):
        onnxamp.convert_folder(source.parent, tmp_path / "other", data_names="safetensors")
    assert not (tmp_path / "other").exists()
    assert "transformers.js" in run("tune", "--help-all").output


def test_a_plan_overrides_a_preset(source: Path) -> None:
    plan = source.with_name("plan.json")
    assert run("convert", source, "-q", "--no-validate", "--save-plan", plan).exit_code == 0
    options = ("--plan", plan, "--preset", "transformers.js", "--black", "Relu")
    made = run("convert", source, "-q", "--no-validate", *options)
    assert made.stderr == "Warning: The plan overrides --black, the options of --preset.\n"
