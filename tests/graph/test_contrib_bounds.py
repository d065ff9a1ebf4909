"""Bounds of ONNX Runtime's own ops hold for what it computes, also of rounded numbers."""

from random import Random

import numpy as np
import onnx
import pytest
from graph.test_bounds import violations
from onnx import TensorProto, helper, numpy_helper

from onnxamp._facts.dtypes import FLOAT16

F = np.float32


def numbers(draw, *shape):
    size = 10 ** draw.uniform(-2, 2)
    return (draw.standard_normal(shape) * size + draw.choice([0, 0, 10])).astype(F)


def blocks(draw, zero=None):
    """Numbers of four bits, their scales and zero points."""
    stored = {"B": draw.integers(0, 256, (4, 2, 8)).astype(np.uint8), "scales": numbers(draw, 8)}
    attributes = {"N": 4, "K": 32, "bits": 4, "block_size": 16}
    return {"x": numbers(draw, 3, 32)}, stored | ({} if zero is None else {"zero": zero}), attributes


def skipped(draw, *names):
    given = {"x": numbers(draw, 2, 3, 8), "z": numbers(draw, 2, 3, 8)}
    return given, {name: numbers(draw, 8) for name in names}, {}


def made(op, draw):
    """Inputs, constants and attributes of an op."""
    row = {"x": numbers(draw, 2, 8)}
    factor = {"alpha": float(draw.choice([1, 0.5, -2]))}
    heads = {name: numbers(draw, 1, 5, 8) for name in "xkv"}
    one_head = {"x": numbers(draw, 1, 3, 16), "k": numbers(draw, 1, 3, 8), "v": numbers(draw, 1, 3, 8)}
    packed = draw.integers(0, 256, 4).astype(np.uint8)
    makers = {
        "BiasGelu": (row, {"b": numbers(draw, 8)}, {}),
        "FastGelu": (row, {"b": numbers(draw, 8)} if draw.random() < 0.5 else {}, {}),
        "Gelu": (row, {}, {}),
        "QuickGelu": (row, {}, {"alpha": float(draw.choice([0, 0.5, 1.702, -1]))}),
        "FusedMatMul": (
            {"x": numbers(draw, 4, 4)}, {"w": numbers(draw, 4, 4)}, {"transB": int(draw.integers(2)), **factor},
        ),
        "SkipLayerNormalization": skipped(draw, "gamma", "beta", "bias"),
        "SkipSimplifiedLayerNormalization": skipped(draw, "gamma"),
        "MatMulNBits": blocks(draw, [None, packed, numbers(draw, 8)][draw.integers(3)]),
        "MultiHeadAttention": (heads, {"b": numbers(draw, 24)} if draw.random() < 0.5 else {}, {"num_heads": 2}),
        "GroupQueryAttention": (one_head, {}, {"num_heads": 2, "kv_num_heads": 1}),
    }  # fmt: skip
    return makers[op]


OPS = (
    "BiasGelu", "FastGelu", "Gelu", "QuickGelu", "FusedMatMul", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "MatMulNBits", "MultiHeadAttention", "GroupQueryAttention",
)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_contributed_ops_stay_within_their_bounds(op):
    known = 0
    for seed in range(8):
        feeds, stored, attributes = made(op, np.random.default_rng(seed))
        names, outputs = [*feeds, *stored], ["y"]
        if op == "GroupQueryAttention":
            stored = {"lengths": np.array([2], np.int32), "total": np.array(3, np.int32)}
            names, outputs = [*feeds, "", "", *stored], ["y", "keys", "values"]
        node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name, a in feeds.items()]
        constants = [numpy_helper.from_array(array, name) for name, array in stored.items()]
        graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y")], constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        for rng in (None, Random(seed)):
            found, count = violations(model, feeds, FLOAT16, rng)
            assert found == []
            known += count
    assert known > 0
