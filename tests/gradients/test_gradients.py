"""Every gradient rule against central differences in float64, against ONNX Runtime in float32, and its kernels."""

from typing import Any

import numpy as np
import onnx
import pytest
from gradient_cases import OPSET, Array, Case, central_difference, gradients_of, missing_kernels, one, reference
from graphs.case import parse
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, GradientError, OpsetError
from onnxamp._gradients import attention, linear, movement, pointwise, quantized
from onnxamp._gradients.walk import FORWARD, RULES, differentiate
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp.train import add_gradients

RNG = np.random.default_rng(0)


def n(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def apart(*shape: int) -> Array:
    """Distinct numbers on both sides of zero, at least 0.02 from it and from each other: far from every kink."""
    count = int(np.prod(shape))
    return (RNG.permutation(count).reshape(shape) - count / 2 + 0.25) * (4 / count)


def positive(*shape: int) -> Array:
    return RNG.uniform(0.5, 2.0, shape)


def inner(*shape: int) -> Array:
    return RNG.uniform(-0.8, 0.8, shape)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


POINTWISE = [
    *(one(op, apart(3, 5)) for op in (
        "Abs", "Asinh", "Atan", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish",
        "Identity", "LeakyRelu", "LogSoftmax", "Mish", "Neg", "Relu", "Selu", "Sigmoid", "Sin", "Sinh", "Softmax",
        "Softplus", "Softsign", "Tan", "Tanh",
    )),
    *(one(op, positive(4, 3)) for op in ("Log", "Reciprocal", "Sqrt")),
    *(one(op, inner(4, 3)) for op in ("Acos", "Asin", "Atanh")),
    one("Acosh", positive(4) + 1),
    one("Gelu", n(2, 7), approximate="tanh"),
    one("Elu", apart(4, 4), alpha=0.7),
    one("Celu", apart(4, 4), alpha=1.7),
    one("Selu", apart(4, 4), alpha=1.2, gamma=0.9),
    one("LeakyRelu", apart(4, 4), alpha=0.3),
    one("HardSigmoid", apart(4, 4), alpha=0.3, beta=0.4),
    one("ThresholdedRelu", apart(3, 5) + 0.05),
    one("ThresholdedRelu", apart(4, 4), alpha=0.33),
    one("Softmax", n(2, 3, 4), axis=1),
    one("LogSoftmax", n(2, 3, 4), axis=0),
    one("Swish", n(3, 4), opset=24, alpha=1.3),
    one("CastLike", n(3, 2), n(1), fixed=(1,)),
    one("Dropout", n(3, 2)),
    *(one(op, n(2, 3), n(2, 3)) for op in ("Add", "Sub", "Mul")),
    *(one(op, n(2, 1, 4), n(3, 1)) for op in ("Add", "Sub", "Mul")),
    *(one(op, n(2, 1, 4), n(3, 1), dynamic=True) for op in ("Add", "Sub", "Mul")),
    one("Mul", n(2, 3), n()),
    one("Mul", n(), n(4, 1), dynamic=True),
    one("Add", n(3), n(2, 4, 3)),
    one("Div", n(2, 3), positive(3)),
    one("Div", n(4), positive(2, 3, 4), dynamic=True),
    one("Pow", positive(2, 3), n(3)),
    one("Pow", positive(2, 3), n(4, 1, 3), dynamic=True),
    one("Pow", n(2, 3), np.array(2.0, np.float32), fixed=(1,), constant=(1,)),
    one("Pow", n(2, 3), ints(3)),
    one("Pow", positive(3), np.array([0.0, 2.0, 0.5], np.float32), fixed=(1,), constant=(1,)),
    one("Max", apart(3, 4), apart(4) + 0.011, apart(3, 1) - 0.007),
    one("Min", apart(3, 4), apart(4) + 0.011, dynamic=True),
    one("Max", apart(3)),
    one("Sum", n(3, 4), n(4), n(3, 1)),
    one("Mean", n(3, 4), n(4), n(1, 1)),
    one("PRelu", apart(2, 3, 4), positive(3, 1)),
    one("Clip", apart(5, 6), np.array(-0.513), np.array(0.707)),
    one("Clip", apart(5, 6), None, np.array(0.707)),
    one("Clip", apart(5, 6), np.array(-0.513)),
    one("Clip", apart(5, 6)),
    one("Where", RNG.integers(0, 2, (3, 4)).astype(bool), n(4), n(3, 1)),
    one("Where", RNG.integers(0, 2, (4,)).astype(bool), n(3, 1), n(1), dynamic=True),
]  # fmt: skip

PRODUCTS = [
    *(one("Gemm", n(*((4, 3) if a else (3, 4))), n(*((5, 4) if b else (4, 5))), n(5), transA=a, transB=b, alpha=0.7,
          beta=1.3) for a in (0, 1) for b in (0, 1)),
    one("Gemm", n(3, 4), n(4, 5)),
    one("Gemm", n(3, 4), n(4, 5), n(3, 1), dynamic=True),
    one("Gemm", n(3, 4), n(4, 5), n()),
    one("MatMul", n(3, 4), n(4, 5)),
    one("MatMul", n(2, 3, 4), n(4, 5)),
    one("MatMul", n(2, 3, 4), n(4, 5), dynamic=True),
    one("MatMul", n(3, 4), n(2, 4, 5)),
    one("MatMul", n(2, 1, 3, 4), n(5, 4, 2)),
    one("MatMul", n(2, 1, 3, 4), n(5, 4, 2), dynamic=True),
    one("MatMul", n(4), n(4)),
    one("MatMul", n(4), n(4, 5)),
    one("MatMul", n(4), n(2, 4, 5)),
    one("MatMul", n(3, 4), n(4)),
    one("MatMul", n(2, 3, 4), n(4), dynamic=True),
    one("Einsum", n(2, 3, 4), n(2, 5, 4), equation="bid,bjd->bij"),
    one("Einsum", n(2, 3), n(3, 4), n(4), equation="ij, jk, k -> i"),
    one("Einsum", n(2, 1), n(3, 4), equation="ij,jk->ik"),
    one("Einsum", n(2, 3), n(1, 3), equation="ij,ij->i"),
    one("Einsum", n(2, 3, 4), n(4, 5), equation="dca,ab"),
    one("Einsum", n(1, 2, 3, 4), n(5, 1, 4, 2), equation="...ij,...jk->...ik"),
    one("Einsum", n(2, 5, 3), n(3, 4), equation="...ij,jk"),
]  # fmt: skip

REDUCTIONS = [
    *(one(op, apart(2, 3, 4), ints(1), keepdims=k) for k in (0, 1) for op in (
        "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
        "ReduceSumSquare",
    )),
    *(one(op, positive(2, 3, 4), ints(0, -1), keepdims=0) for op in ("ReduceLogSum", "ReduceMean", "ReduceProd")),
    *(one(op, positive(2, 3), keepdims=0) for op in ("ReduceMean", "ReduceSum", "ReduceL2", "ReduceProd")),
    *(one(op, positive(2, 3), ints(-1), dynamic=True) for op in ("ReduceMean", "ReduceSum", "ReduceMax")),
    one("ReduceSum", n(2, 3), np.zeros(0, np.int64), noop_with_empty_axes=1),
    *(one(op, n(0, 3), ints(1), dynamic=True) for op in ("ReduceMax", "ReduceMean", "ReduceProd", "ReduceSum")),
    one("ReduceProd", np.array([[0.0, 2, 3], [0, 0, 1], [1, 2, 3]]), ints(1)),
    one("CumSum", n(3, 4), np.array(1), reverse=1),
    one("CumSum", n(3, 4), np.array(0), exclusive=1),
]  # fmt: skip

MOVEMENT = [
    one("Reshape", n(2, 3, 4), ints(4, -1)),
    one("Reshape", n(2, 3, 4), ints(4, -1), dynamic=True),
    one("Flatten", n(2, 3, 4), axis=2),
    one("Squeeze", n(2, 1, 3), ints(1)),
    one("Unsqueeze", n(2, 3), ints(0, -1)),
    one("Transpose", n(2, 3, 4), perm=[2, 0, 1]),
    one("Transpose", n(2, 3, 4)),
    one("Concat", n(2, 3), n(2, 1), n(2, 4), axis=1),
    one("Concat", n(2, 3), n(1, 3), axis=-2, dynamic=True),
    one("Concat", n(2, 3), axis=0),
    one("Split", n(2, 6), ints(1, 2, 3), outputs=3, axis=1),
    one("Split", n(5, 2), outputs=2, num_outputs=2),
    one("Expand", n(3, 1), ints(2, 3, 4)),
    one("Expand", n(3, 1), ints(2, 3, 4), dynamic=True),
    one("Tile", n(2, 3), ints(2, 3)),
    one("Tile", n(2, 3, 1), ints(1, 2, 4), dynamic=True),
    one("Slice", n(4, 5), ints(1, -4), ints(3, -1), ints(0, 1)),
    one("Slice", n(4, 5), ints(1, -4), ints(3, -1), ints(0, 1), dynamic=True),
    one("Slice", n(6, 5), ints(0), ints(1000), ints(-2), ints(2)),
    one("Slice", n(6, 5), ints(5, 4), ints(-1000, 0), ints(0, 1), ints(-2, -1), dynamic=True),
    one("Slice", n(6), ints(2), ints(4)),
    one("Slice", n(3, 2), ints(5), ints(100), ints(0), dynamic=True),
    one("Pad", n(2, 3), ints(1, 0, 0, 2)),
    one("Pad", n(2, 3, 4), ints(2, 1), None, ints(-1), dynamic=True),
    one("Pad", n(2, 3), ints(1, 0, 0, 2), n()),
    one("Pad", n(2, 3, 4), ints(2, 1), n(), ints(-1), dynamic=True),
    one("Pad", n(1, 4, 5), ints(0, 2, 1, 0, 1, 2), mode="reflect"),
    one("Pad", n(1, 4), ints(0, 2, 0, 1), mode="edge"),
    one("Pad", n(1, 4), ints(0, 2, 0, 1), mode="wrap"),
    one("DepthToSpace", n(2, 8, 2, 3), blocksize=2),
    one("DepthToSpace", n(2, 8, 2, 3), blocksize=2, mode="CRD", dynamic=True),
    one("Trilu", n(2, 3, 4), np.array(1), upper=0),
    one("SpaceToDepth", n(1, 2, 4, 6), blocksize=2),
]

SELECTION = [
    one("Gather", n(5, 3), ints(0, 2, 2, -1)),
    one("Gather", n(5, 3), np.array([[1, 1], [0, 4]]), axis=0),
    one("Gather", n(2, 5, 3), np.array([[1, 1], [0, 4]]), axis=1, dynamic=True),
    one("Gather", n(2, 5), np.array(3), axis=-1),
    one("Gather", n(5), np.array([2, 2])),
    one("GatherElements", n(3, 4), np.array([[0, 0, 2, -1], [1, 1, 1, 1]]), axis=0),
    one("GatherND", n(3, 4, 2), np.array([[0, 1], [2, 3], [0, 1]])),
    one("ScatterElements", n(3, 4), np.array([[0, 2, 1, 0]]), n(1, 4), axis=0),
    one("ScatterElements", n(3, 4), np.array([[0, 0], [1, 0], [3, 3]]), n(3, 2), axis=1, reduction="add", dynamic=True),
    one("ScatterND", n(4, 3), np.array([[0], [2]]), n(2, 3)),
    one("ScatterND", n(4, 3), np.array([[2], [2]]), n(2, 3), reduction="add"),
    one("OneHot", ints(0, 2, 2, -1), np.array(3), n(2)),
    one("OneHot", np.array([[0, 1], [5, 1]]), np.array(2), n(2), axis=0),
    one("TopK", apart(3, 6), ints(2), outputs=2, axis=1, used=1),
    one("Resize", n(1, 2, 3, 4), None, np.array([1, 1, 2, 3], np.float32), fixed=(2,), constant=(2,)),
    one("Resize", n(1, 2, 3, 4), None, np.array([1, 1, 2, 2], np.float32), fixed=(2,), constant=(2,),
        coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    one("Resize", n(1, 2, 3, 4), None, np.array([1, 1, 2, 2], np.float32), fixed=(2,), constant=(2,), dynamic=True,
        coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    one("Resize", n(1, 2, 6, 4), None, np.array([1, 1, 0.5, 1.5], np.float32), fixed=(2,), constant=(2,)),
    one("Resize", n(1, 1, 3, 5), None, None, ints(1, 1, 5, 4), mode="linear"),
    one("Resize", n(1, 1, 3, 4), None, None, ints(1, 1, 6, 4), mode="linear",
        coordinate_transformation_mode="align_corners"),
]  # fmt: skip

WINDOWS = [
    one("Conv", n(2, 3, 6, 7), n(4, 3, 3, 2), n(4)),
    one("Conv", n(2, 3, 6, 7), n(4, 3, 3, 2), n(4), pads=[1, 0, 1, 1], dynamic=False),
    one("Conv", n(1, 3, 7, 8), n(4, 3, 3, 3), strides=[2, 3], pads=[1, 1, 1, 1]),
    one("Conv", n(1, 3, 8, 8), n(4, 3, 3, 3), strides=[3, 2], pads=[0, 2, 1, 0]),
    one("Conv", n(1, 2, 9, 9), n(2, 2, 3, 3), dilations=[2, 3], pads=[2, 3, 2, 3]),
    one("Conv", n(1, 2, 12, 11), n(2, 2, 3, 2), dilations=[2, 3], strides=[2, 4], pads=[1, 0, 0, 3]),
    one("Conv", n(2, 4, 5, 5), n(6, 2, 3, 3), n(6), group=2, pads=[1, 1, 1, 1], strides=[2, 2]),
    one("Conv", n(2, 4, 5, 5), n(4, 1, 3, 3), group=4),
    one("Conv", n(2, 2, 9), n(3, 2, 4), strides=[2], auto_pad="SAME_UPPER"),
    one("Conv", n(2, 2, 9), n(3, 2, 4), strides=[2], auto_pad="SAME_LOWER"),
    one("Conv", n(1, 2, 4, 5, 4), n(2, 2, 2, 3, 2), strides=[1, 2, 2], pads=[0, 1, 0, 0, 1, 1]),
    one("Conv", n(2, 3, 4, 5), n(4, 3, 1, 1), n(4)),
    one("Conv", n(2, 3, 6, 7), n(4, 3, 1, 1), strides=[2, 3]),
    one("Conv", n(2, 3, 5), n(4, 3, 1), pads=[1, 0]),
    one("ConvTranspose", n(2, 3, 4, 3), n(3, 2, 1, 1), n(2), strides=[2, 3], output_padding=[1, 0]),
    one("ConvTranspose", n(2, 3, 4, 5), n(3, 2, 3, 3), n(2)),
    one("ConvTranspose", n(1, 4, 4, 3), n(4, 2, 3, 3), n(4), group=2, strides=[2, 2], pads=[1, 0, 1, 1],
        output_padding=[1, 0]),
    one("ConvTranspose", n(1, 2, 5), n(2, 2, 3), strides=[3], dilations=[2]),
    one("MaxPool", apart(1, 2, 6, 6), kernel_shape=[2, 2], strides=[2, 2]),
    one("MaxPool", apart(1, 2, 6, 7), kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 0, 1]),
    one("MaxPool", apart(2, 1, 7), kernel_shape=[3], strides=[2], ceil_mode=1),
    one("AveragePool", n(2, 3, 6, 6), kernel_shape=[2, 2], strides=[2, 2]),
    one("AveragePool", n(1, 2, 6, 7), kernel_shape=[3, 3], strides=[2, 1], pads=[1, 1, 0, 1]),
    one("AveragePool", n(1, 2, 6, 7), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1),
    one("AveragePool", n(1, 1, 4, 7), kernel_shape=[2, 3], strides=[1, 2], ceil_mode=1),
    one("GlobalAveragePool", n(2, 3, 4, 5)),
    one("GlobalMaxPool", apart(2, 3, 4, 5)),
]  # fmt: skip

NORMALIZATIONS = [
    one("LayerNormalization", n(2, 3, 4), positive(4), n(4)),
    one("LayerNormalization", n(2, 3, 4), positive(4), epsilon=0.1, dynamic=True),
    one("LayerNormalization", n(2, 3, 4), positive(3, 4), n(3, 4), axis=1),
    one("RMSNormalization", n(2, 3, 4), positive(4), opset=23),
    one("InstanceNormalization", n(2, 3, 4, 5), positive(3), n(3)),
    one("GroupNormalization", n(2, 4, 3, 3), positive(4), n(4), num_groups=2, stash_type=11),
    one("BatchNormalization", n(2, 3, 4), positive(3), n(3), n(3), positive(3), fixed=(3, 4)),
    one("BatchNormalization", n(3, 2, 4, 4), positive(2), n(2), n(2), positive(2), fixed=(3, 4), training_mode=1),
    one("BatchNormalization", n(5, 3), positive(3), n(3), n(3), positive(3), fixed=(3, 4), training_mode=1,
        epsilon=0.2),
]  # fmt: skip

RECURRENT = [
    one("LSTM", n(3, 2, 4), n(1, 20, 4), n(1, 20, 5), n(1, 40), outputs=3, hidden_size=5),
    one("LSTM", n(2, 2, 3), n(2, 8, 3), n(2, 8, 2), n(2, 16), None, n(2, 2, 2), n(2, 2, 2), outputs=3, hidden_size=2,
        direction="bidirectional"),
    one("GRU", n(3, 2, 4), n(1, 9, 4), n(1, 9, 3), n(1, 18), outputs=2, hidden_size=3),
    one("GRU", n(3, 2, 4), n(1, 9, 4), n(1, 9, 3), n(1, 18), None, n(1, 2, 3), outputs=2, hidden_size=3,
        linear_before_reset=1),
    one("RNN", n(3, 2, 4), n(1, 3, 4), n(1, 3, 3), outputs=2, hidden_size=3),
]  # fmt: skip

BODIES = [
    one("Attention", n(1, 2, 3, 4), n(1, 2, 5, 4), n(1, 2, 5, 4), opset=23),
    one("Attention", n(2, 4, 3, 4), n(2, 2, 3, 4), n(2, 2, 3, 4), opset=23, is_causal=1, scale=0.3),
    one("Attention", n(1, 3, 8), n(1, 3, 8), n(1, 3, 8), n(3, 3), opset=23, q_num_heads=2, kv_num_heads=2),
    one("SoftmaxCrossEntropyLoss", n(4, 5), ints(0, 4, 2, 2), reduction="mean"),
]

CASES = [*POINTWISE, *PRODUCTS, *REDUCTIONS, *MOVEMENT, *SELECTION, *WINDOWS, *NORMALIZATIONS, *RECURRENT, *BODIES]


def name_of(case: Case) -> str:
    shapes = "-".join("x".join(map(str, a.shape)) for a in case.inputs if a is not None)
    return f"{case.op}-{shapes}{'-dynamic' if case.dynamic else ''}"


NOT_EVALUATED = frozenset({
    "Conv-2x2x9-3x2x4", "LSTM-3x2x4-1x20x4-1x20x5-1x40", "LSTM-2x2x3-2x8x3-2x8x2-2x16-2x2x2-2x2x2", "OneHot-2x2--2",
})  # fmt: skip
"""Cases that the evaluator of older onnx packages computes wrongly, or lacks: one-dimensional Conv, LSTM's cell, and
OneHot of an index out of range."""


def needs_evaluator(case: Case) -> None:
    """Skip a case that the installed onnx cannot be asked about."""
    if name_of(case) in NOT_EVALUATED and tuple(map(int, onnx.__version__.split(".")[:2])) < (1, 23):
        pytest.skip("the evaluator of this onnx does not compute it")


@pytest.mark.mostly_slow(fast=80)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_central_differences(case: Case) -> None:
    needs_evaluator(case)
    central_difference(case, gradients_of(case, np.float64))


@pytest.mark.mostly_slow(fast=60)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_onnx_runtime_agrees_and_both_providers_have_the_kernels(case: Case) -> None:
    needs_evaluator(case)
    exact, single = gradients_of(case, np.float64), gradients_of(case)
    found = run(make_session(single.model), case.feeds(np.float32), list(single.outputs.values()))
    wanted = reference(exact.model, case.feeds(np.float64), list(exact.outputs.values()))
    for array, right in zip(found.values(), wanted, strict=True):
        assert array.shape == right.shape
        np.testing.assert_allclose(array, right, rtol=2e-4, atol=2e-4 * float(np.abs(right).max(initial=1e-3)))
    for provider in ("cpu", "cuda"):
        before = missing_kernels(case.model(), provider)
        assert [row for row in missing_kernels(single.model, provider) if row not in before] == []


def chain(*nodes: onnx.NodeProto, opset: int = OPSET, weights: dict[str, Array] | None = None) -> ModelProto:
    """A model from float32 x [2, 3] to the scalar "loss"."""
    kept = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    x, loss = (helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [2, 3]), ("loss", [])))
    graph = helper.make_graph(nodes, "chain", [x], [loss], kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def make(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


TOTAL = make("ReduceSum", "y", "loss", keepdims=0)


INTEGERS = {"ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear", "Size"}
"""Ops without a derivative that errors pass all the same; tests/gradients/test_sensitivity.py measures them."""


def test_every_rule_of_a_standard_op_has_a_case() -> None:
    """Ops of ONNX Runtime have theirs in test_contrib.py, and Casts one below."""
    tried = {node.op_type for case in CASES for node in case.model().graph.node}
    standard = {op for op in RULES if onnx.defs.has(op)}
    assert standard - tried - INTEGERS - {"Cast"} == set(), "add cases to the lists at the head of this file"


def test_each_op_has_its_rule_in_one_module() -> None:
    modules = (attention, linear, movement, pointwise, quantized)
    assert len(RULES) == sum(len(module.RULES) for module in modules)
    assert len(FORWARD) == sum(len(getattr(module, "FORWARD", {})) for module in modules)


def test_a_value_that_is_read_often_adds_up() -> None:
    model = chain(make("Mul", "x x", "s"), make("Add", "s x", "t"), make("Mul", "t x", "y"), TOTAL)
    found = add_gradients(model, "loss", ["x", "s"])
    x = np.array([[1, 2, 3], [-1, 0, 0.5]], np.float32)
    result = run(make_session(found.model), {"x": x})
    np.testing.assert_allclose(result[found.outputs["x"]], 3 * x**2 + 2 * x)
    np.testing.assert_allclose(result[found.outputs["s"]], x)
    assert result["loss"] == pytest.approx((x**3 + x**2).sum())


def test_what_a_pad_crops_has_no_gradient_and_its_value_that_of_what_it_adds() -> None:
    weights = {"pads": ints(1, -1, 0, 2), "value": np.float32(0)}
    found = add_gradients(chain(make("Pad", "x pads value", "y"), TOTAL, weights=weights), "loss", ["x", "value"])
    result = run(make_session(found.model), {"x": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(result[found.outputs["x"]], [[0, 1, 1], [0, 1, 1]])
    assert result[found.outputs["value"]] == 8


def test_gradients_are_finite_wherever_they_can_be() -> None:
    """The exponential of x overflows, but neither its hyperbolic sine nor its cosine, which are equal there."""
    x = np.array([[89, -89, 1], [0, 1e-3, -4]], np.float32)
    for op, right in (("Cosh", np.sinh), ("Sinh", np.cosh)):
        found = add_gradients(chain(make(op, "x", "y"), TOTAL), "loss", ["x"])
        result = run(make_session(found.model), {"x": x})[found.outputs["x"]]
        np.testing.assert_allclose(result, right(x.astype(np.float64)), rtol=2e-6)


def test_casts_change_the_type_on_the_way_back() -> None:
    model = chain(make("Cast", "x", "d", to=11), make("Mul", "d d", "q"), make("Cast", "q", "y", to=1), TOTAL)
    found = add_gradients(model, "loss", ["x"])
    x = np.ones((2, 3), np.float32)
    result = run(make_session(found.model), {"x": x})[found.outputs["x"]]
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, 2 * x)


def test_the_model_is_read_only_and_names_do_not_collide() -> None:
    model = chain(make("Relu", "x", "x/gradient"), make("Identity", "x/gradient", "y"), TOTAL)
    before = model.SerializeToString()
    found = add_gradients(model, "loss", ["x"])
    assert model.SerializeToString() == before
    onnx.checker.check_model(found.model, full_check=True)
    assert found.outputs["x"] != "x/gradient"


def test_dropout_in_training_mode_drops_the_gradient_too() -> None:
    model = chain(make("Dropout", "x ratio on", "y"), TOTAL, weights={"ratio": np.float32(0.5), "on": np.array(True)})
    found = add_gradients(model, "loss", ["x"])
    result = run(make_session(found.model), {"x": np.ones((2, 3), np.float32)}, ["loss", *found.outputs.values()])
    assert set(result[found.outputs["x"]].ravel()) <= {0.0, 2.0}
    assert result["loss"] == result[found.outputs["x"]].sum()


def test_nothing_flows_through_flat_ops_and_integers() -> None:
    model = chain(make("Floor", "x", "f"), make("Cast", "x", "i", to=7), make("Cast", "i", "g", to=1),
                  make("Sum", "f g x", "y"), TOTAL)  # fmt: skip
    found = add_gradients(model, "loss", ["x"])
    result = run(make_session(found.model), {"x": np.full((2, 3), 1.5, np.float32)})
    np.testing.assert_array_equal(result[found.outputs["x"]], np.ones((2, 3)))


def test_training_statistics_weigh_the_old_ones_and_are_biased() -> None:
    nodes = [make("BatchNormalization", "x s b m v", "y mean var", training_mode=1, momentum=0.8), TOTAL]
    model = chain(
        *nodes,
        weights={name: np.full(3, value, np.float32) for name, value in {"s": 1, "b": 0, "m": 2, "v": 3}.items()},
    )
    model.graph.output.extend(helper.make_tensor_value_info(name, 1, [3]) for name in ("mean", "var"))
    x = RNG.standard_normal((2, 3)).astype(np.float32)
    result = run(make_session(add_gradients(model, "loss", ["s"]).model), {"x": x})
    np.testing.assert_allclose(result["mean"], 0.8 * 2 + 0.2 * x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(result["var"], 0.8 * 3 + 0.2 * x.var(0), rtol=1e-6)


BODY = helper.make_graph([make("Identity", "x", "z")], "body", [], [helper.make_tensor_value_info("z", 1, None)])


@pytest.mark.parametrize(("nodes", "said"), [
    ([make("Det", "x", "y")], r"'y' \(Det\).*has no gradient rule"),
    ([helper.make_node("Foo", ["x"], ["y"], name="foo", domain="acme")], r"'foo' \(acme::Foo\)"),
    ([make("If", "c", "y", then_branch=BODY, else_branch=BODY)], r"\(If\).*subgraphs"),
    ([make("Constant", "", "y", value_floats=[1.0])], "does not depend on 'x'"),
    ([make("Floor", "x", "y")], "does not depend on 'x'"),
    ([make("Reshape", "x five", "t"), make("LSTM", "t w r", "y", hidden_size=1, clip=1.0)], "has clip = 1.0"),
    ([make("Einsum", "x", "y", equation="ij->i")], "sums over a letter of one operand"),
    ([make("Einsum", "row x", "y", equation="ij,ij->i")], "first operand with 'i' is broadcast along it: swap"),
], ids=lambda value: value[-1].op_type if isinstance(value, list) else "")  # fmt: skip
def test_what_has_no_rule_is_named(nodes: list[onnx.NodeProto], said: str) -> None:
    weights = {
        "c": np.array(True), "five": ints(2, 1, 3), "w": np.ones((1, 4, 3), np.float32),
        "r": np.ones((1, 4, 1), np.float32), "row": np.ones((1, 3), np.float32),
    }  # fmt: skip
    model = chain(*nodes, TOTAL, weights=weights)
    if nodes[0].domain:
        model.opset_import.append(helper.make_opsetid("acme", 1))
    with pytest.raises(GradientError, match=said):
        add_gradients(model, "loss", ["x"])


def test_wrong_wishes() -> None:
    model = chain(make("Relu", "x", "y"), TOTAL)
    with pytest.raises(GradientError, match="no value 'weight'"):
        add_gradients(model, "loss", ["weight"])
    with pytest.raises(GradientError, match=r"shape \[2, 3\]: reduce it to one element"):
        add_gradients(model, "y", ["x"])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    with pytest.raises(GradientError, match=r"shape \[N, 3\]: reduce it to one element"):
        add_gradients(model, "y", ["x"])
    with pytest.raises(GradientError, match="'t', whose gradient is wanted, is not of a float type"):
        add_gradients(chain(make("Shape", "x", "t"), make("Cast", "t", "y", to=1), TOTAL), "loss", ["t"])
    with pytest.raises(ArgumentTypeError, match="loss must be the name of a value, not list"):
        add_gradients(model, ["y"], ["x"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at least one"):
        add_gradients(model, "loss", [])
    with pytest.raises(OpsetError, match="opset 18"):
        add_gradients(chain(make("Relu", "x", "y"), TOTAL, opset=17), "loss", ["x"])


POOLS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 6, 6), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((2, 2, 6, 7), {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [1, 1, 0, 1]}),
    ((1, 2, 9, 9), {"kernel_shape": [3, 2], "dilations": [2, 3], "strides": [1, 2]}),
    ((2, 1, 7), {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}),
    ((1, 2, 5, 5), {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 1, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2]}),
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("shape", "attributes"), POOLS)
def test_max_pool_without_indices_has_the_same_gradient(
    shape: tuple[int, ...], attributes: dict[str, Any], dynamic: bool
) -> None:
    """Ties and negative numbers included; for engines that have no indices."""
    if dynamic and "auto_pad" in attributes:
        pytest.skip("SAME padding needs known sizes in either form")
    x = np.random.default_rng(0).integers(-3, 2, shape).astype(np.float32)
    sizes = [f"d{axis}" for axis in range(len(shape))] if dynamic else shape
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], **attributes),
        helper.make_node("Sin", ["p"], ["s"]),
        helper.make_node("ReduceSumSquare", ["s"], ["y"], keepdims=0),
    ]
    entries = [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)]
    graph = helper.make_graph(nodes, "g", entries, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    found = []
    for lacks in ((), ("MaxPool.Indices",)):
        made = differentiate(model, "y", ["x"], lacks)
        assert any(len(node.output) > 1 for node in made.model.graph.node) is not bool(lacks)
        found.append(run(make_session(made.model), {"x": x})[made.outputs["x"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert np.any(found[0])


def test_no_gradient_flows_through_the_places_of_one_hot() -> None:
    """An If that computes them needs no rule."""
    text = """(float[3] x, bool c, float[2] values) => (float loss) <float depth = {4}> {
        i = If (c) <then_branch = a () => (float[3] s) { s = Abs (x) },
                    else_branch = b () => (float[3] t) { t = Neg (x) }>
        hit = OneHot (i, depth, values) y = MatMul (x, hit) q = Mul (y, y) loss = ReduceSum <keepdims = 0> (q) }"""
    found = add_gradients(parse(text, 18), "loss", ["x"])
    feeds = {"x": np.float32([0, 1, 2]), "c": np.array(True), "values": np.float32([0, 1])}
    result = run(make_session(found.model), feeds)
    assert result[found.outputs["x"]].tolist() == [0, 2, 4]
