"""A function of the user that says yes or no, in place of limits."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from repository import ROOT

import onnxamp
from onnxamp._cli.command import group

MODEL = ROOT / "models" / "classifier.onnx"
FUNCTIONS = """
import numpy as np

def exact(reference, result):
    return all(np.array_equal(reference[name], result[name]) for name in reference)

def close(reference, result):
    return np.allclose(reference["logits"], result["logits"], rtol=1e-3, atol=1e-4)

def never(reference, result):
    return False

def error(reference, result):
    return 0.5
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "judges.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return str(path)


def within(limit: float) -> Any:
    def judge(reference: dict[str, Any], result: dict[str, Any]) -> bool:
        return bool(abs(reference["logits"] - result["logits"]).max() <= limit)

    return judge


def command(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(group, list(map(str, arguments)))


@pytest.fixture(scope="module")
def low() -> onnx.ModelProto:
    return onnxamp.convert_model(MODEL)


def test_a_function_decides_in_place_of_default_limits(low: onnx.ModelProto) -> None:
    seen: list[set[str]] = []

    def judge(reference: dict[str, Any], result: dict[str, Any]) -> Any:
        seen.append({*reference, *result})
        return np.bool_(True)

    report = onnxamp.diff_models(MODEL, low, provider="cpu", count=3, accept=judge)
    assert report.passed
    assert report.judgements == ()
    assert seen == [{"logits"}] * 3
    assert "judge' judges the outputs." in report.notes[0]


def test_what_it_rejects_fails(low: onnx.ModelProto) -> None:
    report = onnxamp.diff_models(MODEL, low, provider="cpu", count=2, accept=within(1e-9))
    assert not report.passed
    assert report.failure is not None
    assert "rejects the outputs of sample 0." in report.failure
    assert report.layers  # where the error starts is told as for any other failure


def test_limits_hold_besides(low: onnx.ModelProto) -> None:
    limits = onnxamp.make_limits({"max_abs": 1e-9})
    report = onnxamp.diff_models(MODEL, low, provider="cpu", limits=limits, accept=within(1))
    assert not report.passed
    assert [judgement.metric for judgement in report.judgements] == ["max_abs"]


@pytest.mark.parametrize(("given", "said"), [
    (lambda *_: 0.5, "must return True or False, not 0.5; a function that returns an error is a metric"),
    (lambda *_: None, "must return True or False, not None"),
    (lambda *_: False, "rejects the original's own outputs, so nothing can pass"),
    ("math:nothing", "'math:nothing' cannot be imported"),
    ("math:pi", "'math:pi' is not a function"),
    ("nowhere.py:judge", "cannot be imported"),
    (3, "accept must be a function or 'package:function', not int"),
])  # fmt: skip
def test_what_is_no_judge(given: Any, said: str, low: onnx.ModelProto) -> None:
    with pytest.raises((onnxamp.ArgumentError, onnxamp.ArgumentTypeError), match=said):
        onnxamp.diff_models(MODEL, low, provider="cpu", accept=given)


def test_a_boolean_is_no_metric(functions: str) -> None:
    with pytest.raises(
        onnxamp.ArgumentError, match=r"returned (True|False), but a metric returns an error.*\(--accept\)"
    ):
        onnxamp.tune_model(MODEL, metric=f"{functions}:exact", count=1, provider="cpu")


@pytest.mark.slow
def test_tuning_writes_what_is_accepted() -> None:
    how: dict[str, Any] = {"count": 1, "provider": "cpu", "allow_slower": True}
    _, tuned = onnxamp.tune_model(MODEL, 0.5, accept=within(1e-3), **how)
    assert tuned.held
    samples = onnxamp.random_samples(MODEL, 1)
    result = onnxamp.apply_plan(MODEL, tuned.plan)
    assert onnxamp.diff_models(MODEL, result, samples, provider="cpu", accept=within(1e-3)).passed
    loose = onnxamp.tune_model(MODEL, 0.5, **how)[1]
    assert tuned.error < loose.error
    with pytest.raises(onnxamp.ArgumentError, match="rejects the original's own outputs"):
        onnxamp.tune_model(MODEL, 0.5, accept=lambda *_: False, **how)


@pytest.mark.slow
def test_a_conversion_is_cured_until_it_is_accepted(tmp_path: Path, functions: str) -> None:
    out = tmp_path / "out.onnx"
    done = command("convert", MODEL, "-o", out, "--accept", f"{functions}:close", "--provider", "cpu")
    assert done.exit_code == 0, done.output
    assert "judges.py:close' rejects the outputs of sample 0" in done.output
    assert command("diff", MODEL, out, "--accept", f"{functions}:close", "--provider", "cpu").exit_code == 0
    done = command("convert", MODEL, "-o", out, "--accept", f"{functions}:exact", "--provider", "cpu", "-q")
    assert done.exit_code == 0, done.output
    assert command("diff", MODEL, out, "--accept", f"{functions}:exact", "-q").exit_code == 0
    done = command("convert", MODEL, "-o", out, "--accept", f"{functions}:close", "--no-cure", "--provider", "cpu")
    assert done.exit_code == 1
    assert "failed validation" in done.output


def test_a_suggested_command_judges_alike(tmp_path: Path, functions: str, low: onnx.ModelProto) -> None:
    onnx.save(low, tmp_path / "low.onnx")
    judge = f"{functions}:close"
    done = command("diff", MODEL, tmp_path / "low.onnx", "--accept", judge, "--provider", "cpu")
    assert done.exit_code == 1
    assert f"--accept {judge}" in done.output.replace("\n", "")


@pytest.mark.parametrize(("arguments", "said"), [
    (["convert", MODEL, "--accept", "JUDGES:error"], "must return True or False, not 0.5"),
    (["convert", MODEL, "--accept", "math"], "is not of the form PACKAGE:FUNCTION"),
    (["convert", MODEL, "--accept", "JUDGES:nothing"], "cannot be imported"),
    (["convert", MODEL, "--accept", "JUDGES:exact", "--no-validate"], "drop one of the two"),
    (["tune", MODEL, "--accept", "JUDGES:never"], "rejects the original's own outputs"),
])  # fmt: skip
def test_wrong_usage(arguments: list[Any], said: str, tmp_path: Path, functions: str) -> None:
    words = [str(word).replace("JUDGES", functions) for word in arguments]
    done = command(*words, "-o", tmp_path / "out.onnx")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "out.onnx").exists()
