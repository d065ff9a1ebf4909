"""Benchmarks: how time is measured, what is read off profiles, and what follows from it. No test waits for a clock."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from commands import CLASSIFIER, is_one_sentence, report_of, run
from graphs.case import parse

from onnxamp import ArgumentError, RuntimeFailure, bench_models, convert_model
from onnxamp._facts.kernels import kernel_table
from onnxamp._numerics.speed.bench import BenchOptions
from onnxamp._numerics.speed.bench_results import Bench, BenchReport, Latency, OpTime, Slowdown, TimeRatio, Timing
from onnxamp._numerics.speed.timing import (
    Evidence,
    Timed,
    executed,
    find_slowdowns,
    fused_ops,
    interleave,
    latency,
    odd_channels,
    op_times,
    profiled,
    ratio,
    timed,
    warm_up,
)
from onnxamp._report.bench import bench_report
from onnxamp._report.formats import document
from onnxamp._report.terminal import as_text
from onnxamp._runtime.sessions.plugins import bytes_on_device, device_memory_used, device_present
from onnxamp._runtime.sessions.session import bind, cuda_available, make_session

RELU = "(float[N,4] x) => (float[N,4] y) { [only] y = Relu (x) }"
QUICK = BenchOptions(seconds=0.02)
needs_cuda = pytest.mark.skipif(not cuda_available(), reason="no CUDA device")


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def takes(self, name: str, *seconds: float) -> Timed:
        """A function that takes so long, the last time from then on."""
        left = list(seconds)

        def call() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return timed(call, self)


class TestTiming:
    def test_warming_up_ends_when_times_agree(self) -> None:
        clock = Clock()
        assert warm_up(clock.takes("f", 9.0, *[4.0] * 5, *[2.0] * 5, 1.0), clock, 1e9) == 1.0
        assert len(clock.log) == 1 + 4 * 5

    def test_warming_up_ends_at_its_limit(self) -> None:
        clock = Clock()
        ever_slower = clock.takes("f", *[2.0**n for n in range(60)])
        warm_up(ever_slower, clock, 100.0)
        assert clock.now < 5000

    def test_functions_take_turns_in_alternating_order(self) -> None:
        clock = Clock()
        runs = [clock.takes("a", 1.0), clock.takes("b", 2.0)]
        found = interleave(runs, [1.0, 2.0], 0.0)
        assert [len(blocks) for blocks in found] == [8, 8]
        turns = "".join(clock.log)
        assert turns.startswith("aaabbb" + "bbbaaa" + "aaabbb")  # one run to come back to, two that count
        assert {x for blocks in found[1] for x in blocks} == {2.0}

    def test_short_runs_come_in_longer_blocks(self) -> None:
        clock = Clock()
        found = interleave([clock.takes("a", 1e-3), clock.takes("b", 1e-9)], [1e-3, 1e-9], 0.0)
        assert [len(blocks[0]) for blocks in found] == [20, 50]

    def test_more_time_means_more_rounds(self) -> None:
        clock = Clock()
        assert len(interleave([clock.takes("a", 1.0)], [1.0], 90.0)[0]) == 30
        assert len(interleave([clock.takes("a", 1.0)], [1.0], 9e9)[0]) == 60

    def test_quantiles(self) -> None:
        found = latency(7.0, [[float(x) for x in range(51)], [float(x) for x in range(51, 101)]])
        assert found == Latency(7.0, 50.0, 90.0, 99.0, 101)

    def test_drift_cancels_in_the_ratio(self) -> None:
        """Both get slower by a factor of ten: the quotient of what ran side by side does not move."""
        drift = np.linspace(1, 10, 20)
        found = ratio([[2 * x] * 3 for x in drift], [[x] * 3 for x in drift])
        assert found.value == pytest.approx(2)
        assert found.low == pytest.approx(2)
        assert found.high == pytest.approx(2)

    def test_spread_shows_in_the_interval(self) -> None:
        rng = np.random.default_rng(1)
        noisy = ratio([[1.0]] * 40, [[x] for x in rng.uniform(0.5, 1.5, 40)])
        assert noisy.low < noisy.value < noisy.high
        assert noisy == ratio([[1.0]] * 40, [[x] for x in np.random.default_rng(1).uniform(0.5, 1.5, 40)])


class TestBound:
    def test_runs_on_the_arrays_themselves(self) -> None:
        x = np.zeros((1, 4), np.float32)
        session = make_session(parse("(float[1,4] x) => (float[1,4] y) { y = Identity (x) }"))
        bind(session, {"x": x, "stranger": x})()

    @pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16, np.dtype("V2")])
    def test_floats_come_in_the_models_own_type(self, dtype: Any) -> None:
        name = "bfloat16" if dtype in (ml_dtypes.bfloat16, np.dtype("V2")) else "float16"
        model = parse(f"({name}[1,4] x) => (float[1,4] y) {{ y = Cast <to = 1> (x) }}")
        feed = np.zeros((1, 4), np.uint16).view("V2") if dtype == np.dtype("V2") else np.ones((1, 4), dtype)
        bind(make_session(model), {"x": feed})()

    def test_sequences(self) -> None:
        model = parse("(seq(float[2]) s) => (seq(float[2]) t) { t = Identity (s) }")
        bind(make_session(model), {"s": [np.ones(2, np.float32)] * 2})()

    def test_what_does_not_fit_is_one_sentence(self) -> None:
        with pytest.raises(RuntimeFailure, match="inputs and outputs bound"):
            bind(make_session(parse(RELU)), {"x": np.ones((1, 5), np.float32)})
        with pytest.raises(RuntimeFailure, match="inputs and outputs bound"):
            bind(make_session(parse(RELU)), {})


def event(name: str, op: str, seconds: float, at: float, **args: Any) -> dict[str, Any]:
    told = {"op_name": op, "provider": "CUDAExecutionProvider", "input_type_shape": [], "output_type_shape": []} | args
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": seconds * 1e6, "ts": at, "args": told}


def runs(*events: dict[str, Any]) -> list[dict[str, Any]]:
    """A profile of two runs, of which the second counts."""
    spans = [{"cat": "Session", "name": "model_run", "ts": at, "dur": 100} for at in (0, 1000)]
    return [*(e | {"ts": e["ts"]} for e in events), *(e | {"ts": e["ts"] + 1000} for e in events), *spans]


def test_ops_that_run_are_named_as_the_runtime_names_them() -> None:
    """By its schemas; copies and NHWC forms have none that it tells of."""
    import onnxruntime.capi.onnxruntime_pybind11_state as ort_state

    known = {schema.name for schema in ort_state.get_all_operator_schema()} | {"MemcpyFromHost", "MemcpyToHost"}
    facts = executed()
    named = (
        facts.convolutions | facts.conv_activations | facts.attentions | facts.copies | facts.glue | {*facts.channels}
    )
    assert {op.removeprefix("Nhwc") for op in named} <= known
    low = (
        row
        for op in ("com.microsoft::FusedConv", "com.microsoft::NhwcFusedConv")
        for row in kernel_table("cuda").get(op, ())
    )
    assert {name for row in low for name in row.types["T"]} == {"tensor(float)"}


BARE = Bench("m", {}, "float32", 0.0, {})
"""A model whose profile is still to be taken."""


class TestProfiles:
    def test_nodes_are_counted_by_op_provider_and_type(self) -> None:
        low, high = [{"float16": [8, 8]}], [{"float": [8, 8]}]
        found = op_times(runs(
            event("a", "MatMul", 0.5, 1, input_type_shape=low, output_type_shape=low),
            event("b", "MatMul", 0.25, 2, input_type_shape=low, output_type_shape=low),
            event("c", "MatMul", 1.0, 3, input_type_shape=high, output_type_shape=high),
            event("d", "Cast", 0.125, 4, input_type_shape=high, output_type_shape=low),
            event("f", "If", 9.0, 6, output_type_shape=high),  # what is in it counts by itself
            event("e", "Shape", 0.0, 5, provider="CPUExecutionProvider", output_type_shape=[{"int64": [2]}]),
        ))  # fmt: skip
        assert found == (
            OpTime("MatMul", "CUDA", "float32", 1, 1.0), OpTime("MatMul", "CUDA", "float16", 2, 0.75),
            OpTime("Cast", "CUDA", "float16", 1, 0.125), OpTime("Shape", "CPU", "no floats", 1, 0.0),
        )  # fmt: skip

    def test_ops_without_times_are_counted(self) -> None:
        high = [{"float": [8, 8]}]
        found = op_times(runs(*(
            event(name, "MatMul", 0.5, 1, provider="WebGpuExecutionProvider", output_type_shape=high) for name in "ab"
        )))  # fmt: skip
        assert found == (OpTime("MatMul", "WEBGPU", "float32", 2, None),)

    @pytest.mark.parametrize(
        ("op", "dtype", "inner", "outer", "odd"),
        [
            ("Conv", "float16", [1, 3, 9, 9], [1, 16, 9, 9], True),
            ("Conv", "float16", [1, 8, 9, 9], [1, 16, 9, 9], False),
            ("Conv", "float", [1, 3, 9, 9], [1, 16, 9, 9], False),
            ("MatMul", "bfloat16", [5, 64], [5, 30], True),
            ("MatMul", "bfloat16", [5, 64], [5, 32], False),
            ("Relu", "float16", [5, 3], [5, 3], False),
        ],
    )
    def test_odd_channels(self, op: str, dtype: str, inner: list[int], outer: list[int], odd: bool) -> None:
        args = {"input_type_shape": [{dtype: inner}, {dtype: [7, 7]}], "output_type_shape": [{dtype: outer}]}
        assert odd_channels(runs(event("n", op, 1.0, 1, **args))) == ({op: 1} if odd else {})

    @pytest.mark.slow
    def test_a_process_of_its_own(self, tmp_path: Path) -> None:
        path = tmp_path / "m.onnx"
        onnx.save(parse("(float[N,4] x, bfloat16[2] z) => (float[N,4] y, float[2] w)"
                        "{ [only] y = Relu (x)\n [cast] w = Cast <to = 1> (z) }"), path)  # fmt: skip
        feeds = {"x": np.ones((3, 4), np.float32), "z": np.ones(2, ml_dtypes.bfloat16)}
        found = profiled(BARE, path, feeds, "cpu", {})
        kinds = {(row.op, row.provider, row.dtype, row.nodes) for row in found.ops}
        assert kinds == {("Relu", "CPU", "float32", 1), ("Cast", "CPU", "bfloat16", 1)}
        assert all(row.seconds > 0 for row in found.ops)
        assert found.memory is None

    @pytest.mark.slow
    def test_strings_go_there_too(self, tmp_path: Path) -> None:
        model = parse("(string[N] t, float[N,4] x) => (string[N] u, float[N,4] y) { u = Identity (t) y = Relu (x) }")
        onnx.save(model, tmp_path / "model.onnx")
        feeds = {"t": np.array(["a", "bc"], object), "x": np.ones((2, 4), np.float32)}
        found = profiled(BARE, tmp_path / "model.onnx", feeds, "cpu", {})
        assert {row.op for row in found.ops} == {"Identity", "Relu"}

    @pytest.mark.slow
    def test_failures_come_back(self, tmp_path: Path) -> None:
        path = tmp_path / "m.onnx"
        onnx.save(parse(RELU), path)
        with pytest.raises(RuntimeFailure, match=r"^ONNX Runtime could not run the model.*Got: 5"):
            profiled(BARE, path, {"x": np.ones((3, 5), np.float32)}, "cpu", {})
        with pytest.raises(RuntimeFailure, match="--no-profile"):
            profiled(BARE, path, {"x": [np.ones(3, np.float32)]}, "cpu", {})


def bench(*rows: tuple[Any, ...], name: str = "m", kinds: dict[str, int] | None = None, **facts: Any) -> Bench:
    lowest = "float16" if any(row[2] == "float16" for row in rows) else "float32"
    facts = {"options": {}, "kinds": kinds or {}, "ops": tuple(OpTime(*row) for row in rows)} | facts
    return Bench(name, lowest=lowest, load=1.0, assigned={"CUDA": 1}, **facts)


def causes_of(model: Bench, original: Bench | None = None, **facts: Any) -> dict[str, str]:
    model = replace(model, options=facts.get("options", {}))
    timings = facts.get("timings", [timing(1.0, 1.0)])
    found = find_slowdowns(Evidence(original or bench(), model, timings, facts.get("on_cuda", True)))
    return {cause.kind: cause.text for cause in found}


def timing(first: float, median: float) -> Timing:
    return Timing("m", 1, Latency(first, median, median, median, 9), 1.0, None)


MATMUL = ("MatMul", "CUDA", "float16", 10, 1.0)


class TestCauses:
    def test_nothing_to_complain_of(self) -> None:
        assert causes_of(bench(MATMUL), bench(MATMUL)) == {}

    def test_casts(self) -> None:
        found = causes_of(
            bench(MATMUL, ("Cast", "CUDA", "float16", 7, 0.25)), bench(("Cast", "CUDA", "float32", 2, 0.1))
        )
        assert found == {"casts": "7 Casts (2 in the original) take 250 ms, 20 % of the time"}
        assert not causes_of(bench(MATMUL, ("Cast", "CUDA", "float16", 7, 0.01)))
        assert not causes_of(bench(MATMUL, ("Cast", "CUDA", "no floats", 7, 0.25)))

    def test_fallbacks(self) -> None:
        rows = (MATMUL, ("Det", "CPU", "float32", 2, 0.1), ("MemcpyToHost", "CUDA", "float32", 3, 0.2))
        found = causes_of(bench(*rows))
        assert found == {"fallback": "on the CPU: Det ×2 (float32); 3 copies between host and device take 200 ms"}
        assert "as in the original" in causes_of(bench(*rows), bench(*rows))["fallback"]
        assert not causes_of(bench(MATMUL, ("Gather", "CPU", "no floats", 2, 0.1)))

    def test_fusions(self) -> None:
        original = bench(("LayerNormalization", "CUDA", "float32", 5, 1.0), kinds={"ReduceMean": 10})
        found = causes_of(bench(("ReduceMean", "CUDA", "float32", 10, 1.0), kinds={"ReduceMean": 10}), original)
        assert "LayerNormalization ×5" in found["fusion"]
        own = bench(("LayerNormalization", "CUDA", "float32", 5, 1.0), kinds={"LayerNormalization": 5})
        assert not causes_of(bench(MATMUL), own)
        assert fused_ops(original) == {"LayerNormalization": 5}
        assert not causes_of(own, original)  # folded beforehand: nothing is left to fuse
        fused = bench(("SimplifiedLayerNormalization", "CUDA", "float32", 5, 1.0), kinds={"ReduceMean": 10})
        folded = bench(("RMSNormalization", "CUDA", "float16", 5, 1.0), kinds={"RMSNormalization": 5})
        assert not causes_of(folded, fused), "one kernel as well, by the standard's name"

    def test_attention_lost_to_a_softmax(self) -> None:
        original = bench(("Attention", "CUDA", "float32", 4, 1.0))
        found = causes_of(bench(MATMUL, ("Softmax", "CUDA", "float32", 4, 1.0), kinds={"Softmax": 4}), original)
        assert found == {"softmax": "4 attentions are not fused, because 4 Softmax are in float32"}

    def test_activations_of_convolutions(self) -> None:
        original = bench(("FusedConv", "CUDA", "float32", 3, 1.0))
        found = causes_of(bench(("Relu", "CUDA", "float16", 3, 1.0), kinds={"Relu": 3}), original)
        assert found == {
            "fused conv": "3 activations no longer run inside their Conv, because FusedConv exists only in float32"
        }

    def test_layout(self) -> None:
        model = bench(("Conv", "CUDA", "float16", 3, 0.5), kinds={"Conv": 3})
        assert causes_of(model).keys() == {"layout"}
        assert not causes_of(model, options={"prefer_nhwc": "1"})
        assert not causes_of(bench(("Conv", "CUDA", "float32", 3, 0.5), kinds={"Conv": 3}))

    def test_channels(self) -> None:
        assert "MatMul ×2" in causes_of(bench(MATMUL, odd={"MatMul": 2}))["channels"]

    def test_search(self) -> None:
        model = bench(("Conv", "CUDA", "float32", 3, 0.5), kinds={"Conv": 3})
        assert "2 s" in causes_of(model, timings=[timing(2.0, 0.01)])["search"]
        assert not causes_of(model, timings=[timing(0.02, 0.01)])
        assert not causes_of(bench(MATMUL), timings=[timing(2.0, 0.01)])

    def test_launches(self) -> None:
        model = bench(("MatMul", "CUDA", "float16", 100, 1e-4))
        assert "100 kernels" in causes_of(model, timings=[timing(1e-3, 5e-4)])["launches"]
        assert not causes_of(model, timings=[timing(1e-3, 5e-4)], options={"enable_cuda_graph": "1"})
        assert not causes_of(model, timings=[timing(1e-1, 5e-2)])

    def test_float16_on_cpu_has_no_causes(self) -> None:
        model = bench(("MatMul", "CPU", "float16", 1, 1.0), ("Cast", "CPU", "float16", 99, 1.0))
        assert causes_of(model, on_cuda=False) == {}
        high = bench(("MatMul", "CPU", "float32", 1, 1.0), ("Cast", "CPU", "float32", 99, 1.0))
        assert causes_of(high, on_cuda=False).keys() == {"casts"}


class TestModels:
    @pytest.mark.slow
    def test_batches_and_ratios(self) -> None:
        model = onnx.load(CLASSIFIER)
        steps: list[tuple[int, int]] = []
        found = bench_models(
            model, model, provider="cpu", batches=[1, 2], options=QUICK, told=lambda *s: steps.append(s)
        )
        assert [(t.model, t.batch) for t in found.timings] == [
            (model.model, batch) for model in found.models for batch in (1, 2)
        ]
        assert len({m.model for m in found.models}) == 2
        for one in found.timings:
            assert 0 < one.latency.median <= one.latency.p90 <= one.latency.p99
            assert one.throughput == pytest.approx(one.batch / one.latency.median)
            assert (one.speedup is None) == (one.model == found.models[0].model)
        assert found.models[0].assigned == {"CPU": 15}  # the five BatchNormalizations are in their Convs by then
        assert found.models[0].lowest == "float32"
        assert found.models[0].load > 0
        assert found.profiled == 2
        assert steps[-1] == (6, 6)
        assert not found.notes

    @pytest.mark.slow
    def test_low_models_on_cpu_get_a_note(self) -> None:
        model = onnx.load(CLASSIFIER)
        found = bench_models(CLASSIFIER, convert_model(model), provider="cpu", options=QUICK)
        assert "say nothing about a GPU" in found.notes[0]
        assert found.causes == ()

    def test_the_batch_leads_the_inputs(self) -> None:
        anonymous = parse("(float[?,4] x, float[?,4] z) => (float[?,4] y) { y = Add (x, z) }")
        for entry in anonymous.graph.input:
            entry.type.tensor_type.shape.dim[0].Clear()
        only = BenchOptions(seconds=0.02, profile=False)
        found = bench_models(anonymous, provider="cpu", batches=[3], options=only)
        assert found.timings[0].batch == 3
        assert found.models[0].ops == ()
        with pytest.raises(ArgumentError, match="batch size is fixed"):
            bench_models(parse("(float[2,4] x) => (float[2,4] y) { y = Relu (x) }"), provider="cpu", batches=[3])

    @pytest.mark.slow
    def test_given_inputs(self) -> None:
        feeds = {"x": np.ones((5, 4), np.float32)}
        found = bench_models(parse(RELU), provider="cpu", feeds=feeds, options=QUICK)
        assert found.timings[0].batch is None
        assert found.timings[0].throughput == pytest.approx(1 / found.timings[0].latency.median)

    @pytest.mark.parametrize(
        ("models", "given", "message"),
        [
            ((), {}, "no model"),
            ((RELU,), {"batches": [0]}, "positive"),
            ((RELU,), {"batches": [1], "feeds": {"x": np.ones((1, 4), np.float32)}}, "apply only to random inputs"),
            ((RELU,), {"dims": {"M": 3}}, "no dimension 'M'"),
            ((RELU, RELU.replace("x", "z")), {}, r"first model lacks: 'z'"),
            ((RELU,), {"options": BenchOptions(cuda_graph=True)}, "need the CUDA provider"),
        ],
    )
    def test_wrong_arguments(self, models: Sequence[str], given: dict[str, Any], message: str) -> None:
        options = {"options": replace(QUICK, profile=False)} | given
        with pytest.raises(ArgumentError, match=message):
            bench_models(*map(parse, models), provider="cpu", **options)


class TestCommand:
    @pytest.mark.slow
    def test_shows_all(self, tmp_path: Path) -> None:
        low = tmp_path / "low.onnx"
        onnx.save(convert_model(onnx.load(CLASSIFIER)), low)
        arguments = ("--provider", "cpu", "--batch", "1,2", "--seconds", "0.02")
        result = run("bench", CLASSIFIER, low, *arguments)
        assert result.exit_code == 0, result.output
        for text in ("CPU, onnxruntime", "median ms", "p99 ms", "speed-up [95 %]", "low.onnx", "Conv",
                     "nodes per provider", "say nothing about a GPU"):  # fmt: skip
            assert text in result.output
        facts = report_of(run("bench", CLASSIFIER, *arguments, "--format", "json"))
        assert facts["onnxamp"] == "bench"
        assert [row["batch"] for row in facts["report"]["timings"]] == [1, 2]
        assert run("bench", CLASSIFIER, *arguments, "-q").output == ""

    def test_slower_models_are_warned_of(self) -> None:
        slow = replace(timing(1.0, 2.0), speedup=TimeRatio(0.5, 0.45, 0.55))
        first = replace(timing(1.0, 1.0), model="first")
        report = BenchReport(
            "CUDA (Test)", "onnxruntime 9", "made-up",
            (bench(MATMUL, name="first", memory=5 * 10**8, options={"use_tf32": "1"}),
             bench(("Cast", "CUDA", "float16", 2, 1.0))),
            (first, slow), 1, ("m",), (Slowdown("m", "casts", "2 Casts", "Lower more."),), (),
        )  # fmt: skip
        text = shown(as_text(bench_report(report)))
        for part in (
            "m is slower than first.",
            "casts: m: 2 Casts.",
            "→ Lower more.",
            "0.50 [0.45, 0.55]",
            "500.0 MB",
            "use_tf32=1",
        ):
            assert part in text
        assert json.loads(document("bench", {"report": report}))["report"]["slower"] == ["m"]

    @pytest.mark.parametrize(("speedup", "said", "slower"), [
        (TimeRatio(0.99, 0.985, 0.995, 0.004), "m is as fast as first, within the spread.", False),
        (TimeRatio(0.93, 0.91, 0.95, 0.1), "m is as fast as first, within the spread.", False),
        (TimeRatio(0.93, 0.91, 0.95, 0.03), "m is slower than first.", True),
        (TimeRatio(1.01, 1.005, 1.015, 0.004), "m is as fast as first, within the spread.", False),
        (TimeRatio(1.5, 1.4, 1.6, 0.1), "m is faster than first.", False),
        (TimeRatio(2.11, 0.9, 3.2, 1.2), "m is faster than first by the median, but single runs vary too much", False),
    ])  # fmt: skip
    def test_differences_within_the_spread_are_none(self, speedup: TimeRatio, said: str, slower: bool) -> None:
        timings = replace(timing(1.0, 1.0), model="first"), replace(timing(1.0, 1.0), speedup=speedup)
        report = BenchReport(
            "CUDA (Test)", "onnxruntime 9", "made-up", (bench(MATMUL, name="first"), bench(MATMUL)), timings, 1,
            ("m",) if speedup.is_slower else (), (), (),
        )  # fmt: skip
        assert speedup.is_slower == slower
        assert said in shown(as_text(bench_report(report)))

    @pytest.mark.parametrize("option", ["--batch=x", "--batch=1,0", "--seconds=0", "--provider=tpu", "--dim=N"])
    def test_wrong_options(self, option: str) -> None:
        assert run("bench", CLASSIFIER, option).exit_code == 2

    def test_missing_files(self) -> None:
        result = run("bench", "nothing.onnx")
        assert result.exit_code == 1
        assert is_one_sentence(result)


def shown(report: Any) -> str:
    import io

    from rich.console import Console

    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(report)
    return capture.get()


@pytest.mark.skipif(device_present(), reason="there is a device")
def test_without_a_driver_nothing_is_asked_of_it() -> None:
    assert device_memory_used() is None
    with pytest.raises(RuntimeFailure, match="does not give access"):
        bytes_on_device(0, 4)


@pytest.mark.cuda
@pytest.mark.placement
@needs_cuda
class TestCuda:
    def test_models_side_by_side(self) -> None:
        model = onnx.load(CLASSIFIER)
        found = bench_models(model, convert_model(model), provider="cuda", batches=[8, 16], options=QUICK)
        assert found.ran_on.startswith("CUDA (")
        assert found.models[0].memory is not None
        assert found.models[0].memory > 0
        assert {row.provider for row in found.models[1].ops} == {"CUDA"}
        assert any(row.dtype == "float16" for row in found.models[1].ops)

    @pytest.mark.parametrize("nhwc", [False, True])
    def test_cuda_graphs(self, nhwc: bool) -> None:
        model = onnx.load(CLASSIFIER)
        options = replace(QUICK, cuda_graph=True, nhwc=nhwc)
        found = bench_models(convert_model(model), provider="cuda", batches=[8, 16], options=options)
        assert [t.batch for t in found.timings] == [8, 16]

    def test_bfloat16_inputs(self) -> None:
        model = parse("(bfloat16[N,8] x) => (bfloat16[N,8] y) { y = Add (x, x) }")
        assert bench_models(model, provider="cuda", batches=[4], options=QUICK).timings

    def test_device_memory(self) -> None:
        before = device_memory_used()
        assert before is not None
        assert before > 0
