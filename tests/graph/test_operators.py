"""Ops on integers, written as the float ops that they stand for."""

from typing import Any

import numpy as np
import pytest
from graphs.case import add_weights, parse
from judge_numbers import session
from onnx import ModelProto

from onnxamp._graph.quantized import OPERATORS, as_floats

RANDOM = np.random.default_rng(0)
HEAD = "({inputs}) => (int8{dims} y) <{scales}> {{"
DOMAINS = {"com.microsoft": 1}
SCALES = "float xs = {0.05}, int8 xz = {3}, float bs = {0.07}, int8 bz = {-5}, float ys = {0.4}, int8 yz = {10}"
X, B, Y = "x, xs, xz", "b, bs, bz", "ys, yz"
COLUMNS = SCALES.replace(
    "float bs = {0.07}, int8 bz = {-5}", "float[3] bs = {0.07, 0.01, 0.02}, int8[3] bz = {0, 0, 0}"
)


def network(
    node: str, shapes: dict[str, tuple[int, ...]], dims: str, scales: str = SCALES, opset: int = 17
) -> ModelProto:
    """Return a model of one node; ``c`` is an int32 bias, ``m`` a mask, and what is not ``x`` is stored."""
    kinds = {"x": "int8", "z": "int8"}
    inputs = ", ".join(
        f"{kinds[name]}[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items() if name in kinds
    )
    text = HEAD.format(inputs=inputs, dims=dims, scales=scales)
    weights = {
        name: RANDOM.integers(-100, 100, shape).astype({"c": np.int32, "m": np.bool_}.get(name, np.int8))
        for name, shape in shapes.items()
        if name not in kinds
    }
    domains = DOMAINS if "com.microsoft" in node else {}
    return add_weights(parse(f"{text} {node} }}", opset, domains=domains), weights)


IMAGE, KERNEL = (2, 4, 6, 6), (3, 4, 3, 3)
PAIR = {"x": (5, 4), "z": (5, 4)}
CASES = {
    "QLinearConv": (f"y = QLinearConv <pads = [1, 1, 1, 1]> ({X}, {B}, {Y}, c)", {"x": IMAGE, "b": KERNEL, "c": (3,)}),
    "com.microsoft::QLinearConv": (f"y = com.microsoft.QLinearConv ({X}, {B}, {Y})", {"x": IMAGE, "b": KERNEL}),
    "QLinearMatMul": (f"y = QLinearMatMul ({X}, {B}, {Y})", {"x": (5, 4), "b": (4, 3)}),
    "com.microsoft::QGemm": (
        f"y = com.microsoft.QGemm <alpha = 1.0> ({X}, {B}, c, {Y})",
        {"x": (5, 4), "b": (4, 3), "c": (3,)},
    ),
    "com.microsoft::QLinearAdd": (f"y = com.microsoft.QLinearAdd ({X}, z, bs, bz, {Y})", PAIR),
    "com.microsoft::QLinearMul": (f"y = com.microsoft.QLinearMul ({X}, z, bs, bz, {Y})", PAIR),
    "com.microsoft::QLinearConcat": (f"y = com.microsoft.QLinearConcat <axis = 1> ({Y}, {X}, z, bs, bz)", PAIR),
    "com.microsoft::QLinearLeakyRelu": (f"y = com.microsoft.QLinearLeakyRelu <alpha = 0.3> ({X}, {Y})", {"x": (5, 4)}),
    "com.microsoft::QLinearSigmoid": (f"y = com.microsoft.QLinearSigmoid ({X}, {Y})", {"x": (5, 4)}),
    "com.microsoft::QLinearSoftmax": (
        f"y = com.microsoft.QLinearSoftmax <axis = -1, opset = 13> ({X}, {Y})",
        {"x": (5, 4)},
    ),
    "com.microsoft::QLinearWhere": (f"y = com.microsoft.QLinearWhere (m, {X}, z, bs, bz, {Y})", PAIR | {"m": (5, 4)}),
    "com.microsoft::QLinearAveragePool": (
        f"y = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2]> ({X}, {Y})",
        {"x": IMAGE},
    ),
    "com.microsoft::QLinearGlobalAveragePool": (
        f"y = com.microsoft.QLinearGlobalAveragePool ({X}, {Y})",
        {"x": IMAGE},
    ),
}


def run(model: ModelProto, feeds: dict[str, Any]) -> np.ndarray:
    return session(model).run(None, feeds)[0]


def agree(model: ModelProto) -> None:
    """Integers of both forms are the same, where no sum is in the middle of two."""
    feeds = {
        entry.name: RANDOM.integers(-128, 128, [dim.dim_value for dim in entry.type.tensor_type.shape.dim], np.int8)
        for entry in model.graph.input
    }
    floats = as_floats(model)
    ops = {node.op_type for node in floats.graph.node}
    assert {"DequantizeLinear", "QuantizeLinear"} <= ops
    assert not any(op.startswith("Q") and op != "QuantizeLinear" for op in ops)
    found, wanted = run(floats, feeds), run(model, feeds)
    assert found.dtype == wanted.dtype == np.int8
    assert np.abs(found.astype(int) - wanted).max() <= 1
    assert np.mean(found != wanted) < 0.05
    assert len(np.unique(wanted)) > 3


def test_each_operator_has_a_case() -> None:
    assert CASES.keys() == OPERATORS.keys()


@pytest.mark.parametrize("op", CASES)
def test_floats_give_the_same_integers(op: str) -> None:
    node, shapes = CASES[op]
    scales = SCALES.replace("ys = {0.4}", "ys = {0.01}") if op.endswith(("Sigmoid", "Softmax")) else SCALES
    rank = 4 if shapes["x"] == IMAGE else 2
    agree(network(node, shapes, f"[{','.join('ABCD'[:rank])}]", scales))


@pytest.mark.parametrize("op", ["QLinearConv", "QLinearMatMul", "com.microsoft::QGemm"])
def test_scales_of_columns_keep_their_axis(op: str) -> None:
    node, shapes = CASES[op]
    agree(network(node, shapes, "[A,B,C,D]" if op == "QLinearConv" else "[A,B]", COLUMNS))


@pytest.mark.parametrize("op", ["QLinearConv", "QLinearMatMul", "com.microsoft::QGemm"])
def test_scales_of_columns_keep_their_axis_where_quantizers_of_the_opset_have_none(op: str) -> None:
    node, shapes = CASES[op]
    agree(network(node, shapes, "[A,B,C,D]" if op == "QLinearConv" else "[A,B]", COLUMNS, opset=11))


def test_a_transposed_matrix_has_its_columns_along_the_other_axis() -> None:
    node = f"y = com.microsoft.QGemm <alpha = 1.0, transB = 1> ({X}, {B}, c, {Y})"
    agree(network(node, {"x": (5, 4), "b": (3, 4), "c": (3,)}, "[A,B]", COLUMNS))


def test_a_result_without_a_scale_is_a_float() -> None:
    text = HEAD.format(inputs="int8[5,4] x", dims="[A,B]", scales=SCALES).replace("int8[A,B] y", "float[A,B] y")
    weights = {"b": RANDOM.integers(-100, 100, (4, 3)).astype(np.int8), "c": np.arange(3, dtype=np.int32)}
    model = add_weights(
        parse(f"{text} y = com.microsoft.QGemm <alpha = 1.0> ({X}, {B}, c) }}", domains=DOMAINS), weights
    )
    feeds = {"x": RANDOM.integers(-128, 128, (5, 4)).astype(np.int8)}
    np.testing.assert_allclose(run(as_floats(model), feeds), run(model, feeds), rtol=1e-5, atol=1e-5)


def test_what_has_no_such_form_stays() -> None:
    node = f"y = com.microsoft.QLinearAveragePool <kernel_shape = [2, 2], channels_last = 1> ({X}, {Y})"
    model = network(node, {"x": IMAGE}, "[A,B,C,D]")
    assert as_floats(model) is model
