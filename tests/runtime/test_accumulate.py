"""Emulated float16 accumulators beside simulated ones, which round step by step, and beside WebGPU's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxamp
from onnxamp._facts.providers import emulated_arithmetic
from onnxamp._graph.graph import Graph
from onnxamp._runtime.emulate import emulate_graph
from onnxamp._runtime.sessions.session import make_session, run

Array = NDArray[Any]
WEBGPU = emulated_arithmetic("webgpu")
GENERATOR = np.random.default_rng(0)
TERMS: dict[str, Callable[..., Array]] = {
    "normal": GENERATOR.standard_normal,
    "positive": lambda shape: np.abs(GENERATOR.standard_normal(shape)),
    "rectified": lambda shape: np.maximum(GENERATOR.standard_normal(shape), 0),
    "heavy-tailed": lambda shape: GENERATOR.standard_t(2.5, shape),
}


def model_of(op_type: str, x: Array, weights: dict[str, Array], **attributes: Any) -> ModelProto:
    domain, _, name = op_type.rpartition("::")
    node = helper.make_node(name, ["x", *weights], ["y"], domain=domain, **attributes)
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, x.shape)]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "sum", ports, [result], held)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def emulated(model: ModelProto, x: Array, *, rounds: bool = True) -> Array:
    graph = Graph.of(model)
    arithmetic = WEBGPU if rounds else None
    written = emulate_graph(graph, rounds=rounds, arithmetic=arithmetic, shapes=graph.shapes_of({"x": x.shape}))
    return np.asarray(run(make_session(written), {"x": x.astype(np.float32)})["y"], np.float64)


def one_accumulator(x: Array, w: Array) -> Array:
    total = np.zeros((len(x), w.shape[1]), np.float16)
    for column, row in zip(x.T, w, strict=True):
        products = column[:, None].astype(np.float32) * row.astype(np.float32)
        total += products.astype(np.float16)
    return total.astype(np.float64)


def error(found: Array, exact: Array) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("terms", [2, 3, 4, 6, 9, 16, 32])
def test_the_error_of_few_terms_is_not_lost_when_their_sum_is_rounded(terms: int) -> None:
    x, w = (GENERATOR.standard_normal(shape).astype(np.float16) for shape in ((64, terms), (terms, 64)))
    exact = x.astype(np.float64) @ w.astype(np.float64)
    real = error(one_accumulator(x, w), exact)
    assert real / 1.3 < error(emulated(model_of("MatMul", x, {"w": w}), x), exact) < real * 1.3
    assert real > 1.3 * error(exact.astype(np.float16), exact)


@pytest.mark.parametrize("terms", [8, 32, 64, 256])
def test_vectors_of_four_have_errors_inside(terms: int) -> None:
    x, w = (GENERATOR.standard_normal(shape).astype(np.float16) for shape in ((64, terms), (64, terms)))
    total, products = np.zeros((64, 64), np.float16), x[:, None] * w
    for start in range(0, terms, 4):
        vector = products[..., start]
        for place in range(start + 1, start + 4):
            vector = vector + products[..., place]
        total += vector
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    real = error(total.astype(np.float64), exact)
    assert real / 1.2 < error(emulated(model_of("Gemm", x, {"w": w}, transB=1), x), exact) < real * 1.2


def test_one_term_is_rounded_once_and_sums_without_residual_are_exact() -> None:
    x, w = (GENERATOR.standard_normal(shape).astype(np.float16) for shape in ((16, 1), (1, 16)))
    np.testing.assert_array_equal(emulated(model_of("MatMul", x, {"w": w}), x), (x @ w).astype(np.float64))
    rows, table = np.eye(16)[:4].astype(np.float16), GENERATOR.standard_normal((16, 8)).astype(np.float16)
    np.testing.assert_array_equal(emulated(model_of("MatMul", rows, {"w": table}), rows), table[:4])


@pytest.mark.mostly_slow(fast=22)
@pytest.mark.parametrize("weights", ["normal", "positive"])
@pytest.mark.parametrize("terms", [9, 64, 300, 768, 2048])
@pytest.mark.parametrize("kind", TERMS)
def test_the_error_is_that_of_one_accumulator(kind: str, weights: str, terms: int) -> None:
    x, w = (TERMS[name](shape).astype(np.float16) for name, shape in ((kind, (16, terms)), (weights, (terms, 64))))
    model = model_of("MatMul", x, {"w": w})
    exact = x.astype(np.float64) @ w.astype(np.float64)
    real = error(one_accumulator(x, w), exact)
    assert real / 2.5 < error(emulated(model, x), exact) < real * 2.5


def test_ones_stop_at_2048_as_there() -> None:
    x = np.ones((1, 4096), np.float16)
    assert emulated(model_of("MatMul", x, {"w": np.ones((4096, 8), np.float16)}), x).tolist() == [[2048] * 8]


@pytest.mark.parametrize("value", [0, np.inf, -np.inf, np.nan])
def test_what_is_no_number_and_zero_stay(value: float) -> None:
    x = np.array([[value, 0, 0]], np.float16)
    found = emulated(model_of("MatMul", x, {"w": np.ones((3, 1), np.float16)}), x)
    np.testing.assert_array_equal(found, [[value]])


SUMS = {
    "ReduceMean": (np.full((1, 4096), 300), {"axes": [1]}, 300.0),
    "GlobalAveragePool": (np.full((1, 1, 64, 64), 300), {}, 300.0),
    "AveragePool": (np.full((1, 1, 64, 64), 300), {"kernel_shape": [64, 64]}, 300.0),
    "ReduceL2": (np.full((1, 4096), 30), {"axes": [1]}, 1920.0),
    "ReduceLogSumExp": (np.full((1, 4096), 12), {"axes": [1]}, 20.3),
}


@pytest.mark.parametrize("op", SUMS)
def test_a_sum_overflows_before_it_is_divided(op: str) -> None:
    large, attributes, exact = SUMS[op]
    model = model_of(op, large, {}, **attributes)
    assert emulated(model, large, rounds=False).ravel() == pytest.approx(exact, rel=1e-2)
    assert np.isinf(emulated(model, large)).all()
    small = large / 32
    assert emulated(model, small).ravel() == pytest.approx(emulated(model, small, rounds=False).ravel(), rel=1e-2)


def test_a_report_names_the_arithmetic_and_the_node_whose_sum_overflows() -> None:
    model = parse("""(float[1, 2, 64, 64] x) => (float[1, 2, 1, 1] y) <float big = {300}> {
        b = Add (x, big) [pool] y = GlobalAveragePool (b) }""")
    low, feeds = onnxamp.convert_model(model, level="O3"), {"x": np.zeros((1, 2, 64, 64), np.float32)}
    assert onnxamp.diff_models(model, low, feeds, provider="cpu").passed
    found = onnxamp.diff_models(model, low, feeds, provider="cpu", target="webgpu")
    assert found.ran_on == "CPU, emulated float16 of webgpu"
    assert found.first_bad is not None
    assert found.first_bad.node == "pool"


PRODUCTS: dict[str, tuple[tuple[int, ...], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "MatMul": ((16, 768), {"w": (768, 64)}, {}),
    "Gemm": ((16, 768), {"w": (64, 768), "b": (64,)}, {"transB": 1, "alpha": 0.5}),
    "Conv": ((1, 64, 14, 14), {"w": (32, 64, 3, 3), "b": (32,)}, {"pads": [1, 1, 1, 1]}),
    "Gemm of columns": ((16, 768), {"w": (64, 768)}, {"transB": 1}),
    "MatMul of few": ((64, 4), {"w": (4, 64)}, {}),
    "Conv of few with bias": ((1, 3, 16, 16), {"w": (8, 3, 1, 1), "b": (8,)}, {}),
    "Conv of groups": ((1, 64, 14, 14), {"w": (64, 1, 3, 3)}, {"group": 64}),
    "ConvTranspose": ((1, 256, 7, 7), {"w": (256, 16, 1, 1)}, {}),
}


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


SUMMED: dict[str, tuple[Array, dict[str, Array], dict[str, Any]]] = {
    "GlobalAveragePool of few": (np.abs(normal(1, 64, 7, 7)), {}, {}),
    "GlobalAveragePool of many": (np.abs(normal(1, 64, 64, 64)), {}, {}),
    "GlobalAveragePool of signs": (normal(1, 512, 14, 14), {}, {}),
    "GlobalAveragePool of many results": (normal(1, 4096, 12, 12), {}, {}),
    "AveragePool of few windows": (normal(1, 16, 28, 28), {}, {"kernel_shape": [14, 14]}),
    "AveragePool of windows": (normal(1, 16, 32, 32), {}, {"kernel_shape": [16, 16]}),
    "ReduceMean of few": (normal(256, 16), {}, {"axes": [1]}),
    "ReduceMean of many": (normal(256, 4096), {}, {"axes": [1]}),
    "ReduceSum": (normal(256, 300), {"axes": np.array([1])}, {}),
    "ReduceL2": (normal(256, 300), {}, {"axes": [1]}),
    "CumSum": (normal(64, 512), {"axis": np.array(1)}, {}),
    "Einsum": (normal(16, 300), {"w": normal(300, 16)}, {"equation": "ij,jk->ik"}),
    "LayerNormalization": (normal(32, 256), {"s": normal(256), "b": normal(256)}, {}),
    "InstanceNormalization": (normal(2, 8, 32, 32), {"s": normal(8), "b": normal(8)}, {}),
    "Softmax": (normal(64, 64), {}, {}),
    "Erf": (normal(64, 64), {}, {}),
    "Exp": (normal(64, 64), {}, {}),
    "Exp of large": (normal(64, 64) * 3, {}, {}),
    "Cosh": (normal(64, 64), {}, {}),
    "Acos": (np.tanh(normal(64, 64)), {}, {}),
    "LeakyRelu": (normal(64, 64), {}, {}),
    "BatchNormalization": (
        normal(2, 8, 32, 32),
        {"s": normal(8), "b": normal(8), "m": normal(8), "v": np.abs(normal(8))},
        {},
    ),
    "com.microsoft::Gelu": (normal(64, 64), {}, {}),
    "com.microsoft::QuickGelu": (normal(64, 64), {}, {}),
    "Tanh": (normal(64, 64), {}, {}),
    "Sigmoid": (normal(64, 64), {}, {}),
}
CASES = {
    name: (normal(*shape), {key: normal(*size) for key, size in weights.items()}, attributes)
    for name, (shape, weights, attributes) in PRODUCTS.items()
} | SUMMED


EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)
EVERY = EVERY[np.isfinite(EVERY)]


def test_activations_are_off_as_their_formulas_are() -> None:
    """1 / (1 + exp(-x)) is 0 where exp(-x) overflows, and 1 - exp(-2x) of a small x holds few digits."""
    x = np.array([-11, -11.125, -12, 0, 1], np.float16)
    assert emulated(model_of("Sigmoid", x, {}), x).tolist() == [np.float16(1.675e-05), 0, 0, 0.5, np.float16(0.731)]
    x = np.array([1.2218952e-4, 1.2e-4, 0, -1.4043e-4, np.inf], np.float16)
    assert emulated(model_of("Tanh", x, {}), x).tolist() == [2.0**-12, 0, 0, -(2.0**-12), 1]


@pytest.mark.webgpu
@pytest.mark.parametrize("op", sorted(WEBGPU.formulas if WEBGPU else ()))
def test_formulas_give_what_webgpu_computes(op: str) -> None:
    newer = {"Mish": 18}
    model = model_of(op, EVERY, {})
    model.opset_import[0].version = newer.get(op, 17)
    seen = run(make_session(model, "webgpu"), {"x": EVERY})["y"]
    with np.errstate(over="ignore"):
        found = emulated(model, EVERY).astype(np.float16)
    assert np.mean((found == seen) | (np.isnan(found) & np.isnan(seen))) > 0.99


@pytest.mark.webgpu
@pytest.mark.parametrize("name", CASES)
def test_the_error_is_that_of_webgpu(name: str) -> None:
    x, weights, attributes = CASES[name]
    model = model_of(name.split(maxsplit=1)[0], x, weights, **attributes)
    exact = emulated(model, x, rounds=False)
    real = error(run(make_session(model, "webgpu"), {"x": x})["y"].astype(np.float64), exact)
    assert real / 2 < error(emulated(model, x), exact) < real * 2


def test_a_sum_that_vanishes_has_the_error_of_its_terms() -> None:
    """What is left of it is below float16's range, where rounding says nothing of the sum."""
    signs = np.array([(-1) ** i.bit_count() for i in range(64)])  # they cancel in any order of summation
    x, w = np.append(signs / 4, 2.0**-10).astype(np.float16), np.append(np.ones(64), 2.0**-10 * (1 + 2.0**-5))
    found = emulated(model_of("MatMul", x[None], {"w": w.astype(np.float16)[:, None]}), x[None])
    assert abs(found.item()) < 0.02


def test_a_bias_is_added_behind_the_sum() -> None:
    """Where the inputs are zero, it is all that is left, and it is exact."""
    x = np.zeros((1, 64, 8, 8), np.float16)
    model = model_of("Conv", x, {"w": normal(8, 64, 3, 3), "b": normal(8)})
    np.testing.assert_array_equal(emulated(model, x), emulated(model, x, rounds=False))
    x[0, 0, 0, 0] = 1e-3
    assert error(emulated(model, x), emulated(model, x, rounds=False)) < 3e-4
    gemm = model_of("Gemm", x := np.zeros((2, 300), np.float16), {"w": normal(300, 8), "b": normal(8)}, beta=0.5)
    np.testing.assert_array_equal(emulated(gemm, x), emulated(gemm, x, rounds=False))


def test_models_without_where_are_emulated_with_float32_sums() -> None:
    large = np.full((1, 4096), 300)
    model = model_of("ReduceMean", large, {}, axes=[1])
    model.opset_import[0].version = 8
    assert emulated(model, large).item() == 300
