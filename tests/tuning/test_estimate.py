"""What choices cost by the estimate: launches, Casts and bytes, for the shapes of the inputs; and what follows."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import decoders
import numpy as np
import onnx
import pytest
from engine import analysis_of
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto
from repository import ROOT

from onnxamp import Samples, tune_model
from onnxamp._convert.estimate import LAUNCH_US, Estimate, bound_shapes, time_of, time_on_target
from onnxamp._facts.devices import device_called
from onnxamp._graph.graph import Graph
from onnxamp._graph.work import Work
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._tuning.choices.space import find_space


def estimate_of(text: str, **shapes: tuple[int, ...]) -> Estimate:
    graph = Graph.of(parse(text))
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return Estimate(graph, device_called("A100"), bound_shapes(graph, feeds))


def given(**arrays: Any) -> Samples:
    return Samples("1 given", [lambda: arrays])


def test_sizes_are_those_of_the_inputs() -> None:
    text = "(float[N,32] x, float[32,16] w) => (float[N,16] y) { h = MatMul (x, w) y = Tanh (h) }"
    estimate = estimate_of(text, x=(1000, 32))
    assert estimate.work(estimate.graph.nodes[0]) == Work(
        1000 * 32 + 32 * 16 + 1000 * 16, 2 * 32 * 1000 * 16, products=True
    )
    assert estimate_of(text).work(estimate.graph.nodes[1]) == Work(2 * 64 * 16, 64 * 16), "nothing is known of N"


def test_what_launches_a_kernel() -> None:
    estimate = estimate_of(
        """(float[2,8] x, float[9,4] table, int64[3] rows) => (float[16] y, float[3,4] g, int64[3] r) {
            flat = Constant <value = int64[1] {16}> ()
            double = Add (flat, flat)
            t = Tanh (x)
            y = Reshape (t, flat)
            g = Gather (table, rows)
            r = Add (rows, rows)
        }"""
    )
    launches = {node.proto.output[0]: estimate.launches(node) for node in estimate.graph.nodes}
    assert launches == {"flat": 0, "double": 0, "t": 1, "y": 0, "g": 1, "r": 0}
    work = {node.proto.output[0]: estimate.work(node) for node in estimate.graph.nodes}
    assert work["y"] == Work(0, 0)
    assert work["g"] == Work(12 + 3 + 12, 12), "rows are read, not the table"


def test_casts_and_weights_of_a_choice() -> None:
    model = add_weights(
        parse("(float[2,64] x) => (float[2,64] y, float[2,64] z) { m = MatMul (x, w) y = Tanh (m) z = Exp (m) }"),
        {"w": (64, 64)},
    )
    graph = Graph.of(model)
    estimate = Estimate(graph, device_called("A100"), graph.shapes)
    space = find_space(graph, Options.of("auto", {}), estimate)
    decision, ports = space.all_low.decision, space.all_low.ports
    casts = estimate.casts(ports, decision)
    assert {graph.values[value].name for value in casts} == {"x", "y", "z"}
    assert estimate.weight_bytes(ports, decision) == 2 * 64 * 64
    everything = {unit.key for unit in space.tunable}
    nodes = sum(unit.low for unit in space.tunable)
    cast = LAUNCH_US + 6 * 128 / 2.039e6
    assert space.time(everything, casts) == pytest.approx(3 * LAUNCH_US + nodes + 3 * cast)


SMALL = "(float[4,64] x) => (float[4,64] y) { [only] y = Softmax (x) }"


def test_nothing_is_chosen_that_is_slower_than_float32() -> None:
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    model, tuned = tune_model(parse(SMALL), samples=given(x=x))
    assert model == parse(SMALL)
    assert (len(tuned.candidates), tuned.held, tuned.is_slower) == (1, True, False)
    assert tuned.rejected is not None
    assert (tuned.rejected.nodes, tuned.rejected.casts) == (1, 2)
    assert tuned.rejected.time > tuned.candidates[-1].time
    _, tuned = tune_model(parse(SMALL), samples=given(x=x), allow_slower=True)
    assert (tuned.candidates[tuned.chosen].nodes, tuned.is_slower, tuned.rejected) == (1, True, None)


def chain(count: int, kept: int) -> ModelProto:
    """Products with weights of 16 KiB each between two Casts, and one with ``kept`` times as much, in float32."""
    names = ["x", *(f"h{number}" for number in range(1, count)), "h"]
    body = " ".join(f"{b} = MatMul ({a}, w{number})" for number, (a, b) in enumerate(pairwise(names)))
    ends = f"(float[1,64] x) => (float[1,64] h, float[1,{64 * kept}] y)"
    model = parse(f"{ends} {{ {body} [float32] y = MatMul (x, v) }}")
    return add_weights(model, {**{f"w{number}": (64, 64) for number in range(count)}, "v": (64, 64 * kept)})


X = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
HOW: dict[str, Any] = {"samples": given(x=X), "keep_high": ["float32"]}


@pytest.mark.parametrize(("count", "kept", "smaller"), [(8, 4, "33 %"), (8, 100, "4 %"), (1, 1, "25 %")])
def test_what_is_slower_and_smaller_is_written_only_if_that_is_allowed(count: int, kept: int, smaller: str) -> None:
    """The Casts take longer than the products save; and that is said."""
    model = chain(count, kept)
    result, tuned = tune_model(model, **HOW)
    assert result == model
    assert (len(tuned.candidates), tuned.candidates[0].nodes, tuned.runs) == (1, 0, 0)
    assert tuned.rejected is not None
    assert tuned.rejected.weights < tuned.candidates[-1].weights
    told = " ".join(str(tuned).split())
    assert "No candidate is faster by the estimate: the model stays as it is." in told
    assert f"for weights that are {smaller} smaller. --allow-slower converts them anyway." in told
    result, tuned = tune_model(model, **HOW, allow_slower=True)
    low = {tensor.name for tensor in result.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    assert low == {f"w{number}" for number in range(count)}
    assert tuned.is_slower
    told = " ".join(str(tuned).split())
    last = len(tuned.candidates) - 1
    assert f"for weights that are {smaller} smaller. --pick {last} keeps everything in float32." in told


def test_what_the_clock_says_is_told() -> None:
    """A candidate that is worth it by the estimate, and slower than float32 when both are timed whole."""
    _, tuned = tune_model(chain(8, kept=4), **HOW, allow_slower=True, pick=0)
    timed = (("float32", 1e-3), ("result", 1.25e-3))
    kept = replace(tuned, chosen=len(tuned.candidates) - 1, timed=timed)
    told = " ".join(str(kept).split())
    assert "No candidate is faster: the model stays as it is." in told
    assert "Timed as whole models, the candidate takes 25 % longer than float32." in told


def test_a_search_without_time_ends() -> None:
    text = """(float[8] x) => (float[8] y) <float big = {256}> {
        s = Add (x, big) d = Sub (s, big) y = Mul (d, d)
    }"""
    x = np.linspace(1, 2, 8, dtype=np.float32)
    _, tuned = tune_model(parse(text), 3e-2, samples=given(x=x), seconds=0, allow_slower=True)
    assert tuned.conversions <= 2
    assert tuned.held
    _, tuned = tune_model(parse(text), 1e-4, samples=given(x=x), allow_slower=True)
    assert not tuned.stopped


def test_a_model_that_is_read_once_is_not_changed() -> None:
    model = parse(SMALL)
    before = model.SerializeToString()
    tune_model(Model.of(model), samples=given(x=np.ones((4, 64), np.float32)))
    assert model.SerializeToString() == before


def test_what_there_was_no_time_to_try_is_verified() -> None:
    """A chain of which one half needs all of the tolerance: one candidate is measured."""
    body = " ".join(f"v{i} = Tanh (v{i - 1})" for i in range(1, 16))
    text = f"(float[64] v0) => (float[64] y) <float big = {{256}}> {{ {body} s = Add (v15, big) y = Sub (s, big) }}"
    v0 = np.linspace(0.1, 2, 64, dtype=np.float32)
    _, tuned = tune_model(parse(text), 2e-3, samples=given(v0=v0), seconds=0, allow_slower=True)
    chosen = tuned.candidates[tuned.chosen]
    assert tuned.held
    assert chosen.nodes > 0
    assert (chosen.error, chosen.verified) == (tuned.error, True)


@pytest.mark.parametrize("name", ["encoder", "decoder", "recurrent"])
def test_a_decision_costs_what_the_search_says_of_its_nodes(name: str) -> None:
    """Two ways to the time of all that can be low: of a choice of the search, which counts some bytes of nodes that are
    folded away, and of an analysis.
    """
    graph = Graph.of(onnx.load(ROOT / "models" / f"{name}.onnx"))
    estimate = Estimate(graph, device_called("A100"), graph.shapes)
    space = find_space(graph, Options.of("auto"), estimate)
    low = {unit.key for unit in (*space.tunable, *space.followers)}
    casts = estimate.casts(space.all_low.ports, space.all_low.decision)
    assert time_of(space.all_low, estimate) == pytest.approx(space.time(low, casts), rel=1e-3)


def test_nodes_that_run_on_the_device_once_they_are_low_take_no_trip_to_the_cpu() -> None:
    """CUDA's GroupQueryAttention takes float16 alone."""
    model = decoders.grouped()
    low, high = (analysis_of(model, level, target="cuda") for level in ("O2", "O0"))
    attentions = {node.index for node in low.graph.nodes_of({"com.microsoft::GroupQueryAttention"})}
    assert attentions <= {*high.on_cpu}
    estimates = [Estimate(one.graph, device_called("A100"), one.graph.shapes) for one in (low, high)]
    trips = [time_on_target(one) - time_of(one, estimate) for one, estimate in zip((low, high), estimates, strict=True)]
    assert attentions.isdisjoint(low.on_cpu)
    assert trips[0] == 0 < trips[1]
