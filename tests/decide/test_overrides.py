"""What the user says of single nodes and weights: literal names, limits of constants, weights that are stored low."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from graphs.case import parse
from onnx import ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator

import onnxamp
from onnxamp._cli.command import group

TEXT = """(float[N,2] X) => (float[N,2] Y, float[N,2] d) <float[2,2] w = {1, 2, 3, 700}, float[2,2] v = {1, 2, 3, 4}> {
    [first] a = MatMul (X, w) [soft] c = Softmax (a) [relu] d = Relu (c) [last] Y = MatMul (d, v) }"""


def model() -> ModelProto:
    made = parse(TEXT)
    made.graph.node[0].name = "first.a+b"
    return made


def low(**options: Any) -> set[str]:
    """Nodes with a low variable."""
    options = {"lists": "conservative", **options}
    return {row.node for row in onnxamp.plan_model(model(), **options).rows if row.low and row.op != "initializer"}


def said(**options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onnxamp.convert_model(model(), **options)
    return [str(item.message) for item in caught]


def test_names_of_nodes_are_taken_literally() -> None:
    assert low() == {"first.a+b", "last"}
    assert low(keep_nodes=["first.a+b"]) == {"last"}
    assert low(keep_nodes=["a"]) == {"last"}  # by its output
    assert low(keep_high=["first.a+b"]) == low()  # a pattern, which does not match itself
    assert low(keep_nodes=["last"], keep_high=["first.*"]) == set()


def test_a_name_that_no_node_has_is_told_with_the_nearest() -> None:
    assert said(keep_nodes=["first.a-b"]) == [
        "No node and no output of a node is called 'first.a-b'. Did you mean 'first.a+b'?"
    ]
    assert said(keep_nodes=["first.a+b"]) == []


def test_a_node_cannot_be_kept_and_forced() -> None:
    with pytest.raises(onnxamp.ContradictionError, match=r"keep_nodes \(--keep-node\) 'last' contradicts"):
        onnxamp.convert_model(model(), keep_nodes=["last"], force_low=["last"])


@pytest.mark.parametrize(("limit", "lowered"), [
    (700, {"first.a+b", "last"}), (699, {"last"}), (3.5, set()),
])  # fmt: skip
def test_constants_beyond_a_limit_keep_their_readers(limit: float, lowered: set[str]) -> None:
    assert low(init_max=limit) == lowered
    assert low(init_max=limit, hazards=False, level="O3") == lowered | {"relu", "soft"}


def test_a_limit_says_what_it_found() -> None:
    row = next(row for row in onnxamp.plan_model(model(), init_max=699).rows if row.node == "first.a+b")
    assert (row.reason, row.detail) == ("constant range", "'w' holds 700; init_max (--init-max) is 699")
    assert "first.a+b" in low(init_max=699, force_low=["first.*"])  # what names a node is stronger


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "3", True])
def test_a_limit_is_a_positive_number(wrong: Any) -> None:
    with pytest.raises((onnxamp.ArgumentError, onnxamp.ArgumentTypeError), match=r"init_max \(--init-max\) must be"):
        onnxamp.Options(init_max=wrong)


@pytest.mark.parametrize(("patterns", "stored"), [
    ([], set()), (["w"], {"w"}), (["last"], {"v"}), (".*", {"v", "w"}), (["last", "w"], {"v", "w"}),
])  # fmt: skip
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_are_stored_low_though_their_readers_are_not(patterns: Any, stored: set[str], level: Any) -> None:
    result = onnxamp.convert_model(model(), level, keep_nodes=["first.a+b", "last"], low_weights=patterns)
    assert {item.name for item in result.graph.initializer if item.data_type == TensorProto.FLOAT16} == stored
    onnx.checker.check_model(result, full_check=True)
    feeds = {"X": np.array([[0.25, -1], [0.5, 2]], np.float32)}
    expected = ReferenceEvaluator(model()).run(None, feeds)
    for found, wanted in zip(ReferenceEvaluator(result).run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3)


@pytest.mark.parametrize("io", [True, False])
def test_a_low_weight_that_the_model_returns_keeps_the_name_of_the_output(io: bool) -> None:
    text = "(float[2] x) => (float[2] w, float[2] y) <float[2] w = {1, 2}> { y = Add (x, w) }"
    result = onnxamp.convert_model(parse(text, 22), "O3", low_weights=["w"], keep_io_types=io)
    elem = TensorProto.FLOAT if io else TensorProto.FLOAT16
    assert [info.type.tensor_type.elem_type for info in result.graph.output] == [elem] * 2
    assert [tensor.data_type for tensor in result.graph.initializer] == [TensorProto.FLOAT16]
    onnx.checker.check_model(result, full_check=True)
    x = np.ones(2, np.float32 if io else np.float16)
    for found, wanted in zip(ReferenceEvaluator(result).run(None, {"x": x}), ([1, 2], [2, 3]), strict=True):
        np.testing.assert_array_equal(found, wanted)


LOST = {
    "constant range": """(float[2] x) => (float[2] y) <float[2] w = {1e6, 2}, float[2] v = {1, 2}> {
        h = Mul (x, w) y = Add (h, v) }""",
    "epsilon": """(float[2] x) => (float[2] y) <float w = {1e-12}, float[2] v = {1, 2}> {
        h = Add (x, w) s = Sqrt (h) d = Div (x, s) y = Mul (d, v) }""",
    "index path": """(float[1,1,4,4] x) => (float[1,1,a,b] y)
        <float[4] w = {1, 1, 1.3, 1.3}, float[4] v = {1, 1, 2, 2}> {
        h = Resize <mode = "nearest"> (x, , w) y = Resize <mode = "nearest"> (h, , v) }""",
}


@pytest.mark.parametrize("reason", LOST)
def test_weights_that_lose_their_numbers_in_low_precision_are_named(reason: str) -> None:
    (warning,) = onnxamp.plan_model(parse(LOST[reason], 17), low_weights=".*").warnings
    start = "low_weights (--low-weight) '.*' stores 'w' in low precision although that is known to break"
    assert warning.startswith(f"{start}: {reason}: ")
    for options in ({"low_weights": "v"}, {"low_weights": ".*", "hazards": False}):
        assert onnxamp.plan_model(parse(LOST[reason], 17), **options).warnings == ()


def test_weights_that_are_named_in_vain() -> None:
    assert said(low_weights="z+") == ["The pattern 'z+' matches no float32 weight, and no node that reads one."]
    assert onnxamp.convert_model(model(), "O0", low_weights=".*") == model()


def test_a_plan_repeats_all_of_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_nodes": ["last"], "low_weights": ["v"], "init_max": 699, "keep_io_types": ["Y"]}
    onnxamp.plan_model(model(), **options).save(tmp_path / "plan.json")
    plan = onnxamp.load_plan(tmp_path / "plan.json")
    assert plan.options == onnxamp.Options(**options)
    assert onnxamp.apply_plan(model(), plan) == onnxamp.convert_model(model(), **options)


def test_the_command_line_spells_all_of_it(tmp_path: Path) -> None:
    options = onnxamp.Options(keep_nodes=["first.a+b", "d"], low_weights=["v"], init_max=699, keep_io_types=["Y", "X"])
    assert options.written() == (
        "--keep-node", "first.a+b", "--keep-node", "d", "--low-weight", "v", "--init-max", "699.0",
        "--io-types", "keep:X,Y",
    )  # fmt: skip
    onnx.save(model(), tmp_path / "m.onnx")
    arguments = ["convert", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "r.onnx"), *options.written()]
    done = CliRunner().invoke(group, [*arguments, "--no-validate"])
    assert done.exit_code == 0, done.output
    assert onnx.load(tmp_path / "r.onnx") == onnxamp.convert_model(model(), **options.keywords())


def test_inputs_and_outputs_that_are_named_keep_their_types(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    arguments = ["convert", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "r.onnx"), "--no-validate", "--io-types"]
    for text, kept in (("keep:Y", {"Y"}), ("keep:X,d", {"X", "d"}), ("keep", {"X", "Y", "d"}), ("LOW", set())):
        done = CliRunner().invoke(group, [*arguments, text])
        assert done.exit_code == 0, done.output
        graph = onnx.load(tmp_path / "r.onnx").graph
        floats = {v.name for v in (*graph.input, *graph.output) if v.type.tensor_type.elem_type == TensorProto.FLOAT}
        assert floats == kept
    done = CliRunner().invoke(group, [*arguments, "keep:nosuch"])
    assert "no input or output 'nosuch'" in done.output
    assert CliRunner().invoke(group, [*arguments, "low:Y"]).exit_code == 2


RECURRENT = """(float[4,2,8] x, float[8,8] w, float[1,16,8] weights, float[1,16,4] states) => (float[4,1,2,4] y) {
    [product] a = MatMul (x, w) [moved] t = Transpose <perm = [0, 1, 2]> (a)
    [gates] y = LSTM <hidden_size = 4> (t, weights, states) }"""


def test_what_a_forced_node_needs_is_forced_along_a_chain() -> None:
    """TensorRT needs the input and the weights of an LSTM in one type, and a Transpose rounds nothing."""
    options = {"target": "tensorrt", "force_low": ["product"], "black_list": ["LSTM"]}
    plan = onnxamp.plan_model(parse(RECURRENT), **options)
    assert {row.node: row.low for row in plan.rows if row.op in ("MatMul", "LSTM")} == {"product": True, "gates": True}


def test_what_a_forced_node_needs_is_kept_by_another_option() -> None:
    options = {"target": "tensorrt", "force_low": ["product"], "keep_nodes": ["gates"]}
    plan = onnxamp.plan_model(parse(RECURRENT), **options)
    assert plan.warnings == ("'product' cannot be forced low without 'gates' (keep_nodes (--keep-node) 'gates').",)
