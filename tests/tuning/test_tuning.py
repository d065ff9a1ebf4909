"""Level auto: tolerance held, in few runs, whatever the model; and its parts."""

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cuda_double import CudaDouble
from engine import analysis_of, priced, replayed, space_of
from graphs.case import parse
from onnx import ModelProto, TensorProto, numpy_helper
from real_models import REAL_MODELS
from repository import ROOT
from states import samples_in

from onnxamp import ArgumentError, ArgumentTypeError, RuntimeFailure, Samples, Tuned, load_samples, random_samples
from onnxamp import convert_model as convert_at_level
from onnxamp import tune_model as tune_for_speed
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.engines import SampleCache, engine_on, on_cpu
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.session import cuda_available, make_session, run
from onnxamp._runtime.sessions.values import check_inputs
from onnxamp._tuning.choices.solver import CandidateSolver
from onnxamp._tuning.choices.space import find_live
from onnxamp._tuning.errors.foreseen import judging_engine
from onnxamp._tuning.metric import make_metric
from onnxamp._tuning.runs import converted_error

tune_model = partial(tune_for_speed, allow_slower=True)
"""These models are so small that Casts take longer than they save."""

MODELS = sorted((ROOT / "models").glob("*.onnx"))
MOST = 12
"""Candidates that a tuning may convert, whatever the model."""


def called(name: str) -> Path:
    return next(path for path in MODELS if path.stem == name)


def given(*samples: Mapping[str, Any]) -> Samples:
    return Samples(f"{len(samples)} given", [lambda sample=sample: sample for sample in samples])


def worst_error(original: ModelProto, result: ModelProto, samples: Samples) -> float:
    """Relative L2 error, by plain runs of the original and of the emulated result."""
    before, after, worst = make_session(original), make_session(emulate(result)), 0.0
    for sample in samples:
        one, other = run(before, dict(sample)), run(after, dict(sample))
        for name, value in one.items():
            if value.dtype == np.float32 and value.size:
                error = np.linalg.norm(other[name].astype(float) - value) / max(np.linalg.norm(value), 1e-30)
                worst = max(worst, float(error))
    return worst


def is_low(model: ModelProto) -> bool:
    return any(tensor.data_type in (10, 16) for tensor in model.graph.initializer) or any(
        node.op_type == "Cast" and node.attribute[0].i in (10, 16) for node in model.graph.node
    )


# --- the tolerance ----------------------------------------------------------------------------------------------

LEVELS = [1e-2, 1e-3]


@pytest.mark.slow
@pytest.mark.parametrize("tolerance", LEVELS)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_tolerance_holds_on_unseen_samples(path: Path, tolerance: float) -> None:
    model = onnx.load(path)
    samples = random_samples(model, 4, seed=1)
    result, tuned = tune_model(path, tolerance, samples=samples, allow_slower=True)
    assert tuned.held
    assert tuned.error <= tolerance
    assert (tuned.runs, tuned.conversions <= MOST) == (4, True)
    assert any(found.nodes for found in tuned.candidates)
    if path.stem == "detector":  # its outputs are boxes in the order of their scores, which no tolerance bounds
        return
    assert worst_error(model, result, samples) <= 1.05 * tolerance
    assert worst_error(model, result, random_samples(model, 4, seed=2)) <= 2 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("path", [path for path in MODELS if path.stem != "detector"], ids=lambda path: path.stem)
def test_tolerance_holds_whatever_the_samples(path: Path, seed: int) -> None:
    model = onnx.load(path)
    for tolerance in (1e-3, 3e-4):
        result, tuned = tune_model(path, tolerance, samples=random_samples(model, 4, seed=10 * seed))
        assert tuned.held
        assert tuned.conversions <= MOST
        assert worst_error(model, result, random_samples(model, 6, seed=10 * seed + 1)) <= 2 * tolerance


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODELS, reason="needs models that are not part of the repository")
@pytest.mark.parametrize("path", REAL_MODELS, ids=lambda path: path.stem)
def test_tolerance_holds_on_real_models(path: Path) -> None:
    samples = load_samples(path.with_suffix(".npz"))
    result, tuned = tune_for_speed(path, 1e-3, samples=samples)
    assert tuned.held
    assert tuned.conversions <= MOST
    assert tuned.candidates[tuned.chosen].bytes > 0.5
    noisy = [like(samples[0], seed) for seed in range(3)]
    assert worst_error(onnx.load(path), result, given(*noisy)) <= 2e-3


def like(sample: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A sample with some noise in its floats."""
    rng = np.random.default_rng(seed)
    return {
        name: value + (1e-2 * value.std() * rng.standard_normal(value.shape)).astype(value.dtype)
        if value.dtype == np.float32 else value
        for name, value in sample.items()
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "decoder", "unet"])
def test_bfloat16(name: str) -> None:
    model = onnx.load(called(name))
    samples = random_samples(model, 2)
    result, tuned = tune_model(model, 1e-2, samples=samples, dtype="bfloat16")
    assert tuned.held
    assert tuned.candidates[tuned.chosen].bytes > 0.3
    assert tuned.plan.dtype == "bfloat16"
    assert worst_error(model, result, samples) <= 1.05e-2


@pytest.mark.slow
def test_a_tighter_tolerance_lowers_less() -> None:
    shares = []
    for tolerance in (1e-2, 5e-4, 1e-7):
        _, tuned = tune_model(called("encoder"), tolerance, count=1)
        shares.append(tuned.candidates[tuned.chosen].bytes)
        assert tuned.held
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert shares[1] > 0.1
    assert shares[-1] < 1e-3, "what is exact in float16 costs nothing"


@pytest.mark.slow
def test_at_least_as_low_as_level_2_where_that_holds_too() -> None:
    for name in ("classifier", "unet", "encoder"):
        model = onnx.load(called(name))
        samples = random_samples(model, 1)
        reached = 1.2 * worst_error(model, convert_at_level(model), samples)
        _, tuned = tune_model(model, reached, samples=samples)
        assert tuned.candidates[tuned.chosen].flops > 0.9


@pytest.mark.slow
def test_results_are_deterministic() -> None:
    first, second = (tune_model(called("recurrent"), 1e-3) for _ in range(2))
    assert first == second


# --- what models can be like ------------------------------------------------------------------------------------

CANCELS = """(float[8] x) => (float[8] y) <float big = {256}> {
    [add] s = Add (x, big)
    [sub] d = Sub (s, big)
    [mul] y = Mul (d, d)
}"""
"""It squares what is still an input of the model, which the hazards keep in float32."""


def test_nothing_holds() -> None:
    model = parse(CANCELS)
    result, tuned = tune_model(model, 1e-6, count=2, hazards=False)
    assert tuned.held
    assert tuned.error == 0
    assert tuned.chosen == len(tuned.candidates) - 1
    assert result == model
    assert {row.why for row in tuned.kept} <= {"costs accuracy", "breaks on its own", "not worth its Casts"}
    assert {row.node for row in tuned.kept} == {"add", "sub", "mul"}


def test_the_worst_sample_counts() -> None:
    """The last sample cancels more than the others."""
    rng = np.random.default_rng(0)
    rows = [rng.uniform(60, 90, 8).astype(np.float32) for _ in range(4)]
    samples = given(*({"x": row} for row in rows), {"x": rng.uniform(1, 2, 8).astype(np.float32)})
    _, tuned = tune_model(parse(CANCELS), 1e-2, samples=samples, hazards=False)
    assert tuned.held
    others = given(*({"x": row} for row in rows))
    _, without = tune_model(parse(CANCELS), 1e-2, samples=others, hazards=False)
    assert without.candidates[without.chosen].nodes > tuned.candidates[tuned.chosen].nodes > 0


NO_UNIT = {
    "integers": "(int64[2] x) => (int64[2] y) { y = Add (x, x) }",
    "data movement": "(float[2,3] x) => (float[3,2] y) { y = Transpose (x) }",
    "nothing": "(float[2] x) => (float[2] y) { y = Identity (x) }",
}


@pytest.mark.parametrize("text", NO_UNIT.values(), ids=NO_UNIT)
def test_no_unit(text: str) -> None:
    model = parse(text)
    result, tuned = tune_model(model)
    assert result == model
    assert (tuned.units, tuned.runs, tuned.held) == (0, 0, True)


def test_one_unit() -> None:
    text = "(float[4,64] x) => (float[4,64] y) { [only] y = Softmax (x) }"
    result, tuned = tune_model(parse(text), 1e-2)
    assert (tuned.units, tuned.candidates[tuned.chosen].nodes) == (1, 1)
    assert is_low(result)
    assert not is_low(tune_model(parse(text), 1e-6)[0])


def test_all_pinned() -> None:
    model = parse("(float[4] x) => (float[4] y) <float w = {100}> { [far] h = Mul (x, w) [back] y = Div (h, w) }")
    result, tuned = tune_model(model, 1e-1, samples=given({"x": np.full(4, 1000, np.float32)}), rescale=False)
    assert not is_low(result)
    assert {row.why for row in tuned.kept} == {"breaks on its own"}
    end = "1e+05; float16 ends at 65504"
    assert {row.detail for row in tuned.kept} == {f"it reaches {end}", f"it reads {end}"}


def test_wishes_pin() -> None:
    _, tuned = tune_model(called("classifier"), 1e-1, keep_high=[".*"])
    assert tuned.candidates[tuned.chosen].nodes == 0
    result, tuned = tune_model(called("classifier"), 1e-1, black_list=["Conv"])
    assert all(node.input[0] for node in result.graph.node)
    assert {row.op for row in tuned.plan.rows if row.reason == "black list"} == {"Conv"}


def test_values_near_the_end_of_the_range_are_kept() -> None:
    model = parse("(float[4] x) => (float[4] y) <float w = {100}> { [far] h = Mul (x, w) [back] y = Sqrt (h) }")
    _, tuned = tune_model(model, 1e-1, samples=given({"x": np.full(4, 400, np.float32)}))
    assert "reaches 4e+04; float16 ends at 65504" in {row.node: row.detail for row in tuned.kept}["far"]


def test_low_inputs_and_outputs() -> None:
    model = onnx.load(called("classifier"))
    result, tuned = tune_model(model, 1e-2, keep_io_types=False)
    assert tuned.held
    assert result.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert tuned.plan.options.keep_io_types is False


def test_noise_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that draw other numbers although a seed says which, or add up in any order."""
    monkeypatch.setattr("onnxamp._tuning.job.run_noise", lambda *_: 0.5)
    told: list[str] = []
    model = parse("(float[64] x) => (float[64] y) { n = RandomNormal <shape = [64]> () [add] y = Add (x, n) }")
    with pytest.raises(RuntimeFailure, match=r"not deterministic.*more than the tolerance"):
        tune_model(model, progress=lambda text, *_: told.append(text))
    assert not any(text.startswith("measuring sensitivities") for text in told)


def test_too_old() -> None:
    model = parse("(float[8] x) => (float[8] y) { y = Tanh (x) }", opset=8, ir=3)
    assert tune_model(model)[1].candidates[0].nodes == 1
    result, tuned = tune_model(model, 1e-7, opset="keep")
    assert (tuned.held, result) == (True, model)


BRANCHES = """(float[8] x, bool c) => (float[8] y) {
    [head] h = Sigmoid (x)
    [choice] y = If (c) <
        then_branch = yes () => (float[8] t) { [first] t = Sqrt (h) },
        else_branch = no () => (float[8] e) { [second] k = Softplus (x) [third] e = Add (k, h) }>
}"""


def ways(*conditions: bool) -> Samples:
    x = np.linspace(0.1, 1, 8, dtype=np.float32)
    return given(*({"x": x, "c": np.array(c)} for c in conditions))


def test_branches_that_no_sample_takes_are_as_at_level_2() -> None:
    """Softplus and the Add after it are float32 at level O2; without the Softplus, the Add is low."""
    result, tuned = tune_model(parse(BRANCHES), samples=ways(True, True))
    assert [(row.node, row.why) for row in tuned.kept] == [("second", "never run"), ("third", "never run")]
    assert (tuned.units, tuned.unseen) == (2, ())
    assert tuned.candidates[0].flops == 1, "of what can be low"
    assert worst_error(parse(BRANCHES), result, ways(False)) <= 1e-3
    easy = parse(BRANCHES.replace("[second] k = Softplus (x) [third] e = Add (k, h)", "[third] e = MatMul (x, h)"))
    result, tuned = tune_model(easy, samples=ways(True, True))
    assert tuned.unseen == ("third",)
    assert tuned.candidates[tuned.chosen].nodes == 3
    assert worst_error(easy, result, ways(False)) <= 1e-3
    _, tuned = tune_model(easy, 1e-9, samples=ways(True, True))
    assert (tuned.held, tuned.error) == (True, 0)


def test_what_is_never_run_heeds_hazards() -> None:
    text = BRANCHES.replace("[second] k = Softplus (x) [third] e = Add (k, h)", "[third] e = Mul (h, far)")
    text = text.replace("(float[8] y) {", "(float[8] y) <float far = {1e6}> {", 1)
    _, tuned = tune_model(parse(text), samples=ways(True))
    assert {row.key.split(":")[0] for row in tuned.plan.rows if row.reason == "constant range"} == {
        "choice.else_branch/third"
    }
    assert tuned.candidates[tuned.chosen].nodes == 2


def test_branches_that_differ_by_sample_are_measured() -> None:
    _, tuned = tune_model(parse(BRANCHES), samples=ways(True, True, True, True, True, False))
    assert tuned.units == 4
    assert not tuned.kept
    assert tuned.candidates[tuned.chosen].nodes == 4


def test_live_nodes() -> None:
    model = Model.of(parse(BRANCHES))
    live = find_live(Graph.of(model.proto), ways(True, False, True), model)
    assert live[0] == live[2]
    assert len(live[0] - live[1]) == 1
    assert len(live[1] - live[0]) == 2


@pytest.mark.slow
def test_loops_count_as_measured() -> None:
    _, tuned = tune_model(called("recurrent"), 1e-1, count=6)
    assert not {"not measured", "never run"} & {row.why for row in tuned.kept}


def test_nodes_that_cannot_be_told_apart_stay_float32() -> None:
    text = BRANCHES.replace("k = Softplus (x) [third] e = Add (k, h)", "t = Exp (h) [third] e = Add (t, h)")
    space = space_of(parse(text))
    assert {unit.label for unit in space.tunable} == {"head", "third"}
    _, tuned = tune_model(parse(text), samples=ways(True, False))
    assert tuned.held
    assert {row.node for row in tuned.kept} >= {"first", "second"}


def test_exact_ops_do_not_round_what_others_read_in_float32() -> None:
    """A Concat of low values and a float32 one, which a float32 op reads: lowering it would save a Cast, and round."""
    text = """(float[8] x) => (float[32] y, float[32] z) {
        a = Softplus (x)  b = Tanh (x)  c = Sqrt (x)  exact = Erf (x)
        all = Concat <axis = 0> (a, b, c, exact)
        y = Exp (all)
        z = Sigmoid (READ)
    }"""
    for read, reader, wanted in (("all", "float32", False), ("y", "low", True)):
        model = parse(text.replace("READ", read))
        space = space_of(model)
        high = {"exact", "y", "z"} if reader == "float32" else {"exact"}
        errors = priced(space, (np.inf if unit.key in high else 0.0 for unit in space.tunable))
        low = CandidateSolver(space, analysis_of(model, "auto"), errors).choose(1.0)
        assert low - {"all"} == {"a", "b", "c", "y", "z"} - high
        assert ("all" in low) == wanted


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("name", [path.stem for path in MODELS])
def test_plans_lower_what_candidates_say(name: str) -> None:
    model = onnx.load(called(name))
    _, tuned = tune_model(model, 1e-3, count=1, fold=False)
    space = space_of(model)
    repeated = replayed(model, tuned.plan.decisions())
    found = set()
    for unit in space.tunable:
        outputs = [repeated.graph.nodes[unit.node].outputs[port] for port in unit.ports.outputs]
        variables = [repeated.ports.produced[value] for value in outputs]
        variables += [repeated.ports.consumed[unit.node][port] for port in unit.ports.inputs]
        found |= {unit.key} if any(map(repeated.decision.is_low, variables)) else set()
    assert found == tuned.candidates[tuned.chosen].low & {unit.key for unit in space.tunable}


# --- metrics ----------------------------------------------------------------------------------------------------


def test_metrics() -> None:
    one = {"y": np.array([[3.0, 4.0], [1.0, 0.0]], np.float32), "i": np.array([1, 2])}
    other = {"y": np.array([[4.0, 3.0], [1.0, 0.0]], np.float32), "i": np.array([1, 2])}
    assert make_metric("rel-l2", 1).error(one, other) == pytest.approx(np.sqrt(2 / 26))
    assert make_metric("cosine", 1).error(one, other) == pytest.approx(1 - 25 / 26)
    assert make_metric("cosine", 1).of_amplitude(make_metric("cosine", 1).amplitude(0.3)) == pytest.approx(0.3)
    assert make_metric("top1", 1).error(one, other) == 0.5
    assert make_metric("snr", 20).tolerance == pytest.approx(0.1)
    for name in ("rel-l2", "cosine", "top1", "snr"):
        assert make_metric(name, 1).error(one, one) == 0
        broken = {**one, "y": np.array([[np.nan, 4], [1, 0]], np.float32)}
        assert make_metric(name, 1).error(one, broken) == np.inf


def worst_difference(reference: Mapping[str, Any], result: Mapping[str, Any]) -> float:
    return max(float(np.abs(reference[name] - result[name]).max()) for name in reference)


def no_number(reference: Mapping[str, Any], result: Mapping[str, Any]) -> Any:
    return np.nan if "y" in reference and "y" in result else None


@pytest.mark.slow
def test_a_function_as_metric() -> None:
    _, tuned = tune_model(called("classifier"), 1e-2, metric=f"{__name__}:worst_difference")
    assert tuned.held
    assert 0 < tuned.error <= 1e-2
    _, same = tune_model(called("classifier"), 1e-2, metric=worst_difference)
    assert (same.error, same.candidates, same.metric) == (tuned.error, tuned.candidates, "worst_difference")
    assert make_metric(f"{__name__}:no_number", 1).error({"y": 1}, {"y": 1}) == np.inf
    with pytest.raises(ArgumentError, match="must return a number, not None"):
        make_metric(f"{__name__}:no_number", 1).error({}, {})


def test_a_metric_is_a_name_or_a_function() -> None:
    with pytest.raises(ArgumentTypeError, match="metric must be a name or a function, not int"):
        make_metric(3, 1)


@pytest.mark.parametrize(("metric", "tolerance"), [("cosine", 1e-6), ("snr", 60), ("top1", 0.02)])
def test_other_metrics_hold(metric: str, tolerance: float) -> None:
    _, tuned = tune_model(called("classifier"), tolerance, metric=metric)
    assert tuned.held
    assert tuned.candidates[tuned.chosen].bytes > 0
    assert tuned.conversions <= MOST


@pytest.mark.parametrize("metric", ["rel-l2", "cosine"])
def test_amplitudes_add_up_as_squares(metric: str) -> None:
    """Errors that have nothing to do with each other: together they are as large as predicted, in either metric."""
    rng, judge = np.random.default_rng(0), make_metric(metric, 1)
    x = rng.standard_normal(20_000)
    parts = [1e-3 * rng.standard_normal(x.shape) for _ in range(8)]
    alone = [judge.amplitude(judge.error({"y": x}, {"y": x + part})) for part in parts]
    together = judge.amplitude(judge.error({"y": x}, {"y": x + sum(parts)}))
    assert together == pytest.approx(np.sqrt(np.sum(np.square(alone))), rel=0.05)


def flips(reference: Mapping[str, Any], result: Mapping[str, Any]) -> float:
    """Nothing, until the error passes a step: no error of parts tells that of the whole."""
    error = np.linalg.norm(reference["logits"] - result["logits"]) / np.linalg.norm(reference["logits"])
    return float(error > 3e-4)


@pytest.mark.slow
def test_a_metric_that_does_not_add_up_holds_all_the_same() -> None:
    model = onnx.load(called("classifier"))
    samples = random_samples(model, 2)
    result, tuned = tune_model(model, 0.5, metric=f"{__name__}:flips", samples=samples)
    assert tuned.held
    assert tuned.conversions <= MOST
    assert 0 < tuned.candidates[tuned.chosen].nodes < tuned.units
    assert worst_error(model, result, samples) <= 3.1e-4


@pytest.mark.slow
def test_order_that_flips_leaves_much_low() -> None:
    """Of a detector, whose boxes change places, more than the ops around its convolutions can be low."""
    _, tuned = tune_model(called("detector"), 1e-2, count=1)
    assert tuned.held
    assert tuned.candidates[tuned.chosen].flops > 0.3


WRONG = {
    "times": ({"times": "guessed"}, "Unknown times 'guessed': choose one of roofline, measured"),
    "provider": ({"provider": "tpu"}, "Unknown provider 'tpu'"),
    "metric": ({"metric": "psnr"}, "Unknown metric 'psnr': choose one of auto, rel-l2, .* or 'package:function'"),
    "module": ({"metric": "nowhere:f"}, "'nowhere:f' cannot be imported"),
    "function": ({"metric": "math:nothing"}, "'math:nothing' cannot be imported"),
    "no function": ({"metric": "math:pi"}, "'math:pi' is not a function"),
    "a function without a name": (
        {"metric": lambda *_: 0.0, "state": "state.json"},
        "A state file needs a metric with a name",
    ),
    "tolerance": ({"tolerance": 0}, "must be a positive number, not 0"),
    "not a number": ({"tolerance": np.nan}, "must be a positive number, not nan"),
    "device": ({"device": "TPU"}, "Unknown device 'TPU'"),
    "runs": ({"runs": 0}, "at least 1, not 0"),
    "candidate": ({"pick": 99}, r"There is no candidate 99: the report has \d+ candidates, counted from 0"),
    "no sample": ({"samples": Samples("none", [])}, "There is no sample"),
    "samples": ({"samples": given({"nothing": np.ones(1)})}, "missing"),
}


@pytest.mark.parametrize(("arguments", "named"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        tune_model(parse(CANCELS), **arguments)


# --- where candidates are judged, and how long ops take -----------------------------------------------------------


@pytest.mark.slow
def test_without_emulation_the_converted_model_itself_runs(cuda_double: CudaDouble) -> None:
    """As on CUDA, with the CPU in its place: it computes float16 in float32, and shows less error than emulation."""
    _, emulated = tune_model(called("encoder"), 1e-3, count=1, provider="cpu")
    cuda_double.models.clear()
    result, tuned = tune_model(called("encoder"), 1e-3, count=1, provider="cuda")
    assert is_low(result)
    ran = [ModelProto.FromString(model) for model in cuda_double.models if isinstance(model, bytes)]
    assert any(map(is_low, ran)), "float16 nodes ran as they are"
    assert (tuned.held, tuned.ran_on, emulated.ran_on) == (True, "CUDA (CUDA device)", "CPU, emulated float16")
    assert tuned.error != emulated.error
    result, tuned = tune_model(called("unet"), 1e-1, count=1, dtype="bfloat16", provider="cuda")
    assert not is_low(result), "bfloat16 does not even load on the CPU"
    assert tuned.conversions > 1


def test_what_does_not_run_is_not_written() -> None:
    model = onnx.load(called("classifier"))
    judge, samples = make_metric("rel-l2", 1), random_samples(model, 1)
    assert converted_error(Model(model), Model(model), Run(inputs=samples), judge, judging_engine("cpu")) == 0
    low = convert_at_level(model, dtype="bfloat16")
    assert converted_error(Model(model), Model(low), Run(inputs=samples), judge, judging_engine("cpu")) < 0.1
    assert (
        converted_error(Model(model), Model(low), Run(inputs=samples), judge, engine_on("cpu", emulates=False))
        == np.inf
    )


@pytest.mark.slow
def test_the_original_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its outputs are known, only the result runs: once a sample, as one piece is enough."""
    model = onnx.load(called("classifier"))
    low, judge, samples = convert_at_level(model), make_metric("rel-l2", 1), random_samples(model, 3)
    original, references, run = on_cpu(Model.of(model)), SampleCache(), Run(inputs=samples)
    for number, sample in enumerate(samples):
        references.keep(number, original.run(check_inputs(model, sample)))
    runs: list[None] = []

    class Session(onnxruntime.InferenceSession):
        def run_with_ort_values(self, *arguments: Any, **given: Any) -> Any:
            runs.append(None)
            return super().run_with_ort_values(*arguments, **given)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    error = converted_error(Model(model), Model(low), run, judge, judging_engine("cpu"), references=references)
    assert len(runs) == 3
    del references.kept[1]
    assert (
        converted_error(Model(model), Model(low), run, judge, judging_engine("cpu"), references=references) == error > 0
    )
    assert len(runs) == 3 + 4
    measured: list[int] = []

    def hear(text: str, *_: int) -> None:
        if text.startswith("verifying"):
            measured.append(len(runs))

    _, tuned = tune_model(called("recurrent"), 5e-4, count=2, progress=hear)
    assert len(runs) == measured[0] + 2 * (1 + tuned.conversions), "the original once"


def test_what_a_model_passes_through_outlives_the_sample() -> None:
    model = parse("(float[4] x) => (float[4] x, float[4] y) { y = Mul (x, x) }")
    x = np.arange(4, dtype=np.float32)
    found = on_cpu(Model.of(model)).run({"x": x})
    assert not np.shares_memory(found["x"], x)
    np.testing.assert_array_equal(found["x"], x)


def test_no_more_outputs_are_kept_than_fit() -> None:
    references = SampleCache(room=25)
    references.keep(0, {"y": np.zeros(4, np.float32), "s": [np.zeros(1, np.float32)]})
    references.keep(1, {"y": np.zeros(2, np.float32)})
    references.keep(2, {"y": np.zeros(1, np.float32), "none": None})
    assert references.kept.keys() == {0}
    assert references.room == 5


STRAYS = """(float[1,2] x, float[N] t) => (float[M] y) <float[2,1] halves = {0.5, 0.5}, int64[4] far = {9, 9, 9, 9}> {
    [grown] s = Softplus (x) [product] v = MatMul (s, halves)
    [largest] m = ReduceMax <keepdims = 0> (v) [compare] c = Greater (m, limit)
    [act] h = Tanh (t)
    [choice] y = If (c) <then_branch = near () => (float[4] a) { [root] a = Sigmoid (h) },
                         else_branch = out () => (float[4] b) { [pick] b = Gather (h, far) }>
}"""
"""The mean is above the limit, but not once it is rounded, and the other branch reads what is not there."""


def test_what_does_not_run_once_rounded_stays_float32() -> None:
    """In the pass that measures each op, too, of which no outputs are kept then."""
    model = parse(STRAYS)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1024.15), "limit"))
    sample = {"x": np.array([[1024, 1024.6]], np.float32), "t": np.linspace(-1, 1, 4, dtype=np.float32)}
    assert not np.isfinite(everything_low(model, given(sample)))
    result, tuned = tune_model(model, 1e-3, samples=given(sample))
    assert tuned.held
    assert "h" in tuned.candidates[tuned.chosen].low <= {"a", "h"}
    assert worst_error(model, result, given(sample)) == pytest.approx(tuned.error)


def everything_low(model: ModelProto, samples: Samples) -> float:
    low = convert_at_level(model, "O3", hazards=False)
    return converted_error(
        Model(model), Model(low), Run(inputs=samples), make_metric("rel-l2", 1), judging_engine("cpu")
    )


def test_cuda_that_is_not_there() -> None:
    if cuda_available():
        pytest.skip("there is a CUDA device")
    assert judging_engine(None) == engine_on("cpu")
    with pytest.raises(RuntimeFailure, match="CUDA cannot be used here"):
        judging_engine("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not cuda_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_confirmed_on_cuda(path: Path) -> None:
    _, tuned = tune_model(path, 1e-2, count=2)
    assert tuned.held
    assert tuned.ran_on.startswith("CUDA (")


@pytest.mark.slow
def test_measured_times() -> None:
    samples = random_samples(onnx.load(called("encoder")), 1)
    _, roofline = tune_model(called("encoder"), 1e-3, samples=samples)
    _, measured = tune_model(called("encoder"), 1e-3, samples=samples, times="measured")
    assert measured.held
    assert "on the CPU" in measured.times
    assert "estimates for A100" in roofline.times
    slowest = measured.candidates[-1].time, roofline.candidates[-1].time
    assert slowest[0] != slowest[1]
    assert measured.candidates[0].time < measured.candidates[-1].time


def test_measured_times_of_units() -> None:
    space = space_of(parse(CANCELS), hazards=False)
    add, sub, mul = (unit.key for unit in space.tunable)
    found = {unit.key: unit for unit in space.retimed({add: (4e-6, None), sub: (2e-6, 3e-6)}).tunable}
    assert (found[add].high, found[add].low) == (pytest.approx(4), pytest.approx(2)), "as the roofline has it"
    assert (found[sub].high, found[sub].low) == (pytest.approx(2), pytest.approx(3))
    assert found[mul].high == pytest.approx(6 * space.tunable[2].high / sum(unit.high for unit in space.tunable[:2]))
    assert found[sub].gain < found[add].gain


# --- what is remembered -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_in_the_pass_and_resumed(tmp_path: Path) -> None:
    """Each trial is killed after two samples: what it measured is not measured again."""
    state, model = tmp_path / "state.json", onnx.load(called("recurrent"))
    samples = random_samples(model, 5)
    whole = tune_model(model, 5e-4, samples=samples)
    begun: list[set[int]] = []

    def tuned_until(last: int) -> tuple[ModelProto, Tuned]:
        begun.append(set())

        def hear(text: str, done: int, _: int) -> None:
            if text.startswith("measuring sensitivities"):
                begun[-1].add(done)
                if done == last:
                    raise KeyboardInterrupt

        return tune_model(model, 5e-4, samples=samples, state=state, progress=hear)

    for samples_done in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            tuned_until(samples_done)
        assert samples_in(state) == samples_done
    result, tuned = tuned_until(6)
    assert begun == [{1, 2}, {3, 4}, {5}]
    assert (result, tuned.kept, tuned.candidates) == (whole[0], whole[1].kept, whole[1].candidates)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_what_it_measured(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    code = (
        "import os, sys, onnxamp\n"
        "def hear(text, done, _):\n"
        "    if 'sensitivities' in text and done == 2: os.kill(os.getpid(), 9)\n"
        "onnxamp.tune_model(sys.argv[1], count=4, allow_slower=True, state=sys.argv[2], progress=hear)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(called("recurrent")), str(state)], check=False)
    assert done.returncode != 0
    assert samples_in(state) == 2
    result, tuned = tune_model(called("recurrent"), count=4, state=state)
    again, whole = tune_model(called("recurrent"), count=4)
    assert (result, tuned.candidates, tuned.recalled) == (again, whole.candidates, 2)


@pytest.mark.slow
def test_a_pick_measures_no_more_than_the_converted_model(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    _, first = tune_model(called("recurrent"), 5e-4, count=1, state=state)
    other = next(number for number, one in enumerate(first.candidates) if not one.verified)
    result, tuned = tune_model(called("recurrent"), 5e-4, count=1, state=state, pick=other)
    assert (tuned.chosen, tuned.runs, tuned.recalled) == (other, 0, 1)
    assert tuned.candidates[other].verified
    assert tuned.held == (tuned.error <= 5e-4)
    assert 0 < tuned.error < 1e-2
    assert is_low(result)


def test_what_a_state_holds_is_not_counted_where_it_is_not_read(tmp_path: Path) -> None:
    """Without ``allow_slower``, nothing is measured where float32 is the fastest."""
    state = tmp_path / "state.json"
    tune_model(called("classifier"), 5e-4, count=2, state=state)
    _, tuned = tune_model(called("classifier"), 5e-4, count=2, state=state, allow_slower=False)
    assert (tuned.runs, tuned.recalled) == (0, 0)


@pytest.mark.slow
def test_another_tolerance_recalls_and_other_weights_are_refused(tmp_path: Path) -> None:
    state, model = tmp_path / "state.json", onnx.load(called("recurrent"))
    _, first = tune_model(model, 5e-4, count=1, state=state)
    _, second = tune_model(model, 4e-4, count=1, state=state)
    assert (first.runs, first.recalled, second.runs, second.recalled) == (1, 0, 0, 1)
    assert second.candidates[0].predicted == first.candidates[0].predicted
    tensor = next(tensor for tensor in model.graph.initializer if tensor.data_type == 1 and len(tensor.dims) == 2)
    tensor.raw_data = np.ones(tuple(tensor.dims), np.float32).tobytes()
    kept = state.read_bytes()
    with pytest.raises(ArgumentError, match=r"belongs to another tuning: the model changed since then\. Delete it"):
        tune_model(model, 5e-4, count=1, state=state)
    assert state.read_bytes() == kept


@pytest.mark.parametrize("content", ["[]", "{}", '{"onnxamp": "diff", "format": 1}', "\0"])
def test_what_is_no_state(content: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=r"state\.json.*name another file"):
        tune_model(parse(CANCELS), state=path)
    assert path.read_text() == content


# --- what breaks, and what is told ------------------------------------------------------------------------------


def test_a_block_that_breaks_the_outputs_is_narrowed_down() -> None:
    """The difference of two large sums is fine on its own, but infinite once they are low; the rest can be low."""
    text = "(float[8] x) => (float[8] y) <float k = {30000}, float w = {0.001}> {\n" + "\n".join(
        f"[n{i}] v{i} = Tanh ({'x' if i == 0 else f'v{i - 1}'})" for i in range(12)
    )
    text += "\n[a] a = Mul (v11, k) [b] b = Mul (a, w) [r] r = Reciprocal (b) [c] y = Reciprocal (r) }"
    _, tuned = tune_model(parse(text), 5e-3, samples=given({"x": np.linspace(0.5, 3, 8, dtype=np.float32)}))
    assert tuned.held
    assert tuned.candidates[tuned.chosen].nodes >= 12


def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    _, tuned = tune_model(called("recurrent"), 5e-4, count=1, progress=lambda *said: told.append(said))
    assert list(dict.fromkeys(text.partition(":")[0] for text, _, _ in told)) == [
        "measuring ranges", "measuring sensitivities", "verifying the converted model",
    ]  # fmt: skip
    assert all(done <= total for _, done, total in told)
    assert isinstance(tuned, Tuned)
