"""The user's lists: what they lower, what stands against them, and what is said of it."""

import warnings
from typing import Any

import onnx.defs
import pytest
from graphs.case import parse
from onnx import ModelProto
from repository import ROOT

import onnxamp
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.targets import with_kernels
from onnxamp._options.lists import PRESETS, framework_names, ops_named, preset

ENCODER = ROOT / "models" / "encoder.onnx"
DECODER = ROOT / "models" / "decoder.onnx"
ELEMENTWISE = """(float[N,4] X) => (float[N,4] Y) {{
    [a] a = Add (X, X) [b] b = {op} (a) [y] Y = Add (b, b) }}"""


def low_ops(plan: onnxamp.Plan) -> set[str]:
    return {op for op, low in plan.counts() if low} - {"initializer", "Constant"}


def said(function: Any, *arguments: Any, **options: Any) -> list[str]:
    """What a call warns of; each warning points at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments, **options)
    assert {item.filename for item in caught} <= {__file__}
    assert {item.category for item in caught} <= {onnxamp.OptionWarning}
    return [str(item.message) for item in caught]


@pytest.mark.parametrize("op", ["Softmax", "Erf", "Sigmoid", "Relu", "Exp", "Flatten", "Identity", "Neg"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_listed_becomes_low(op: str, level: str) -> None:
    plan = onnxamp.plan_model(parse(ELEMENTWISE.format(op=op)), level, white_list=[op], black_list=["Add"])
    assert plan.counts()[op, True] == 1
    assert plan.counts()["Add", False] == 2
    assert next(row.reason for row in plan.rows if row.op == op) == "white list"


@pytest.mark.parametrize(("path", "op", "others"), [
    (ENCODER, "Softmax", {"Mul", "Add"}),  # the mask goes with its Softmax
    (ENCODER, "Erf", set()),  # and not the rest of its Gelu
    (DECODER, "Sigmoid", set()),
])  # fmt: skip
def test_lists_beat_ties_of_preference(path: Any, op: str, others: set[str]) -> None:
    plan = onnxamp.plan_model(path, "O1", white_list=[op], black_list=["MatMul", "Gemm"])
    assert plan.counts()[op, True] == 2
    assert plan.counts()[op, False] == 0
    assert low_ops(plan) <= {op} | others


def test_a_batch_norm_is_low_without_its_convolution() -> None:
    path = ROOT / "models" / "classifier.onnx"
    plan = onnxamp.plan_model(path, "O1", white_list=["BatchNormalization"], black_list=["Conv"])
    assert plan.counts()["BatchNormalization", False] == plan.counts()["Conv", True] == 0


def test_listed_nodes_give_way_to_overrides() -> None:
    model = parse(ELEMENTWISE.format(op="Sigmoid"))
    assert onnxamp.plan_model(model, white_list=["Sigmoid"], keep_high=["b"]).counts()["Sigmoid", False] == 1


@pytest.mark.parametrize("op", ["Det", "Unique", "com.microsoft.Inverse"])
def test_what_ties_and_ill_conditioned_matrices_change_stays_float32(op: str) -> None:
    """Rounded elements that become equal are one to Unique; an inverse is off by the condition times the rounding."""
    plan = onnxamp.plan_model(parse(f"(float[4,4] X) => (float Y) {{ a = Sigmoid (X) b = {op} (a) Y = Relu (b) }}"))
    name = op.replace(".Inverse", "::Inverse")
    assert plan.counts()[name, False] == 1
    assert next(row.reason for row in plan.rows if row.op == name) == "black list"


def test_o0_lowers_nothing() -> None:
    assert said(onnxamp.convert_model, ENCODER, "O0", white_list=["Pow"]) == []
    assert low_ops(onnxamp.plan_model(ENCODER, "O0", white_list=["MatMul"])) == set()


def test_plans_repeat_lists(tmp_path: Any) -> None:
    plan = onnxamp.plan_model(ENCODER, "O1", white_list=["Erf", "nn.Softmax"])
    plan.save(tmp_path / "plan.json")
    loaded = onnxamp.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    wanted = onnxamp.convert_model(ENCODER, "O1", white_list=["Erf", "Softmax"])
    assert onnxamp.apply_plan(ENCODER, loaded) == wanted


# --- what stands against a list ---------------------------------------------------------------------------------


AGAINST = {
    "hazard": (
        (ENCODER,), {"white_list": ["ReduceSum", "Sqrt"]},
        ("Sqrt of your white list stays in float32 at 'embeddings/norm/deviation' and 4 more: part of a decomposed op"
        " whose intermediate values exceed the range of low precision: part of the normalization around"
        " 'embeddings/norm/deviation'. force_low (--force-low) lowers it anyway."),
    ),
    "kernel": (
        (parse("(float[N] X) => (float[N] Y) <float low = {0}> { [here] Y = Clip (X, low) }"),),
        {"white_list": ["Clip"], "dtype": "bfloat16"},
        ("Clip of your white list stays in float32 at 'here': no bfloat16 kernel for Clip (opset 13) on cuda."
        " Another target (--target) or opset (--opset) may have one."),
    ),
    "schema": (
        (parse("(float[N,3] X) => (float[N,3] Y) { [here] Y = MeanVarianceNormalization <axes = [0]> (X) }"),),
        {"white_list": ["MeanVarianceNormalization"]},
        ("MeanVarianceNormalization of your white list stays in float32 at 'here': schema: its input must not be"
        " rounded."),
    ),
    "schema of an old opset": (
        (parse("(float[N] X) => (float[N] Y) { [here] Y = Selu (X) }", opset=21),),
        {"white_list": ["Selu"], "dtype": "bfloat16"},
        "Selu of your white list stays in float32 at 'here': schema: opset 6 does not allow bfloat16.",
    ),
    "unknown schema": (
        (parse("(float[N] X) => (float[N] Y) { [here] Y = own.Op (X) }"),),
        {"white_list": ["own::Op"]},
        ("own::Op of your white list stays in float32 at 'here': schema: its schema, or that of an op around it,"
         " is unknown."),
    ),
    "a tie": (
        (parse("""(float[2,2] X, int64 i) => (float[2,2] Y) {
            [one] s = SequenceConstruct (X) [two] Y = SequenceAt (s, i) }"""),),
        {"white_list": ["SequenceAt"], "black_list": ["SequenceConstruct"]},
        (
            "SequenceAt of your white list stays in float32 at 'two': on the black list: SequenceConstruct"
            " (shares its precision)."
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "options", "sentence"), AGAINST.values(), ids=AGAINST)
def test_what_stands_against_a_list_is_said(model: Any, options: dict[str, Any], sentence: str) -> None:
    plan = onnxamp.plan_model(*model, "O1", **options)
    about = [warning for warning in plan.warnings if "stays in float32" in warning]
    assert about == [sentence]
    assert [text for text in said(onnxamp.convert_model, *model, "O1", **options) if text in about] == about


@pytest.mark.slow
def test_files_warn_as_models_do(tmp_path: Any) -> None:
    options = {"white_list": ["Pow", "Sofmax"], "fold": False}
    found = said(onnxamp.convert_file, ENCODER, tmp_path / "low.onnx", "O2", **options)
    assert found == said(onnxamp.convert_model, ENCODER, "O2", **options)
    assert [text.split()[0] for text in found] == ["The", "Your", "Pow"]


@pytest.mark.slow
def test_folders_warn_of_names_that_no_model_has(tmp_path: Any) -> None:
    (tmp_path / "in").mkdir()
    onnx.save(parse(ELEMENTWISE.format(op="Sigmoid")), tmp_path / "in" / "one.onnx")
    found = said(
        onnxamp.convert_folder, tmp_path / "in", tmp_path / "out", jobs=1, validate=False, white_list=["Sigmoi"]
    )
    sentence = "The op type 'Sigmoi' in your lists does not occur in the model. Did you mean 'Sigmoid'?"
    assert found == [sentence]
    again = onnxamp.convert_folder(tmp_path / "in", tmp_path / "out", jobs=1, validate=False, white_list=["Sigmoi"])
    assert (again.count("up to date"), len(again.unmatched)) == (1, 1)


def test_tuning_warns() -> None:
    options = {"white_list": ["Sigmoi"], "tolerance": 0.1}
    model = parse(ELEMENTWISE.format(op="Sigmoid"))
    assert len(said(onnxamp.tune_model, model, **options)) == 1
    assert len(said(onnxamp.convert_model, model, "auto", **options)) == 1


def test_wishes_for_single_nodes_are_no_news() -> None:
    model = parse(ELEMENTWISE.format(op="Sigmoid"))
    assert said(onnxamp.convert_model, model, white_list=["Sigmoid"], keep_high=["b"]) == []


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "nearest"), [("Sofmax", "Softmax"), ("convv2d", "conv2d"), ("MatMull", "MatMul"),
                                               ("com.microsoft::Atention", "com.microsoft::Attention")])  # fmt: skip
def test_unknown_names_warn_with_the_nearest(name: str, nearest: str) -> None:
    sentence = f"The op type {name!r} in your lists does not occur in the model. Did you mean {nearest!r}?"
    for option in ("white_list", "black_list"):
        assert said(onnxamp.convert_model, ENCODER, **{option: [name]}) == [sentence]
    assert said(onnxamp.convert_model, ENCODER, white_list=["qqqqq"]) == [
        "The op type 'qqqqq' in your lists does not occur in the model."
    ]


def test_known_names_that_do_not_occur_are_no_slips() -> None:
    assert said(onnxamp.convert_model, ENCODER, white_list=["LSTM", "Dense", "conv2d", "com.microsoft::Gelu"]) == []


def test_own_ops_are_known() -> None:
    model = parse("(float[N] X) => (float[N] Y) { [here] a = own.Op (X) Y = Relu (a) }")
    assert said(onnxamp.convert_model, model, black_list=["own::Op"]) == []


def test_what_a_list_takes_off_the_black_list_is_said() -> None:
    found = said(onnxamp.convert_model, ENCODER, "O2", white_list=["Softmax", "Gelu"])
    assert found == ["Your white list removes Softmax from the black list of 'default'."]
    assert said(onnxamp.convert_model, ENCODER, "O3", white_list=["Softmax"]) == []
    assert said(onnxamp.convert_model, ENCODER, "O2", lists="mindspore", white_list=["Softmax"]) == []


@pytest.mark.parametrize(("name", "op"), [
    ("Conv2D", "Conv"), ("Conv2d", "Conv"), ("conv2d", "Conv"), ("matmul_v2", "MatMul"), ("mul", "MatMul"),
    ("BatchNorm2d", "BatchNormalization"), ("BatchNorm2D", "BatchNormalization"), ("Dense", "Gemm"),
    ("softmax_with_cross_entropy", "LogSoftmax"), ("paddle.nn.LayerNorm", "LayerNormalization"), ("ops.ReLU", "Relu"),
])  # fmt: skip
def test_names_of_frameworks(name: str, op: str) -> None:
    assert op in ops_named(name)
    assert op in onnxamp.Options("O1", white_list=[name]).white
    assert op not in onnxamp.Options("O1", lists="mindspore", black_list=[name]).white
    with pytest.raises(onnxamp.ContradictionError, match=op):
        onnxamp.Options("O1", white_list=[name], black_list=[op])


def test_names_of_frameworks_mean_ops_and_are_none() -> None:
    standard = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain}
    known = standard.union(*(kernel_table(provider) for provider in with_kernels()))
    for name, ops in framework_names().items():
        assert name not in standard
        assert ops, name
        assert known.issuperset(ops), name
    names = [name for lists in PRESETS for name in preset(lists).names]
    assert len(names) == len(set(names))


def test_a_string_is_no_list() -> None:
    for option in ("white_list", "black_list"):
        for function in (onnxamp.convert_model, onnxamp.plan_model):
            with pytest.raises(onnxamp.ArgumentTypeError, match=f"{option} must be a list of names, not str"):
                function(ENCODER, **{option: "Softmax"})


def test_training_lists_nothing_of_its_own() -> None:
    from onnxamp.train import SGD, build_train_network

    model: ModelProto = onnx.load(ROOT / "models" / "classifier.onnx")
    assert said(build_train_network, model, SGD(), "cross-entropy", "O3") == []
