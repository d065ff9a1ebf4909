"""``data_max``: nodes whose values are large on samples stay in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from graphs.case import parse
from onnx import ModelProto
from repository import ROOT

import onnxamp
from onnxamp._cli.command import group

TEXT = """(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}> {
    [one] a = MatMul (X, w) [two] b = MatMul (a, w) c = MatMul (b, w) [four] Y = Tanh (c) }"""
"""On a row of ones: 4 6, 22 32, 118 172, 1 1."""

ONES = {"X": np.ones((1, 2), np.float32)}


def model() -> ModelProto:
    return parse(TEXT)


def low(**options: Any) -> set[str]:
    plan = onnxamp.plan_model(model(), "O3", samples=ONES, **options)
    return {row.node for row in plan.rows if row.low and row.op != "initializer"}


@pytest.mark.parametrize(("limit", "lowered"), [
    (172, {"one", "two", "c", "four"}), (171, {"one", "two"}), (32, {"one", "two"}), (31, {"one"}), (5, set()),
])  # fmt: skip
def test_nodes_stay_float32_that_read_or_write_large_values(limit: float, lowered: set[str]) -> None:
    assert low(data_max=limit) == lowered


def test_inputs_of_the_model_count() -> None:
    assert low(data_max=171) >= {"one"}
    plan = onnxamp.plan_model(model(), "O3", samples={"X": np.full((1, 2), 200, np.float32)}, data_max=199)
    assert not any(row.low and row.node == "one" for row in plan.rows)


def test_all_samples_count() -> None:
    samples = [ONES, {"X": np.full((1, 2), 10, np.float32)}]
    plan = onnxamp.plan_model(model(), "O3", samples=samples, data_max=172)
    assert {row.node for row in plan.rows if row.low and row.op != "initializer"} == {"one"}


def test_what_is_forced_is_low_all_the_same() -> None:
    assert low(data_max=31, force_low=["two"]) == {"one", "two"}


def test_a_plan_holds_the_nodes(tmp_path: Path) -> None:
    plan = onnxamp.plan_model(model(), samples=ONES, data_max=32)
    assert plan.options.data_max is None
    assert plan.options.keep_nodes == ("c", "four")
    plan.save(tmp_path / "plan.json")
    wanted = onnxamp.convert_model(model(), samples=ONES, data_max=32)
    assert onnxamp.apply_plan(model(), onnxamp.load_plan(tmp_path / "plan.json")) == wanted


@pytest.mark.parametrize("command", ["convert", "tune"])
def test_names_are_looked_for_before_ranges(command: str, tmp_path: Path) -> None:
    """What matches nothing is refused at once, when no range is known yet."""
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    asked = [
        command,
        str(path),
        "-o",
        f"{tmp_path}/",
        "--keep-fp32",
        "on[e]",
        "--keep-fp32",
        "nosuch",
        "--data-max",
        "40",
    ]
    done = CliRunner().invoke(group, asked)
    assert done.exit_code == 2, done.output
    assert "'nosuch'" in done.output
    assert not (tmp_path / "m_fp16.onnx").exists()


def test_it_takes_a_run() -> None:
    with pytest.raises(onnxamp.ArgumentError, match="samples is only for level 'auto', rescale, data_max or rounding"):
        onnxamp.convert_model(model(), samples=ONES)
    done = CliRunner().invoke(group, ["inspect", str(ROOT / "models" / "classifier.onnx"), "--data-max", "3"])
    assert done.exit_code == 2
    assert "data_max needs the ranges of values" in done.output
    broken = model()
    broken.graph.node[0].domain = "nowhere"
    broken.opset_import.add(domain="nowhere", version=1)
    with pytest.raises(onnxamp.RuntimeFailure, match="could not load"):
        onnxamp.convert_model(broken, data_max=3)


def test_tuning_obeys_it() -> None:
    tuned = onnxamp.tune_model(model(), 0.5, samples=ONES, data_max=32, provider="cpu")[1]
    assert tuned.plan.options.keep_nodes == ("c", "four")
    assert not any(row.low for row in tuned.plan.rows if row.node in ("c", "four"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--no-validate"]])
def test_the_command_line_measures(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "in").mkdir()
    onnx.save(model(), tmp_path / "in" / "m.onnx")
    np.savez(tmp_path / "in" / "m.npz", **ONES)
    options = ["--data-max", "32", "--level", "O3", *more]
    inputs = ["--inputs", str(tmp_path / "in" / "m.npz")]
    arguments = [str(tmp_path / "in" / "m.onnx"), "-o", str(tmp_path / "one.onnx"), *inputs]
    done = CliRunner().invoke(group, ["convert", *arguments, *options])
    assert done.exit_code == 0, done.output
    wanted = onnxamp.convert_model(model(), "O3", samples=ONES, data_max=32)
    assert onnx.load(tmp_path / "one.onnx") == wanted
    folders = [str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--inputs", str(tmp_path / "in"), "--jobs", "1"]
    done = CliRunner().invoke(group, ["convert", *folders, *options])
    assert done.exit_code == 0, done.output
    assert onnx.load(tmp_path / "out" / "m.onnx") == wanted
