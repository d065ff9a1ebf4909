"""The script that asks engines which types they take: what it asks, and what the table makes of the answers."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from graphs.case import parse
from repository import ROOT

import onnxamp
from onnxamp._facts.kernels import kernel_table

FLOAT, HALF = "tensor(float)", "tensor(float16)"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("ask_types")
    sys.path[:] = before


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.tensorrt
@pytest.mark.parametrize(("op", "opset"), [("GridSample", 22), ("ConvTranspose", 22), ("Where", 16)])
def test_the_builder_still_answers_as_the_table_says(script: ModuleType, op: str, opset: int, tmp_path: Path) -> None:
    forms = importlib.import_module("op_forms")
    answers = script.Answers(tmp_path / "answers.jsonl", script.TensorRT())
    asked = 0
    for form in forms.random_form(op, opset, 0):
        answer = script.ask(form, answers)
        rows = kernel_table("tensorrt")[op]
        for types, refusal in answer.refusals.items():
            bound = dict(types) | {name: "tensor(bool)" for name, kind in types if kind == script.OTHER}
            assert any(row.takes(form.signature, bound) for row in rows) == (refusal == ""), (op, bound, refusal)
            asked += 1
    assert asked >= 2
    answers.engine.builder.end()
    again = script.Answers(tmp_path / "answers.jsonl", answers.engine)
    assert len(again.known) == len(answers.known) > 0, "answers are kept, so that asking can go on"


def answer(script: ModuleType, op: str, refusals: dict[tuple[tuple[str, str], ...], str]) -> object:
    forms = importlib.import_module("op_forms")
    form = next(iter(forms.random_form(op, 22, 0)))
    return script.Answer(form, {frozenset(types): text for types, text in refusals.items()})


def test_a_mixture_is_taken_if_no_form_is_refused_with_it(script: ModuleType) -> None:
    built = answer(script, "Relu", {(("T", FLOAT),): "", (("T", HALF),): ""})
    refused = answer(script, "Relu", {(("T", FLOAT),): "", (("T", HALF),): "no"})
    (both,) = script.rows([built], script.refused_types("tensorrt", [built]))
    assert {FLOAT, HALF} <= both["T"]
    assert "tensor(int32)" in both["T"], "what is no float is not asked, and counts as taken"
    (less,) = script.rows([built, refused], script.refused_types("tensorrt", [built, refused]))
    assert FLOAT in less["T"]
    assert HALF not in less["T"]


def test_a_row_says_which_parameters_are_absent(script: ModuleType) -> None:
    plain = answer(script, "Relu", {(("T", HALF),): ""})
    more = answer(script, "Relu", {(("T", HALF), ("U", HALF)): "no"})
    rows = script.rows([plain, more], script.refused_types("tensorrt", [plain, more]))
    assert [row["U"] for row in rows if HALF in row["T"]] == [frozenset()], "with U bound, the mixture is refused"


@pytest.mark.parametrize("scale", ["float", "double"])
def test_openvino_was_asked_about_double_as_well(scale: str) -> None:
    text = "(float[1,2,4] x, SCALE[2] s, float[2] m) => (float[1,2,4] y) { y = BatchNormalization (x, s, s, m, m) }"
    audit = onnxamp.audit_model(parse(text.replace("SCALE", scale), 15), "openvino")
    assert [node.provider for node in audit.nodes] == ["OPENVINO" if scale == "float" else "none"]
    assert ("float32 with float64" in str(audit.findings)) == (scale == "double")
