"""TensorRT-RTX builds engines in a process of its own, and what it refuses names the node and the cure."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import ModelProto
from real_models import REAL_MODELS
from repository import MODELS
from strategies import random_model

import onnxamp
from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime import building
from onnxamp._runtime.building import build_engine, refusal
from onnxamp._runtime.inputs.samples import as_samples, load_samples

WARP = """(float[1,1,4,4] x, float[1,4,4,2] grid) => (float[1,1,4,4] y) {
    h = Relu (x)
    [warp] y = GridSample (h, grid)
}"""
REFUSED = """(float16[1,1,4,4] x, float[1,4,4,2] grid) => (float16[1,1,4,4] y) {
    h = Relu (x)
    [warp] y = GridSample (h, grid)
}"""
OPEN = "(float[N,4] x) => (float[N,4] y) { [double] y = Add (x, x) }"


@pytest.mark.tensorrt
def test_an_engine_is_built_for_the_shapes_of_the_inputs() -> None:
    built = build_engine(Model.of(parse(OPEN)), {"x": np.zeros((3, 4), np.float32)})
    assert built.by.startswith("TensorRT-RTX ")
    assert built.refusals == ()
    assert built.size > 0
    (missing,) = build_engine(Model.of(parse(OPEN))).refusals
    assert "Dynamic input tensor x is missing dimensions" in missing.text


@pytest.mark.tensorrt
def test_numbers_of_inputs_that_are_shapes_are_given() -> None:
    model = parse("(float[6] x, int64[2] shape) => (float[N,M] y) { y = Reshape (x, shape) }")
    feeds = {"x": np.zeros(6, np.float32), "shape": np.array([2, 3])}
    assert build_engine(Model.of(model), feeds).refusals == ()


@pytest.mark.tensorrt
def test_a_refusal_names_the_node_the_rule_and_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parse(REFUSED, 20), path)
    audit = onnxamp.audit_model(path, "tensorrt", build={})
    assert audit.engine is not None
    assert not audit.engine.built
    (found,) = [finding for finding in audit.findings if finding.kind == "engine"]
    assert (found.severity, found.node, found.op) == ("error", "warp", "GridSample")
    assert "must be of same type" in found.text
    assert "node1." not in found.text
    assert "--keep-node NAME or --black GridSample" in found.action
    (said,) = [finding for finding in audit.findings if finding.kind == "kernel"]
    assert said.node == "warp", "the table knows it without building"


@pytest.mark.tensorrt
def test_a_node_without_a_name_is_known_by_its_output_even_in_a_body() -> None:
    model = parse("""(bool c, float16[2] x, float[2] z) => (float16[2] y) {
        y = If (c) <then_branch = a () => (float16[2] p) { p = Add (x, z) },
                    else_branch = b () => (float16[2] q) { q = Neg (x) }>
    }""")
    (found,) = build_engine(Model.of(model)).refusals
    assert found.node == "p"
    assert "must have same input types" in found.text


@pytest.mark.tensorrt
def test_a_model_without_an_opset_is_built_as_onnx_runtime_reads_it() -> None:
    model = parse("(float[3] x) => (float[3] y) { y = LogSoftmax (x) }")
    (known,) = build_engine(Model.of(model)).refusals  # since opset 13
    model.opset_import[0].CopyFrom(onnx.helper.make_opsetid("com.microsoft", 1))
    assert build_engine(Model.of(model)).refusals == (known,)


@pytest.mark.tensorrt
def test_weights_beside_the_model_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = parse("(float[2,64] x) => (float[2,64] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert build_engine(Model.read(path)).refusals == ()


@pytest.mark.tensorrt
def test_check_builds(tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "low.onnx"
    onnx.save(parse(WARP, 20), source)
    assert run("convert", source, "-o", target, "--level", "O3", "--target", "tensorrt", "--no-validate").exit_code == 0
    assert onnx.load(target) != onnx.load(source)
    done = run("check", target, "--target", "tensorrt", "--build", "--static", "--format", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["static"]["engine"]["built"] is True
    onnx.save(parse(REFUSED, 20), target)
    done = run("check", target, "--target", "tensorrt", "--build", "--static")
    assert done.exit_code == 1
    assert "TensorRT-RTX" in done.stdout
    assert "not built" in done.stdout


STAND_IN = """
import onnx
__version__ = "0"
class ILogger:
    ERROR, INTERNAL_ERROR = 1, 0
class NetworkDefinitionCreationFlag:
    STRONGLY_TYPED = 0
class Builder:
    num_inputs = 0
    nbytes = 8
    def __init__(self, log): pass
    def create_network(self, flags): return self
    create_builder_config = create_optimization_profile = lambda self: self
    def build_serialized_network(self, network, config): return self
class Error:
    def __init__(self, name): self.node_name = lambda: name
    def desc(self): return "the kernel is missing"
class OnnxParser:
    def __init__(self, network, log): pass
    def parse(self, data, path):
        nodes = onnx.ModelProto.FromString(data).graph.node
        self.errors = [Error(node.name) for node in nodes if REFUSED]
        self.num_errors = len(self.errors)
        return not self.errors
    def get_error(self, index): return self.errors[index]
"""
"""A builder that refuses nodes, for reasons of its own."""
TWO = """(float[2,4] x) => (float[2,4] y) {
    [first] h = MatMul (x, w) [middle] r = Relu (h) [last] y = MatMul (r, w)
}"""
CONVERT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from onnxamp._cli.command import group; group()"


def convert(folder: Path, refused: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``onnxamp convert --target tensorrt`` with a builder that refuses these nodes."""
    model = parse(TWO)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    onnx.save(model, folder / "model.onnx")
    (folder / "there" / "tensorrt_rtx").mkdir(parents=True)
    (folder / "there" / "tensorrt_rtx" / "__init__.py").write_text(STAND_IN.replace("REFUSED", refused))
    command = [sys.executable, "-c", CONVERT, str(folder / "there"), "convert", "model.onnx", "--provider", "cpu",
               "--target", "tensorrt", *arguments]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_a_result_that_is_not_built_keeps_the_named_nodes_in_float32(tmp_path: Path) -> None:
    done = convert(tmp_path, "node.op_type == 'MatMul' and node.input[0] == 'x_fp16'", "--format", "json")
    assert done.returncode == 0, done.stderr
    validation = json.loads(done.stdout)["validation"]
    assert validation["cure"]["nodes"] == ["first"]
    assert validation["loaded"].endswith("and TensorRT-RTX 0")
    failure = "TensorRT-RTX 0 does not build the result: the kernel is missing (first)."
    assert validation["cure"]["failure"] == failure


@pytest.mark.slow
def test_what_is_built_in_float32_is_never_put_in_place_unbuilt(tmp_path: Path) -> None:
    done = convert(tmp_path, "node.op_type == 'Cast'")
    assert done.returncode == 0, done.stderr
    assert "The model stays in float32" in done.stdout
    assert (tmp_path / "model_fp16.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.slow
def test_what_is_not_built_in_float32_either_is_no_fault_of_the_result(tmp_path: Path) -> None:
    done = convert(tmp_path, "True")
    assert done.returncode == 0, done.stderr
    assert "output matches the original" in " ".join(done.stdout.split())


def test_engines_are_built_for_tensorrt_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parse(OPEN), path)
    with pytest.raises(ArgumentError, match="No engine can be built for 'cuda': choose tensorrt"):
        onnxamp.audit_model(path, "cuda", build={})
    done = run("check", path, "--build", "--static")
    assert done.exit_code == 2
    assert "--target tensorrt" in done.output


def test_without_the_builder_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    with pytest.raises(RuntimeFailure, match=r"not installed: pip install 'onnxamp\[tensorrt\]'"):
        build_engine(Model.of(parse(OPEN)))


@pytest.mark.skipif(sys.platform == "win32", reason="processes end without signals")
def test_a_crash_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tensorrt_rtx"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    builder = building.EngineBuilder()
    assert find_spec("tensorrt_rtx") is not None
    (found,) = builder.build(parse(OPEN)).refusals
    assert found.text == "the process that builds it was ended by SIGABRT"
    builder.end()


LONG = """Invalid Node - y
ITensor::f: Error Code 4: API Usage Error (y: two types. In validateTypes at /_src/a.cpp:31)
[checkMacros.cpp::f::250] Error Code 1: Cuda Runtime (In f at /_src/b.cpp:2)"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (LONG, "y: two types"),
        ("Assertion failed: rank > 0: The rank must be known.", "Assertion failed: rank > 0: The rank must be known"),
        ("", "it does not say why"),
    ],
)
def test_refusals_are_told_without_places_in_sources(said: str, told: str) -> None:
    assert refusal(said) == told


def first_sample(path: Path) -> dict[str, Any]:
    given = path.with_suffix(".npz")
    samples = load_samples(given) if given.exists() else as_samples(None, Model.read(path), count=1, seed=0)
    return dict(samples[0])


@pytest.mark.slow
@pytest.mark.tensorrt
@pytest.mark.parametrize("path", [*MODELS, *REAL_MODELS], ids=lambda path: path.stem)
def test_models_that_build_in_float32_build_when_converted(path: Path) -> None:
    feeds = first_sample(path)
    original = Model.read(path)
    if refused := build_engine(original, feeds).refusals:
        pytest.skip(f"not built in float32: {refused[0].text}")
    seen: list[ModelProto] = []
    for dtype, level in (("float16", "O2"), ("float16", "O3"), ("bfloat16", "O2")):
        made = onnxamp.convert_model(original, level, dtype=dtype, target="tensorrt")
        if made not in seen:
            seen.append(made)
            assert build_engine(Model.of(made), feeds).refusals == (), (dtype, level)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("op", "seed"), [("GRU", 103), ("GridSample", 100), ("Mul", 104), ("RandomUniform", 104), ("Xor", 106)]
)
def test_random_models_build_when_converted(op: str, seed: int) -> None:
    made = random_model(Random(f"goal {op} {seed}"), op, 5)
    if refused := build_engine(Model.of(made.model), made.feeds).refusals:  # other versions of onnx draw other graphs
        pytest.skip(f"not built in float32: {refused[0].text}")
    for dtype, keeps in (("float16", True), ("bfloat16", True), ("bfloat16", False)):
        low = onnxamp.convert_model(made.model, "O3", dtype=dtype, target="tensorrt", keep_io_types=keeps)
        assert low != made.model
        assert build_engine(Model.of(low), made.feeds).refusals == (), (dtype, keeps)
