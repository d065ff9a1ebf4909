"""Times that an engine measures, and what tuning makes of them."""

import re
from dataclasses import replace

import numpy as np
import pytest
from engine import priced, space_of
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp
from onnxamp import RuntimeFailure, bench_models
from onnxamp._convert.analysis import low_nodes, solve
from onnxamp._numerics.speed.bench import BenchOptions
from onnxamp._runtime.sessions.plugins import engine_called
from onnxamp._runtime.sessions.session import choose_provider, make_session
from onnxamp._tuning.choices.solver import CandidateSolver
from onnxamp._tuning.choices.space import SearchSpace, exactly, find_fusions
from onnxamp._tuning.job import apportioned

CHAIN = """(float[8,64] x) => (float[8,64] y) {
    [p] a = MatMul (x, w)  [q] c = Add (a, b)  [r] d = Relu (c)  [s] e = MatMul (d, w)  [t] y = Tanh (e)
}"""


def chain() -> ModelProto:
    """Two products with what engines fuse into them."""
    model = parse(CHAIN)
    random = np.random.default_rng(0)
    for name, shape in (("w", (64, 64)), ("b", (64,))):
        array = (random.standard_normal(shape) / 8).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


FEEDS = {"x": np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)}


def test_kernels_are_apportioned_to_the_nodes_between_their_neighbors() -> None:
    space = space_of(chain())
    found = apportioned(space.all_low.graph, {"a": 4e-6, "Fused_3": 2e-6, "e": 3e-6}, space.estimate)
    assert (found["a"], found["e"], found["y"]) == (4e-6, 3e-6, 0.0), "what is fused into a node costs nothing"
    assert found["c"] + found["d"] == pytest.approx(2e-6)
    assert min(found["c"], found["d"]) > 0


def test_kernels_may_have_the_name_of_a_node_with_a_suffix() -> None:
    space = space_of(chain())
    found = apportioned(space.all_low.graph, {"a/WithoutBiases": 4e-6, "a/Reorder": 1e-6, "d": 2e-6}, space.estimate)
    assert (found["a"], found["c"], found["d"]) == (pytest.approx(5e-6), 0.0, 2e-6)


def test_a_choice_is_what_is_low_whatever_weights_take_and_nodes_gain() -> None:
    model = chain()
    heavy = np.zeros((2048, 64, 64), np.float32)  # 32 MB, which low precision halves
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(heavy, "w"))
    space = space_of(model, target="openvino")
    units = (*space.tunable, *space.followers)
    space = space.retimed({unit.key: (1e-6, 1e-6) for unit in units}, 1.0)
    assert {unit.gain for unit in space.tunable} == {1}
    for low in (frozenset[str](), frozenset({"a"}), frozenset({"a", "e"})):
        analysis = solve(space.all_low.problem, prices=exactly(space, low, {}))
        keys = {analysis.graph.nodes[index].first_output for index in low_nodes(analysis)}
        assert keys == low


def test_a_measured_price_of_casts_counts_savings_in_casts() -> None:
    space = space_of(chain())
    seconds = {"a": (50e-6, 10e-6), "c": (0.0, 0.0)}
    cheap, dear = (space.retimed(seconds, price) for price in (0.5, 2.0))
    gains = [{unit.key: unit.gain for unit in one.tunable} for one in (cheap, dear)]
    assert gains[0]["a"] == pytest.approx(4 * gains[1]["a"], rel=0.01)
    assert gains[0]["c"] == gains[1]["c"] == 1, "nobody lowers a node for its own sake that costs nothing"
    values = [0]
    assert cheap.time(frozenset(), values) < dear.time(frozenset(), values)


FUSED = {"a": 50e-6, "c": 0.0, "d": 0.0, "e": 50e-6, "y": 4e-6}
"""Seconds of nodes where what follows a product is part of its kernel."""


def fused_space() -> SearchSpace:
    """An engine that computes products in a fifth of the time in low precision."""
    space = space_of(chain(), target="openvino", dtype="bfloat16")
    low = {key: time / 5 for key, time in FUSED.items()}
    fusions = find_fusions(space.all_low.graph, space.estimate, FUSED, low)
    return space.retimed({key: (time, low[key]) for key, time in FUSED.items()}, 1.0, fusions)


def test_what_takes_no_time_behind_a_product_is_fused_into_it() -> None:
    space = fused_space()
    assert [one.keys for one in space.fusions] == [("a", "c"), ("c", "d")]
    assert all(one.time > 0 for one in space.fusions)
    parted, whole, none = (space.time(low, []) for low in ({"a", "d"}, {"a", "c", "d"}, set[str]()))
    assert parted == pytest.approx(whole + sum(one.time for one in space.fusions))
    assert none == pytest.approx(sum(FUSED.values()) * 1e6 + space.rest)


def test_nodes_with_kernels_and_views_are_not_fused() -> None:
    text = """(float[8,64] x, float[64,64] w, int64[1] s) => (float[512] y) {
        [p] a = MatMul (x, w) [v] r = Reshape (a, s) [n] y = Neg (r) }"""
    space = space_of(parse(text), target="openvino")
    graph, estimate = space.all_low.graph, space.estimate
    assert find_fusions(graph, estimate, {"a": 1e-6, "r": 0.0, "y": 0.0}, {}) == ()
    graph = (space := space_of(chain(), target="openvino")).all_low.graph
    for high, low, fused in ((0.0, 0.0, 1), (0.0, 1e-6, 0), (1e-6, 0.0, 0)):
        assert len(find_fusions(graph, space.estimate, {"y": high}, {"y": low})) == fused
    unseen = dict.fromkeys(FUSED, 0.0)
    assert find_fusions(graph, space.estimate, unseen, unseen) == ()


def test_nodes_of_decomposed_normalizations_have_kernels_of_their_own() -> None:
    text = """(float[8,64] x, float[64,64] w) => (float[8,64] y) <float e = {1e-5}> {
        a = MatMul (x, w) m = ReduceMean <axes = [-1]> (a) d = Sub (a, m) s = Mul (d, d)
        v = ReduceMean <axes = [-1]> (s) f = Add (v, e) r = Sqrt (f) y = Div (d, r) }"""
    space = space_of(parse(text), target="openvino")
    seconds = dict.fromkeys("mdsvfry", 0.0)
    assert find_fusions(space.all_low.graph, space.estimate, seconds, seconds) == ()


@pytest.mark.parametrize("fuses", [True, False])
def test_an_error_is_not_avoided_at_the_price_of_a_fusion(fuses: bool) -> None:
    """The addition errs most. By itself it would be float32 for two Casts, but these part it from its product."""
    space = fused_space()
    part = space.parting()[0, 1]
    space = space if fuses else replace(space, fusions=())
    errors = priced(space, (1.0 if unit.key == "c" else 0.0 for unit in space.tunable))
    solver = CandidateSolver(space, space.all_low, errors)
    assert solver.choose(1.0) == {"a", "c", "d", "e", "y"}
    assert solver.choose(0.8 * part) == ({"a", "c", "d", "e", "y"} if fuses else {"a", "d", "e", "y"})
    assert solver.choose(4.0 * part) == ({"a", "e", "y"} if fuses else {"a", "d", "e", "y"})


@pytest.mark.slow
@pytest.mark.webgpu
def test_the_result_is_timed_on_the_engine() -> None:
    _, tuned = onnxamp.tune_model(chain(), 1e-2, samples=FEEDS, provider="webgpu", times="measured", allow_slower=True)
    assert re.fullmatch(r"estimates for .*, because WebGPU on .* does not report .*", tuned.times)
    first, *others = (name for name, _ in tuned.timed)
    assert first == "float32"
    assert set(others) & {"result", "level O2"}
    assert all(seconds > 0 for _, seconds in tuned.timed)
    assert tuned.held


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("allow_slower", [False, True])
def test_times_on_openvino(allow_slower: bool) -> None:
    low, tuned = onnxamp.tune_model(
        chain(), 1e-2, samples=FEEDS, provider="openvino", times="measured", dtype="bfloat16", allow_slower=allow_slower
    )
    assert tuned.times.startswith("measured on OpenVINO (hint dynamic) on ")
    assert tuned.held
    assert onnxamp.diff_models(chain(), low, FEEDS, provider="openvino").ran_on == tuned.ran_on
    times, chosen = dict(tuned.timed), tuned.candidates[tuned.chosen]
    if times and not chosen.low and not allow_slower:
        assert times["float32"] <= min(times.values()) * 1.03


@pytest.mark.openvino
def test_the_hint_decides_whether_types_count() -> None:
    model = chain()
    low = onnxamp.convert_model(model, dtype="bfloat16")
    assert onnxamp.diff_models(model, low, FEEDS, provider="openvino").outputs[0].rel_l2 > 1e-4
    exact = onnxamp.diff_models(model, model, FEEDS, provider="openvino:f32")
    assert exact.ran_on.startswith("OpenVINO (hint f32) on ")
    assert exact.outputs[0].rel_l2 < 1e-5


@pytest.mark.openvino
def test_reports_say_where_kernels_compute_in_float32_alone() -> None:
    hinted = onnxamp.diff_models(chain(), chain(), FEEDS, provider="openvino:bf16")
    rounds = hinted.outputs[0].rel_l2 > 1e-4
    assert (re.search(r", float32( and float16)? kernels$", hinted.ran_on) is None) == rounds


@pytest.mark.slow
@pytest.mark.openvino
def test_models_of_several_engines_are_timed_beside_each_other() -> None:
    places = ("cpu", "openvino:f32", "openvino")
    each = [BenchOptions(provider=place, threads=1, seconds=0.01, profile=False) for place in places]
    report = bench_models(chain(), chain(), chain(), provider="cpu", options=each)
    assert report.ran_on.split("; ")[0] == "CPU"
    assert len(report.ran_on.split("; ")) == 3
    assert [set(model.assigned) for model in report.models] == [{"CPU"}, {"OPENVINO"}, {"OPENVINO"}]


@pytest.mark.openvino
def test_the_number_of_threads_reaches_the_engine() -> None:
    assert 'INFERENCE_NUM_THREADS":"3"' in engine_called("openvino").settings(3)["load_config"]
    session = make_session(chain(), "openvino", threads=1)
    assert session.run(None, FEEDS)[0].shape == (8, 64)


def test_hints_are_checked() -> None:
    with pytest.raises(onnxamp.ArgumentError, match="'openvino' has no hint 'int8': it takes dynamic, f32, bf16, f16"):
        choose_provider("openvino:int8")
    with pytest.raises(onnxamp.ArgumentError, match="'webgpu' has no hint 'f16': it takes none"):
        choose_provider("webgpu:f16")
    with pytest.raises((RuntimeFailure, onnxamp.ArgumentError)):
        choose_provider("vulkan:f16")


@pytest.mark.openvino
def test_what_the_target_allows_runs_there() -> None:
    model = parse(
        "(float[8,64] x, int64 i) => (float[8,64] y) { [e] a = Exp (x) [sum] c = CumSum (a, i) [t] y = Tanh (c) }"
    )
    feeds = {**FEEDS, "i": np.array(1)}
    low = onnxamp.convert_model(model, level="O3", target="openvino", dtype="bfloat16")
    rows = {row.node: row.low for row in onnxamp.plan_model(model, "O3", target="openvino", dtype="bfloat16").rows}
    assert not rows["sum"], "OpenVINO takes CumSum in float32 alone"
    assert rows["e"]
    assert onnxamp.diff_models(model, low, feeds, provider="openvino").ran_on.startswith("OpenVINO")
