"""Products as matrices: rows times matrices give what ONNX Runtime computes, whatever the op and its attributes."""

from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper

from onnxamp._facts.ops import op_facts, op_key
from onnxamp._tuning.arrangement import Arrangement, arranged, rows_of

Floats = np.ndarray[Any, np.dtype[np.float32]]
DOMAINS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
ALL = 1 << 30


def drawn(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng((*shape, seed)).normal(size=shape).astype(np.float32)


def ran(node: NodeProto, *given: Floats) -> Floats:
    """The node's first output for these inputs; names without one are left empty."""
    named = dict(zip([name for name in node.input if name], given, strict=True))
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in named.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output if name]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = helper.make_model(graph, opset_imports=DOMAINS, ir_version=8)
    return np.asarray(ort.InferenceSession(model.SerializeToString()).run(None, named)[0])


def pieces(node: NodeProto, weight: Floats, value: Floats, number: int = 0) -> tuple[Arrangement, Floats]:
    """The arrangement of a product's weight, and the product, by group."""
    product = op_facts().products[op_key(node)][number]
    way = arranged(node, product, weight.shape, range(weight.ndim))
    assert way is not None
    rows = rows_of(node, product, weight.shape, value, ALL)
    assert rows is not None
    assert np.array_equal(way.stored(way.matrices(weight), weight.shape), weight)
    assert way.matrices(weight).shape[1] == way.depth
    return way, rows @ way.matrices(weight)


def close(found: Floats, wanted: Floats) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("op", "flags", "left", "right"), [
    ("MatMul", {}, (2, 3, 5), (5, 4)), ("MatMul", {}, (5,), (5, 4)), ("MatMul", {}, (3, 5), (1, 5, 4)),
    ("Gemm", {}, (3, 5), (5, 4)), ("Gemm", {"transB": 1}, (3, 5), (4, 5)),
    ("Gemm", {"transA": 1}, (5, 3), (5, 4)), ("Gemm", {"transA": 1, "transB": 1, "alpha": 1.0}, (5, 3), (4, 5)),
    ("com.microsoft::FusedMatMul", {"transA": 1, "transB": 1}, (2, 5, 3), (4, 5)),
    ("com.microsoft::FusedGemm", {"transB": 1, "activation": "LeakyRelu", "activation_alpha": 1.0}, (3, 5), (4, 5)),
])  # fmt: skip
def test_matrices_on_the_right(op: str, flags: dict[str, Any], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    domain, _, name = op.rpartition("::")
    node = helper.make_node(name, ["A", "B"], ["Y"], domain=domain, **flags)
    value, weight = drawn(*left), drawn(*right)
    close(pieces(node, weight, value)[1].reshape(-1, 4), ran(node, value, weight).reshape(-1, 4))


@pytest.mark.parametrize(("op", "flags", "left", "right"), [
    ("MatMul", {}, (3, 5), (2, 5, 4)), ("MatMul", {}, (3, 5), (5,)),
    ("Gemm", {"transA": 1}, (5, 3), (5, 4)), ("Gemm", {"transB": 1}, (3, 5), (4, 5)),
    ("com.microsoft::FusedMatMul", {"transA": 1}, (5, 3), (2, 5, 4)),
])  # fmt: skip
def test_matrices_on_the_left(op: str, flags: dict[str, Any], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    domain, _, name = op.rpartition("::")
    node = helper.make_node(name, ["A", "B"], ["Y"], domain=domain, **flags)
    weight, value = drawn(*left), drawn(*right)
    wanted = ran(node, weight, value)
    wanted = wanted.swapaxes(-1, -2) if value.ndim > 1 else wanted
    close(pieces(node, weight, value, 1)[1].reshape(-1, 3), wanted.reshape(-1, 3))


@pytest.mark.parametrize("left", [(5,), (3, 5), (2, 3, 5), (1, 3, 5), (4, 2, 3, 5)])
def test_batches_of_matrices(left: tuple[int, ...]) -> None:
    node, value, weight = helper.make_node("MatMul", ["A", "B"], ["Y"]), drawn(*left), drawn(2, 5, 4)
    found = pieces(node, weight, value)[1]
    wanted = ran(node, value, weight)
    wanted = wanted if value.ndim > 1 else wanted[:, None]
    close(found, np.moveaxis(wanted, -3, 0).reshape(found.shape))


def convolved(node: NodeProto, weight: Floats, value: Floats, groups: int) -> None:
    """Compare by position and channel."""
    wanted = ran(node, value, weight)
    wanted = np.moveaxis(wanted, 1, -1).reshape(-1, wanted.shape[1])
    found = pieces(node, weight, value)[1]
    assert len(found) == groups
    close(np.concatenate(list(found), axis=-1), wanted)


@pytest.mark.parametrize("flags", [
    {}, {"strides": [2, 3]}, {"pads": [1, 0, 2, 1]}, {"dilations": [2, 1]}, {"auto_pad": "SAME_UPPER"},
    {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, {"auto_pad": "VALID"}, {"group": 2},
    {"group": 4, "strides": [2, 1], "dilations": [1, 2], "pads": [0, 2, 1, 0]},
], ids=str)  # fmt: skip
def test_convolutions(flags: dict[str, Any]) -> None:
    groups = flags.get("group", 1)
    convolved(helper.make_node("Conv", ["X", "W"], ["Y"], **flags), drawn(8, 4 // groups, 2, 3), drawn(2, 4, 7, 8),
              groups)  # fmt: skip


@pytest.mark.parametrize("axes", [1, 3])
def test_convolutions_of_other_dimensions(axes: int) -> None:
    node = helper.make_node("Conv", ["X", "W"], ["Y"], strides=[2] * axes, pads=[1] * (2 * axes))
    convolved(node, drawn(3, 2, *[3] * axes), drawn(1, 2, *range(5, 5 + axes)), 1)


@pytest.mark.parametrize("flags", [
    {}, {"strides": [2, 3]}, {"pads": [1, 0, 1, 1]}, {"dilations": [2, 1]}, {"group": 2},
    {"strides": [2, 2], "output_padding": [1, 0], "pads": [1, 1, 0, 1]},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, {"strides": [2, 3], "auto_pad": "SAME_LOWER"},
    {"strides": [2, 2], "auto_pad": "VALID"}, {"strides": [2, 2], "output_shape": [9, 12]},
    {"group": 2, "strides": [3, 2], "dilations": [1, 2]},
], ids=str)  # fmt: skip
def test_transposed_convolutions(flags: dict[str, Any]) -> None:
    groups = flags.get("group", 1)
    convolved(helper.make_node("ConvTranspose", ["X", "W"], ["Y"], **flags), drawn(4, 6 // groups, 2, 3),
              drawn(2, 4, 5, 6), groups)  # fmt: skip


def test_transposed_convolutions_of_one_dimension() -> None:
    node = helper.make_node("ConvTranspose", ["X", "W"], ["Y"], strides=[2], pads=[3, 2])
    convolved(node, drawn(2, 3, 4), drawn(1, 2, 6), 1)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_steps_of_recurrent_ops(direction: str) -> None:
    """With the identity as activation a state is a product of the input, and one of the state before."""
    sides = 2 if direction == "bidirectional" else 1
    node = helper.make_node(
        "RNN", ["X", "W", "R"], ["Y"], hidden_size=3, direction=direction, activations=["Affine"] * sides,
        activation_alpha=[1.0] * sides, activation_beta=[0.0] * sides,
    )  # fmt: skip
    value, gates, states = drawn(5, 2, 4), drawn(sides, 3, 4), drawn(sides, 3, 3, seed=1) / 3
    found = ran(node, value, gates, states)
    given = pieces(node, gates, value)[1].reshape(sides, 5, 2, 3)
    before = pieces(node, states, found, 1)[1].reshape(sides, 4, 2, 3)
    for side in range(sides):
        is_backwards = direction == "reverse" or side
        told = slice(None, -1) if is_backwards else slice(1, None)
        close(given[side, told] + before[side], found[told, side])


def test_the_batch_may_come_first() -> None:
    last, first = (helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=3, layout=layout,
                                    linear_before_reset=1) for layout in (0, 1))  # fmt: skip
    states = drawn(5, 1, 2, 3)
    product, weight = op_facts().products["GRU"][1], drawn(1, 9, 3)
    assert np.array_equal(
        rows_of(last, product, weight.shape, states, ALL),
        rows_of(first, product, weight.shape, states.transpose(2, 0, 1, 3), ALL),
    )


def test_a_gate_behind_its_reset_has_other_rows() -> None:
    node = helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=3)
    gates, states = op_facts().products["GRU"]
    assert arranged(node, gates, (1, 9, 4), range(3)) is not None
    assert arranged(node, states, (1, 9, 3), range(3)) is None


@pytest.mark.parametrize(("op", "shape"), [
    ("MatMul", (2, 2, 5, 4)), ("MatMul", (5,)), ("Conv", (3, 2)), ("Gemm", (0, 4)),
])  # fmt: skip
def test_what_is_no_matrix_has_no_arrangement(op: str, shape: tuple[int, ...]) -> None:
    node = helper.make_node(op, ["A", "B"], ["Y"])
    assert arranged(node, op_facts().products[op][0], shape, range(len(shape))) is None


def test_transposed_weights_are_put_back() -> None:
    node, weight = helper.make_node("MatMul", ["A", "B"], ["Y"]), drawn(4, 5)
    way = arranged(node, op_facts().products["MatMul"][0], weight.shape, (1, 0))
    assert way is not None
    assert np.array_equal(way.matrices(weight)[0], weight.T)
    assert np.array_equal(way.stored(way.matrices(weight), weight.shape), weight)


def test_few_rows_are_chosen_of_many_and_always_the_same() -> None:
    node = helper.make_node("Conv", ["X", "W"], ["Y"])
    product, value, shape = op_facts().products["Conv"][0], drawn(2, 3, 9, 9), (4, 3, 2, 2)
    every, some, again = (rows_of(node, product, shape, value, most) for most in (ALL, 10, 10))
    assert every is not None
    assert some is not None
    assert every.shape == (1, 2 * 8 * 8, prod(shape[1:]))
    assert some.shape == (1, 10, prod(shape[1:]))
    assert np.array_equal(some, again)
    assert {row.tobytes() for row in some[0]} <= {row.tobytes() for row in every[0]}


def test_no_rows_are_none() -> None:
    node = helper.make_node("RNN", ["X", "W", "R"], ["Y"], hidden_size=3)
    assert rows_of(node, op_facts().products["RNN"][1], (1, 3, 3), drawn(1, 1, 2, 3), ALL) is None
