"""What a conversion says of the Casts that float32 costs, and of the time that it should gain."""

import json
from pathlib import Path
from typing import Any

import commands
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import helper

import onnxamp
from onnxamp._convert.causes import Cause

BLOCK = """(float[N,64] X) => (float[N,64] Y) {
    h = MatMul (X, w) n = LayerNormalization (h, g) m = MatMul (n, w) s = Softmax (m) Y = MatMul (s, w)
}"""
WEIGHTS = {"w": (64, 64), "g": (64,)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    onnx.save(add_weights(parse(BLOCK, 17), WEIGHTS), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def causes(source: Path, level: str = "O2", **options: Any) -> dict[tuple[str, str], Cause]:
    made = onnxamp.convert_file(source, source.with_name("low.onnx"), level, **options, validate=False)
    return {(cause.reason, cause.advice): cause for cause in made.causes}


def casts(source: Path, **options: Any) -> int:
    nodes = onnxamp.convert_model(source, **options).graph.node
    return sum(node.op_type == "Cast" for node in nodes)


def test_the_black_list_names_the_casts_that_another_preset_saves(source: Path) -> None:
    found = causes(source, lists="conservative")
    cause = found["black list", "--lists default lowers them, as the kernels accumulate in float32"]
    assert cause.ops == {"LayerNormalization": 1, "Softmax": 1}
    assert cause.casts == casts(source, lists="conservative") - casts(source) == 4


def test_a_list_of_the_user_is_the_users_own(source: Path) -> None:
    found = causes(source, black_list=["Softmax"])
    assert found["black list", "your own black list names them"].casts == 2


@pytest.mark.parametrize("black", [[], ["Softmax"]])
def test_inputs_and_outputs_cost_what_low_ones_save(source: Path, black: list[str]) -> None:
    found = causes(source, black_list=black)["inputs and outputs", "--io-types low lowers them as well"]
    assert found.casts == casts(source, black_list=black) - casts(source, black_list=black, keep_io_types=False) == 2


def test_inputs_and_outputs_cost_what_follows_from_them(tmp_path: Path) -> None:
    """A cache stays in float32 where its inputs and outputs do: low ones lower the Concat between them as well."""
    cache = """(float[4,64] X, float[4,64] past) => (float[4,64] Y, float[8,64] present) {
        h = MatMul (X, w) present = Concat <axis = 0> (past, h) s = Slice (present, from, to) Y = MatMul (s, w)
    }"""
    model = parse(cache, 17)
    model.graph.initializer.extend([helper.make_tensor(name, 7, [1], [at]) for name, at in (("from", 4), ("to", 8))])
    source = tmp_path / "cache.onnx"
    onnx.save(add_weights(model, {"w": (64, 64)}), source)
    found = causes(source)["inputs and outputs", "--io-types low lowers them as well"]
    assert found.casts == casts(source) - casts(source, keep_io_types=False) == 4


def test_missing_kernels_and_overrides_are_told(source: Path) -> None:
    found = {reason: cause for (reason, _), cause in causes(source, keep_nodes=["m"]).items()}
    assert found["user pattern"].ops == {"MatMul": 1}
    assert found["user pattern"].casts == 2


@pytest.mark.parametrize("options", [{"keep_io_types": False}, {"level": "O0"}])
def test_where_nothing_costs_anything_nothing_is_said(source: Path, options: dict[str, Any]) -> None:
    assert all(cause.casts == 0 for cause in causes(source, **options).values())


def test_reports_say_it(source: Path) -> None:
    told = " ".join(commands.run("convert", source, "--lists", "conservative", "--no-validate", "-v").output.split())
    assert (
        "4 Casts: 2 nodes in float32: on the black list (LayerNormalization ×1, Softmax ×1). --lists default lowers"
        in told
    )
    assert "2 Casts: The model's inputs and outputs stay in float32. --io-types low lowers them as well." in told
    told = " ".join(commands.run("inspect", source, "--level", "O2", "--black", "Softmax").output.split())
    assert "2 Casts: 1 node in float32: on the black list (Softmax ×1). Your own black list names them." in told


# --- the expected speed-up ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_estimate_is_of_the_sizes_that_were_validated(source: Path) -> None:
    made = commands.run("convert", source, "--dim", "N=4096", "--format", "json")
    expected = json.loads(made.output)["speed_up"]
    assert expected["shapes"] == {"X": [4096, 64]}
    assert expected["device"] == "A100"
    assert min(expected["before"], expected["after"]) > 0
    told = commands.run("convert", source, "-o", source.with_name("o.onnx"), "--dim", "N=4096").output
    factor = expected["before"] / expected["after"]
    assert f"{factor:.2f}×" in told
    assert "estimate for A100, not measured, at X 4096×64" in told


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--no-validate",), "the size of N is open, and nothing ran"),
        (("--target", "cpu"), "the CPU provider computes float16 in float32"),
        (("--level", "O0"), "nothing is low"),
    ],
)
def test_no_estimate_is_made_up(source: Path, words: tuple[str, ...], why: str) -> None:
    made = commands.run("convert", source, "-o", source.with_name("o.onnx"), *words, "--format", "json")
    assert json.loads(made.output)["speed_up"] is None, why


def test_declared_sizes_are_enough(tmp_path: Path) -> None:
    onnx.save(add_weights(parse(BLOCK.replace("N", "8"), 17), WEIGHTS), tmp_path / "fixed.onnx")
    made = onnxamp.convert_file(tmp_path / "fixed.onnx", tmp_path / "low.onnx", validate=False)
    assert made.speed_up is not None
    assert made.speed_up.shapes == {"X": (8, 64)}
