"""Every minimal graph of the field notes, converted in every way, before the judge; then the sharp assertions.

The numbers in the names of the tests are rows of the field notes; test_field_rows.py has what this file does not, and
sees to it that no row is left out.
"""

from collections.abc import Iterator
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from conversions import (
    DTYPES,
    ELEMS,
    LEVELS,
    LOW,
    SINGLE,
    again,
    all_nodes,
    converted,
    count,
    opset,
    source,
    tensors,
    typed,
)
from every import every
from graphs import CASES, Case
from graphs.case import add_weights, draw, parse
from judge import judge
from judge_kernels import subgraphs, typed_nodes
from onnx import ModelProto, TensorProto, numpy_helper

import onnxamp
from onnxamp import ExternalDataError, OnnxAmpError, OpsetError

levels = every(level=LEVELS)
dtypes = every(dtype=DTYPES)


# --- every case, every way ----------------------------------------------------------------------------------


def ids(cases: dict[str, Case]) -> list[str]:
    return [f"row {case.row:02} {name}" for name, case in cases.items()]


@pytest.mark.mostly_slow(fast=15)
@pytest.mark.parametrize("case", CASES.values(), ids=ids(CASES))
def test_judge_has_no_complaint(case: Case) -> None:
    """At every level, in both low types, with inputs and outputs of either precision."""
    seen: dict[tuple[str, bool, bytes], list[str]] = {}
    complaints = []
    for level, dtype, keep_io in product(LEVELS, DTYPES, (True, False)):
        complaints += [
            f"{level} {dtype} {keep_io=}: {text}" for text in complaints_of(case, level, dtype, keep_io, seen)
        ]
    assert not complaints, "\n".join(complaints)


def complaints_of(
    case: Case, level: str, dtype: str, keep_io: bool, seen: dict[tuple[str, bool, bytes], list[str]]
) -> Iterator[str]:
    """What the judge says; levels that make the same of a model share the verdict, but for what is level's own."""
    original = source(case.name).proto
    options = {"dtype": dtype, "keep_io_types": keep_io}
    try:
        result = converted(case.name, level, **options)
    except OnnxAmpError as error:
        too_old = isinstance(error, OpsetError) and dtype == "bfloat16" and opset(original) < 13
        if case.loads and not too_old:
            raise
        return
    key = (dtype, keep_io, result.SerializeToString())
    if key not in seen:
        seen[key] = judged(case, original, result, dtype, keep_io=keep_io)
        if keep_io:
            seen[key] += check_constants(original, result, dtype)
    yield from seen[key]
    if result != original and again(result, case.name, level, **options) != result:
        yield "idempotent: converting the result again changes it"


def judged(case: Case, original: ModelProto, result: ModelProto, dtype: str, **options: Any) -> list[str]:
    return judge(
        original,
        result,
        case.inputs(),
        dtype=dtype,
        tolerance=case.tolerance,
        loose_integers=case.loose_integers,
        frozen=case.options.get("freeze_defaults", case.name == "every_initializer_is_input"),
        **options,
    )


def check_constants(original: ModelProto, result: ModelProto, dtype: str) -> Iterator[str]:
    """Row 25: finite constants stay finite, and infinite ones infinite."""
    if original.functions:
        return
    low = [array.astype(np.float32) for array in tensors(result, ELEMS[dtype]).values()]
    if any(np.isinf(array).any() for array in tensors(original, TensorProto.FLOAT).values()):
        low += tensors(result, TensorProto.FLOAT).values()
        if not any(np.isneginf(array).any() for array in low):
            yield "constants: the infinite ones are gone"
    elif not all(np.isfinite(array).all() for array in low):
        yield "constants: finite ones became infinite"


@every(value=[2, -np.inf])
def test_25_a_damaged_constant_is_noticed(value: float) -> None:
    text = "(float[2] X) => (float[2] Y) { Y = Add (X, w) }"
    original, good, bad = (
        add_weights(parse(text), {"w": np.array([1, number], dtype)})
        for number, dtype in ((value, np.float32), (value, np.float16), (np.inf, np.float16))
    )
    assert list(check_constants(original, good, "float16")) == []
    assert len(list(check_constants(original, bad, "float16"))) == 1


UNFROZEN = {name: case for name, case in CASES.items() if "freeze_defaults" not in case.options}


@pytest.mark.slow
@every(case=UNFROZEN.values(), level=["O1", "O2"])
def test_32_36_all_black_is_bit_identical(case: Case, level: str) -> None:
    read = source(case.name)
    original = read.proto
    bodies = chain.from_iterable(function.node for function in original.functions)
    nodes = chain(all_nodes(original.graph), bodies)
    ops = {f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes}
    options = {**case.options, "white_list": (), "black_list": tuple(sorted(ops)), "force_low": ()}
    try:
        result = onnxamp.convert_model(read, level, **options)
    except OnnxAmpError:
        if case.loads:
            raise
        return
    assert result.SerializeToString() == case.build().SerializeToString()


@pytest.mark.slow
@every(case=UNFROZEN.values())
def test_level_0_is_bit_identical(case: Case) -> None:
    read = source(case.name)
    options = {key: value for key, value in case.options.items() if key != "force_low"}
    result = onnxamp.convert_model(read, "O0", **options)
    assert result.SerializeToString() == case.build().SerializeToString()


NOT_AT_22 = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
# ONNX Runtime 1.31.1 gives a QuantizeLinear of its own a wrong zero point in qdq_unit, whoever upgrades it.
UPGRADES = {
    name: case
    for name, case in CASES.items()
    if case.loads
    and "keep_functions" not in case.options
    and name != "qdq_unit"
    and not any(node.op_type in NOT_AT_22 for node in all_nodes(case.build().graph))
}
"""What ONNX Runtime can run at opset 22, judged by the names of the ops alone."""


@pytest.mark.mostly_slow(fast=20)
@pytest.mark.parametrize("case", UPGRADES.values(), ids=UPGRADES)
@dtypes
def test_19_an_upgrade_of_the_opset_changes_no_answer(case: Case, dtype: str) -> None:
    options = {"dtype": dtype, "opset": 22}
    try:
        result = converted(case.name, "O2", **options)
    except OpsetError:
        return  # onnx cannot upgrade every model, and then says so; the next test counts them
    complaints = judged(
        case,
        source(case.name).proto,
        result,
        dtype,
        keep_io=True,
        opset=22,
        again=lambda model: again(model, case.name, "O2", **options),
    )
    assert not complaints, "\n".join(complaints)


@pytest.mark.slow
def test_19_nearly_every_model_is_upgraded() -> None:
    """All but those with sparse tensors, an untyped op, or what opset 12 had no LayerNormalization for."""

    def refused(name: str) -> bool:
        try:
            return not converted(name, "O2", dtype="float16", opset=22)
        except OpsetError:
            return True

    assert len([name for name in UPGRADES if refused(name)]) < 0.03 * len(UPGRADES)


# --- 1a: validity -------------------------------------------------------------------------------------------


@levels
@every(name=["cast_int_both_kinds", "cast_int_to_matmul_and_blocked", "cast_int_is_output"])
def test_01_integers_are_rounded_once(name: str, level: str) -> None:
    """Each float version of the integers comes from the integers, not from another float version."""
    model = converted(name, level)
    casts = {node.output[0] for node in model.graph.node if node.op_type == "Cast"}
    assert not [node for node in model.graph.node if node.op_type == "Cast" and node.input[0] in casts]


def test_01_both_versions_of_the_integers() -> None:
    model = converted("cast_int_to_matmul_and_blocked", "O2")
    kinds = {node.attribute[0].i for node in model.graph.node if node.op_type == "Cast" and node.input[0] == "I"}
    assert kinds == {TensorProto.FLOAT, TensorProto.FLOAT16}


@every(name=["constant_of_shape_default", "random_normal_like", "eye_like_from_integers"])
def test_02_types_meet(name: str) -> None:
    for one in typed(converted(name, "O3"), "Mul", "MatMul", "Add"):
        assert len(set(one.inputs)) == 1


def test_02_constant_of_shape_is_made_low() -> None:
    (one,) = typed(converted("constant_of_shape", "O3"), "ConstantOfShape")
    assert one.outputs == [LOW]


@every(name=["constant_value_float_opset17", "constant_value_floats", "constant_tensor", "shared_constant"])
def test_03_constants_cost_no_cast(name: str) -> None:
    """What remains are the Casts of the model's input and output, and of what shared_constant blocks."""
    model = converted(name, "O3")
    assert count(model) == 2
    assert not tensors(model, TensorProto.FLOAT)


RESIZES = [
    "resize_opset11", "resize_opset13", "resize_opset18", "resize_22", "resize_without_roi",
    "resize_sizes", "resize_sizes_only", "resize_crop", "resize_computed_scales", "resize_scales_from_floats",
]  # fmt: skip


@every(name=RESIZES)
def test_04_scales_stay_float32(name: str) -> None:
    (one,) = typed(converted(name, "O3"), "Resize")
    assert one.inputs[0] == LOW
    assert one.inputs[2] in ("", SINGLE)


def test_04_scales_stay_float32_at_opset_10() -> None:
    (one,) = typed(converted("resize_opset10", "O3"), "Resize")
    assert one.inputs == [LOW, SINGLE]


def test_05_shared_initializer_is_stored_twice() -> None:
    original, model = CASES["shared_initializer_of_matmul"].build(), converted("shared_initializer_of_matmul")
    (single,), (low,) = tensors(model, TensorProto.FLOAT).values(), tensors(model, TensorProto.FLOAT16).values()
    want = numpy_helper.to_array(original.graph.initializer[0])
    assert single.tobytes() == want.tobytes()
    assert low.tobytes() == want.astype(np.float16).tobytes()
    assert count(model) == 2


def test_05_shared_constant_is_stored_twice() -> None:
    model = converted("shared_constant")
    assert len(tensors(model, TensorProto.FLOAT)) == len(tensors(model, TensorProto.FLOAT16)) == 1
    (exp,) = typed(model, "Exp")
    assert exp.inputs == [SINGLE]


@pytest.mark.parametrize(
    ("name", "casts"),
    [
        ("two_blocked_consumers", 2),  # the input down, r up once for both
        ("blocked_twice_the_same", 2),
        ("blocked_node_is_output", 2),
        ("output_is_consumed", 2),  # the model output is the float32 version that Exp reads
        ("output_is_consumed_by_both_kinds", 2),
        ("fan_out_of_input", 2),
        ("four_blocked_consumers", 2),
        ("exact_ops_between", 2),
        ("matmul_only", 2),
        ("integers_to_blocked", 0),
    ],
)
def test_06_09_10_39_45_number_of_casts(name: str, casts: int) -> None:
    assert count(converted(name)) == casts


def test_07_casts_sit_where_the_value_is_defined() -> None:
    """The captured value is cast once, outside the branches."""
    model = converted("if_capture_then_opset17", "O3")
    assert all(node.op_type != "Cast" for node in all_nodes(model.graph) if node not in list(model.graph.node))


@levels
def test_07_branches_agree(level: str) -> None:
    (one,) = typed(converted("if_branches_disagree", level), "If")
    ends = {output.type.tensor_type.elem_type for body in subgraphs(one.node) for output in body.output}
    assert len(ends) == 1


def test_07_loop_carried_state_is_low_throughout() -> None:
    model = converted("loop_carried", "O3")
    (one,) = typed(model, "Loop")
    assert one.outputs == [LOW, LOW]
    (body,) = subgraphs(one.node)
    assert count(model) == 3, "the input, and the two outputs"
    assert not [node for node in body.node if node.op_type == "Cast"]


def test_07_blocked_loop_stays_float32() -> None:
    (one,) = typed(converted("loop_blocked"), "Loop")
    assert one.outputs == [SINGLE, SINGLE]


def test_07_a_state_that_a_kept_function_makes_gets_a_cast() -> None:
    """The function is not looked into: it reads and makes float32, as the body of the loop reveals."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 22, "my": 1]>
        g (float[3,3] X) => (float[3,3] Y) {
            f = my.Foo (X)
            m = Constant <value = int64 {3}> ()
            k = Constant <value = bool {1}> ()
            Y = Loop (m, k, f) <body = b (int64 i, bool c, float[3,3] p) => (bool d, float[3,3] q) {
                d = Identity (c)
                q = MatMul (X, X)
            }>
        }
        <domain: "my", opset_import: ["": 22]> Foo (a) => (b) { b = Relu (a) }""")
    result = onnxamp.convert_model(model, "O3", keep_functions=True, keep_io_types=False)
    onnx.checker.check_model(result, full_check=True)
    (one,), (call,) = typed(result, "Loop"), typed(result, "Foo")
    (body,) = subgraphs(one.node)
    assert body.output[1].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert {node.inputs[0] for node in typed(result, "MatMul")} == {LOW}
    casts = {node.node.output[0]: node.node.input[0] for node in typed(result, "Cast")}
    assert call.inputs == [SINGLE]
    assert casts[call.node.input[0]] == "X"
    assert casts[one.node.input[2]] == call.node.output[0]
    assert {info.type.tensor_type.elem_type for info in result.graph.output} == {TensorProto.FLOAT16}


def test_08_untidy_nodes_are_sorted() -> None:
    result = converted("unsorted_nodes")
    onnx.checker.check_model(result, full_check=True)
    assert [node.op_type for node in result.graph.node if node.op_type != "Cast"] == ["MatMul", "Exp", "MatMul"]


@every(level=LEVELS, name=["initializer_is_input", "some_initializers_are_inputs"])
def test_11_overridable_default_is_cast_once(level: str, name: str) -> None:
    model = converted(name, level)
    assert [info.name for info in model.graph.input] == ["X", "w"]
    assert tensors(model, TensorProto.FLOAT)["w"].shape == (3, 3)
    assert sum(node.op_type == "Cast" and node.input[0] == "w" for node in model.graph.node) == 1


def test_11_weight_of_an_old_file_is_converted() -> None:
    model = converted("initializer_is_input_ir3")
    assert model.graph.initializer[0].data_type == TensorProto.FLOAT16
    assert model.graph.input[1].type.tensor_type.elem_type == TensorProto.FLOAT16


@every(name=["initializer_is_input_frozen", "every_initializer_is_input"])
def test_11_frozen_default_is_a_weight(name: str) -> None:
    model = converted(name)
    assert [info.name for info in model.graph.input] == ["X"]
    assert [tensor.data_type for tensor in model.graph.initializer] == [TensorProto.FLOAT16]
    assert count(model) == 2


def test_11_scalars_that_callers_may_override_are_settings() -> None:
    model = parse("(float[2,3] X, float[1] s) => (float[2,3] Y) { h = Mul (X, s) Y = MatMul (h, h) }")
    add_weights(model, {"s": np.ones(1, np.float32)})
    assert [info.name for info in onnxamp.convert_model(model, "O3", target="any").graph.input] == ["X", "s"]


def test_11_who_made_weights_of_inputs_is_told_how_to_keep_them(tmp_path: Path) -> None:
    onnx.save(CASES["every_initializer_is_input"].build(), tmp_path / "model.onnx")
    (note,) = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", validate=False).notes
    assert note.startswith("1 initializer was also a graph input and is now only a weight.")
    assert "--keep-overridable" in note
    kept = onnxamp.Options(freeze_defaults=False)
    assert kept.written() == ("--keep-overridable",)
    assert onnxamp.Options(freeze_defaults=True).written() == ("--freeze-defaults",)


@every(name=["names_like_ours", "no_node_names", "same_node_names"])
@levels
def test_12_names_of_ours_are_new(name: str, level: str) -> None:
    original, model = CASES[name].build(), converted(name, level)
    made = [output for node in all_nodes(model.graph) for output in node.output if output]
    made += [tensor.name for tensor in model.graph.initializer] + [info.name for info in model.graph.input]
    assert len(made) == len(set(made))
    old = [node.name for node in original.graph.node]
    added = [node.name for node in model.graph.node if node.op_type == "Cast" and node.name]
    assert len(added) == len(set(added))
    assert not set(added) & set(old)


@every(
    name=["sequence_construct_opset17", "sequence_blocked_element", "sequence_empty_insert", "sequence_carried_by_loop"]
)
@levels
def test_14_a_sequence_is_one_decision(name: str, level: str) -> None:
    kinds = {
        type_
        for one in typed_nodes(converted(name, level))
        for type_ in one.inputs + one.outputs
        if type_.startswith("seq")
    }
    assert len(kinds) == 1
    if level == "O3":
        assert kinds == {f"seq({LOW})"}


def test_15_functions_are_inlined() -> None:
    model = converted("function_used_twice", "O3")
    assert not [node for node in model.graph.node if node.domain]
    assert {one.outputs[0] for one in typed(model, "Mul", "MatMul")} == {LOW}


def test_15_functions_are_kept() -> None:
    original, model = CASES["function_kept"].build(), converted("function_kept", "O3")
    assert list(model.functions) == list(original.functions)
    (call,) = typed(model, "Foo")
    assert call.inputs == [SINGLE]


@levels
@every(name=["custom_unknown", "custom_unknown_with_body"])
def test_16_unknown_ops_stay_float32(name: str, level: str) -> None:
    (one,) = typed(converted(name, level), "Custom", "Repeat")
    assert one.inputs == [SINGLE]
    for body in subgraphs(one.node):
        assert body == next(iter(subgraphs(CASES[name].build().graph.node[1])))


@levels
def test_16_float_only_contrib_op(level: str) -> None:
    (one,) = typed(converted("contrib_float_only", level), "MurmurHash3")
    assert one.inputs == [SINGLE]


@levels
@every(name=["qdq_unit", "quantize_dequantize_opset19"])
def test_17_quantized_units_stay_where_they_become_integer_kernels(name: str, level: str) -> None:
    for one in typed(converted(name, level, target="cpu"), "QuantizeLinear", "DequantizeLinear"):
        assert LOW not in one.inputs + one.outputs


@levels
def test_18_statistics_stay_float32(level: str) -> None:
    for name in ("layer_norm_three_outputs_opset17", "layer_norm_white"):
        (one,) = typed(converted(name, level), "LayerNormalization")
        assert one.outputs[1:] == [SINGLE, SINGLE]


def test_18_white_layer_norm_is_low() -> None:
    (one,) = typed(converted("layer_norm_white"), "LayerNormalization")
    assert one.outputs[0] == LOW


def test_19_bfloat16_needs_opset_13() -> None:
    with pytest.raises(OpsetError, match="13"):
        converted("matmul_opset11", dtype="bfloat16", opset="keep")


def test_19_opset_is_raised_when_asked() -> None:
    model = converted("matmul_opset11", dtype="bfloat16", opset=13)
    assert opset(model) == 13
    assert count(model) >= 2


@levels
def test_22_the_float16_island_is_kept(level: str) -> None:
    model = converted("float16_island", level)
    (relu,) = typed(model, "Relu")
    assert relu.outputs == [LOW]


# --- 1b: numbers --------------------------------------------------------------------------------------------

DECOMPOSED = [name for name, case in CASES.items() if case.row == 24 and name != "l2_norm"] + ["layer_norm_to_fuse"]


@pytest.mark.slow
@levels
@dtypes
@every(name=DECOMPOSED)
def test_24_islands_stay_float32_as_a_unit(name: str, level: str, dtype: str) -> None:
    model = converted(name, level, dtype=dtype)
    for one in typed(model, "Pow", "ReduceMean", "ReduceSum", "Sqrt", "Reciprocal", "Div", "Sub"):
        assert {*one.inputs, *one.outputs} <= {SINGLE, "tensor(int64)"}, one.node.op_type


@every(level=["O2", "O3"])
def test_24_what_surrounds_an_island_is_low(level: str) -> None:
    model = converted("rms_norm_in_network", level)
    assert {one.outputs[0] for one in typed(model, "MatMul")} == {LOW}


def test_25_a_forced_sentinel_leaves_room_for_the_score() -> None:
    low = tensors(converted("mask_forced_low"), TensorProto.FLOAT16)
    assert float(np.finfo(np.float16).min) / 2 in {float(array) for array in low.values() if array.size == 1}


@levels
@every(name=[name for name, case in CASES.items() if case.row == 26 and name != "tiny_weights"])
def test_26_no_constant_vanishes(name: str, level: str) -> None:
    for array in tensors(converted(name, level), TensorProto.FLOAT16).values():
        assert (np.abs(array) >= np.finfo(np.float16).tiny).all() or array.size > 1


def test_26_weights_may_flush() -> None:
    """Tiny weights in a matrix are no reason to keep a MatMul in float32."""
    (one,) = typed(converted("tiny_weights"), "MatMul")
    assert one.outputs == [LOW]


@levels
def test_27_what_fits_is_not_clamped(level: str) -> None:
    values = {float(a) for a in tensors(converted("large_constant_that_fits", level), 10).values()}
    assert values <= {30000.0}


@every(name=["large_constant", "large_weights"])
@levels
def test_27_what_does_not_fit_stays_float32(name: str, level: str) -> None:
    single = tensors(converted(name, level), TensorProto.FLOAT)
    assert max(float(np.abs(array).max()) for array in single.values()) >= 3e5


@levels
@every(name=["softmax_by_hand", "softmax_by_hand_in_network"])
def test_30_softmax_by_hand_is_an_island(name: str, level: str) -> None:
    for one in typed(converted(name, level), "Exp", "ReduceSum", "Div"):
        assert LOW not in one.inputs + one.outputs


SOFTMAXES = """(float[2,4] X) => (float[2,4] Y) {
    a = Softmax (X) b = Softmax (a) c = Softmax (b) d = Softmax (c) Y = Softmax (d)
}"""


@pytest.mark.parametrize(("keep_io", "casts"), [(True, 0), (False, 2)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_32_a_chain_of_blocked_ops(level: str, keep_io: bool, casts: int) -> None:
    model = onnxamp.convert_model(parse(SOFTMAXES), level, keep_io_types=keep_io, lists="conservative")
    assert count(model) == casts


def test_32_a_chain_between_white_ops() -> None:
    text = SOFTMAXES.replace("Softmax (X)", "Softmax (m)").replace("a =", "m = MatMul (X, w) a =", 1)
    original = parse(text.replace("Y = Softmax (d)", "e = Softmax (d) Y = MatMul (e, w)"))
    original.graph.initializer.append(numpy_helper.from_array(2 * np.eye(4, dtype=np.float32), "w"))
    assert count(onnxamp.convert_model(original, lists="conservative")) == 4
    assert count(onnxamp.convert_model(original, lists="conservative", keep_io_types=False)) == 2
    assert count(onnxamp.convert_model(original)) == 2, "the kernels of Softmax accumulate in float32"


# --- 1c: scale and usability --------------------------------------------------------------------------------


@every(name=["external_initializer", "external_constant"])
@levels
def test_37_data_that_is_not_loaded_is_not_relabelled(name: str, level: str) -> None:
    with pytest.raises(ExternalDataError):
        converted(name, level)


def test_39_a_float32_path_is_not_rounded() -> None:
    model = converted("float32_path_through_split", lists="conservative")
    for one in typed(model, "LayerNormalization"):
        assert set(one.inputs) == {SINGLE}
    casts = {node.output[0] for node in model.graph.node if node.op_type == "Cast"}
    assert not [n for n in model.graph.node if n.op_type == "LayerNormalization" and casts & {*n.input}]


def fused(model: ModelProto, path: str) -> dict[str, int]:
    """Fused nodes that ONNX Runtime makes of the model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = path
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ops = [node.op_type for node in onnx.load(path).graph.node]
    return {op: ops.count(op) for op in ("LayerNormalization", "Gelu", "FastGelu", "BiasGelu") if op in ops}


@levels
@every(name=["layer_norm_to_fuse", "skip_layer_norm_to_fuse", "layer_norm_decomposed_in_network"])
def test_40_fusions_survive(name: str, level: str, tmp_path) -> None:
    want = fused(CASES[name].build(), str(tmp_path / "original.onnx"))
    assert fused(converted(name, level), str(tmp_path / "converted.onnx")) == want


@levels
@dtypes
@every(name=["gelu_erf", "gelu_tanh"])
def test_40_written_out_activations_are_cut_at_their_border(name: str, level: str, dtype: str) -> None:
    """The CPU provider fuses in float32 only, so what it would fuse cannot be counted: no Cast may stand inside."""
    inside = typed(converted(name, level, dtype=dtype, fold=False), "Div", "Erf", "Add", "Mul", "Pow", "Tanh")
    assert len({type_ for one in inside for type_ in one.inputs + one.outputs}) == 1


RESIDUAL = CASES["residual_add"]
SUBSETS = list(
    chain.from_iterable(
        combinations(("Add", "Cast", "Constant", "MatMul", "Mul", "Relu", "Tanh"), size) for size in range(8)
    )
)


@pytest.mark.slow
@every(blocked=SUBSETS)
def test_44_every_subset_of_op_types_may_be_blocked(blocked: tuple[str, ...]) -> None:
    original = RESIDUAL.build()
    feeds = draw(original, np.random.default_rng(0), {})
    result = onnxamp.convert_model(original, "O2", black_list=blocked)
    assert judge(original, result, feeds, dtype="float16", keep_io=True) == []
    for one in typed(result, *(set(blocked) - {"Cast", "Constant"})):
        assert LOW not in one.inputs + one.outputs


def test_46_weights_are_halved() -> None:
    model = converted("unused_initializer", "O2")
    assert not [name for name in tensors(model, TensorProto.FLOAT) if name != "unused"]


def test_47_metadata_is_kept() -> None:
    original, model = CASES["metadata"].build(), converted("metadata", "O3")
    assert {entry.key: entry.value for entry in model.metadata_props}.items() >= {
        "sample_rate": "16000",
        "language": "none",
    }.items()
    assert [node.name for node in model.graph.node if node.name.startswith("block/")] == [
        node.name for node in original.graph.node
    ]
