"""Files are loaded by ONNX Runtime in a process that may crash, and results that do not load are not written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import parse
from onnx import TensorProto, numpy_helper

import onnxamp
from onnxamp._base.executor import ending
from onnxamp._model.model import Model
from onnxamp._runtime.loading import Loader, load_file

GOOD = "(float[2] x) => (float[2] y) { y = Neg (x) }"


def save(path: Path, text: str = GOOD, **options: int) -> Path:
    onnx.save(parse(text, **options), path)
    return path


def unloadable(path: Path) -> Path:
    model = parse("(float[2] x) => (float[2] y) { [sum] y = Add (x, x) }")
    model.graph.input.append(onnx.helper.make_tensor_value_info("z", TensorProto.FLOAT16, [2]))
    model.graph.node[0].input[1] = "z"
    onnx.save(model, path)
    return path


def test_what_onnx_runtime_loads(tmp_path: Path) -> None:
    loader = Loader()
    good, bad = save(tmp_path / "good model.onnx"), unloadable(tmp_path / "bad model.onnx")
    for provider in (None, "cpu"):
        loaded = loader.load(good, provider)
        assert loaded.fault == ""
        assert loaded.by.startswith("ONNX Runtime 1.")
        fault = loader.load(bad, provider).fault
        assert fault.startswith("Type Error: Type parameter (T) of Optype (Add) bound to different types")
        assert "(sum)" in fault
    assert loader.load(good, "cpu").where("cpu").endswith(" on CPU")
    loader.end()


def test_kernels_count_only_on_the_provider_that_is_meant(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", "(bfloat16[2] x) => (bfloat16[2] y) { y = Exp (x) }")
    loader = Loader()
    assert loader.load(path, None).fault == ""
    assert "Could not find an implementation for Exp" in loader.load(path, "cpu").fault
    loader.end()


@pytest.mark.parametrize("data", ["inside", "beside"])
def test_the_weights_of_a_large_file_are_not_read_for_its_graph(data: str, tmp_path: Path) -> None:
    """What is written there is no matter: the test takes it away."""
    path = tmp_path / "m.onnx"
    model = parse("(float[2,2048] x) => (float[2,2048] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((2048, 2048), np.float32), "w"))
    onnx.save(model, path, save_as_external_data=data == "beside", location="m.data", size_threshold=0)
    opened = Model.read(path)
    if data == "beside":
        (tmp_path / "m.data").write_bytes(b"")
    loaded = load_file(opened, None, whole=False)
    assert (loaded.fault, loaded.limit) == ("", "its weights were not read")


def test_a_session_is_started_although_another_provider_is_meant(tmp_path: Path) -> None:
    """Whatever fails there is a fault, but for kernels that only this provider lacks."""
    loader = Loader()
    lacking = loader.load(save(tmp_path / "m.onnx", "(bfloat16[2] x) => (bfloat16[2] y) { y = Exp (x) }"), None)
    assert lacking.fault == ""
    assert lacking.limit.startswith("Could not find an implementation for Exp")
    assert loader.load(save(tmp_path / "n.onnx"), None).limit == ""
    backwards = "(float[1,1,2] x, float[1,12,2] w, float[1,12,3] r) => (float[1,1,1,3] y) {"
    backwards += " y = LSTM <hidden_size = 3, layout = 1> (x, w, r) }"
    assert "layout" in loader.load(save(tmp_path / "k.onnx", backwards), None).fault
    loader.end()


STAND_IN = {
    "onnxruntime/__init__.py": """
__version__ = "0"
class SessionOptions:
    pass
""",
    "onnxruntime/capi/__init__.py": "",
}
"""An ONNX Runtime for the process that loads."""
ABORTS = "import os\nos.abort()\n"
REFUSES = """
import onnx
class InferenceSession:
    def __init__(self, options, path, *_):
        graph = onnx.load(path).graph
        read = {name for node in graph.node for name in node.input}
        low = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
        if CONDITION:
            import os
            FAIL
    def initialize_session(self, *_): pass
"""
"""Refuses or crashes."""


def refusing(condition: str, fail: str = "raise RuntimeError('Type Error in node (first)')") -> str:
    return REFUSES.replace("CONDITION", condition).replace("FAIL", fail)


def stand_in(folder: Path, state: str) -> Path:
    files = {**STAND_IN, "onnxruntime/capi/onnxruntime_pybind11_state.py": state}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("provider", [None, "cpu"])
def test_a_model_in_text_is_loaded_as_the_file_that_it_stands_for(provider: str | None, tmp_path: Path) -> None:
    path = tmp_path / "m.onnxtxt"
    path.write_text('<ir_version: 8, opset_import: ["" : 17]> m (float[2] x) => (float[2] y) { y = Neg (x) }')
    assert load_file(Model.read(path), provider, in_text=True).fault == ""
    path.write_text('<ir_version: 8, opset_import: ["" : 17]> m (bfloat16[2] x) => (bfloat16[2] y) { y = Exp (x) }')
    assert bool(load_file(Model.read(path), provider, in_text=True).fault) == (provider == "cpu")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes end without signals")
def test_a_crash_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(stand_in(tmp_path / "crashing", ABORTS))
    loader = Loader()
    path = save(tmp_path / "m.onnx")
    assert loader.load(path, None).fault == "the process that loads it was ended by SIGABRT"
    monkeypatch.undo()
    assert loader.load(path, None).fault == "", "the next one gets a process of its own"
    loader.end()


def test_endings_have_names() -> None:
    assert ending(3) == "ended with exit code 3"
    assert ending(-11) == "was ended by SIGSEGV"
    assert ending(-250) == "was ended by signal 250"


# --- convert ------------------------------------------------------------------------------------------------------

TWO = """(float[2,4] x) => (float[2,4] y) {
    [first] h = MatMul (x, w) [middle] r = Relu (h) [last] y = MatMul (r, w)
}"""
CONVERT = (
    "import sys, onnxruntime; sys.path.insert(0, sys.argv.pop(1)); from onnxamp._cli.command import group; group()"
)


def convert(folder: Path, state: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``onnxamp convert`` with an ONNX Runtime that refuses what ``state`` says, in the loading process alone."""
    model = parse(TWO)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    onnx.save(model, folder / "model.onnx")
    there = stand_in(folder / "there", state)
    command = [sys.executable, "-c", CONVERT, str(there), "convert", "model.onnx", "--provider", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
def test_a_result_that_does_not_load_keeps_what_the_runtime_names_in_float32(tmp_path: Path) -> None:
    done = convert(tmp_path, refusing("'x_fp16' in read"), "--format", "json")
    assert done.returncode == 0, done.stderr
    validation = json.loads(done.stdout)["validation"]
    assert validation["cure"]["nodes"] == ["first"]
    assert validation["cure"]["confirmed"] is True
    assert "does not load the result: Type Error in node (first)" in validation["cure"]["failure"]
    assert validation["loaded"] == "ONNX Runtime 0"
    kept = onnxamp.convert_model(str(tmp_path / "model.onnx"), keep_high=["first"])
    assert onnx.load(tmp_path / "model_fp16.onnx") == kept


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes end without signals")
def test_a_result_that_cannot_be_made_to_load_stays_float32(tmp_path: Path) -> None:
    done = convert(tmp_path, refusing("low", "os.abort()"), "-v")
    assert done.returncode == 0, done.stderr
    assert "The model stays in float32: no conversion passed validation." in done.stdout
    assert "was ended by SIGABRT" in done.stdout
    assert (tmp_path / "model_fp16.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.slow
def test_without_a_cure_a_result_that_does_not_load_is_kept_apart(tmp_path: Path) -> None:
    done = convert(tmp_path, refusing("'x_fp16' in read"), "--no-cure")
    assert done.returncode == 1
    assert "ONNX Runtime 0 does not load the result: Type Error in node (first)." in done.stderr
    assert (tmp_path / "model_fp16.failed.onnx").exists()
    assert not (tmp_path / "model_fp16.onnx").exists()


@pytest.mark.slow
def test_what_the_original_has_as_well_is_no_fault_of_the_result(tmp_path: Path) -> None:
    done = convert(tmp_path, refusing("True"), "-v")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())  # lines end where a terminal does
    assert "the output matches the original, but neither loads." in printed
    assert "Neither the original nor the result loads in ONNX Runtime 0: Type Error in node (first)." in printed
    assert "loads in ONNX Runtime 0," not in done.stdout


ATTENTION = """(float[N,S,16] q, float[N,S,8] k, float[N,S,8] v, int32[N] lengths, int32[1] total)
    => (float[N,S,16] y, float[N,1,T,8] new_k, float[N,1,T,8] new_v) {
    y, new_k, new_v = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1>
        (q, k, v, , , lengths, total) }"""


def test_a_kernel_that_ends_the_process_ends_another_one() -> None:
    """On an empty batch, GroupQueryAttention divides by its size (ONNX Runtime 1.31.1)."""
    model = Model.of(parse(ATTENTION, 20))
    loader = Loader()
    found = []
    for batch in (1, 0, 1):
        feeds = {name: np.ones((batch, 4, size), np.float32) for name, size in {"q": 16, "k": 8, "v": 8}.items()}
        feeds["lengths"] = np.full(batch, 3, np.int32)
        feeds["total"] = np.array([4], np.int32)
        found.append(loader.runs(model, feeds))
    assert found in ([True, False, True], [True, True, True])
    loader.end()
