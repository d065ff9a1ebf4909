"""Samples in forms that people have: of other sizes, without their types, with labels, from folders and texts."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxamp
from onnxamp import ArgumentError, ArgumentTypeError
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.inputs.random_inputs import random_inputs

RNG = np.random.default_rng(0)
SQUARE = numpy_helper.from_array(RNG.standard_normal((8, 8)).astype(np.float32), "w")


def with_weight(text: str, opset: int = 18) -> ModelProto:
    model = parse(text, opset)
    model.graph.initializer.append(SQUARE)
    return model


@pytest.mark.parametrize("order", [(8, 4096), (4096, 8)])
def test_sums_are_those_of_each_sample(order: tuple[int, int]) -> None:
    """A target that adds up in float16 loses more in longer sums, whichever sample comes first."""
    model = parse("(float16[a,n] x, float16[n,4] z) => (float16[a,4] y) { y = MatMul (x, z) }")
    samples = [
        {
            "x": RNG.standard_normal((8, size)).astype(np.float16).astype(np.float32),
            "z": RNG.standard_normal((size, 4)).astype(np.float16).astype(np.float32),
        }
        for size in order
    ]
    report = onnxamp.diff_models(without_rounding(model), model, samples, target="webgpu", provider="cpu")
    assert report.outputs[0].rel_l2 > 3e-3


def test_sizes_that_come_in_have_any_length() -> None:
    model = with_weight("""(float[a,8] x, int64[r] s) => (float total) { h = MatMul (x, w) q = Reshape (h, s)
        total = ReduceSum <keepdims = 0> (q) }""")
    x = RNG.standard_normal((2, 8)).astype(np.float32)
    samples = [{"x": x, "s": np.array(shape)} for shape in ([16], [4, 4], [2, 2, 4])]
    result = onnxamp.convert_model(model, "O3")
    assert onnxamp.diff_models(model, result, samples, provider="cpu").passed
    assert onnxamp.check_run(result, samples, provider="cpu").skipped is None


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("op", ["Equal", "Less"])
def test_inputs_may_be_compared_with_infinity(op: str, number: float) -> None:
    model = parse(f"(float[N,4] x) => (float[N,4] y) {{ c = {op} (x, k) y = Where (c, one, x) }}")
    constants = {"k": number, "one": 1.0}
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(one), name) for name, one in constants.items())
    assert np.isfinite(random_inputs(model)["x"]).all()


@pytest.mark.parametrize(("formula", "given"), [("height / 32", 2), ("height - 20", 44)])
def test_formulas_give_sizes(formula: str, given: int) -> None:
    """Tensors without elements would tell nothing."""
    ends = [helper.make_tensor_value_info("x", 1, ["N", 3, formula, 8]), helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert random_inputs(model)["x"].shape[2] > 0
    assert random_inputs(model, dims={"height": np.int64(64)})["x"].shape[2] == given


def text_model() -> ModelProto:
    keys = helper.make_node(
        "LabelEncoder", ["s"], ["k"], domain="ai.onnx.ml", keys_strings=["a", "b"], values_floats=[1.0, 2.0]
    )
    graph = helper.make_graph(
        [keys, helper.make_node("Mul", ["k", "k"], ["y"])], "g",
        [helper.make_tensor_value_info("s", TensorProto.STRING, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("given", [np.array([b"a", b"b"]), np.array([b"a", "b"], object), np.array(["a", "b"])])
def test_strings_as_bytes(given: Any) -> None:
    model = text_model()
    report = onnxamp.diff_models(model, model, {"s": given}, provider="cpu")
    assert (report.passed, report.outputs[0].differing) == (True, 0)
    for wrong in (np.array([1, "b"], object), np.array([b"\xff"])):
        with pytest.raises(ArgumentError, match=r"'s' (must hold strings|holds bytes)"):
            onnxamp.diff_models(model, model, {"s": wrong}, provider="cpu")


def test_types_that_numpy_drops_are_not_guessed(tmp_path: Path) -> None:
    """numpy.savez writes bfloat16 as two bytes without a type."""
    np.savez(tmp_path / "x.npz", x=np.array([1, 2, 3, 4], ml_dtypes.bfloat16))
    for kind, is_right in (("bfloat16", True), ("float16", False)):
        model = parse(f"({kind}[4] x) => (float[4] y) {{ y = Cast <to = 1> (x) }}")
        if is_right:
            assert onnxamp.diff_models(model, model, tmp_path / "x.npz", provider="cpu").passed
            continue
        with pytest.raises(ArgumentError, match="lost its type"):
            onnxamp.diff_models(model, model, tmp_path / "x.npz", provider="cpu")


def test_labels_of_a_data_set_are_left_out() -> None:
    model = with_weight("(float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }")
    x = RNG.standard_normal((1, 8)).astype(np.float32)
    for label in (3, "cat", np.int64(3)):
        assert onnxamp.diff_models(model, model, [(x, label)], provider="cpu").passed


def test_empty_lists_are_of_any_type(tmp_path: Path) -> None:
    model = parse("(int64[1,N] ids) => (int64[1,M] y) { y = Concat <axis = 1> (ids, ids) }")
    Path(tmp_path, "x.json").write_text(json.dumps({"ids": [[]]}))
    report = onnxamp.check_run(model, onnxamp.load_samples(tmp_path / "x.json"), provider="cpu")
    assert report.skipped is None


def test_inputs_of_a_byte_per_float() -> None:
    model = parse("(float8e4m3fn[4] x) => (float[4] y) { y = Cast <to = 1> (x) }", 19)
    assert onnxamp.check_run(model, {"x": np.ones(4, ml_dtypes.float8_e4m3fn)}, provider="cpu").skipped is None


def test_samples_that_did_not_run_do_not_count() -> None:
    model = parse("(float16[4] x) => (float16[4] y) { h = Mul (x, x) y = Relu (h) }")
    samples = [{"x": np.full(4, number, np.float16)} for number in (1, 300, 1, 1)]
    assert onnxamp.check_run(model, samples, provider="cpu", stop=True).samples == 2


@pytest.mark.parametrize("given", [{"y": "abc"}, {"y": None}, [0.1], b"0.1"])
def test_limits_that_are_none(given: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="must be"):
        onnxamp.make_limits({"rel_l2": given})
    assert onnxamp.make_limits({"rel_l2": np.float32(0.5)}).of["rel_l2"][""] == 0.5


def noisy(seed: float | None) -> ModelProto:
    """What speech synthesis adds to its latents."""
    model = with_weight("""(float[2,8] x) => (float[2,8] y) <float k = {0.667}> { m = MatMul (x, w)
        r = RandomNormalLike (m) n = Mul (r, k) s = Add (m, n) y = MatMul (s, w) }""")
    if seed is not None:
        model.graph.node[1].attribute.append(helper.make_attribute("seed", seed))
    return model


@pytest.mark.parametrize("seed", [None, 1.0])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_results_draw_the_noise_of_the_original(tmp_path: Path, level: Any, seed: float | None) -> None:
    onnx.save(noisy(seed), tmp_path / "model.onnx")
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", level)
    assert made.validation is not None
    assert (made.validation.passed, made.validation.cure) == (True, None)
    # At level auto, so small a model is faster in float32.
    assert level == "auto" or any(row.low for row in made.plan.rows)
    low = onnx.load(tmp_path / "low.onnx")
    (drawn,) = (node for node in low.graph.node if node.op_type == "RandomNormalLike")
    assert [item.name for item in drawn.attribute if item.name == "seed"] == ([] if seed is None else ["seed"])
