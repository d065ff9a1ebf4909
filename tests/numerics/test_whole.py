"""Models on devices that compute in float16 whatever their types say: what breaks there, and what cures it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from repository import ROOT

import onnxamp
from onnxamp._base.errors import OptionWarning

STREAM = """(float[2,8] x) => (float[2,8] y) {
    [up] h = MatMul (x, w)
    [back] y = Mul (h, s)
}"""
FITS = "(float[2,8] x) => (float[2,8] y) { y = MatMul (x, w) }"


def stream(path: Path, text: str = STREAM) -> Path:
    """A value that reaches 80,000, and comes back to 1 in the end."""
    model = parse(text)
    weights = {"w": 1e4 * np.ones((8, 8), np.float32) if text is STREAM else np.eye(8, dtype=np.float32)}
    weights |= {"s": np.float32(1.25e-5)} if text is STREAM else {}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, path)
    np.savez(path.with_suffix(".npz"), x=np.ones((2, 8), np.float32))
    return path


def check(path: Path, *arguments: str) -> Any:
    return run("check", path, "--target", "float16-only", "--inputs", path.with_suffix(".npz"), *arguments)


def test_a_float32_model_is_checked_as_float16_and_exponents_cure_it(tmp_path: Path) -> None:
    path = stream(tmp_path / "m.onnx")
    done = check(path)
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert "'h' (output of MatMul node 'up'): overflow, which becomes NaN, in 16 of 16 elements" in text
    assert "float16 everywhere" in text
    assert "Tried: all values fit in a conversion with --rescale" in text
    others = text.count("onnxamp convert --rescale") + text.count("reaches with --rescale")
    assert text.count("--rescale") == others + 1, "the cure stands there once"
    assert run("check", path, "--inputs", path.with_suffix(".npz")).exit_code == 0, "elsewhere float32 is float32"


def test_float32_islands_protect_nothing_and_what_is_rescaled_fits(tmp_path: Path) -> None:
    path = stream(tmp_path / "m.onnx")
    feeds = dict(np.load(path.with_suffix(".npz")))
    islands, fitting = path.with_name("islands.onnx"), path.with_name("fitting.onnx")
    onnx.save(onnxamp.convert_model(path, keep_high=["up", "back"]), islands)
    onnx.save(onnxamp.convert_model(path, rescale=True, samples=[feeds]), fitting)
    for made in (islands, fitting):
        made.with_suffix(".npz").write_bytes(path.with_suffix(".npz").read_bytes())
    assert check(islands, "--no-cure").exit_code == 1
    done = check(fitting)
    assert done.exit_code == 0, done.stdout


@pytest.mark.slow
def test_one_op_in_place_of_a_decomposed_one_cures_it() -> None:
    done = run("check", ROOT / "models" / "decoder.onnx", "--target", "float16-only", "--provider", "cpu")
    assert done.exit_code == 1
    assert "--fold" in done.stdout.splitlines()[-1]


def test_without_a_cure_it_is_said_that_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parse("(float[4] x) => (float[4] y) { [grow] h = Exp (x) y = Relu (h) }"), path)
    np.savez(path.with_suffix(".npz"), x=np.full(4, 12, np.float32))
    done = check(path)
    assert done.exit_code == 1
    assert "even with --fold or --rescale, some values do not fit float16" in " ".join(done.stdout.split())


def test_what_fits_passes(tmp_path: Path) -> None:
    done = check(stream(tmp_path / "m.onnx", FITS))
    assert done.exit_code == 0, done.stdout
    assert "float32 protects no value" in done.stdout


def test_a_conversion_warns_that_types_protect_nothing(tmp_path: Path) -> None:
    path = stream(tmp_path / "m.onnx")
    with pytest.warns(OptionWarning, match="float16-only computes float32 nodes in float16 as well"):
        onnxamp.convert_model(path, keep_high=["up"], target="float16-only")


def test_a_model_that_does_not_run_ran_nowhere(tmp_path: Path) -> None:
    path = stream(
        tmp_path / "m.onnx", FITS.replace("y = MatMul (x, w)", "[same] a = MatMul (x, w) [same] y = Relu (a)")
    )
    done = check(path)
    assert done.exit_code == 1
    assert "  CPU, 1 sample of" in done.stdout
    assert "everywhere" not in done.stdout


def test_bfloat16_does_not_exist_there(tmp_path: Path) -> None:
    path = stream(tmp_path / "m.onnx")
    done = run("convert", path, "-o", tmp_path / "low.onnx", "--target", "float16-only", "--dtype", "bfloat16")
    assert done.exit_code == 2
    assert "float16-only computes only in float16, but dtype (--dtype) is bfloat16" in " ".join(done.output.split())
    assert not (tmp_path / "low.onnx").exists()


@pytest.mark.slow
def test_a_conversion_is_validated_as_it_runs_there(tmp_path: Path) -> None:
    path, low = stream(tmp_path / "m.onnx"), tmp_path / "low.onnx"
    ways = ["--keep-node", "up", "--keep-node", "back"], ["--rescale"]
    codes = {}
    for target in ("any", "float16-only"):
        for way in ways:
            done = run("convert", path, "-o", low, "--inputs", path.with_suffix(".npz"), "--target", target, *way)
            codes[target, way[0]] = done.exit_code
            if target == "float16-only":
                assert "emulated float16 everywhere" in " ".join(done.stdout.split())
            if done.exit_code:
                assert "Float32 nodes cannot fix it there, but --fold or --rescale may" in " ".join(done.output.split())
                assert low.with_name("low.failed.onnx").exists()
                assert not low.exists()
            low.unlink(missing_ok=True)
    assert codes == {
        ("any", "--keep-node"): 0, ("any", "--rescale"): 0,
        ("float16-only", "--keep-node"): 1, ("float16-only", "--rescale"): 0,
    }  # fmt: skip
