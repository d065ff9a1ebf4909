"""The kernel tables against the runtime: where nodes are said to run, and where ONNX Runtime runs them."""

import onnx
import pytest
from assignment import disagreements, must_fail, named
from commands import MODELS, run
from every import every
from graphs import CASES
from graphs.case import parse
from onnx import ModelProto

from onnxamp import OnnxAmpError, convert_model, diff_models
from onnxamp._audit.audit import audit_model
from onnxamp._runtime.sessions.session import Provider, assigned_nodes, cuda_available, make_session

ZOO = {path.stem: lambda path=path: onnx.load(path) for path in MODELS} | {
    name: case.build for name, case in CASES.items()
}
needs_cuda = pytest.mark.skipif(not cuda_available(), reason="no CUDA device")


def variants(model: ModelProto, *targets: str) -> dict[str, ModelProto]:
    """The model as it is, and lowered as far as a target's kernels allow."""
    found = {"as it is": model}
    for dtype in ("float16", "bfloat16"):
        for target in targets:
            try:
                found[f"{dtype} for {target}"] = convert_model(
                    model, level="O3", dtype=dtype, target=target, hazards=False
                )
            except OnnxAmpError:  # models that cannot be converted are other tests' matter
                continue
    return found


def compared(name: str, provider: Provider, *targets: str) -> list[str]:
    found = variants(ZOO[name](), *targets)
    distinct = {model.SerializeToString(): (what, model) for what, model in found.items()}
    return [f"{what}: {text}" for what, model in distinct.values() for text in disagreements(model, provider)]


@pytest.mark.slow
@every(name=ZOO, parts=12)
def test_predictions_hold_on_cpu(name: str) -> None:
    """Models made for CUDA or for no target hold nodes that the CPU has no kernel for: those must be named."""
    assert compared(name, "cpu", "cpu", "cuda", "any") == []


@pytest.mark.cuda
@pytest.mark.placement
@needs_cuda
@every(name=ZOO, parts=8)
def test_predictions_hold_on_cuda(name: str) -> None:
    assert compared(name, "cuda", "cuda", "any") == []


@pytest.mark.slow
@pytest.mark.webgpu
@every(name=ZOO, parts=4)
def test_predictions_hold_on_webgpu(name: str) -> None:
    assert compared(name, "webgpu", "webgpu") == []


NORM = """(float[2,3] x) => (float[2,3] y) <float[3] s = {1, 2, 3}, float[3] b = {1, 2, 3}> {
    m = Relu (x) y = LayerNormalization (m, s, b) }"""
BATCH_NORM = """(float[2,3] x) => (float[2,3] y) <float[3] s = {1, 2, 3}, float[3] m = {1, 2, 3}> {
    r = Relu (x) y = BatchNormalization (r, s, s, m, m) }"""


@pytest.mark.mostly_slow(fast=5)
@pytest.mark.webgpu
@pytest.mark.parametrize(("text", "opset"), [(NORM, 13), (NORM, 17), (BATCH_NORM, 13), (BATCH_NORM, 15)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O3"])
def test_norms_take_one_type_on_webgpu(text: str, opset: int, dtype: str, level: str) -> None:
    """Its registry restricts the first type alone, but mixtures load and do not run."""
    model = parse(text, opset)
    low = convert_model(model, level=level, dtype=dtype, target="webgpu", opset="keep")
    found = diff_models(model, low, provider="webgpu", layers=False)
    assert found.passed, found.failure


def test_refusals_are_predicted_and_seen() -> None:
    """The comparison would notice: a float32 Relu loads, a bfloat16 MaxPool does not."""
    good = parse("(float[1,2,4,4] x) => (float[1,2,4,4] y) { y = Relu (x) }")
    bad = parse("(bfloat16[1,2,4,4] x) => (bfloat16[1,2,3,3] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }", 22)
    assert not must_fail(audit_model(good, "cpu"))
    assert must_fail(audit_model(bad, "cpu"))
    assert disagreements(good, "cpu") == disagreements(bad, "cpu") == []


def test_a_wrong_prediction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse("(float[2] x) => (float[2] y) { [here] y = Relu (x) }")
    monkeypatch.setattr("assignment.assigned_nodes", lambda _: [("CUDA", "Relu", "here")])
    assert disagreements(model, "cpu") == ["Relu 'here' (float32): predicted on CPU, is on CUDA"]
    monkeypatch.setattr("assignment.must_fail", lambda _: True)
    assert "it should not load, but does" in disagreements(model, "cpu")[0]


def test_assignments_name_every_node_in_every_body() -> None:
    model = named(onnx.load(next(path for path in MODELS if path.stem == "recurrent")))
    session = make_session(model, "cpu", optimize=False, record=True)
    audit = audit_model(model, "cpu")
    assert {(node.op, node.node) for node in audit.nodes} == {(op, name) for _, op, name in assigned_nodes(session)}


def test_check_shows_where_ops_run(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parse("(float[2,2] x) => (float y) { h = Relu (x)\n y = Det (h) }", 22), path)
    text = run("check", path, "--static", "-v").output
    rows = [line.split() for line in text.splitlines()]
    assert ["Det", "CPU", "float32", "1"] in rows
    assert ["Relu", "CUDA", "float32", "1"] in rows
    assert rows.index(["Det", "CPU", "float32", "1"]) < rows.index(["Relu", "CUDA", "float32", "1"])
    assert "Where nodes run" not in run("check", path, "--static", "--target", "any").output
