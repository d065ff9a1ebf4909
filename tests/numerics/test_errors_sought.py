"""The inputs that validation seeks for the error of a result there, which neither samples nor large values show."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run, saved
from graphs.case import add_weights, parse

import onnxamp
from onnxamp._base.errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.effort import ErrorEffort
from onnxamp._numerics.unseen.errors_sought import Pair, Sought, largest_error
from onnxamp._numerics.unseen.stress import Stress
from onnxamp._runtime.engines import choose_engine, on_cpu

WIDTH = 32
FLAT = """(float[1,8,32] x) => (float[1,8,8] y) <float e = {1e-5}, int64[1] axis = {1}> {
    a = MatMul (x, w0) b = Tanh (a) c = MatMul (b, w1) d = Tanh (c) f = MatMul (d, w2) g = Add (f, bias)
    m = ReduceMean (g, axis) rest = Sub (g, m) q = Mul (rest, rest) v = ReduceMean (q, axis)
    s = Add (v, e) root = Sqrt (s) z = Div (rest, root) y = MatMul (z, out) }"""
"""Divides by the deviation over the tokens of a sequence, which random numbers keep large."""
NEAR = """(float[1,32] x) => (float[1,8] y) <float e = {1e-6}, int64[1] axis = {-1}> {
    a = MatMul (x, w0) b = Tanh (a) p = MatMul (b, left) r = MatMul (b, right) d = Sub (p, r)
    q = Mul (d, d) s = ReduceSum (q, axis) t = Add (s, e) length = Sqrt (t) u = Div (d, length) y = MatMul (u, out) }"""
"""The direction from one learned point to another, which no random input brings close to it."""
PLAIN = """(float[1,32] x) => (float[1,8] y) { a = MatMul (x, w0) b = Tanh (a) y = MatMul (b, out) }"""


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def network(text, size=WIDTH):
    draw = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH), "bias": (WIDTH,)}
    shapes |= {"left": (WIDTH, 4), "right": (WIDTH, 4), "out": (size, 8)}
    drawn = {name: draw.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    drawn["bias"] *= np.sqrt(WIDTH)
    used = {name: array.astype(np.float32) for name, array in drawn.items() if f"{name})" in text}
    return add_weights(parse(text, 18), used)


FLAWED = {"flat": (FLAT, WIDTH), "near": (NEAR, 4)}


def converted(model, *arguments, code=0):
    result = run("convert", saved(model), "-o", "low.onnx", "--format", "json", *arguments)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", FLAWED)
def test_an_error_that_no_random_input_shows_is_found_and_healed(kind):
    model = network(*FLAWED[kind])
    samples = onnxamp.random_samples(model, 50, seed=1)
    assert onnxamp.diff_models(model, onnxamp.convert_model(model), samples, provider="cpu").outputs[0].rel_l2 < 0.01
    found = converted(model)["validation"]
    assert "made to be hard for precision: Output 'y'" in found["cure"]["failure"]
    assert found["cure"]["nodes"]
    assert any("for precision" in extra["what"] for extra in found["extras"])
    assert all(judged["passed"] for extra in found["extras"] for judged in extra["judgements"])
    assert converted(model, "--stress", "0")["validation"]["cure"] is None


def test_a_search_does_not_begin_with_silence():
    model = network(*FLAWED["near"])
    samples = [dict(sample) for sample in onnxamp.random_samples(model, 3, seed=1)]
    Path("inputs").mkdir()
    for number, sample in enumerate([{"x": np.zeros((1, WIDTH), np.float32)}, *samples]):
        np.savez(f"inputs/{number}.npz", **sample)
    assert "made to be hard" in converted(model, "--inputs", "inputs")["validation"]["cure"]["failure"]


def test_what_was_found_is_told_where_it_is_no_fault():
    model = network(PLAIN)
    sought = converted(model)["validation"]["sought"]
    assert sought["inputs"] == 64
    assert 1e-4 < sought["error"] < 0.01
    told = run("convert", saved(model), "-o", "low.onnx", "-v", "--html", "page.html").output
    assert "the largest on 64 inputs made to be hard" in " ".join(told.split())
    assert "also on random inputs made to be hard" in " ".join(told.split())
    assert "error sought" in Path("page.html").read_text(encoding="utf-8")


def test_outputs_that_nearly_vanish_have_no_digits_to_lose():
    """The difference of two products is as small as its rounding where both agree."""
    text = """(float[1,32] x) => (float[1,4] y) { a = MatMul (x, w0) p = MatMul (a, left) r = MatMul (a, right)
        y = Sub (p, r) }"""
    assert converted(network(text))["validation"]["cure"] is None


def both(model, low):
    """Return a model and its conversion, as they are compared."""
    engine = choose_engine("cpu")
    return Pair(on_cpu(Model.of(model)), engine.open(low), frozenset({"y"}))


def balanced(model, x, apart):
    """An input like ``x`` whose features are equal in two projections that differ by ``apart``."""
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}
    difference = apart(weights)
    inner = np.tanh(0.1 * x @ weights["w0"])
    inner -= inner @ difference @ np.linalg.pinv(difference)
    return (np.arctanh(inner) @ np.linalg.inv(weights["w0"])).astype(np.float32)


def test_what_float32_does_not_compute_either_is_no_fault():
    """Without an epsilon, the direction is noise in any precision where both points are equal."""
    text = NEAR.replace("1e-6", "1e-20")
    samples = [dict(sample) for sample in onnxamp.random_samples(network(text, 4))]
    model = network(text, 4)
    pair = both(model, onnxamp.convert_model(model))
    equal = balanced(model, samples[0]["x"], lambda weights: weights["left"] - weights["right"])
    outputs, low = (found["y"] for found in pair.floats({"x": equal}))
    assert np.linalg.norm(low - outputs) > 0.1 * np.linalg.norm(outputs)
    found = largest_error(pair, samples, {"x": (-3.0, 3.0)}, 2, 0.1, then=[{"x": equal}])
    assert found.inputs is not equal
    assert found.error < 0.1


def test_an_output_that_is_zero_on_the_sample_has_no_scale():
    model = network(PLAIN)
    sample = {"x": np.zeros((1, WIDTH), np.float32)}
    pair = both(model, onnxamp.convert_model(model))
    assert largest_error(pair, [sample], {"x": (-1.0, 1.0)}, 8, 0.1).error == 0


def test_masks_and_flags_are_left_alone():
    text = """(float[1,32] x, float[1,32] flags) => (float[1,8] y) {
        a = Mul (x, flags) b = MatMul (a, w0) c = Tanh (b) y = MatMul (c, out) }"""
    model = network(text)
    sample = {
        "x": np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32),
        "flags": np.arange(WIDTH, dtype=np.float32).reshape(1, -1) % 2,
    }
    np.savez("inputs.npz", **sample)
    assert converted(model, "--inputs", "inputs.npz")["validation"]["sought"] is not None
    flags = {"x": sample["flags"], "flags": sample["flags"]}
    np.savez("flags.npz", **flags)
    assert converted(model, "--inputs", "flags.npz")["validation"]["sought"] is None


def test_choices_near_ties_are_no_fault(monkeypatch):
    """Half of the comparisons are ties, which no precision gets right."""
    text = """(float[1,32] x) => (float[1,32] y) { c = MatMul (x, w0) h = Tanh (c) a = MatMul (h, w1)
        b = MatMul (h, w2) [pick] g = Greater (a, b) n = Neg (a) y = Where (g, a, n) }"""
    model = network(text)
    x = onnxamp.random_samples(model)[0]["x"]
    tied = balanced(model, x, lambda weights: (weights["w1"] - weights["w2"])[:, :16])
    monkeypatch.setattr(Stress, "far_off", lambda *given: Sought({"x": tied}, 1.0, 1))
    found = converted(model, "--level", "O3", "--no-hazards")["validation"]
    assert found["cure"] is None
    assert found["sought"] is None
    (near,) = [extra for extra in found["extras"] if "for precision" in extra["what"]]
    assert near["choices"][0]["node"] == "pick"
    assert near["choices"][0]["differ"]


def test_inputs_stay_in_the_range_of_the_samples_and_keep_some_contrast():
    model = network(*FLAWED["flat"])
    low = onnxamp.convert_model(model)
    samples = [dict(sample) for sample in onnxamp.random_samples(model, 2)]
    ends = (-1.5, 2.0)
    pair = both(model, low)
    found = largest_error(pair, samples, {"x": ends}, 64, 0.1)
    assert found.error >= 0.1
    assert found.runs < 64
    x = found.inputs["x"]
    assert ends[0] <= x.min() < x.max() <= ends[1]
    assert np.ptp(x) > 0.9 * (ends[1] - ends[0]) / 256
    assert largest_error(pair, samples, {"x": ends}, 64, 0.1).error == found.error


def test_a_result_that_does_not_run_ends_the_search():
    model = network(PLAIN)
    sample = dict(onnxamp.random_samples(model)[0])
    pair = both(model, model)
    with pytest.raises((RuntimeFailure, onnxamp.ArgumentError)):
        largest_error(pair, [{"x": sample["x"][:, :4]}], {"x": (0.0, 1.0)}, 8, 0.1)


def test_the_effort_is_counted():
    small = ErrorEffort.within(4, 1 << 20)
    assert small == ErrorEffort(inputs=64, steps=40, divisors=2)
    assert ErrorEffort.within(8, 1 << 20) == ErrorEffort(inputs=128, steps=80, divisors=2)
    assert ErrorEffort.within(4, 1 << 28).inputs == 8
    assert ErrorEffort.within(4, 1 << 28).divisors == 0
    assert ErrorEffort.within(4, 1 << 32).inputs == 0
    assert ErrorEffort.within(0, 1 << 20).inputs == 0
