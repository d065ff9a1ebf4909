"""What the tables of kernels call good runs: ONNX Runtime's CPU is asked, and results are run."""

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto, helper, shape_inference
from repository import ROOT

import onnxamp
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.targets import release
from onnxamp._runtime.sessions.session import make_session, run

FORMS = 150
"""Forms of ops that are run in each test; scripts/ask_runs.py runs them all."""
SCATTERS = ("ScatterND", "ScatterElements")
SCATTER = """(float[4,4] x, float[2,4] u) => (float[4,4] y) {
    i = Constant <value = int64INDEX> ()
    h = Relu (x)
    v = Relu (u)
    z = OP <reduction = "REDUCTION"> (h, i, v)
    y = Relu (z)
}"""
INDEX = {"ScatterND": "[2,1] {0,1}", "ScatterElements": "[2,4] {0,1,0,1,0,1,0,1}"}
ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("webgpu", "openvino")]
SAMPLE = 12
"""Ops of each engine that are run in each test."""
MASKED = "(float[1,2,4,8] q) => (float[1,2,4,8] y) { h = Relu (q) y = Attention (h, k, VALUES, m) }"
ATTENTION = "(float[1,2,4,8] q) => (float[1,2,4,8] y) { h = Relu (q) y = Attention (h, KEYS, VALUES) }"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("ask_runs")
    sys.path[:] = before


def scatter(op: str, reduction: str) -> ModelProto:
    return parse(SCATTER.replace("INDEX", INDEX[op]).replace("OP", op).replace("REDUCTION", reduction), 18)


def numbers(model: ModelProto) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        info.name: random.uniform(0, 1, [dim.dim_value for dim in info.type.tensor_type.shape.dim]).astype(
            helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        )
        for info in model.graph.input
    }


def types_of(model: ModelProto, op: str) -> list[int]:
    """Element types of the inputs of the first node of an op."""
    graph = shape_inference.infer_shapes(model).graph
    infos = [*graph.value_info, *graph.input, *graph.output]
    known = {info.name: info.type.tensor_type.elem_type for info in infos}
    known |= {item.name: item.data_type for item in graph.initializer}
    node = next(node for node in graph.node if node.op_type == op)
    return [known[name] for name in node.input if known.get(name) != 7]


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
@pytest.mark.parametrize("op", SCATTERS)
def test_scatters_run_on_the_cpu(op: str, reduction: str, low: str) -> None:
    model = scatter(op, reduction)
    result = onnxamp.convert_model(model, "O3", target="cpu", dtype=low)
    is_low = set(types_of(result, op)) != {1}
    assert is_low == (
        reduction == "none" or (op == "ScatterElements" and low == "float16" and reduction in ("min", "max"))
    )
    assert "fails" not in str(onnxamp.audit_model(result, "cpu").findings)
    if is_low or low == "float16":
        run(make_session(result, "cpu"), numbers(result))


@pytest.mark.parametrize("op", SCATTERS)
def test_an_audit_says_that_a_kernel_fails(op: str) -> None:
    everything_low = onnxamp.convert_model(scatter(op, "add"), "O3", target="float16-only")
    assert set(types_of(everything_low, op)) == {10}
    findings = str(onnxamp.audit_model(everything_low, "cpu").findings)
    assert "its kernel on CPU fails when it runs" in findings


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", SCATTERS)
def test_what_fails_on_a_provider_stays_float32_for_any(op: str, low: str) -> None:
    for reduction, level in itertools.product(("add", "mul"), ("O1", "O2", "O3")):
        result = onnxamp.convert_model(scatter(op, reduction), level, target="any", dtype=low)
        assert set(types_of(result, op)) == {1}, (reduction, level)
        if low == "float16":
            run(make_session(result, "cpu"), numbers(result))
    plan = onnxamp.plan_model(scatter(op, "add"), "O3", target="any", dtype=low)
    (row,) = (row for row in plan.rows if row.op == op)
    assert row.reason == "no kernel"
    assert row.detail.endswith((", since it reduces", ", since it adds up or multiplies"))
    plain = onnxamp.convert_model(scatter(op, "none"), "O3", target="any", dtype=low)
    assert 1 not in types_of(plain, op)


@pytest.mark.webgpu
def test_webgpu_leaves_no_scatter_that_it_fails_at() -> None:
    result = onnxamp.convert_model(scatter("ScatterND", "add"), "O3", target="webgpu")
    assert set(types_of(result, "ScatterND")) == {1}
    run(make_session(result, "webgpu"), numbers(result))


def test_a_norm_has_one_precision_for_webgpu() -> None:
    model = parse("(float[2,8] x) => (float[2,8] y) { h = Relu (x) y = RMSNormalization (h, s) }", 23)
    add_weights(model, {"s": (8,)})
    for level, preset in itertools.product(("O1", "O2", "O3"), ("default", "fast", "mindspore")):
        result = onnxamp.convert_model(model, level, target="webgpu", lists=preset)
        assert len(set(types_of(result, "RMSNormalization"))) == 1, (level, preset)


@pytest.mark.parametrize("target", ["any", "webgpu", "openvino"])
@pytest.mark.parametrize("preset", ["mindspore", "default"])
@pytest.mark.parametrize("constants", ["v", "kv"])
def test_attention_has_one_precision_where_its_body_has(constants: str, preset: str, target: str) -> None:
    keys, values = ("k" if "k" in constants else "h"), ("v" if "v" in constants else "h")
    model = parse(ATTENTION.replace("KEYS", keys).replace("VALUES", values), 23)
    add_weights(model, dict.fromkeys(constants, (1, 2, 4, 8)))
    for level, low in itertools.product(("O1", "O2", "O3"), ("float16", "bfloat16")):
        result = onnxamp.convert_model(model, level, target=target, lists=preset, dtype=low)
        assert len(set(types_of(result, "Attention"))) == 1, (level, low)
        if low == "float16":
            run(make_session(result, "cpu"), numbers(result))


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("values", ["h", "v"])
@pytest.mark.parametrize("target", ["any", *ENGINES])
def test_attention_has_one_precision_with_a_constant_mask(target: str, values: str) -> None:
    model = parse(MASKED.replace("VALUES", values), 23)
    shapes = {"k": (1, 2, 4, 8), "v": (1, 2, 4, 8), "m": (4, 4)}
    add_weights(model, {name: shape for name, shape in shapes.items() if name in ("k", "m", values)})
    for level, preset in itertools.product(("O2", "O3"), ("mindspore", "default")):
        result = onnxamp.convert_model(model, level, target=target, lists=preset)
        if target != "webgpu":
            assert len(set(types_of(result, "Attention"))) == 1, (level, preset)
        run(make_session(result, "cpu" if target == "any" else target), numbers(result))


@pytest.mark.openvino
def test_an_audit_says_that_openvino_fails_at_mixtures() -> None:
    text = """(float[1,2,4,8] q, float16[4,4] m) => (float[1,2,4,8] y) { y = Attention (q, k, q, m) }"""
    mixed = add_weights(parse(text, 23), {"k": (1, 2, 4, 8)})
    (finding,) = onnxamp.audit_model(mixed, "openvino").findings
    assert "its inputs have different types" in finding.text


@pytest.mark.webgpu
def test_webgpu_thresholds_no_float16() -> None:
    model = parse("(float[2,4] x) => (float[2,4] y) { h = Relu (x) y = ThresholdedRelu (h) }", 21)
    for target in ("webgpu", "any"):
        result = onnxamp.convert_model(model, "O3", target=target)
        assert types_of(result, "ThresholdedRelu") == [1]
        run(make_session(result, "webgpu"), numbers(result))
    model = parse("(float[2,4] x) => (float[2,4] y) { h = Relu (x) y = ThresholdedRelu (h) }", 22)
    expanded = onnxamp.convert_model(model, "O3", target="webgpu")  # no kernel takes this version
    assert types_of(expanded, "ThresholdedRelu") == [10]
    run(make_session(expanded, "webgpu"), numbers(expanded))
    assert "fails" not in str(onnxamp.audit_model(expanded, "webgpu").findings)


@pytest.mark.openvino
@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_a_function_body_runs_if_the_types_that_it_makes_do(low: str) -> None:
    """OpenVINO has no RandomUniformLike in low precision, which ONNX Runtime makes of Bernoulli."""
    model = parse("(float[2,4] x) => (float[2,4] y) { h = Sigmoid (x) y = Bernoulli (h) }", 22)
    result = onnxamp.convert_model(model, "O3", target="openvino", dtype=low)
    assert types_of(result, "Bernoulli") == [1]
    run(make_session(result, "openvino"), numbers(result))


@pytest.mark.slow
@pytest.mark.parametrize("target", ENGINES)
def test_results_run_on_their_engine(script: ModuleType, target: str) -> None:
    op_forms = importlib.import_module("op_forms")
    opset = min(release("cpu").opset, onnx.defs.onnx_opset_version())
    ops = [op for op in sorted(kernel_table(target)) if op in op_forms.schemas()]
    runner, lowered, failing = script.Runner(target), 0, []
    for op in Random(0).sample(ops, SAMPLE):
        for form in op_forms.random_form(op, opset, 0):
            result = onnxamp.convert_model(form.model({}), "O3", target=target)
            lowered += "Cast" in {node.op_type for node in result.graph.node}
            refusal = runner.refuses(result)
            if refusal not in ("", script.LEFT) and not runner.refuses(form.model({})):
                failing.append((form.name, refusal))
    runner.rest()
    assert failing == []
    assert lowered > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_forms_that_the_table_takes_run_on_the_cpu(script: ModuleType, seed: int, tmp_path: Path) -> None:
    every = [*script.node_forms(), *script.random_forms()]
    reinterpreted = {"BitCast"}  # no number of it is ever low: its widths are part of what it computes
    forms = Random(seed).sample([form for form in every if form.op not in reinterpreted], FORMS)
    forms += [form for form in every if form.op in ("QuantizeLinear", "Resize", *SCATTERS)][seed::20]
    answers = script.Answers(tmp_path / "answers.jsonl", script.Runner("cpu"))
    assert list(script.failures(forms, answers)) == []
    assert len(answers.known) > FORMS // 2  # older schemas have fewer forms that load
    answers.engine.rest()


BAD_ENGINE = """
import base64, os, time
from onnx import ModelProto
from onnxamp._runtime.servers import answer_with

asked = []

def serve():
    answer_with(lambda: answer)

def answer(target, data):
    name = ModelProto.FromString(base64.b64decode(data)).graph.name
    asked.append(name)
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        os._exit(3)
    return {"refusal": "no" if name == "fails" or (name == "is tired" and len(asked) > 1) else ""}
"""


@pytest.mark.slow
def test_a_question_that_an_engine_dies_of_costs_that_question_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_engine.py").write_text(BAD_ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    runner = script.Runner("bad")
    runner.child.module = "bad_engine"

    def refusal(name: str) -> str:
        return str(runner.refuses(ModelProto(graph=onnx.GraphProto(name=name))))

    assert [refusal(name) for name in ("runs", "crashes", "runs")] == ["", "its process ended with exit code 3", ""]
    assert refusal("is tired") == "", "what fails is asked in a fresh process"
    assert refusal("fails") == "no"
    monkeypatch.setattr(script, "SECONDS", 0.5)
    assert refusal("hangs") == "its process was ended by SIGKILL"
    runner.rest()
