"""Times of nodes from ONNX Runtime's profile."""

import pytest
from graphs.case import parse

from onnxamp import ArgumentError, RuntimeFailure, random_samples
from onnxamp._runtime.profile import node_times, times_of
from onnxamp._runtime.sessions.session import cuda_available

LOOP = """(float[64,64] x, int64 n, bool go) => (float[64,64] y) {
    [once] h = MatMul (x, x)
    [loop] y = Loop (n, go, h) <body = steps (int64 i, bool c, float[64,64] a) => (bool d, float[64,64] b) {
        d = Identity (c)  [often] b = MatMul (a, a) }>
}"""


def node(name: str, ts: int, dur: int, provider: str = "CPUExecutionProvider") -> dict[str, object]:
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {"provider": provider}}


def model_run(ts: int) -> dict[str, object]:
    return {"cat": "Session", "name": "model_run", "ts": ts, "dur": 100}


def test_every_node_has_a_time() -> None:
    model = parse(LOOP)
    feeds = random_samples(model)[0]
    times = node_times(model, {**feeds, "n": feeds["n"] * 0 + 20, "go": feeds["go"] | True}, runs=3)
    assert {"once", "often", "loop"} <= times.keys()
    assert all(seconds >= 0 for seconds in times.values())
    assert times["loop"] > times["often"] > 0, "the loop's time holds that of its body"


def test_median_after_a_first_run() -> None:
    events = [event for run, dur in enumerate((900, 3, 50, 4)) for event in (node("a", 1000 * run + 1, dur),)]
    events += [node("a", 1002, 1), *(model_run(1000 * run) for run in range(4))]
    assert times_of(events) == {"a": pytest.approx(4e-6)}
    assert times_of([]) == {}


def test_kernels_count_where_they_are_shown() -> None:
    def kernel(dur: int) -> dict[str, object]:
        return {"cat": "Kernel", "name": "gemm", "ts": 9999, "dur": dur, "args": {"op_name": "MatMul"}}

    one_run = [node("gpu", 1001, 77, "CUDAExecutionProvider"), kernel(5), kernel(6), node("cpu", 1050, 8)]
    events = [node("gpu", 1, 500, "CUDAExecutionProvider"), kernel(100), *one_run, model_run(0), model_run(1000)]
    assert times_of(events) == {"gpu": pytest.approx(11e-6), "cpu": pytest.approx(8e-6)}


def test_what_the_host_takes_is_not_what_kernels_take() -> None:
    waits = [node("a", 1001, 5), model_run(0), model_run(1000)]
    assert times_of(waits) == {"a": pytest.approx(5e-6)}
    assert times_of([*waits, node("b", 1002, 5, "WebGpuExecutionProvider")]) == {}


@pytest.mark.webgpu
def test_webgpu_tells_no_times() -> None:
    model = parse("(float[2] x) => (float[2] y) { [only] y = Exp (x) }")
    assert node_times(model, random_samples(model)[0], "webgpu") == {}


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_double")
def test_what_cannot_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse("(float[2] x) => (float[2] y) { [only] y = Exp (x) }")
    feeds = random_samples(model)[0]
    with pytest.raises(ArgumentError, match="at least 1, not 0"):
        node_times(model, feeds, runs=0)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with pytest.raises(RuntimeFailure, match="CUDA"):  # another process has no double
        node_times(model, feeds, "cuda")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert node_times(model, feeds, "cuda").keys() == {"only"}


@pytest.mark.cuda
@pytest.mark.placement
@pytest.mark.skipif(not cuda_available(), reason="needs a CUDA device")
def test_times_on_cuda() -> None:
    model = parse("(float[512,512] x) => (float[512,512] y) { [only] y = MatMul (x, x) }")
    assert node_times(model, random_samples(model)[0], "cuda")["only"] > 0


def test_an_engine_that_compiles_shows_its_own_kernels() -> None:
    def kernel(name: str, ts: int, dur: int) -> dict[str, object]:
        args = {"ep": "OpenVINOExecutionProvider", "parent_ort_event_name": "graph_kernel_time"}
        return {"cat": "Kernel", "name": f"OV::{name}", "ts": ts, "dur": dur, "args": args}

    first = [model_run(0), node("graph", 1, 900, "OpenVINOExecutionProvider"), node("cpu", 5, 9)]
    second = [model_run(1000), node("graph", 1001, 90, "OpenVINOExecutionProvider"), node("cpu", 1005, 8)]
    kernels = [kernel("a", 2, 800), kernel("MVN_7", 3, 50), kernel("a", 1002, 70), kernel("MVN_7", 1003, 5)]
    found = times_of([*first, *second, *kernels])
    assert found == {"a": pytest.approx(7e-5), "MVN_7": pytest.approx(5e-6), "cpu": pytest.approx(8e-6)}
    assert list(found)[:2] == ["a", "MVN_7"], "in the order in which they ran"
