"""Without ONNX Runtime and scipy, models are converted all the same; what runs models says what to install."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from repository import ROOT

import onnxamp
from onnxamp._base import optional
from onnxamp._facts.dtypes import FORMATS
from onnxamp._model import weights

HIDDEN = "import sys; sys.modules.update(dict.fromkeys(('onnxruntime', 'scipy', 'openpyxl', 'safetensors')));"
ENCODER = ROOT / "models" / "encoder.onnx"


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """The command line in a process that cannot import these packages."""
    command = [sys.executable, "-W", "error", "-c", f"{HIDDEN} from onnxamp.__main__ import main; main()"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_convert_says_that_nothing_was_validated(tmp_path: Path) -> None:
    done = run("convert", ENCODER, "-o", tmp_path / "x.onnx")
    assert done.returncode == 0, done.stderr
    assert "Converted to float16; not validated." in done.stdout
    assert "ONNX Runtime is not installed: pip install 'onnxamp[cpu]'" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_result_is_the_same(dtype: str, tmp_path: Path) -> None:
    """Weights are converted by NumPy instead of ONNX Runtime's kernel, and large cuts by our own algorithm."""
    model = onnx.load(ENCODER)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(300, 300)).astype(np.float32)
    weight[:4, 0] = (np.inf, -np.inf, 1e-7, 7e4)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "large"))
    model.graph.node.append(onnx.helper.make_node("MatMul", ["large", "large"], ["product"], name="product"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("product", TensorProto.FLOAT, [300, 300]))
    onnx.save(model, tmp_path / "model.onnx")
    done = run("convert", tmp_path / "model.onnx", "-o", tmp_path / "x.onnx", "--dtype", dtype, "--no-validate")
    assert done.returncode == 0, done.stderr
    onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "y.onnx", dtype=dtype, validate=False)
    assert (tmp_path / "x.onnx").read_bytes() == (tmp_path / "y.onnx").read_bytes()


@pytest.mark.parametrize("low", FORMATS.values(), ids=FORMATS)
def test_numpy_rounds_as_the_kernel_does(low: object) -> None:
    """Every kind of float32, quiet and signaling NaN among them."""
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32)
    numbers = bits.view(np.float32)
    assert np.isnan(numbers).sum() > 500
    expected, found = (np.empty(numbers.size, low.patterns) for _ in range(2))
    weights._caster(TensorProto.FLOAT, low.elem)(numbers, expected)
    weights._cast_by_numpy(TensorProto.FLOAT, low.elem, numbers, found)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "view", "lists"])
def test_what_runs_nothing_works(command: str, tmp_path: Path) -> None:
    arguments = {"inspect": [ENCODER], "view": [ENCODER, "-o", tmp_path / "page.html"], "lists": ["default"]}
    done = run(command, *arguments[command])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", ENCODER],
        ["diff", ENCODER, ENCODER],
        ["bench", ENCODER],
        ["tune", ENCODER, "-o", "x.onnx"],
        ["convert", ENCODER, "-o", "x.onnx", "--rescale"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_runs_models_says_what_to_install(arguments: list[object]) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert "ONNX Runtime is not installed" in done.stderr
    assert "pip install 'onnxamp[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_functions_do_as_the_command_does(tmp_path: Path) -> None:
    code = f"""{HIDDEN}
import onnxamp
made = onnxamp.convert_file({str(ENCODER)!r}, {str(tmp_path / "x.onnx")!r})
print(made.validation.skipped)
print(onnxamp.plan_model({str(ENCODER)!r}).casts)
try:
    onnxamp.diff_models({str(ENCODER)!r}, {str(tmp_path / "x.onnx")!r})
except onnxamp.MissingPackageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ONNX Runtime is not installed") == 2


@pytest.mark.slow
def test_an_old_runtime_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.29.1")
    optional.runtime_fault.cache_clear()
    try:
        with pytest.raises(onnxamp.MissingPackageError, match=r"ONNX Runtime 1\.29\.1 .* 1\.30 or newer: pip install"):
            onnxamp.diff_models(ENCODER, ENCODER)
    finally:
        optional.runtime_fault.cache_clear()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(
        onnxamp.MissingPackageError, match=r"openpyxl, which is not installed: pip install 'onnxamp\[xlsx\]'"
    ):
        onnxamp.debugging.compare_models(ENCODER, ENCODER, tmp_path / "x.xlsx", onnxamp.random_samples(ENCODER)[0])


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would import it, as a package without contents."""
    (tmp_path / "quite_optional").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(onnxamp.MissingPackageError, match="This needs it, which is not installed"):
        optional.require("quite_optional", "This needs it", "ray")
