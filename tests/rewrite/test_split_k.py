"""Split-K: long products become sums of short ones that compute the same, and the rest of the model stays as it is."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_numbers import run_original
from onnx import ModelProto, numpy_helper
from passes import passed

import onnxamp
from onnxamp._decide.kinds import product_splits
from onnxamp._graph.graph import Graph
from onnxamp._model.sources import has_data_file
from onnxamp._options.options import Options
from onnxamp._options.values import Rescaling, Unfit
from onnxamp._rewrite.passes import split_k

WEBGPU = Options("O3", target="webgpu")
OPSETS = (9, 11, 12, 13, 17, 21)
TERMS = (1536, 1875, 2048, 2310, 3072)
SPLIT = ["Reshape", "Transpose", "MatMul", "ReduceSum"]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def product(terms: int = 2048, more: str = "", **weights: np.ndarray) -> ModelProto:
    text = f"(float[N,3,{terms}] x) => (float[N,3,4] y) {{ [product] y = MatMul (x, w) {more} }}"
    return add_weights(parse(text), {"w": normal(terms, 4)} | weights)


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Cast"]


# --- what it computes -----------------------------------------------------------------------------------------------


def random_product(rng: Random) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """A product of some form, among batches that broadcast, with or without known sizes, of a weight or an input."""
    terms, rows, columns, opset = rng.choice(TERMS), rng.choice([1, 3]), rng.choice([1, 2]), rng.choice(OPSETS)
    first, second = (rows, terms), (terms, columns)
    if rng.random() < 0.3:
        turned = rng.randint(0, 1)
        op = f"Gemm <transB = {turned}> (a, b{', k' * rng.randint(opset < 11, 1)})"  # the bias was no option before
        second = second[::-1] if turned else second
        rank = 2
    else:
        op, batches = "MatMul (a, b)", [tuple(rng.choice([1, 2]) for _ in range(rng.randint(0, 2))) for _ in range(2)]
        first, second = (shape if rng.random() < 0.2 else (*batch, *shape)
                         for batch, shape in zip(batches, (first, second), strict=True))  # fmt: skip
        first, second = ((terms,) if rng.random() < 0.15 else shape for shape in (first, second))
        rank = np.ndim(np.zeros(first, bool) @ np.zeros(second, bool))
    is_weight, is_free = rng.random() < 0.5, rng.random() < 0.5
    sizes = ",".join(f"n{axis}" if is_free and axis < len(first) - 2 else str(size) for axis, size in enumerate(first))
    given = "" if is_weight else f", float[{','.join(map(str, second))}] b"
    result = ",".join(f"r{axis}" for axis in range(rank))
    text = f"(float[{sizes}] a{given}, float[{columns}] k) => (float[{result}] y) {{ [p] y = {op} }}"
    model = parse(text, opset=opset)
    model.graph.output[0].type.tensor_type.shape.SetInParent()
    weights = {"b": normal(*second)}
    feeds = {"a": normal(*first), "k": normal(columns)}
    return (add_weights(model, weights), feeds) if is_weight else (model, feeds | weights)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_split_product_computes_what_it_did(seed: int) -> None:
    model, feeds = random_product(Random(seed))
    split = passed(split_k, Graph.of(model), WEBGPU)
    assert len(split.notes) == 1
    result = split.graph.model
    onnx.checker.check_model(result, full_check=True)
    (expected,), (found,) = run_original(model, feeds), run_original(result, feeds)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-6 * max(TERMS), "sums of so many random terms are about 50"


# --- what is split --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "parts"), [(1024, None), (1409, None), (2 * 1601, None), (1536, 6), (2304, 8), (3072, 12), (4096, 16)]
)
def test_parts_are_the_least_divisor_that_is_accurate_enough(terms: int, parts: int | None) -> None:
    found = product_splits(Graph.of(product(terms)), WEBGPU)
    assert found == ({} if parts is None else {0: parts})


@pytest.mark.parametrize(
    "options",
    [
        {"level": "O0"}, {"dtype": "bfloat16"}, {"split_k": False}, {"keep_nodes": ["product"]}, {"keep_nodes": ["y"]},
        {"level": "O3", "black_list": ["MatMul"]},
        {"keep_high": ["prod.*"]}, {"rule": lambda _: "high"}, {"level": "O2", "black_list": ["MatMul"]},
        {"level": "O2", "black_list": ["ReduceSum"]}, {"level": "O1", "lists": "mindspore", "black_list": ["MatMul"]},
        *({"target": target} for target in ("cuda", "cpu", "openvino", "tensorrt", "any", "float16-only")),
    ],
)  # fmt: skip
def test_what_is_not_summed_up_in_float16_or_stays_float32_is_not_split(options: dict[str, Any]) -> None:
    level = options.pop("level", "O3")
    model = onnxamp.convert_model(product(), level, **({"target": "webgpu", "opset": "keep"} | options))
    assert ops(model) == ["MatMul"]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("lists", ["default", "paddle", "mindspore"])
def test_the_parts_are_low_precision_as_one(level: str, lists: Any) -> None:
    """Though lists keep sums in float32."""
    plan = onnxamp.plan_model(product(), level, lists=lists, target="webgpu", force_low=["product"])
    rows = {row.op: row.low for row in plan.rows if row.op != "initializer"}
    assert rows["MatMul"]
    assert rows["ReduceSum"]
    assert plan.hazards == ()


@pytest.mark.parametrize("op", ["Gemm <alpha = 0.5> (x, w)", "Gemm <transA = 1> (u, w)", "Gemm <beta = 2.0> (x, w, k)"])
def test_a_gemm_that_is_more_than_a_product_and_a_bias_is_not_split(op: str) -> None:
    text = f"(float[3,2048] x, float[2048,3] u, float[4] k) => (float[3,4] y) {{ y = {op} }}"
    assert product_splits(Graph.of(add_weights(parse(text), {"w": normal(2048, 4)})), WEBGPU) == {}


def test_a_bias_that_stays_float32_at_o1_would_cost_a_cast() -> None:
    model = parse("(float[3,2048] x) => (float[3,4] y) { y = Gemm (x, w, k) }")
    add_weights(model, {"w": normal(2048, 4), "k": normal(4)})
    graph = Graph.of(model)
    assert [bool(product_splits(graph, Options(level, target="webgpu"))) for level in ("O1", "O2")] == [False, True]
    assert product_splits(graph, Options("O1", target="webgpu", white_list=["Add"]))


def test_unknown_sizes_of_what_is_summed_up_are_those_of_the_weight() -> None:
    model = add_weights(parse("(float[a,b] x) => (float[a,4] y) { y = MatMul (x, w) }"), {"w": normal(2048, 4)})
    assert product_splits(Graph.of(model), WEBGPU) == {0: 8}


# --- weights --------------------------------------------------------------------------------------------------------


def test_a_weight_that_nobody_else_reads_gets_other_dimensions() -> None:
    model = onnxamp.convert_model(product(), "O3", target="webgpu")
    assert ops(model) == SPLIT
    assert [list(tensor.dims) for tensor in model.graph.initializer if tensor.name == "w"] == [[8, 256, 4]]


def test_a_weight_of_two_products_gets_them_once() -> None:
    model = product(more="z = MatMul (y, v) y2 = Add (z, x) q = MatMul (y2, w)", v=normal(4, 2048))
    model.graph.output[0].name = "q"
    result = onnxamp.convert_model(model, "O3", target="webgpu")
    assert ops(result) == [*SPLIT, "MatMul", "Add", *SPLIT]


@pytest.mark.parametrize("more", ["r = Relu (w)", "r = Identity (w)"])
def test_a_weight_with_other_readers_is_reshaped_for_the_product(more: str) -> None:
    model = product(more=more)
    model.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("r", 1, (2048, 4)))
    result = onnxamp.convert_model(model, "O3", target="webgpu")
    assert ops(result) == ["Reshape", "Transpose", "Reshape", "MatMul", "ReduceSum", more.split()[2]]
    feeds = {"x": normal(2, 3, 2048)}
    for one, other in zip(run_original(model, feeds), run_original(result, feeds), strict=True):
        assert np.allclose(one, other, atol=0.3)


def test_a_weight_that_is_listed_as_an_input_keeps_its_dimensions() -> None:
    model = product()
    model.ir_version, model.opset_import[0].version = 3, 9
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, (2048, 4)))
    result = onnxamp.convert_model(model, "O3", target="webgpu", opset="keep")
    assert ops(result).count("Reshape") == 2
    onnx.checker.check_model(result, full_check=True)


def test_what_is_declared_of_a_weight_goes_with_its_dimensions() -> None:
    model = product()
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("w", 1, (2048, 4)))
    result = passed(split_k, Graph.of(model), WEBGPU).graph.model
    assert not result.graph.value_info
    onnx.checker.check_model(result, full_check=True)


def test_weights_in_files_are_not_read(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(product(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    kept = onnx.load(source, load_external_data=False)
    split = passed(split_k, Graph.of(kept, tmp_path), WEBGPU).graph.model
    tensor = next(tensor for tensor in split.graph.initializer if tensor.name == "w")
    assert has_data_file(tensor)
    assert list(tensor.dims) == [8, 256, 4]
    onnxamp.convert_file(source, tmp_path / "low.onnx", "O3", target="webgpu", validate=False)
    expected = onnxamp.convert_model(product(), "O3", target="webgpu")
    found = onnx.load(tmp_path / "low.onnx")
    weights = ({t.name: numpy_helper.to_array(t) for t in one.graph.initializer} for one in (expected, found))
    one, other = weights
    assert {name: (array.shape, array.tobytes()) for name, array in one.items()} == {
        name: (array.shape, array.tobytes()) for name, array in other.items()
    }


# --- with the rest of a conversion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_plan_repeats_the_conversion(level: Any, tmp_path: Path) -> None:
    model = product(more="z = Relu (y)")
    plan = onnxamp.plan_model(model, level, target="webgpu")
    plan.save(tmp_path / "plan.json")
    again = onnxamp.apply_plan(model, onnxamp.load_plan(tmp_path / "plan.json"))
    assert again == onnxamp.convert_model(model, level, target="webgpu")
    assert {"product", "product/sum"} <= {row.node for row in plan.rows}


def test_layers_are_compared_by_the_name_of_the_result() -> None:
    model = product(more="[end] z = Neg (y)")
    model.graph.output[0].name = "z"
    result = onnxamp.convert_model(model, "O3", target="webgpu")
    feeds = {"x": normal(2, 3, 2048)}
    layers = onnxamp.diff_models(model, result, layers=True, samples=feeds, provider="cpu", target="webgpu").layers
    errors = {row.value: row.accumulated.rel_l2 for row in layers if row.accumulated is not None}
    assert 1e-4 < errors["y"] < 5e-3


@pytest.mark.slow
def test_exponents_come_first() -> None:
    """They are found for the model as it is, and split products are low precision then."""
    text = """(float[2,2048] x) => (float[2,8] y) {
        [up] h = MatMul (x, big) r = Relu (h) n = LpNormalization <axis = 1> (r) [down] y = MatMul (n, w) }"""
    model = add_weights(parse(text), {"big": 1e4 * normal(2048, 2048), "w": normal(2048, 8)})
    feeds = {"x": normal(2, 2048)}
    options: dict[str, Any] = {"rescale": True, "samples": feeds, "target": "webgpu"}
    result = onnxamp.convert_model(model, "O3", **options)
    assert ops(result) == [*SPLIT, "Relu", "LpNormalization", *SPLIT]
    report = onnxamp.diff_models(model, result, samples=feeds, provider="cpu", target="webgpu")
    assert report.outputs[0].rel_l2 < 1e-2
    plan = onnxamp.plan_model(model, "O3", **options)
    assert plan.options.rescaling.scaled
    assert onnxamp.apply_plan(model, plan) == result


def test_values_that_do_not_fit_keep_the_product_whole() -> None:
    found = Rescaling(unfit=(Unfit("y", 1e6, "it overflows"),))
    assert ops(onnxamp.convert_model(product(), "O3", target="webgpu", rescaling=found)) == ["MatMul"]


def test_what_meets_large_numbers_is_kept_by_its_own_name(recwarn: pytest.WarningsRecorder) -> None:
    feeds = {"x": normal(1, 3, 2048)}
    plan = onnxamp.plan_model(product(), "O3", data_max=50.0, samples=feeds, target="webgpu")
    assert plan.options.keep_nodes == ("product",)
    assert not recwarn.list
    assert {row.op for row in plan.rows} == {"MatMul", "initializer"}


def test_tuning_switches_the_parts_together() -> None:
    model = product(more="z = Softmax (y)")
    model.graph.output[0].name = "z"
    feeds = {"x": 0.02 * normal(2, 3, 2048)}
    result, tuned = onnxamp.tune_model(model, 1e-2, samples=feeds, target="webgpu", provider="cpu", allow_slower=True)
    assert tuned.error <= 1e-2
    assert {row.low for row in tuned.plan.rows if row.op in ("MatMul", "ReduceSum")} == {True}
    assert ops(result)[:4] == SPLIT


def test_a_float16_model_is_split_when_it_is_converted_for_another_target() -> None:
    model = onnxamp.convert_model(product(), "O3", target="cuda", keep_io_types=False)
    result = onnxamp.convert_model(model, "O3", target="webgpu", from_dtype="float16")
    assert ops(result) == SPLIT
    assert ops(onnxamp.convert_model(result, "O3", target="webgpu", from_dtype="float16")) == SPLIT


def test_the_report_says_how_many_and_why(tmp_path: Path) -> None:
    onnx.save(product(more="z = MatMul (y, v)", v=normal(4, 4)), tmp_path / "model.onnx")
    notes = onnxamp.convert_file(
        tmp_path / "model.onnx", tmp_path / "low.onnx", "O3", target="webgpu", validate=False
    ).notes
    assert notes[0] == (
        "Split 1 product of up to 2,048 terms into a sum of shorter ones, since webgpu sums up float16 in float16;"
        " --no-split-k keeps it in float32 instead."
    )


def test_weights_are_rounded_with_compensation_part_by_part(tmp_path: Path) -> None:
    """On inputs whose elements depend on each other, it helps."""
    feeds = {"x": normal(32, 3, 16) @ normal(16, 2048)}
    onnx.save(product(), tmp_path / "model.onnx")
    options: dict[str, Any] = {"target": "webgpu", "rounding": "compensated", "samples": feeds}
    notes = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", "O3", **options, validate=False).notes
    assert any(note.startswith("Rounded 1 of 1 weights with compensation") for note in notes), notes
