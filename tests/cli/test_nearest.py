"""A misspelled word brings a suggestion only if a name is near. All commands and functions follow the same rule."""

import re
from pathlib import Path

import onnx
import pytest
from commands import run, small
from graphs.case import parse

import onnxamp

MODEL = """(float[1,4] tokens) => (float[1,4] Y) <float[4,4] w = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}> {
    [encoder_mlp_up] h = MatMul (tokens, w)
    [encoder_mlp_act] a = Relu (h)
    [head] Y = Softmax (a)
}"""

KEYWORDS = {
    "levl": "level", "leevl": "level", "dtpe": "dtype", "whitelist": "white_list", "blak_list": "black_list",
    "keep_hihg": "keep_high", "targt": "target", "rescal": "rescale", "opest": "opset", "io_types": "keep_io_types",
    "speed": None, "quantize": None, "foo": None, "device": None,
}  # fmt: skip
COMMANDS = {
    "cnvert": "convert", "convret": "convert", "tnue": "tune", "dif": "diff", "chekc": "check", "inpsect": "inspect",
    "benhc": "bench", "export": None, "quantize": None, "run": None,
}  # fmt: skip
OPTIONS = {
    "--levle": "--level", "--targt": "--target", "--outptu": "--output", "--keepfp32": "--keep-fp32",
    "--keep_fp32": "--keep-fp32", "--wihte": "--white", "--htlm": "--html", "--wheels": None, "--gpu": None,
}  # fmt: skip
CHOICES = {
    ("--level", "auot"): "auto", ("--target", "cdua"): "cuda", ("--target", "tensort"): "tensorrt",
    ("--target", "coreml"): None, ("--target", "gpu"): None, ("--dtype", "float61"): "float16",
    ("--dtype", "int8"): None, ("--lists", "defalt"): "default", ("--provider", "cudaa"): "cuda",
    ("--white", "Sofmax"): "Softmax", ("--white", "Foo"): None, ("--keep-node", "encoder_mlp_pu"): "encoder_mlp_up",
    ("--keep-node", "decoder_7"): None, ("--force-low", "hed"): "head", ("--dim", "bach=1"): None,
}  # fmt: skip


def proposed(text: str) -> str | None:
    found = re.search(r"[Dd]id you mean '([^']+)'\?", " ".join(text.split()))
    return found and found[1]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("typed", "near"), KEYWORDS.items())
def test_of_python_keywords(typed: str, near: str | None) -> None:
    with pytest.raises(onnxamp.ArgumentTypeError) as caught:
        onnxamp.convert_model(parse(MODEL), **{typed: "O2"})
    assert proposed(str(caught.value)) == near


@pytest.mark.parametrize(("typed", "near"), COMMANDS.items())
def test_of_commands(typed: str, near: str | None) -> None:
    called = run(typed, "model.onnx")
    assert called.exit_code == 2
    assert proposed(called.output) == near


@pytest.mark.parametrize(("typed", "near"), OPTIONS.items())
def test_of_options(typed: str, near: str | None) -> None:
    called = run("convert", small(), typed, "x")
    assert called.exit_code == 2
    assert f"No such option '{typed}'." in called.output
    assert proposed(called.output) == near


@pytest.mark.parametrize(("typed", "near"), CHOICES.items())
def test_of_values(typed: tuple[str, str], near: str | None) -> None:
    onnx.save(parse(MODEL), "model.onnx")
    called = run("convert", "model.onnx", "-o", "out.onnx", *typed)
    assert proposed(called.output) == near


@pytest.mark.parametrize(("typed", "near"), {"updat": "update", "scal": "scale", "quantize": None}.items())
def test_of_attributes(typed: str, near: str | None) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(onnxamp.amp.GradScaler(), typed)
    assert proposed(str(caught.value)) == near
