"""Bugs of onnxamp: where a result would be wrong, the nodes around the fault stay in float32, and the others do not.

The bug here is a Cast that is forgotten: nodes of one op type read what their producers deliver.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from commands import run
from graphs.case import add_weights, parse
from judge import inference_error
from onnx import ModelProto, TensorProto
from strategies import random_model

import onnxamp
from onnxamp._convert import analysis as solved
from onnxamp._decide.precision import Decision
from onnxamp._decide.problem import Problem
from onnxamp._rewrite.edits.apply import Edits

CHAIN = """(float[2,8] x, float[2,8] v) => (float[2,8] y) {
    a = MatMul (x, w)  b = MatMul (a, w)  c = Mul (b, v)  d = MatMul (c, w)  e = MatMul (d, w)  f = MatMul (e, w)
    y = MatMul (f, w) }"""
BODY = """(float[2,8] x, bool k) => (float[2,8] y) {
    a = MatMul (x, w)
    b = If (k) <then_branch = t () => (float[2,8] p) { p = MatMul (a, w) },
                else_branch = e () => (float[2,8] q) { r = MatMul (a, w)  q = Mul (r, x) }>
    c = MatMul (b, w)  d = MatMul (c, w)  y = MatMul (d, w) }"""


def model_of(text: str) -> ModelProto:
    model = parse(text)
    add_weights(model, {"w": (8, 8)})
    return model


def forget_casts(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Let nodes of an op type read float32 and low precision alike."""
    plan_edits = solved.plan_edits

    def forgetful(problem: Problem, decision: Decision) -> Edits:
        edits = plan_edits(problem, decision)
        graph = problem.graph

        def is_forgotten(index: int, port: int) -> bool:
            producer = graph.values[graph.nodes[index].inputs[port]].producer
            return graph.nodes[index].key == op and producer not in edits.removed

        kept = {key: name for key, name in edits.inputs.items() if not is_forgotten(*key)}
        return replace(edits, inputs=kept)

    monkeypatch.setattr(solved, "plan_edits", forgetful)


def kinds(model: ModelProto) -> dict[str, int]:
    """The type of each value, as onnx infers it."""
    inferred = onnx.shape_inference.infer_shapes(model)
    return {entry.name: entry.type.tensor_type.elem_type for entry in inferred.graph.value_info}


WARNING = "stay in float32, since the converted model would be wrong there otherwise"


@pytest.mark.parametrize("options", [{}, {"target": "any", "dtype": "bfloat16"}, {"level": "O1"}])
def test_only_the_nodes_around_a_fault_stay_float32(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CHAIN)
    forget_casts(monkeypatch, "Mul")
    with pytest.warns(onnxamp.OptionWarning, match=WARNING):
        result = onnxamp.convert_model(model, black_list=["Mul"], **options)
    assert inference_error(result) is None
    low = TensorProto.BFLOAT16 if "dtype" in options else TensorProto.FLOAT16
    found = kinds(result)
    assert {name: found[name] for name in "abce"} == {"a": low, "b": 1, "c": 1, "e": low}


def test_a_fault_in_a_branch_leaves_the_rest_low(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(BODY)
    forget_casts(monkeypatch, "Mul")
    with pytest.warns(onnxamp.OptionWarning, match=WARNING):
        result = onnxamp.convert_model(model, black_list=["Mul"])
    assert inference_error(result) is None
    assert kinds(result)["d"] == TensorProto.FLOAT16


def test_plans_repeat_what_stayed_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_casts(monkeypatch, "Mul")
    source, target, plan = tmp_path / "model.onnx", tmp_path / "low.onnx", tmp_path / "plan.json"
    onnx.save(model_of(CHAIN), source)
    written = run("convert", source, "-o", target, "--black", "Mul", "--save-plan", plan)
    assert written.exit_code == 0, written.output
    assert WARNING in " ".join(written.output.split())
    again = tmp_path / "again.onnx"
    assert run("convert", source, "-o", again, "--plan", plan).exit_code == 0
    assert again.read_bytes() == target.read_bytes()
    assert onnxamp.load_plan(plan).options.unsound


def test_tuning_keeps_the_nodes_around_a_fault_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_casts(monkeypatch, "Mul")
    model = model_of(CHAIN)
    with pytest.warns(onnxamp.OptionWarning, match=WARNING):
        result, tuned = onnxamp.tune_model(model, 1e-1, count=2, provider="cpu", allow_slower=True, keep_nodes=["c"])
    assert tuned.held
    assert inference_error(result) is None
    assert [kinds(result)[name] for name in "be"] == [1, TensorProto.FLOAT16]


def test_tuning_ends_with_float32_where_nothing_else_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise onnxamp.InternalError("The converted model would be wrong: somewhere.")

    monkeypatch.setattr("onnxamp._convert.convert.verify", wrong)
    model = model_of(CHAIN)
    with pytest.warns(onnxamp.OptionWarning, match=WARNING):
        result, tuned = onnxamp.tune_model(model, 1e-1, count=2, provider="cpu", allow_slower=True)
    assert result.graph == model.graph
    assert tuned.plan.counts().keys() == {("MatMul", False), ("Mul", False), ("initializer", False)}


@pytest.mark.slow
def test_random_models_convert_whatever_casts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """All results are well typed, and no model stays in float32 as a whole."""
    region = whole = 0
    for seed in range(40):
        model = random_model(Random(seed), "MatMul", 8).model
        keys = sorted({node.op_type for node in model.graph.node})
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forget_casts(patch, keys[seed % len(keys)])
            result = onnxamp.convert_model(model, "O2", target="any", strict=True)
        texts = [str(item.message) for item in caught]
        whole += any("The whole model stays in float32" in text for text in texts)
        region += any(WARNING in text for text in texts)
        assert inference_error(result) is None
    assert (region > 2, whole) == (True, 0)
