"""Contrib ops with integers inside: scales and activations are low where a kernel of the target takes them so."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
from conversions import count
from graphs.case import add_weights, parse
from judge_kernels import typed_nodes
from judge_numbers import session
from onnx import ModelProto

import onnxamp
from onnxamp._runtime.emulate import emulate

RANDOM = np.random.default_rng(0)
WIDTH, EXPERTS = 64, 4


class Case(NamedTuple):
    """A node between two products, the constants that it reads, and the targets that have a low kernel for it."""

    node: str
    weights: Mapping[str, np.ndarray]
    low_on: frozenset[str]


def numbers(*shape: int) -> np.ndarray:
    return (RANDOM.standard_normal(shape) / 8).astype(np.float32)


def integers(*shape: int, kind: type = np.int8) -> np.ndarray:
    return RANDOM.integers(0, 100, shape).astype(kind)


def scales(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.01, 0.03, shape).astype(np.float32)


KERNEL = numbers(WIDTH, WIDTH)
BLOCKS = WIDTH // 32
ONE = {"w": integers(WIDTH, WIDTH), "s": np.array(0.01, np.float32), "z": np.array(0, np.int8)}
STATES = {"r": integers(1, 16, 64), "rs": scales(1), "rz": np.zeros(1, np.int8)}
ATTENTION = {**ONE, "w": integers(WIDTH, 3 * WIDTH), "bias": numbers(3 * WIDTH)}
CASES: Mapping[str, Case] = {
    "MatMulNBits": Case(
        f"b = com.microsoft.MatMulNBits <K = {WIDTH}, N = {WIDTH}, bits = 4, block_size = 32> (a, w, s)",
        {"w": integers(WIDTH, BLOCKS, 16, kind=np.uint8), "s": scales(WIDTH, BLOCKS)},
        frozenset({"cuda", "webgpu"}),
    ),
    "GatherBlockQuantized": Case(
        """i = ArgMax <axis = 1> (a)
        g = com.microsoft.GatherBlockQuantized <block_size = 32, bits = 4, quantize_axis = 1> (w, i, s)
        b = Squeeze (g, one)""",
        {
            "w": integers(WIDTH, WIDTH // 2, kind=np.uint8),
            "s": scales(WIDTH, BLOCKS),
            "one": np.array([1]),
        },
        frozenset({"cuda", "webgpu"}),
    ),
    "QMoE": Case(
        """p = MatMul (a, route) b = com.microsoft.QMoE <k = 2, activation_type = "swiglu", swiglu_fusion = 1,
        block_size = 32, expert_weight_bits = 4> (a, p, w, s, "", w2, s2)""",
        {
            "route": numbers(WIDTH, EXPERTS),
            "w": integers(EXPERTS, 2 * WIDTH, WIDTH // 2, kind=np.uint8),
            "s": scales(EXPERTS, 2 * WIDTH, BLOCKS),
            "w2": integers(EXPERTS, WIDTH, WIDTH // 2, kind=np.uint8),
            "s2": scales(EXPERTS, WIDTH, BLOCKS),
        },
        frozenset({"cuda", "webgpu"}),
    ),
    "QAttention": Case(
        """c = Unsqueeze (a, none) q, qs, qz = DynamicQuantizeLinear (c)
        d = com.microsoft.QAttention <num_heads = 2> (q, w, bias, qs, s, "", qz, z) b = Squeeze (d, none)""",
        {**ATTENTION, "none": np.array([0])},
        frozenset(),  # of int8 alone on cuda: see below
    ),
    "DynamicQuantizeMatMul": Case("b = com.microsoft.DynamicQuantizeMatMul (a, w, s, z)", ONE, frozenset()),
    "MatMulIntegerToFloat": Case(
        "q, qs, qz = DynamicQuantizeLinear (a) b = com.microsoft.MatMulIntegerToFloat (q, w, qs, s, qz, z)",
        ONE,
        frozenset(),
    ),
    "DynamicQuantizeLSTM": Case(
        """c = Unsqueeze (a, none)
        "", d = com.microsoft.DynamicQuantizeLSTM <hidden_size = 16> (c, w, r, "", "", "", "", "", s, z, rs, rz)
        e = Squeeze (d, none) b = Tile (e, repeats)""",
        {
            "w": integers(1, WIDTH, 64),
            "s": scales(1),
            "z": np.zeros(1, np.int8),
            **STATES,
            "none": np.array([0]),
            "repeats": np.array([1, 4]),
        },
        frozenset(),
    ),
}
FEEDS = {"x": RANDOM.standard_normal((3, WIDTH)).astype(np.float32)}


def network(case: Case) -> ModelProto:
    nodes = f"a = MatMul (x, k) {case.node} y = MatMul (b, k)"
    model = parse(f"(float[3,{WIDTH}] x) => (float[N,{WIDTH}] y) {{ {nodes} }}", 21, 10, {"com.microsoft": 1})
    return add_weights(model, {"k": KERNEL, **case.weights})


def outputs(model: ModelProto) -> np.ndarray:
    return np.asarray(session(model, optimized=True).run(None, FEEDS)[0])


def floats(model: ModelProto, op: str) -> set[str]:
    """The types of floats that the nodes of an op read and make."""
    nodes = [one for one in typed_nodes(model) if one.node.op_type == op]
    kinds = {kind for one in nodes for kind in (*one.inputs, *one.outputs)}
    return kinds & {"tensor(float)", "tensor(float16)"}


@pytest.mark.parametrize("target", ["cuda", "webgpu", "tensorrt", "openvino"])
@pytest.mark.parametrize("op", CASES)
def test_scales_are_low_where_a_kernel_takes_them_low(op: str, target: str) -> None:
    original = network(CASES[op])
    result = onnxamp.convert_model(original, target=target)
    if target == "openvino":  # what its provider lacks runs on the CPU, in what that has
        assert floats(result, op) == {"tensor(float16)" if CASES[op].low_on else "tensor(float)"}
    else:
        assert floats(result, op) == {"tensor(float16)" if target in CASES[op].low_on else "tensor(float)"}
    assert floats(result, "MatMul") == {"tensor(float16)"}
    expected = outputs(original)
    limit = 0.03 if "Dynamic" in CASES[op].node else 5e-3  # it rounds to integers again
    for computed in (outputs(result), outputs(emulate(result))):
        assert np.linalg.norm(computed - expected) < limit * np.linalg.norm(expected)


@pytest.mark.webgpu
@pytest.mark.parametrize("op", [op for op, case in CASES.items() if "webgpu" in case.low_on])
def test_webgpu_runs_low_scales(op: str) -> None:
    original = network(CASES[op])
    result = onnxamp.convert_model(original, target="webgpu")
    assert onnxamp.diff_models(original, result, [FEEDS], provider="webgpu").passed


def test_cuda_has_attention_of_int8_in_low_precision() -> None:
    """Of uint8, as DynamicQuantizeLinear makes it, no kernel but the CPU's is there."""
    node = """q = QuantizeLinear (c, s, z) d = com.microsoft.QAttention <num_heads = 2> (q, w, bias, s, s, "", z, z)"""
    case = Case(f"c = Unsqueeze (a, none) {node} b = Squeeze (d, none)", CASES["QAttention"].weights, frozenset())
    for target, kind in (("cuda", "tensor(float16)"), ("webgpu", "tensor(float)")):
        assert floats(onnxamp.convert_model(network(case), target=target), "QAttention") == {kind}


def test_products_that_round_on_their_way_are_low_around_their_integers_alone() -> None:
    """Sums of integers and their scales stay in float32, so a chain of such units gains nothing but Casts."""
    unit = """q{0}, s{0}, z{0} = DynamicQuantizeLinear (a{0}) p{0} = MatMulInteger (q{0}, w, z{0}, z)
        f{0} = Cast <to = 1> (p{0}) m{0} = Mul (s{0}, s) u{0} = Mul (f{0}, m{0}) a{1} = Relu (u{0})"""
    chain = Case("a0 = Relu (a) " + unit.format(0, 1) + unit.format(1, 2) + "b = Relu (a2)", ONE, frozenset())
    original = network(chain)
    result = onnxamp.convert_model(original, target="cuda")
    assert floats(result, "MatMul") == {"tensor(float16)"}
    assert floats(result, "Mul") == {"tensor(float)"}
    assert count(result) == count(original) + 4  # at both ends of both products
    assert np.linalg.norm(outputs(result) - outputs(original)) < 0.05 * np.linalg.norm(outputs(original))
