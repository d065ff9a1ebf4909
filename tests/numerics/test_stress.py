"""What validation proves for every input, and the inputs that it makes to be hard."""

import json

import numpy as np
import pytest
from commands import run, saved
from graphs.case import add_weights, parse

import onnxamp
from onnxamp import convert_model
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._model.model import Model
from onnxamp._numerics.stress import Stress
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.samples import given_samples

WIDTH = 64


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def planted(seed=1, opset=17):
    """A network whose values stay below 20,000 on 1,000 random inputs, and whose worst input is beyond float16."""
    draw = np.random.default_rng(seed)
    weights = {f"w{number}": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for number in range(4)}
    rows = draw.standard_normal((1000, WIDTH)).astype(np.float32)
    for name in list(weights)[:-1]:
        rows = np.maximum(rows @ weights[name], 0)
    weights["w3"] *= 19_000 / np.abs(rows @ weights["w3"]).max()
    assert np.abs(rows @ weights["w3"]).max() < 20_000
    weights["v"] = draw.standard_normal((WIDTH, 8)).astype(np.float32) / 10_000
    model = parse(
        """(float[N,64] x) => (float[N,8] y) {
            a = MatMul (x, w0) b = Relu (a) c = MatMul (b, w1) d = Relu (c) e = MatMul (d, w2) f = Relu (e)
            [last] h = MatMul (f, w3) g = Relu (h) y = MatMul (g, v) }""",
        opset,
    )
    return add_weights(model, weights)


def converted(model, *arguments, code=0):
    result = run("convert", saved(model), "-o", "low.onnx", "--format", "json", *arguments)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "opset"), [(0, 17), (1, 11), (2, 21), (6, 13), (4, 18)])
def test_an_overflow_that_no_random_input_shows_is_found_and_healed(seed, opset):
    found = converted(planted(seed, opset))["validation"]
    assert "made to be hard: Output 'y': Inf" in found["cure"]["failure"]
    assert "last" in found["cure"]["nodes"]
    assert found["headroom"]["stressed"] < 65504
    assert converted(planted(seed, opset), "--stress", "0")["validation"]["cure"] is None


def test_a_range_of_the_input_rules_the_overflow_out():
    found = converted(planted(), "--input-range", "x=-0.25:0.25")["validation"]
    assert found["cure"] is None
    assert found["proof"]["assumed"] == ["x"]
    assert found["headroom"]["stressed"] < 65504 / 2


def test_the_range_of_given_samples_counts():
    samples = np.random.default_rng(0).uniform(-0.1, 0.1, (4, WIDTH)).astype(np.float32)
    np.savez("inputs.npz", x=samples)
    found = converted(planted(), "--inputs", "inputs.npz")["validation"]
    assert found["cure"] is None
    assert found["proof"]["assumed"] == ["x"]


def test_what_is_proven_for_every_input_is_not_stressed():
    model = add_weights(
        parse("(float[N,64] x) => (float[N,64] y) { n = LayerNormalization (x, s) m = MatMul (n, w) y = Tanh (m) }"),
        {"s": (64,), "w": (64, 64)},
    )
    low = convert_model(model, keep_io_types=True, white_list=["LayerNormalization"])
    stressed = Stress(FLOAT16, 4).of(Model.of(model), Model.of(low), onnxamp.random_samples(model))
    assert stressed.proof.is_complete
    assert stressed.samples is None


def test_a_model_without_gradients_says_so():
    text = "(float[N,4,8,8] x) => (float[N,4,8,8] y) { n = LRN <size = 3> (x) y = MatMul (n, w) }"
    model = add_weights(parse(text), {"w": (8, 8)})
    found = converted(model, "--target", "any")["validation"]
    assert [clause for clause in found["not_run"] if clause.startswith("inputs made to be hard")]


def test_ranges_are_checked():
    for text, why in (("x=1:0", "smaller one first"), ("x=1", "NAME=LOW:HIGH"), ("z=0:1", "no input 'z'")):
        result = run("convert", saved(planted()), "-o", "low.onnx", "--input-range", text)
        assert result.exit_code == 2
        assert why in " ".join(result.output.split())


def test_random_inputs_stay_in_the_range_that_is_stated():
    options = onnxamp.Options(input_ranges={"x": (2, 3)})
    assert options.input_ranges == (("x", (2.0, 3.0)),)
    assert onnxamp.Options.from_json(options.as_json()) == options
    assert options.written() == ("--input-range", "x=2:3")
    drawn = requested_samples(RunOptions(), Model.of(planted()), ranges={"x": (2, 3)})
    x = drawn[0]["x"]
    assert 2 <= x.min() < 2.2
    assert 2.8 < x.max() <= 3


def test_samples_of_other_sizes_are_left_out():
    draw = np.random.default_rng(0)
    samples = [{"x": draw.standard_normal((rows, WIDTH)).astype(np.float32)} for rows in (2, 3, 2)]
    model = planted()
    found = Stress(FLOAT16, 1).of(Model.of(model), Model.of(convert_model(model)), given_samples(samples, model))
    assert found.samples is not None
    assert {sample["x"].shape for sample in found.samples} == {(2, WIDTH)}


def test_integers_are_not_moved():
    model = parse("(int64[N,4] ids) => (float[N,4] y) { f = Cast <to = 1> (ids) g = Mul (f, f) y = Sqrt (g) }")
    stress = Stress(FLOAT16, 2, (("ids", (0.0, 10.0)),))
    found = stress.of(Model.of(model), Model.of(convert_model(model, "O3")), onnxamp.random_samples(model))
    assert found.samples is None
    assert found.proof.is_complete


def test_inputs_are_sought_on_which_errors_weigh_most():
    """A product whose rows nearly cancel is small beside what it adds up, whose rounding then shows."""
    draw = np.random.default_rng(0)
    arrays = {"w": draw.standard_normal((8, 8)), "v": draw.standard_normal((8, 4))}
    weights = {name: array.astype(np.float32) for name, array in arrays.items()}
    model = add_weights(parse("(float[1,8] x) => (float[1,4] y) { a = MatMul (x, w) y = MatMul (a, v) }", 17), weights)
    result = convert_model(model)
    one, other = (Model.of(each) for each in (model, result))
    made_up = requested_samples(RunOptions(), one)
    hard = Stress(FLOAT16, 8).of(one, other, made_up).samples
    errors = [
        onnxamp.diff_models(model, result, [feeds], provider="cpu").outputs[0].rel_l2 for feeds in (made_up[0], hard[1])
    ]
    assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize("seed", [0, 1, 6])
def test_level_auto_keeps_what_hard_inputs_bring_out_of_range(seed):
    """On samples, values stay so small that level auto would lower everything."""
    model = planted(seed)
    settings = {"count": 1, "provider": "cpu", "allow_slower": True}
    low, tuned = onnxamp.tune_model(model, **settings)
    assert tuned.held
    kept = {row.node: row.detail for row in tuned.kept}
    assert "on inputs made to be hard; float16 ends at 65504" in kept["last"]
    assert set(kept) == {"last", "y"}
    samples = onnxamp.random_samples(model)
    one = Model.of(model)
    hard = Stress(FLOAT16, 4).of(one, one, samples).samples
    assert onnxamp.diff_models(model, low, list(hard), provider="cpu").passed


def test_the_expected_error_counts_what_hard_inputs_bring_out_of_range():
    model = planted()
    asked = ("--no-validate", "--expected-error")
    assert converted(model, *asked)["plan"]["expected"]["error"] > 1
    assert converted(model, *asked, "--keep-fp32", "last")["plan"]["expected"]["error"] > 1  # its result is cast
    assert converted(model, *asked, "--keep-fp32", "last|g|y")["plan"]["expected"]["error"] < 0.01
    assert converted(model, *asked, "--input-range", "x=-0.1:0.1")["plan"]["expected"]["error"] < 0.01


def test_inspect_shows_what_hard_inputs_reach():
    x = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32)
    np.savez("x.npz", x=x)
    told = json.loads(run("inspect", saved(planted()), "--format", "json", "--inputs", "x.npz").stdout)
    rooms = {room["value"]: room for room in told["headroom"]}
    assert 1_000 < rooms["h"]["seen"] < 19_000
    assert rooms["h"]["stressed"] > 30_000
