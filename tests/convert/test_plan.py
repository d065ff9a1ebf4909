"""Plans: a decision printed, saved, loaded, and applied to the same model, or refused for another."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from every import every
from graphs import CASES
from graphs.case import parse
from repository import MODELS

import onnxamp
from onnxamp import Plan

TEXT = """(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}, float eps = {1e-12}> {
    [first] h = MatMul (X, w)
    [second] s = Softmax (h)
    [third] a = Add (s, eps)
    [fourth] Y = MatMul (a, w)
}"""


@pytest.fixture
def plan() -> Plan:
    return onnxamp.plan_model(parse(TEXT), lists="conservative")


def test_a_plan_says_what_and_why(plan: Plan) -> None:
    assert (plan.level, plan.dtype, plan.target) == ("O2", "float16", "cuda")
    assert plan.casts == 4
    rows = {row.key: row for row in plan.rows}
    assert rows["first:T"].low
    assert rows["first:T"].reason == "white list"
    assert rows["second:T"].reason == "black list"
    assert not rows["second:T"].low
    assert rows["third:T"].reason == "epsilon"
    assert "1e-12" in rows["third:T"].detail
    assert [(row.node, row.op, row.reason) for row in plan.hazards] == [("third", "Add", "epsilon")]
    assert plan.counts()["MatMul", True] == 2
    assert plan.warnings == ()


def test_a_plan_is_a_table(plan: Plan) -> None:
    head, *body = str(plan).splitlines()
    assert head == f"O2 float16 for cuda: 4 new Casts, cost {plan.cost}"
    assert len(body) == len(plan.rows)
    assert any("first:T" in line and "float16" in line and "white list" in line for line in body)
    assert any("second:T" in line and "float32" in line and "black list" in line for line in body)


def test_a_plan_is_frozen(plan: Plan) -> None:
    with pytest.raises(AttributeError):
        plan.level = "O3"  # type: ignore[misc]


def test_save_and_load(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert onnxamp.load_plan(path) == plan
    assert onnxamp.load_plan(str(path)) == plan
    assert json.loads(path.read_text(encoding="utf-8"))["options"]["level"] == "O2"


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_applying_a_plan_is_converting(path: Path, level: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    onnxamp.plan_model(path, level).save(saved)
    found = onnxamp.apply_plan(path, onnxamp.load_plan(saved))
    assert found == onnxamp.convert_model(path, level)


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize(
    ("name", "wishes"),
    [
        pytest.param("decoder", {"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param("decoder", {"strict": True}, id="strict"),
        pytest.param("recurrent", {"target": "any", "level": "O3"}, id="target"),
        pytest.param("recurrent", {"keep_high": [".*0.*"]}, id="patterns"),
        pytest.param("encoder", {"lists": "paddle"}, id="lists"),
        pytest.param("decoder", {"hazards": False, "level": "O3"}, id="no hazards at O3"),
        pytest.param("classifier", {"lists": "mindspore"}, id="no folding"),
        pytest.param("decoder", {"hazards": False}, id="no hazards"),
    ],
)
def test_a_plan_holds_all_wishes(name: str, wishes: dict[str, Any]) -> None:
    model = onnx.load(next(path for path in MODELS if path.stem == name))
    assert onnxamp.apply_plan(model, onnxamp.plan_model(model, **wishes)) == onnxamp.convert_model(model, **wishes)


@pytest.mark.parametrize(
    ("name", "wishes"),
    [
        ("some_initializers_are_inputs", {"freeze_defaults": True}),
        ("every_initializer_is_input", {}),
        ("function", {"keep_functions": True}),
        ("same_node_names", {"lists": "paddle"}),
        ("same_node_names", {}),
    ],
)
def test_a_plan_holds_how_the_model_was_prepared(name: str, wishes: dict[str, Any]) -> None:
    model = CASES[name].build()
    assert onnxamp.apply_plan(model, onnxamp.plan_model(model, **wishes)) == onnxamp.convert_model(model, **wishes)


@pytest.mark.parametrize("kept", [False, ["X"], ["Y"]])
def test_a_plan_holds_the_types_of_inputs_and_outputs(kept: bool | list[str], tmp_path: Path) -> None:
    plan = onnxamp.plan_model(parse(TEXT), keep_io_types=kept)
    plan.save(tmp_path / "plan.json")
    found = onnxamp.apply_plan(parse(TEXT), onnxamp.load_plan(tmp_path / "plan.json"))
    assert found == onnxamp.convert_model(parse(TEXT), keep_io_types=kept)


@pytest.mark.slow
@every(name=[name for name, case in CASES.items() if not case.options and case.loads], parts=2)
def test_plans_of_the_corpus(name: str) -> None:
    model = CASES[name].build()
    assert onnxamp.apply_plan(model, onnxamp.plan_model(model)) == onnxamp.convert_model(model)


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    with pytest.raises(onnxamp.ArgumentError, match=r"does not contain 'renamed:T'.*another model"):
        onnxamp.apply_plan(parse(TEXT.replace("[first]", "[renamed]")), plan)


def test_a_plan_survives_a_new_order_and_new_weights(plan: Plan) -> None:
    again = parse(TEXT.replace("{1, 2, 3, 4}", "{5, 6, 7, 8}"))
    assert onnxamp.apply_plan(again, plan) == onnxamp.convert_model(again, lists="conservative")


BROKEN = {
    "missing": None,
    "empty": "",
    "no JSON": "O2",
    "other JSON": "[1]",
    "other format": '{"format": 99}',
    "no rows": '{"format": 1, "level": "O2"}',
    "rows of another kind": '{"format": 1, "level": "O2", "dtype": "float16", "target": "cuda", "rows": [{"a": 1}],'
    ' "hazards": [], "casts": 0, "cost": 0, "warnings": []}',
    "binary": b"\xff\xfe",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_plan(content: str | bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(onnxamp.ArgumentError, match=r"plan\.json") as caught:
        onnxamp.load_plan(path)
    assert "\n" not in str(caught.value)


def test_a_plan_that_cannot_be_written(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(onnxamp.OutputError, match=r"missing.*does not exist; create it"):
        plan.save(tmp_path / "missing" / "plan.json")


def test_unmatched_wishes_are_warnings() -> None:
    found = onnxamp.plan_model(parse(TEXT), keep_high=["nobody"], force_low=["some.*"], black_list=["Conv", "Convv"])
    assert len(found.warnings) == 3  # "Conv" is no slip
    for word in ("'nobody'", "'some.*'", "'Convv' in your lists does not occur in the model. Did you mean 'Conv'?"):
        assert any(word in warning for warning in found.warnings)


def test_what_cannot_be_forced_is_a_warning() -> None:
    text = """(float[N] X) => (float[N] Y) <float low = {0}> { [here] Y = Clip (X, low) }"""
    found = onnxamp.plan_model(parse(text), dtype="bfloat16", force_low=["here"])
    assert [warning for warning in found.warnings if "'here'" in warning and "no bfloat16 kernel" in warning]
