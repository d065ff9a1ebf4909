"""The rows of the field notes that test_field_notes.py does not look at sharply, and that every row has its tests.

A row that concerns conversion is tested by what there is of these: its minimal graphs (tests/graphs; every level, low
type and kind of inputs and outputs, by test_field_notes.py), functions whose names hold its number, golden files.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from conversions import DTYPES, ELEMS, LEVELS, LOWS, SINGLE, all_nodes, converted, count, opset, tensors, typed
from counting import calls
from every import every
from graphs import CASES, Case
from graphs.case import add_weights, parse
from judge_kernels import typed_nodes
from judge_numbers import session
from onnx import ModelProto, TensorProto, numpy_helper
from properties import check_types, graphs

import onnxamp
from onnxamp import OpsetError

ELSEWHERE = {
    33: "validation: test_emulate.py, test_diff.py",
    35: "search: test_tuning.py",
    51: "diagnosis: test_check.py, test_cure.py",
    52: "samples: test_samples.py",
}
"""Rows that do not concern conversion, and who tests them."""
ROWS = frozenset(range(1, 53)) - ELSEWHERE.keys()

levels = every(level=LEVELS)
dtypes = every(dtype=DTYPES)


def of_row(row: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The minimal graphs of a row that can be converted to either low type."""
    return every(case=[case for case in CASES.values() if case.row == row and case.loads and opset(case.build()) >= 13])


def test_every_row_has_a_test_at_every_level() -> None:
    """Rows in the names of functions that take a level and a low type, and rows of graphs, which are converted so."""
    tested = {case.row for case in CASES.values()}
    for function in filter(inspect.isfunction, globals().values()):
        if {"level", "dtype"} <= inspect.signature(inspect.unwrap(function)).parameters.keys():
            tested |= {int(part) for part in function.__name__.split("_") if part.isdigit() and len(part) == 2}
    assert ROWS - tested == set()


def convert(case: Case, level: str, dtype: str, **options: Any) -> ModelProto:
    return converted(case.name, level, dtype=dtype, **options)


MATMULS = """(float[2,4] X) => (float[2,4] Y) {
    a = MatMul (X, w)
    b = NODE
    Y = MatMul (b, w)
}"""


def between_matmuls(node: str, opset: int = 17) -> ModelProto:
    """A node between two white-listed ones."""
    return add_weights(parse(MATMULS.replace("NODE", node), opset), {"w": (4, 4)})


# --- 1a: validity -------------------------------------------------------------------------------------------


@dtypes
@levels
@of_row(13)
def test_13_what_is_left_out_stays_left_out(case: Case, level: str, dtype: str) -> None:
    for old, new in zip(case.build().graph.node, named_like(case, convert(case, level, dtype)), strict=True):
        assert [bool(name) for name in old.input] == [bool(name) for name in new.input]
        assert [bool(name) for name in old.output] == [bool(name) for name in new.output]


def named_like(case: Case, model: ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the result that are not Casts of ours; no case of these rows has Casts."""
    assert not count(case.build())
    return (node for node in model.graph.node if node.op_type != "Cast")


@dtypes
@levels
@of_row(20)
def test_20_declarations_say_what_is(case: Case, level: str, dtype: str) -> None:
    model = convert(case, level, dtype)
    assert list(check_types(model)) == []
    known = {name: kind for one in typed_nodes(model) for name, kind in zip(one.node.output, one.outputs, strict=True)}
    for info in model.graph.value_info:
        assert f"tensor({TensorProto.DataType.Name(info.type.tensor_type.elem_type).lower()})" == known[info.name]


@dtypes
@levels
def test_21_sparse_weights_stay_as_they_are(level: str, dtype: str) -> None:
    model = converted("sparse_initializer", level, dtype=dtype)
    assert list(model.graph.sparse_initializer) == list(CASES["sparse_initializer"].build().graph.sparse_initializer)


@dtypes
@levels
@of_row(23)
def test_23_casts_of_the_user_keep_their_meaning(case: Case, level: str, dtype: str) -> None:
    """A value that the user rounds to float16 is still rounded to it, once: the target "any" would lower all else.

    Casts that nothing reads go.
    """
    original, model = case.build(), convert(case, level, dtype, target="any")
    read = {name for node in all_nodes(original.graph) for name in node.input}
    read |= {entry.name for body in graphs(original) for entry in body.output}
    casts = (node for node in all_nodes(original.graph) if is_cast(node, TensorProto.FLOAT16))
    rounded = {node.input[0] for node in casts if node.output[0] in read}
    have = {node.input[0] for node in all_nodes(model.graph) if is_cast(node, TensorProto.FLOAT16)}
    made_low = {name for one in typed_nodes(model) for name, kind in zip(one.node.output, one.outputs, strict=True)
                if kind == LOWS["float16"]}  # fmt: skip
    assert rounded <= have | made_low


def is_cast(node: onnx.NodeProto, elem: int) -> bool:
    return node.op_type == "Cast" and node.attribute[0].i == elem


# --- 1b: numbers --------------------------------------------------------------------------------------------


@dtypes
@levels
@of_row(28)
def test_28_integers_are_not_rounded(case: Case, level: str, dtype: str) -> None:
    """No low value becomes an integer, an index or an angle."""
    sinks = ("Sin", "Cos", "Floor", "Range", "CumSum", "Mod")
    for one in typed_nodes(convert(case, level, dtype)):
        to_integer = one.node.op_type == "Cast" and one.outputs[0] in ("tensor(int64)", "tensor(int32)")
        if to_integer or one.node.op_type in sinks:
            assert LOWS[dtype] not in one.inputs


@dtypes
@levels
@every(name=["timestep_embedding", "box_coordinates"])
def test_29_coordinates_and_timesteps_stay_float32(name: str, level: str, dtype: str) -> None:
    for one in typed(converted(name, level, dtype=dtype), "Sin", "Cos", "Range"):
        assert LOWS[dtype] not in one.inputs + one.outputs


@dtypes
@levels
@of_row(31)
def test_31_a_tiny_variance_is_guarded_by_the_epsilon(case: Case, level: str, dtype: str) -> None:
    """A variance that vanishes in float16 may do so where the epsilon beside it is what counts."""
    model, before = convert(case, level, dtype), tensors(case.build(), TensorProto.FLOAT)
    low = tensors(model, ELEMS[dtype])
    for one in typed(model, "BatchNormalization"):
        epsilon = next((a.f for a in one.node.attribute if a.name == "epsilon"), 1e-5)
        name = one.node.input[4]
        if name in low:
            np.testing.assert_allclose(low[name].astype(np.float32) + epsilon, before[name] + epsilon, rtol=1e-2)


@dtypes
@levels
@every(name=["residual_add", "if_blocked_inside", "loop_carried", "shared_initializer_of_matmul"])
def test_32_36_a_model_of_which_every_node_is_kept_comes_back(name: str, level: str, dtype: str) -> None:
    original = CASES[name].build()
    result = onnxamp.convert_model(original, level, dtype=dtype, keep_high=[".*"])
    assert result.SerializeToString(deterministic=True) == original.SerializeToString(deterministic=True)


@dtypes
@levels
def test_34_weights_that_the_low_type_holds_convert_exactly(level: str, dtype: str) -> None:
    model = between_matmuls("Relu (a)")
    weight = np.array([[0.5, 1.25, -3, 2**-9]] * 4, np.float32)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    low = tensors(onnxamp.convert_model(model, level, dtype=dtype), ELEMS[dtype])
    assert [array.astype(np.float32).tobytes() for array in low.values()] == [weight.tobytes()]


# --- 1c: scale and usability --------------------------------------------------------------------------------


def calls_of_chain(length: int, level: str, dtype: str) -> int:
    """Function calls that it takes to convert a chain of so many nodes, a quarter of them black-listed."""
    ops = ("MatMul", "Relu", "Softmax", "Add")
    lines = [f"v{k + 1} = {ops[k % 4]} (v{k}{', w' if k % 2 == k % 4 // 2 and ops[k % 4] == 'MatMul' else ''}"
             f"{', w' if ops[k % 4] == 'Add' else ''})" for k in range(length)]  # fmt: skip
    text = "(float[4,4] v0) => (float[4,4] v" + str(length) + ") {" + "\n".join(lines) + "}"
    model = add_weights(parse(text), {"w": (4, 4)})
    return calls(lambda: onnxamp.convert_model(model, level, dtype=dtype))


@pytest.mark.slow
@dtypes
@levels
def test_38_effort_grows_with_the_model_and_not_faster(level: str, dtype: str) -> None:
    calls_of_chain(40, level, dtype)  # fills caches
    one, two, four = (calls_of_chain(length, level, dtype) for length in (100, 200, 400))
    assert (four - two) < 2.2 * (two - one)


@dtypes
@levels
@every(op=["Clip", "MaxPool"])
def test_41_the_targets_kernels_decide(op: str, level: str, dtype: str) -> None:
    """CUDA has no bfloat16 kernel for these; the target "any" asks for none."""
    name = {"Clip": "kernel_clip_opset22", "MaxPool": "kernel_max_pool_opset22"}[op]
    (there,), (anywhere,) = (typed(converted(name, level, dtype=dtype, target=t), op) for t in ("cuda", "any"))
    if dtype == "bfloat16":
        assert there.inputs[0] == SINGLE
    if level == "O3":
        assert anywhere.inputs[0] == LOWS[dtype]


@dtypes
@levels
@every(node=["Max (a, w)", "Min (a, w)", "Abs (a)"])
def test_42_nothing_is_blocked_by_habit(node: str, level: str, dtype: str) -> None:
    """Ops that other tools keep in float32 are low where the target has kernels for them."""
    model = onnxamp.convert_model(between_matmuls(node), level, dtype=dtype)
    (one,) = typed(model, node.split(maxsplit=1)[0])
    assert one.outputs == [LOWS[dtype]]
    assert count(model) == 2


@dtypes
@levels
def test_43_wishes_are_as_fine_as_nodes_and_warn_when_they_match_none(level: str, dtype: str) -> None:
    model = between_matmuls("Tanh (a)")
    for index, node in enumerate(model.graph.node):
        node.name = f"layer/{index}"
    options = {"level": level, "dtype": dtype, "keep_high": ["layer/2"], "force_low": ["layer/1"]}
    first, tanh, last = typed(onnxamp.convert_model(model, **options), "MatMul", "Tanh")
    assert [one.outputs[0] for one in (first, tanh, last)] == [LOWS[dtype], LOWS[dtype], SINGLE]
    assert any("nothing/like/it" in text for text in onnxamp.plan_model(model, keep_high=["nothing/like/it"]).warnings)
    black = typed(onnxamp.convert_model(model, level, dtype=dtype, black_list=["MatMul"]), "MatMul")
    assert {one.outputs[0] for one in black} == {SINGLE}


@dtypes
@levels
def test_48_the_callers_model_is_not_touched(level: str, dtype: str) -> None:
    model = between_matmuls("Softmax (a)")
    before = model.SerializeToString(deterministic=True)
    onnxamp.convert_model(model, level, dtype=dtype, keep_io_types=False, opset=22)
    assert model.SerializeToString(deterministic=True) == before


@dtypes
@levels
def test_49_inputs_and_outputs_are_kept_by_name(level: str, dtype: str) -> None:
    model = onnxamp.convert_model(between_matmuls("Relu (a)"), level, dtype=dtype, keep_io_types=["X"])
    entries = (*model.graph.input, *model.graph.output)
    assert [entry.type.tensor_type.elem_type for entry in entries] == [TensorProto.FLOAT, ELEMS[dtype]]


@dtypes
@levels
def test_50_errors_name_what_where_and_what_to_do(level: str, dtype: str) -> None:
    broken = between_matmuls("Relu (nowhere)")
    broken.graph.node[1].name = "layer/1"
    with pytest.raises(onnxamp.ModelError, match=r"'layer/1' \(Relu\) reads the value 'nowhere'"):
        onnxamp.convert_model(broken, level, dtype=dtype)
    if dtype == "bfloat16":
        with pytest.raises(OpsetError, match=r"opset 12 has no Cast to bfloat16.*--opset 13"):
            onnxamp.convert_model(between_matmuls("Relu (a)", 12), level, dtype=dtype, opset="keep")


# --- found by random models (test_properties.py) ------------------------------------------------------------


def test_08_unsorted_nodes_do_not_end_the_process() -> None:
    """onnx's inference crashes on an EyeLike whose input it has not seen yet; ONNX Runtime loads such files."""
    text = """(float[3,3] X) => (float[3,3] Y) {
        e = EyeLike <dtype = 1> (r)
        r = Relu (X)
        Y = MatMul (e, r)
    }"""
    assert count(onnxamp.convert_model(parse(text), "O3")) >= 2


DOWN = """(float[2] X) => (float[2] Y, float16[2] H) <float[2] w = {1, 2}> {
    H = Cast <to = 10> (w)
    Y = Add (X, w2)
    w2 = Constant <value_floats = [1.0, 2.0]> ()
}"""


@pytest.mark.parametrize("options", [{"level": "O0"}, {"black_list": ["Add", "Cast", "Constant"]}], ids=["O0", "black"])
def test_36_a_weight_that_the_user_casts_stays(options: dict[str, Any]) -> None:
    original = parse(DOWN)
    assert onnxamp.convert_model(original, **options) == original


RETURNED = """(float[2] X, bool C, float16[2] h) => (float[2] Y) <float[2] w = {1, 2}> {
    b = If (C) <then_branch = t () => (float[2] up) { up = Cast <to = 1> (h) },
                else_branch = e () => (float[2] r) { r = Relu (X) }>
    m = Relu (b)
    Y = Cast <to = 1> (d)
    d = Cast <to = 10> (m)
}"""


@every(dtype=["float16"])
@levels
def test_07_a_body_never_returns_a_value_from_outside(level: str, dtype: str) -> None:
    """A Cast of the user's from the low type, which a branch returns, stays where the branch is low."""
    model = onnxamp.convert_model(parse(RETURNED), level, dtype=dtype, target="any")
    (one,) = typed(model, "If")
    for attribute in one.node.attribute:
        made = {name for node in attribute.g.node for name in node.output}
        assert {output.name for output in attribute.g.output} <= made


NESTED = """(float[2] X, bool C) => (float[2] Y, float16[2] Z) <float[2,2] w = {1, 2, 3, 4}> {
    s = Softmax (X)
    m = MatMul (s, w)
    Z = If (C) <then_branch = t () => (float16[2] a) { c = Cast <to = 10> (s)  a = Relu (c) },
                else_branch = e () => (float16[2] b) { d = Cast <to = 10> (X)  b = Neg (d) }>
    Y = Add (m, X)
}"""


@dtypes
@levels
def test_07_a_cast_in_a_body_serves_no_one_twice(level: str, dtype: str) -> None:
    """The value is cast once, outside, for the white-listed reader there and the user's Cast in the branch."""
    model = onnxamp.convert_model(parse(NESTED), level, dtype=dtype, lists="conservative")
    casts = [node.input[0] for node in all_nodes(model.graph) if is_cast(node, TensorProto.FLOAT16)]
    assert casts.count("s") == (1 if level != "O3" or dtype == "bfloat16" else 0)


def test_18_statistics_are_float32_where_nothing_says_so() -> None:
    """Their type follows from an attribute, not from an input: what reads them must know."""
    text = """(float[2,3] X, float[3] w) => (float[2,1] Y) {
        a, mean, deviation = LayerNormalization (X, w)
        Y = CastLike (deviation, deviation)
    }"""
    for keep_io in (True, False):
        model = onnxamp.convert_model(parse(text), "O3", keep_io_types=keep_io)
        onnx.checker.check_model(model, full_check=True)
        assert list(check_types(model)) == []


@every(op=["HannWindow", "HammingWindow", "BlackmanWindow"], opset=[17, 22])
def test_41_a_function_body_of_older_ops_is_no_kernel(op: str, opset: int) -> None:
    """ONNX Runtime expands these where Cos is still what it was when they were written: up to opset 21."""
    text = f"(int64 N, float[6] X) => (float[6] Y) {{ h = {op} <output_datatype = 1> (N)  Y = Mul (h, X) }}"
    model = onnxamp.convert_model(parse(text, opset, ir=10), "O3", target="cpu")
    session(model)
    assert typed(model, op)[0].outputs == [LOWS["float16"] if opset == 17 else SINGLE]


def test_19_mean_variance_normalization_is_float32_alone() -> None:
    """onnx's checker expands its function body, whose constants are float32."""
    text = "(float[1,2,3,3] X) => (float[1,2,3,3] Y) { Y = MeanVarianceNormalization <axes = [0, 2, 3]> (X) }"
    model = onnxamp.convert_model(parse(text, 22, ir=10), "O3", target="any", keep_io_types=False)
    assert typed(model, "MeanVarianceNormalization")[0].inputs == [SINGLE]
    onnx.checker.check_model(model, full_check=True)
