"""Tuning that rounds weights with compensation by itself: where that makes a faster candidate hold the tolerance."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp

Floats = np.ndarray[Any, np.dtype[np.float32]]
HOW: dict[str, Any] = {"dtype": "bfloat16", "target": "any", "provider": "cpu", "allow_slower": True}
TOLERANCE = 4e-3
"""Between the errors of the model with all weights low: 4.6e-3 to nearest, 3.2e-3 with compensation."""


def drawn(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng((*shape, seed)).normal(size=shape).astype(np.float32)


def perceptron() -> ModelProto:
    text = "(float[N,24] X) => (float[N,6] Y) { [one] h = MatMul (X, w1) r = Relu (h) [two] Y = MatMul (r, w2) }"
    model = parse(text)
    weights = {"w1": drawn(24, 20), "w2": drawn(20, 6)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def correlated(count: int) -> list[dict[str, Floats]]:
    """Samples whose last axis has a few common causes."""
    causes = np.random.default_rng(99).normal(size=(4, 24)).astype(np.float32) + 1
    return [{"X": drawn(64, 4, seed=number) @ causes} for number in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its inputs."""
    onnx.save(perceptron(), tmp_path / "m.onnx")
    (tmp_path / "inputs").mkdir()
    for number, feeds in enumerate(correlated(4)):
        np.savez(tmp_path / "inputs" / f"{number}.npz", **feeds)
    return tmp_path


def test_weights_are_compensated_where_a_faster_candidate_holds_then() -> None:
    model, samples = perceptron(), correlated(4)
    made, tuned = onnxamp.tune_model(model, TOLERANCE, samples=samples, **HOW)
    assert tuned.compensation is not None
    assert tuned.compensation.used
    assert tuned.plan.options.rounding == "compensated"
    assert (tuned.held, tuned.chosen, tuned.candidates[0].nodes) == (True, 0, 2)
    assert tuned.compensation.other is not None
    assert tuned.compensation.other.nodes < 2
    assert "Weights are rounded with compensation: " in str(tuned)
    repeated = onnxamp.apply_plan(model, tuned.plan, samples=samples)
    assert repeated == made
    asked, _ = onnxamp.tune_model(model, TOLERANCE, samples=samples, rounding="compensated", **HOW)
    assert asked == made


def test_what_is_measured_counts_for_both_ways() -> None:
    told = list[tuple[str, int, int]]()
    progress = lambda *said: told.append(said)  # noqa: E731 - a line
    _, tuned = onnxamp.tune_model(perceptron(), TOLERANCE, samples=correlated(4), progress=progress, **HOW)
    assert tuned.compensation is not None
    assert tuned.compensation.other is not None
    measured = [done for text, done, _ in told if text == "measuring sensitivities"]
    assert measured == sorted(set(measured))
    assert tuned.runs == 4


@pytest.mark.slow
def test_they_are_not_where_that_is_forbidden_or_brings_nothing() -> None:
    model, samples = perceptron(), correlated(4)
    _, forbidden = onnxamp.tune_model(model, TOLERANCE, samples=samples, rounding="nearest", **HOW)
    assert (forbidden.compensation, forbidden.candidates[forbidden.chosen].nodes < 2) == (None, True)
    _, needless = onnxamp.tune_model(model, 1e-2, samples=samples, **HOW)
    assert (needless.compensation, needless.chosen) == (None, 0)
    _, useless = onnxamp.tune_model(model, 2.3e-3, samples=samples, **HOW)
    assert useless.compensation is not None
    assert (useless.compensation.used, useless.plan.options.rounding) == (False, "auto")
    assert "Weights are rounded to nearest: " in str(useless)


@pytest.mark.parametrize(
    ("count", "seconds", "why"),
    [
        (0, 60.0, "the inputs are random"),
        (3, 60.0, "that needs 4 inputs or more"),
        (4, 0.0, "more than --search-time"),
    ],
)
def test_the_report_says_why_it_is_not_tried(count: int, seconds: float, why: str) -> None:
    samples = correlated(count) or None
    _, tuned = onnxamp.tune_model(perceptron(), 1e-3, samples=samples, seconds=seconds, **HOW)
    assert tuned.compensation is not None
    assert why in tuned.compensation.why
    assert tuned.compensation.other is None
    page = re.sub(r'<span class="option">(\S+)</span>', r"\1", tuned._repr_html_().replace("&nbsp;", " "))
    assert f"not with compensation: {tuned.compensation.why}" in page


def test_a_state_keeps_both_ways(tmp_path: Path) -> None:
    model, how = perceptron(), {"samples": correlated(4), "state": tmp_path / "state", **HOW}
    first, tuned = onnxamp.tune_model(model, TOLERANCE, **how)
    again, resumed = onnxamp.tune_model(model, TOLERANCE, **how)
    assert again == first
    assert (resumed.runs, resumed.compensation) == (0, tuned.compensation)
    _, picked = onnxamp.tune_model(model, TOLERANCE, pick=1, **how)
    assert (picked.chosen, picked.runs) == (1, 0)
    assert picked.candidates[1].low == tuned.candidates[1].low


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("arguments", [["tune"], ["convert", "--level", "auto"]])
def test_commands_write_what_was_judged(folder: Path, arguments: list[str]) -> None:
    """With inputs and outputs in low precision there are no Casts, and all that is low is faster."""
    options = {key: value for key, value in HOW.items() if key != "allow_slower"} | {"keep_io_types": False}
    expected, tuned = onnxamp.tune_model(perceptron(), TOLERANCE, samples=correlated(4), **options)
    assert tuned.compensation is not None
    assert tuned.compensation.used
    done = run(
        *arguments, folder / "m.onnx", "-o", folder / "low.onnx", "--dtype", "bfloat16", "--target", "any", "--inputs",
        folder / "inputs", "--tolerance", str(TOLERANCE), "--provider", "cpu", "--io-types", "low",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert onnx.load(folder / "low.onnx") == expected
