"""The judge accepts good conversions and names what is wrong with bad ones."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from conversions import naive
from every import every
from graphs import CASES, Case
from graphs.case import draw, parse
from judge import check_signature, judge
from judge_kernels import KERNELS, has_kernel, missing_kernels, schema_of
from judge_numbers import low_feeds, run_original, trusted
from onnx import ModelProto, TensorProto, numpy_helper

NETWORK = """(float[2,3] X) => (float[2,3] Y) <float[3,3] w = {0.5, 1.0, 2.0, -1.0, 0.25, 3.0, 1.5, -2.0, 0.1}> {
    m = MatMul (X, w)
    Y = Softmax (m)
}"""
LOWERED = """(float[2,3] X) => (float[2,3] Y) {
    x = Cast <to = 10> (X)
    m = MatMul (x, w)
    s = Cast <to = 1> (m)
    Y = Softmax (s)
}"""


def half(model: ModelProto, *names: str) -> ModelProto:
    """The model with weights of float16, taken from ``NETWORK`` and named."""
    weight = numpy_helper.to_array(parse(NETWORK).graph.initializer[0])
    for name in names:
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float16), name))
    return model


def verdict(original: ModelProto, converted: ModelProto, keep_io: bool = True, **arguments) -> list[str]:
    """Complaints, each cut to its kind."""
    feeds = arguments.pop("feeds", None) or draw(original, np.random.default_rng(1), {})
    arguments.setdefault("dtype", "float16")
    return [text.split(":")[0] for text in judge(original, converted, feeds, keep_io=keep_io, **arguments)]


@pytest.mark.slow
@every(case=CASES.values(), parts=2)
def test_every_case_is_its_own_good_conversion(case: Case) -> None:
    model, copy = case.build(), case.build()
    assert model == copy, "the case must build the same model every time"
    found = judge(
        model,
        copy,
        case.inputs(),
        dtype="float16",
        keep_io=True,
        tolerance=case.tolerance,
        loose_integers=case.loose_integers,
        before=model.SerializeToString(),
        again=lambda again: again,
    )
    assert found == []
    assert case.loads == (run_original(model, case.inputs()) is not None)


def test_the_rows_are_covered() -> None:
    assert {*range(1, 32), 37, 39, 40, 41, 44, 45, 46, 47} <= {case.row for case in CASES.values()}


def test_accepts_a_good_conversion() -> None:
    good = half(parse(LOWERED), "w")
    assert verdict(parse(NETWORK), good, again=lambda model: model) == []


def test_accepts_a_good_conversion_with_low_inputs_and_outputs() -> None:
    good = half(
        parse("""(float16[2,3] X) => (float16[2,3] Y) {
            m = MatMul (X, w)
            s = Cast <to = 1> (m)
            p = Softmax (s)
            Y = Cast <to = 10> (p)
        }"""),
        "w",
    )
    assert verdict(parse(NETWORK), good, keep_io=False) == []


def test_type_error() -> None:
    """The weight is float16, but the Cast in front of its consumer was forgotten."""
    bad = half(parse(NETWORK.replace("<float[3,3] w", "<float[3,3] v")), "w")
    assert set(verdict(parse(NETWORK), bad)) - {"kernel"} == {"checker", "inference", "load"}


def test_missing_cast_behind() -> None:
    text = LOWERED.replace("s = Cast <to = 1> (m)", "s = Identity (m)")
    assert {"checker", "inference"} <= set(verdict(parse(NETWORK), half(parse(text), "w")))


def test_type_error_inside_a_branch() -> None:
    text = """(bool C, float[2,2] X) => (float[2,2] Y) {
        Y = If (C) <
            then_branch = t () => (float[2,2] a) { a = Exp (X) },
            else_branch = e () => (float[2,2] b) { b = ELSE }
        >
    }"""
    original = parse(text.replace("ELSE", "Relu (X)"))
    bad = parse(text.replace("ELSE", "Cast <to = 10> (X)"))
    assert {"checker", "inference"} <= set(verdict(original, bad))


@pytest.mark.parametrize(
    ("signature", "keep_io"),
    [
        ("(float16[2,3] X) => (float[2,3] Y)", True),
        ("(float[2,3] X) => (float16[2,3] Y)", True),
        ("(float[N,3] X) => (float[2,3] Y)", True),
        ("(float[2,3] x) => (float[2,3] Y)", True),
        ("(float[2,3] X) => (float[2,3] Y, float[2,3] X)", True),
        ("(float[2,3] X) => (float[2,3] Y)", False),
        ("(float16[2,3] X) => (float[2,3] Y)", False),
    ],
)
def test_changed_signature(signature: str, keep_io: bool) -> None:
    bad = parse(NETWORK)
    bad.graph.ClearField("input")
    bad.graph.ClearField("output")
    shown = parse(f"{signature} {{ }}")
    bad.graph.input.extend(shown.graph.input)
    bad.graph.output.extend(shown.graph.output)
    found = signature_verdict(parse(NETWORK), bad, keep_io)
    assert "signature" in found


def signature_verdict(original: ModelProto, converted: ModelProto, keep_io: bool) -> list[str]:
    return [text.split(":")[0] for text in check_signature(original, converted, "float16", keep_io=keep_io)]


def test_swapped_outputs() -> None:
    text = "(float[2,3] X) => (OUTPUTS) { A = Exp (X) B = Relu (X) }"
    original = parse(text.replace("OUTPUTS", "float[2,3] A, float[2,3] B"))
    bad = parse(text.replace("OUTPUTS", "float[2,3] B, float[2,3] A"))
    assert "signature" in signature_verdict(original, bad, True)


def test_overflow() -> None:
    text = "(float[4] X) => (float[4] Y) { CASTS a = Mul (x, k) b = Mul (a, l) BACK }"
    constants = {"k": 1e4, "l": 1e-4}
    original = parse(text.replace("CASTS", "").replace("BACK", "").replace("x,", "X,").replace("b =", "Y ="))
    bad = parse(text.replace("CASTS", "x = Cast <to = 10> (X)").replace("BACK", "Y = Cast <to = 1> (b)"))
    for name, value in constants.items():
        original.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
        bad.graph.initializer.append(numpy_helper.from_array(np.float16(value), name))
    feeds = {"X": np.array([10, 20, -30, 1], np.float32)}
    assert verdict(original, bad, feeds=feeds) == ["numbers"]


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm_pow",  # zeros, nothing infinite
        "layer_norm_decomposed",
        "mask_lowest",  # 0 * -inf
        "mask_lowest_table",
        "epsilon_clip",  # 0 / 0
        "epsilon_log_direct",
        "tiny_divisor",
        "softmax_by_hand",
        "log_sum_exp",
        "large_constant",
    ],
)
def test_naive_conversions_compute_nonsense(name: str) -> None:
    case = CASES[name]
    found = verdict(case.build(), naive(case), feeds=case.inputs(), tolerance=case.tolerance)
    assert found == ["numbers"]


def test_naive_conversion_loses_integers() -> None:
    case = CASES["index_from_cumsum"]
    bad = parse("""(float[N] X) => (int64[N] I) <int64 a = {0}> {
        x = Cast <to = 10> (X)
        c = CumSum (x, a)
        I = Cast <to = 7> (c)
    }""")
    assert verdict(case.build(), bad, feeds=case.inputs()) == ["numbers"]


def test_lost_infinity() -> None:
    text = "(bool[2] C, float[2] X) => (float[2] Y) <float i = {INF}> { Y = Where (C, X, i) }"
    feeds = {"C": np.array([True, False]), "X": np.ones(2, np.float32)}
    bad = parse(text.replace("INF", "-65504.0"))
    assert verdict(parse(text.replace("INF", "-inf")), bad, feeds=feeds) == ["numbers"]


def test_cast_pair() -> None:
    text = LOWERED.replace("Y = Softmax (s)", "d = Cast <to = 10> (s) u = Cast <to = 1> (d) Y = Softmax (u)")
    assert verdict(parse(NETWORK), half(parse(text), "w")) == ["casts"]


def test_cast_down_and_up_again() -> None:
    """Nothing but rounding: what a converter leaves around a blocked op."""
    text = NETWORK.replace("Y = Softmax (m)", "d = Cast <to = 10> (m) u = Cast <to = 1> (d) Y = Softmax (u)")
    assert verdict(parse(NETWORK), parse(text)) == ["casts"]


def test_duplicate_cast() -> None:
    original = parse("(float[2,3] X) => (float[2,3] Y) { a = MatMul (X, w) b = MatMul (X, v) Y = Add (a, b) }")
    weight = numpy_helper.to_array(parse(NETWORK).graph.initializer[0])
    for name in "wv":
        original.graph.initializer.append(numpy_helper.from_array(weight, name))
    bad = parse("""(float[2,3] X) => (float[2,3] Y) {
        x = Cast <to = 10> (X)
        z = Cast <to = 10> (X)
        a = MatMul (x, w)
        b = MatMul (z, v)
        c = Add (a, b)
        Y = Cast <to = 1> (c)
    }""")
    assert verdict(original, half(bad, "w", "v")) == ["casts"]


def test_duplicate_cast_in_branches() -> None:
    text = """(bool C, float[2,2] X) => (float[2,2] Y) {
        Y = If (C) <
            then_branch = t () => (float[2,2] a) { FIRST },
            else_branch = e () => (float[2,2] b) { SECOND }
        >
    }"""
    original = parse(text.replace("FIRST", "a = Relu (X)").replace("SECOND", "b = Relu (X)"))
    bad = text
    for key, name in (("FIRST", "a"), ("SECOND", "b")):
        low = f"x{name} = Cast <to = 10> (X) r{name} = Relu (x{name}) {name} = Cast <to = 1> (r{name})"
        bad = bad.replace(key, low)
    assert verdict(original, parse(bad)) == ["casts"]


needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the dump of the registries is not here")


@needs_kernels
@pytest.mark.parametrize(
    ("op", "opset", "elem", "missing"),
    [
        ("Clip", 22, 16, False),  # no kernel, but a function body: without bounds, Identity
        ("Relu", 22, 16, False),
        ("Clip", 22, 10, False),
        ("Clip", 11, 10, True),
        ("GlobalAveragePool", 22, 16, True),
        ("Elu", 22, 10, False),  # no kernel in float32 either: it goes to the CPU anyway
    ],
)
def test_kernels(op: str, opset: int, elem: int, missing: bool) -> None:
    text = "(float[1,2,3] X) => (float[1,2,D] Y) { x = Cast <to = ELEM> (X) y = OP (x) Y = Cast <to = 1> (y) }"
    model = parse(text.replace("OP", op).replace("ELEM", str(elem)), opset, 10)
    assert bool(missing_kernels(model)) == missing
    original = parse(f"(float[1,2,3] X) => (float[1,2,D] Y) {{ Y = {op} (X) }}", opset, 10)
    found = verdict(original, model, dtype="bfloat16" if elem == 16 else "float16")
    assert found == (["kernel"] if missing else [])


@needs_kernels
@pytest.mark.parametrize(("opset", "missing"), [(13, ["Less", "Where"]), (22, ["Less"])])
def test_kernels_of_a_function_body(opset: int, missing: list[str]) -> None:
    """CUDA has no bfloat16 Clip, and its body needs Less and Where (bfloat16 from opset 16 on)."""
    text = "(float[4] X) => (float[4] Y) { x = Cast <to = 16> (X) y = Clip (x, low, high) Y = Cast <to = 1> (y) }"
    model = parse(text, opset, 10)
    for name in ("low", "high"):
        model.graph.initializer.append(onnx.helper.make_tensor(name, TensorProto.BFLOAT16, [], [1.0]))
    assert sorted({key.split("-")[0] for key in missing_kernels(model)}) == missing


@needs_kernels
def test_an_open_ended_row_matches_its_own_version_only() -> None:
    half_elu = {"T": {"tensor(float16)"}}
    assert has_kernel("", "Elu", schema_of("", "Elu", 21).since_version, half_elu)
    assert not has_kernel("", "Elu", schema_of("", "Elu", 22).since_version, half_elu)


@needs_kernels
def test_kernels_behind_an_op_that_onnx_does_not_know() -> None:
    text = "(float[2,3] X) => (float[2,3] Y) { x = Cast <to = 16> (X) g = com.microsoft.Gelu (x) c = Ceil (g) }"
    model = parse(text.replace("c =", "Y ="), 17, 8, {"com.microsoft": 1})
    assert [key.split("-")[0] for key in missing_kernels(model)] == ["Ceil"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: model.ClearField("metadata_props"),
        lambda model: model.graph.ClearField("metadata_props"),
        lambda model: model.ClearField("producer_name"),
        lambda model: model.graph.ClearField("doc_string"),
        lambda model: model.graph.node[0].ClearField("metadata_props"),
        lambda model: model.graph.node[1].ClearField("doc_string"),
        lambda model: model.opset_import.pop(),
        lambda model: setattr(model, "ir_version", 9),
    ],
)
def test_lost_metadata(damage: Callable[[ModelProto], object]) -> None:
    case = CASES["metadata"]
    bad = case.build()
    damage(bad)
    assert verdict(case.build(), bad) == ["metadata"]


def test_lost_denotation() -> None:
    case = CASES["metadata"]
    bad = case.build()
    bad.graph.input[0].type.ClearField("denotation")
    assert verdict(case.build(), bad) == ["signature"]


def test_changed_input() -> None:
    model = parse(NETWORK)
    before = model.SerializeToString()
    model.doc_string = "changed"
    assert verdict(model, model, before=before) == ["input"]


def test_second_conversion_differs() -> None:
    def again(model: ModelProto) -> ModelProto:
        result = ModelProto()
        result.CopyFrom(model)
        result.graph.node.add(op_type="Relu", input=["X"], output=["unused"])
        return result

    assert verdict(parse(NETWORK), parse(NETWORK), again=again) == ["idempotent"]


def test_model_that_does_not_load() -> None:
    """Two nodes of one name: the checker accepts it, ONNX Runtime does not."""
    bad = half(parse(LOWERED), "w")
    for node in bad.graph.node:
        node.name = "same"
    assert "load" in verdict(parse(NETWORK), bad)


def test_wrong_integers() -> None:
    text = "(float[3] X) => (int64[K] I) <int64[1] k = {K}> { V, I = TopK (X, k) }"
    feeds = {"X": np.array([1, 3, 2], np.float32)}
    original = parse(text.replace("{K}", "{2}"))
    bad = parse(text.replace("{K}", "{2}").replace("TopK", "TopK <largest = 0>"))
    assert verdict(original, bad, feeds=feeds) == ["numbers"]
    assert verdict(original, bad, feeds=feeds, loose_integers=True) == []
    assert verdict(original, parse(text.replace("{K}", "{1}")), feeds=feeds, loose_integers=True) == ["numbers"]


def test_feeds_follow_the_signature() -> None:
    model = parse("(float16[2] X, int64[2] I, float[2] F) => (float16[2] Y) { Y = Relu (X) }")
    value = np.array([0.1, 70000], np.float32)
    feeds = {"X": value, "I": np.array([1, 2]), "F": value}
    given = low_feeds(model, feeds)
    assert [array.dtype.name for array in given.values()] == ["float16", "int64", "float32"]
    rounded = low_feeds(model, feeds, as_float32=True)
    assert rounded["X"].dtype == np.float32
    assert rounded["X"][0] == np.float16(0.1)


@pytest.mark.parametrize(("name", "expected"), [("gelu_erf", True), ("loop_carried", False)])
def test_the_evaluator_is_trusted_only_where_it_agrees(name: str, expected: bool) -> None:
    """It joins the scan outputs of a Loop along the wrong axis."""
    case = CASES[name]
    reference = run_original(case.build(), case.inputs())
    assert trusted(case.build(), case.inputs(), reference) == expected
