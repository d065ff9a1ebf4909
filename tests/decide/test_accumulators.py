"""Hazards of a target that accumulates in float16."""

from typing import Any

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp


def product(terms: int) -> ModelProto:
    model = parse(f"(float[2, {terms}] x) => (float[2, 8] y) {{ [product] y = MatMul (x, w) }}")
    weights = np.random.default_rng(0).standard_normal((terms, 8)).astype(np.float32) / terms**0.5
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model


def reasons(
    model: ModelProto, target: str, level: str = "O2", dtype: str = "float16", *, split_k: bool = False
) -> dict[str, str]:
    plan = onnxamp.plan_model(model, level=level, target=target, dtype=dtype, split_k=split_k)
    return {hazard.node: hazard.reason for hazard in plan.hazards}


@pytest.mark.parametrize(("terms", "kept"), [(64, False), (1024, False), (2048, True), (4096, True)])
def test_long_products_stay_float32_where_they_are_summed_up_in_float16(terms: int, kept: bool) -> None:
    assert reasons(product(terms), "webgpu") == ({"product": "long float16 product"} if kept else {})
    assert reasons(product(terms), "webgpu", split_k=True) == {}
    assert reasons(product(terms), "cuda") == reasons(product(terms), "any") == {}
    assert reasons(product(terms), "webgpu", dtype="bfloat16") == {}


@pytest.mark.parametrize(
    ("shape", "kept"),
    [("1, 8, 7, 7", False), ("N, 8, 7, 7", False), ("1, 8, 64, 64", True), ("1, 8, H, W", True)],
)
def test_a_pooling_stays_float32_if_its_sum_may_overflow(shape: str, kept: bool) -> None:
    model = parse(f"(float[{shape}] x) => (float[a, b, c, d] y) {{ [pool] y = GlobalAveragePool (x) }}")
    assert reasons(model, "webgpu", "O3") == ({"pool": "float16 accumulator"} if kept else {})
    assert reasons(model, "cuda", "O3") == {}


def test_a_normalization_stays_float32_where_its_mean_is_subtracted_in_float16() -> None:
    model = parse("""(float[1, 2, 1, 1] x) => (float[1, 2, 1, 1] y) <float[2] s = {1, 1}, float[2] b = {1, 2}> {
        t = Tanh (x) [norm] y = InstanceNormalization (t, s, b) }""")
    assert reasons(model, "webgpu", "O3") == {"norm": "float16 accumulator"}
    assert reasons(model, "cuda", "O3") == {}


@pytest.mark.webgpu
def test_what_is_kept_for_webgpu_passes_there() -> None:
    model = parse("""(float[1, 2, 64, 64] x) => (float[1, 2, 1, 1] y) <float big = {300}> {
        b = Add (x, big) [pool] y = GlobalAveragePool (b) }""")
    feeds = {"x": np.zeros((1, 2, 64, 64), np.float32)}
    passed = {
        target: onnxamp.diff_models(
            model, onnxamp.convert_model(model, level="O3", target=target), feeds, provider="webgpu"
        ).passed
        for target in ("cuda", "webgpu")
    }
    assert passed == {"cuda": False, "webgpu": True}


ALONE = """(float[1, 1, {terms}] x) => (float[1, 1, 8] y) {{
    n = LayerNormalization (x, s)
    [product] h = MatMul (n, v)
    y = LayerNormalization (h, r) }}"""
AMONG = """(float[1, 1, {terms}] x) => (float[1, 1, {terms}] y) {{
    n = LayerNormalization (x, s)
    a = MatMul (n, w) b = Relu (a)
    [product] c = MatMul (b, w) d = Relu (c)
    e = MatMul (d, w)
    y = LayerNormalization (e, s) }}"""


@pytest.mark.parametrize(
    ("text", "terms", "low"),
    [(ALONE, 512, True), (ALONE, 1024, False), (AMONG, 512, True), (AMONG, 1024, True), (AMONG, 2048, False)],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_product_is_low_precision_where_its_casts_cost_less_than_its_error(
    text: str, terms: int, low: bool, level: str
) -> None:
    model = parse(text.format(terms=terms))
    for name, shape in (("w", (terms, terms)), ("v", (terms, 8)), ("s", (terms,)), ("r", (8,))):
        model.graph.initializer.append(numpy_helper.from_array(np.full(shape, 0.5, np.float32), name))

    def row(**options: str) -> tuple[bool, str]:
        given = {"level": level, "target": "webgpu", "split_k": False} | options
        rows = onnxamp.plan_model(model, **given).rows  # type: ignore[arg-type]
        return next((row.low, row.reason) for row in rows if row.node == "product")

    assert row() == (low, "white list" if low else "long float16 product")
    assert row(target="cuda") == (True, "white list")
    assert row(level="O3")[0] is (terms <= 1024), "at O3 hazards alone keep products in float32"
    whole: dict[str, Any] = {"target": "webgpu", "split_k": False}
    listed = onnxamp.plan_model(model, level=level, white_list=["MatMul"], **whole)
    assert all(row.low for row in listed.rows if row.node == "product" and terms <= 1024)
    strict = onnxamp.plan_model(model, level="O2", strict=True, **whole)
    assert all(row.low for row in strict.rows if row.node == "product" and terms <= 1024)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_product_among_others_is_low_precision_in_parts(level: Any) -> None:
    model = parse(AMONG.format(terms=2048))
    for name, shape in (("w", (2048, 2048)), ("s", (2048,))):
        model.graph.initializer.append(numpy_helper.from_array(np.full(shape, 0.5, np.float32), name))
    rows = onnxamp.plan_model(model, level, target="webgpu").rows
    assert {row.low for row in rows if row.op in ("MatMul", "ReduceSum")} == {True}


@pytest.mark.webgpu
@pytest.mark.parametrize("terms", [2048, 4096])
def test_parts_of_products_are_accurate_on_webgpu(terms: int) -> None:
    rng = np.random.default_rng(0)
    model = parse(f"(float[16, {terms}] x) => (float[16, 64] y) {{ y = MatMul (x, w) }}")
    weights = rng.standard_normal((terms, 64)).astype(np.float32) / terms**0.5
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    feeds = {"x": rng.standard_normal((16, terms)).astype(np.float32)}
    errors = []
    for split_k in (True, False):
        result = onnxamp.convert_model(model, level="O3", target="webgpu", hazards=False, split_k=split_k)
        assert {tensor.data_type for tensor in result.graph.initializer} <= {7, 10}, "all floats are float16"
        errors.append(onnxamp.diff_models(model, result, feeds, provider="webgpu").outputs[0].rel_l2)
    assert errors[0] < 4e-3
    assert errors[0] < 0.7 * errors[1]
