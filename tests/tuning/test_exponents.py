"""Tuning with exponents by itself: where values overflow, it tunes with and without, and keeps what is better."""

from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from onnx import ModelProto

import onnxamp

STREAM = """(float[64,512] X) => (float[64,512] Y) {
    h = MatMul (X, w) r = Relu (h) n = RMSNormalization (r, gain) Y = MatMul (n, v) }"""
"""``h`` and ``r`` overflow, and a normalization takes the exponent away."""

BOTH = """(float[64,512] X) => (float[64,512] Y) {
    h = MatMul (X, w) r = Relu (h) n = RMSNormalization (r, gain)
    a = MatMul (n, v) b = MatMul (a, u) t = Softplus (b) s = Sqrt (t) Y = Mul (s, n) }"""
"""As ``STREAM``, and then no exponent passes through ``t``, which overflows too."""

FEEDS = {"X": np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)}


def model(text: str, size: float = 2e4) -> ModelProto:
    rng = np.random.default_rng(0)
    sizes = {"u": size / 6, "w": size / 6, "v": 1 / 22}
    weights = {name: rng.standard_normal((512, 512)) * by for name, by in sizes.items()} | {"gain": np.ones(512)}
    return add_weights(
        parse(text, 23), {name: array.astype(np.float32) for name, array in weights.items() if f"{name})" in text}
    )


def tuned(proto: ModelProto, **options: Any) -> tuple[ModelProto, onnxamp.Tuned]:
    """As much low precision as there can be: by the estimate, Casts outweigh such small products."""
    how = {"provider": "cpu", "target": "any", "allow_slower": True}
    return onnxamp.tune_model(proto, 2e-2, samples=FEEDS, **how, **options)


def test_what_overflows_is_rescaled() -> None:
    result, found = tuned(model(STREAM))
    assert found.exponents is not None
    assert (found.exponents.values, found.exponents.used, found.exponents.other) == (2, True, None)
    assert found.held
    assert found.float32_nodes == ()
    assert found.plan.options.rescaling is not None
    assert onnxamp.apply_plan(model(STREAM), found.plan) == result


@pytest.mark.parametrize(("size", "options"), [(2e4, {"rescale": False}), (2e4, {"rescale": True}), (10, {}),
                                               (2e4, {"dtype": "bfloat16"})])  # fmt: skip
def test_where_nothing_is_open_nothing_is_said(size: float, options: dict[str, Any]) -> None:
    _, found = tuned(model(STREAM, size), **options)
    assert found.exponents is None
    assert (found.plan.options.rescaling is not None) == bool(options.get("rescale"))


@pytest.mark.slow
def test_both_ways_are_tuned_where_not_all_can_be_low() -> None:
    _, found = tuned(model(BOTH))
    assert found.exponents is not None
    other = found.exponents.other
    assert other is not None
    assert found.exponents.used
    assert found.held
    assert found.candidates[found.chosen].time < other.time
    _, plain = tuned(model(BOTH), rescale=False)
    assert plain.candidates[plain.chosen] == other
    assert plain.error == found.exponents.error


@pytest.mark.slow
def test_the_report_and_the_state(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(BOTH), "model.onnx")
    np.savez("in.npz", **FEEDS)
    command = ("tune", "model.onnx", "-o", "low.onnx", "--inputs", "in.npz", "--target", "any", "--tolerance", 2e-2,
               "--state", "state.json", "--allow-slower", "-v")  # fmt: skip
    first = run(*command)
    assert first.exit_code == 0, first.output
    assert "These exponents are used: with them" in " ".join(first.output.split())
    written = onnx.load("low.onnx")
    again = run(*command)
    assert "Sensitivities come from 1 sample (1 in the state file)" in again.output
    assert onnx.load("low.onnx") == written
    picked = run(*command, "--pick", 0)
    assert picked.exit_code == 0, picked.output
    refused = run(*command, "--no-rescale")
    assert "exponents" not in refused.output
