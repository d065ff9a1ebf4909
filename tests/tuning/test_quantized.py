"""Level auto and exponents on networks that other tools quantized."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto
from quantized import images, quantized

import onnxamp
from onnxamp._runtime.emulate import emulate

SAMPLES = images(4)
FEEDS = images(3, seed=7)


def outputs(model: ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, feeds)[0] for feeds in FEEDS])


def products(plan: onnxamp.Plan) -> tuple[int, int]:
    """How many quantized products are low, and how many float32."""
    parts = [part for part in plan.quantized if part.role in ("products", "integers")]
    return sum(part.low for part in parts), sum(len(part.float32) for part in parts)


def tuned(tool: str, *, is_large: bool = False, **options: Any) -> onnxamp.Tuned:
    arguments = {"target": "cuda", "provider": "cpu", "allow_slower": True} | options
    return onnxamp.tune_model(quantized(tool, is_large=is_large), samples=SAMPLES, **arguments).tuned


@pytest.mark.mostly_slow(fast=2)
@pytest.mark.parametrize("tool", ["qdq", "qdq with biases", "nbits", "nbits in qdq"])
def test_products_are_low_within_the_tolerance(tool: str) -> None:
    found = tuned(tool)
    assert found.held
    low, high = products(found.plan)
    assert low > 0 == high
    is_rounded = tool.startswith("qdq")
    assert (found.coarse > 0) is is_rounded
    assert found.tolerance == 1e-2 + found.coarse
    assert ("rounds values to integers" in str(found)) is is_rounded


@pytest.mark.slow
def test_a_tolerance_that_is_given_allows_for_no_more() -> None:
    found = tuned("qdq", tolerance=2e-3)
    assert (found.tolerance, found.coarse) == (2e-3, 0.0)
    assert found.error <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_held_to_the_usual_limit_where_that_is_wider(dtype: Any, tmp_path: Path) -> None:
    onnx.save(quantized("qdq"), tmp_path / "model.onnx")
    options: dict[str, Any] = {"level": "auto", "target": "cuda", "samples": SAMPLES, "provider": "cpu", "dtype": dtype}
    report = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", **options).validation
    assert report is not None
    tolerance = tuned("qdq", dtype=dtype).tolerance
    usual = {"float16": 1e-2, "bfloat16": 5e-2}[dtype]
    assert tolerance > 1e-2
    assert [row.limit for row in report.judgements] == [max(tolerance, usual)]


def test_the_float_rest_of_a_dynamically_quantized_network_is_tuned() -> None:
    found = tuned("dynamic")
    assert found.held
    assert found.coarse > 0
    convolutions = [row for row in found.plan.rows if row.op == "Conv"]
    assert convolutions
    assert all(row.low for row in convolutions)


def test_the_float_rest_of_a_network_of_ops_on_integers_is_tuned() -> None:
    """Its QLinearConv, QLinearAdd, QLinearMatMul and QGemm have gradients, so none is moved to see what it does."""
    found = tuned("operators")
    assert found.held
    assert found.plan.expected is not None
    assert found.plan.expected.spread == ()
    assert found.plan.expected.error
    assert any(row.low for row in found.plan.rows if row.op == "Relu")


MOVED = """(float[2,3,8,8] image) => (float[2,9] scores) <float s = {0.03}, float t = {0.1}, uint8 z = {128}> {
    q = QuantizeLinear (image, s, z)  c = QLinearConv <pads = [1, 1, 1, 1]> (q, s, z, k, s, zero, t, z)
    p = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (c)  a, b = Split <axis = 1> (p)
    g = GatherElements <axis = 2> (a, at)  f = Flatten (g)  d = DequantizeLinear (f, t, z)
    h = MatMul (d, w)  scores = Softmax (h) }"""


def test_integers_that_nodes_move_have_gradients() -> None:
    """Also in networks that are older than nodes that quantize along an axis."""
    random = np.random.default_rng(0)
    weights = {
        "k": random.integers(-30, 30, (4, 3, 3, 3)).astype(np.int8),
        "zero": np.asarray(0, np.int8),
        "at": random.integers(0, 4, (2, 2, 1, 4)),
        "w": random.standard_normal((8, 9)).astype(np.float32),
    }
    model = add_weights(parse(MOVED, 12), weights)
    found = onnxamp.tune_model(model, samples=SAMPLES, target="cuda", provider="cpu", allow_slower=True).tuned
    assert found.held
    assert found.coarse > 0
    assert found.plan.expected is not None
    assert found.plan.expected.spread == ()


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
@pytest.mark.parametrize("tool", ["qdq", "qdq with biases"])
def test_exponents_leave_the_grid_where_it_is(tool: str, target: str) -> None:
    """They go into scales, which take powers of two exactly: the result is that of the network without the powers."""
    options: dict[str, Any] = {"target": target, "samples": SAMPLES}
    large = onnxamp.convert_model(quantized(tool, is_large=True), rescale=True, **options)
    usual = onnxamp.convert_model(quantized(tool), target=target)
    assert np.array_equal(outputs(emulate(large)), outputs(emulate(usual)))
    plan = onnxamp.plan_model(quantized(tool, is_large=True), rescale=True, **options)
    assert products(plan) == (4, 0)
    assert products(onnxamp.plan_model(quantized(tool, is_large=True), target=target))[0] < 4


@pytest.mark.parametrize("tool", ["nbits", "nbits in qdq", "dynamic", "operators"])
def test_exponents_suit_what_other_tools_quantized(tool: str) -> None:
    model = quantized(tool, is_large=True)
    plan = onnxamp.plan_model(model, rescale=True, samples=SAMPLES)
    plain = onnxamp.plan_model(model)
    assert sum(row.low for row in plan.rows) >= sum(row.low for row in plain.rows)
    low = onnxamp.apply_plan(model, plan)
    expected = outputs(model)
    assert np.linalg.norm(outputs(emulate(low)) - expected) < 1e-2 * np.linalg.norm(expected)
    if tool != "operators":
        assert plan.options.rescaling is not None
        assert plan.options.rescaling.scaled


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("tool", ["qdq", "nbits"])
def test_tuning_takes_exponents_where_a_quantized_network_overflows(tool: str) -> None:
    found = tuned(tool, is_large=True)
    assert found.held
    assert found.exponents is not None
    assert found.exponents.used
    assert products(found.plan)[1] == 0
