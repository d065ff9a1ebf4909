"""The exponents of ONNX Runtime's own ops: random ones around each op give the same bits, as for standard ops."""

from random import Random
from typing import Any

import numpy as np
import pytest
from judge_numbers import run_original
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from passes import passed

from onnxamp._facts.exponents import exponent_rules
from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options
from onnxamp._rewrite.passes import rescale

from .test_rescale import random_rescaling, same_bits

Array = NDArray[Any]
RNG = np.random.default_rng(0)


class Given(tuple[Array]):
    """An array that goes into the node as a constant; others are inputs of the model times a constant."""

    __slots__ = ()


def x(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def c(array: Any) -> Given:
    return Given((np.asarray(array),))


def ints(*numbers: int) -> Given:
    return c(np.array(numbers, np.int64))


def w(*shape: int) -> Given:
    return c(x(*shape))


ATTENTION = {"num_heads": 2}
QUANTIZED = c(RNG.integers(0, 255, (4, 1, 8), np.uint8))

RECIPES: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "ExpandDims": ([x(2, 3), c(np.int32(1))], {}, 1),
    "GatherND": ([x(2, 3), c(np.array([[0, 1]], np.int64))], {}, 1),
    "GridSample": ([x(1, 1, 4, 4), c(x(1, 2, 2, 2))], {}, 1),
    "Trilu": ([x(3, 3)], {}, 1),
    "RotaryEmbedding": ([x(1, 2, 8), c(np.array([[0, 1]], np.int64)), w(4, 2), w(4, 2)], {"num_heads": 2}, 1),
    "UnfoldTensor": ([x(2, 6)], {"size": 2, "step": 2}, 1),
    "Unique": ([x(6)], {}, 3),
    "Pad": ([x(2, 3), ints(0, 1, 0, 1), c(np.float32([0.5]))], {}, 1),
    "FusedMatMul": ([x(2, 3), w(4, 3)], {"transB": 1, "alpha": 0.5}, 1),
    "TransposeMatMul": ([x(2, 3), w(4, 3)], {"transB": 1}, 1),
    "FusedConv": ([x(1, 2, 5, 5), w(3, 2, 3, 3), w(3)], {"activation": "Relu"}, 1),
    "FusedGemm": ([x(2, 3), w(3, 4), w(4)], {"activation": "LeakyRelu", "activation_alpha": 0.1}, 1),
    "ConvTransposeWithDynamicPads": ([x(1, 2, 4, 4), w(2, 3, 3, 3), ints(1, 1, 1, 1), w(3)], {}, 1),
    "MultiHeadAttention": ([x(1, 3, 8), x(1, 3, 8), x(1, 3, 8)], ATTENTION, 1),
    "GroupQueryAttention": (
        [x(1, 1, 16), x(1, 1, 16), x(1, 1, 16), x(1, 2, 4, 8), x(1, 2, 4, 8), c(np.array([3], np.int32)),
         c(np.array(4, np.int32))], {"num_heads": 2, "kv_num_heads": 2}, 3,
    ),
    "Attention": ([x(1, 3, 8), w(8, 24), w(24)], ATTENTION, 1),
    "SkipLayerNormalization": ([x(1, 3, 8), x(1, 3, 8), w(8), w(8), w(8)], {"epsilon": 1e-3}, 1),
    "SkipSimplifiedLayerNormalization": ([x(1, 3, 8), x(1, 3, 8), w(8), w(8)], {"epsilon": 1e-3}, 1),
    "EmbedLayerNormalization": (
        [c(np.array([[1, 2]], np.int32)), c(np.array([[0, 1]], np.int32)), w(5, 8), w(4, 8), w(2, 8), w(8), w(8)],
        {"epsilon": 1e-3}, 2,
    ),
    "QuantizeLinear": ([x(3, 4), c(np.float32(0.01)), c(np.uint8(128))], {}, 1),
    "DequantizeLinear": ([c(np.arange(12, dtype=np.uint8)), c(np.float32(0.1)), c(np.uint8(7))], {}, 1),
    "MatMulNBits": ([x(2, 16), QUANTIZED, w(4)], {"K": 16, "N": 4, "bits": 4, "block_size": 16}, 1),
    "GatherBlockQuantized": (
        [c(RNG.integers(0, 255, (4, 16), np.uint8)), c(np.array([1, 3], np.int64)), w(4, 2)],
        {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}, 1,
    ),
    "SimplifiedLayerNormalization": ([x(2, 8), w(8)], {"epsilon": 1e-3, "axis": -1}, 1),
}  # fmt: skip
"""Op -> its inputs, attributes, and number of outputs."""

INTEGERS = {
    ("EmbedLayerNormalization", 1): TensorProto.INT32,
    ("QuantizeLinear", 0): TensorProto.UINT8,
    ("Unique", 1): TensorProto.INT64,
    ("Unique", 2): TensorProto.INT64,
}
"""Outputs that are no floats."""

ELSEWHERE = frozenset({
    "BiasAdd", "ComplexMul", "ComplexMulConj", "GroupNorm", "Irfft", "NhwcConv", "NhwcFusedConv", "NhwcMaxPool", "Rfft",
    "Rsqrt", "SkipGroupNorm", "TorchEmbedding",
})  # fmt: skip
"""Ops that ONNX Runtime computes on GPUs alone, or in other types."""


def model_of(op: str, seed: int) -> tuple[ModelProto, dict[str, Array]]:
    """The op with a constant factor at every input and output that is a float."""
    rng, feeds = Random(seed), dict[str, Array]()
    inputs, attributes, count = RECIPES[op]
    nodes, weights, names = [], [], []

    def constant(array: Array, name: str) -> str:
        weights.append(numpy_helper.from_array(array, name))
        return name

    for port, given in enumerate(inputs):
        if isinstance(given, Given):
            names.append(constant(given[0], f"c{port}"))
            continue
        feeds[f"x{port}"] = given
        factor = constant(np.float32(rng.uniform(0.5, 2)), f"f{port}")
        nodes.append(helper.make_node("Mul", [f"x{port}", factor], [f"u{port}"]))
        names.append(f"u{port}")
    domain = "" if op == "SimplifiedLayerNormalization" else "com.microsoft"
    nodes.append(helper.make_node(op, names, [f"y{port}" for port in range(count)], "op", domain=domain, **attributes))
    ends = []
    for port in range(count):
        kind = INTEGERS.get((op, port), TensorProto.FLOAT)
        end = f"y{port}"
        if kind == TensorProto.FLOAT:
            factor, end = constant(np.float32(rng.uniform(0.5, 2)), f"g{port}"), f"z{port}"
            nodes.append(helper.make_node("Mul", [f"y{port}", factor], [end]))
        ends.append(helper.make_tensor_value_info(end, kind, None))
    starts = [helper.make_tensor_value_info(name, 1, list(array.shape)) for name, array in feeds.items()]
    graph = helper.make_graph(nodes, "contrib", starts, ends, weights)
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=9), feeds


def scaled_around(op: str, seed: int) -> int:
    """The number of exponents; the rescaled model gives the same bits."""
    model, feeds = model_of(op, seed)
    expected = run_original(model, feeds)
    assert expected is not None, op
    graph = Graph.of(model)
    rescaling = random_rescaling(graph, Random(seed))
    rescaled = passed(rescale, graph, Options(rescaling=rescaling))
    found = run_original(rescaled.graph.model, feeds)
    assert found is not None, op
    left = any("float32's range" in note for note in rescaled.notes)
    assert left or all(map(same_bits, expected, found)), (op, seed)
    return len(rescaling.scaled)


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("op", RECIPES)
def test_each_op(op: str) -> None:
    assert sum(scaled_around(op, seed) for seed in range(4)) > 0


def test_every_rule_is_tested() -> None:
    known = {op.rpartition("::")[2] for op in exponent_rules() if op.startswith("com.microsoft::")}
    assert known - ELSEWHERE == RECIPES.keys() - {"SimplifiedLayerNormalization"}
    assert not RECIPES.keys() & ELSEWHERE
