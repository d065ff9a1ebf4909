"""What a check says of values beyond float16's range: whether they fit with exponents, or what forbids one."""

import json

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp
from onnxamp._model.model import Model
from onnxamp._numerics.check import check_run
from onnxamp._numerics.results import RangeFit
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.cure_check import find_fit

STREAM = """(float[2,8] X) => (float[2,8] Y) {
    h = MatMul (X, w) r = Relu (h) n = RMSNormalization (r, gain) Y = MatMul (n, v) }"""
"""``h`` and ``r`` overflow, and a normalization takes the exponent away."""
SOFTPLUS = "(float[2,8] X) => (float[2,8] Y) { h = MatMul (X, w) t = Softplus (h) s = Sqrt (t) Y = Tanh (s) }"
"""No exponent passes through ``t``."""

FEEDS = {"X": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}


def model(text: str, size: float) -> ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((8, 8)) * size, "v": rng.standard_normal((8, 8)), "gain": np.ones(8)}
    used = {name: array.astype(np.float32) for name, array in weights.items() if f"{name})" in text}
    return add_weights(parse(text, 23), used)


def careless(text: str, size: float) -> ModelProto:
    return onnxamp.convert_model(model(text, size), "O3", hazards=False)


def fit(proto: ModelProto) -> RangeFit | None:
    samples = as_samples(FEEDS, proto)
    return find_fit(Model.of(proto), check_run(proto, samples, provider="cpu"), Run(inputs=samples, provider="cpu"))


@pytest.mark.parametrize("made", [model, careless])
def test_what_fits_with_exponents(made) -> None:
    found = fit(made(STREAM, 1e5))
    assert found is not None
    assert found.tried
    assert [row.value for row in found.fitting] == [row.value for row in found.values] == ["h", "r"]
    assert all(row.largest > 65504 > row.largest * 2.0**-row.exponent for row in found.values)


@pytest.mark.parametrize("made", [model, careless])
def test_what_does_not(made) -> None:
    found = fit(made(SOFTPLUS, 2e4))
    assert found is not None
    assert found.fitting == ()
    assert not found.tried
    assert "'t' (Softplus)" in {row.value: row.why for row in found.values}["t"]


def test_nothing_is_said_where_all_fits() -> None:
    assert fit(model(STREAM, 1e2)) is None
    assert fit(onnxamp.convert_model(model(STREAM, 1e5), "O3", dtype="bfloat16", target="any")) is None


@pytest.mark.slow
def test_the_command_says_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", **FEEDS)
    onnx.save(model(STREAM, 1e5), "full.onnx")
    onnx.save(careless(STREAM, 1e5), "bad.onnx")
    onnx.save(model(SOFTPLUS, 2e4), "never.onnx")
    good = run("check", "full.onnx", "--inputs", "in.npz", "--target", "any")
    assert good.exit_code == 0, good.output
    assert "2 values do not fit float16, and are float32: the largest" in " ".join(good.output.split())
    assert "All fit with onnxamp convert --rescale." in good.output
    bad = run("check", "bad.onnx", "--inputs", "in.npz", "--target", "any")
    assert bad.exit_code == 1
    assert "float32" not in bad.output.partition("do not fit float16")[2].partition("reaches")[0]
    assert "Tried: no fault is left with --rescale" in bad.output
    again = run("convert", "bad.onnx", "-o", "good.onnx", "--level", "O3", "--rescale", "--from", "float16", "--inputs",
                "in.npz", "--target", "any", "-q")  # fmt: skip
    assert again.exit_code == 0, again.output
    assert check_run("good.onnx", FEEDS, provider="cpu").first_bad is None
    never = run("check", "never.onnx", "--inputs", "in.npz", "--format", "json")
    assert not any(row["exponent"] for row in json.loads(never.output)["run"]["fit"]["values"])
    assert "--rescale cannot bring" in run("check", "never.onnx", "--inputs", "in.npz").output
