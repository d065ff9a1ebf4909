"""The Python interface: signatures, what goes in and comes out, and errors that name what, where and what to do."""

import inspect
import re
from dataclasses import fields
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args, get_type_hints

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir
import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto
from repository import ROOT

import onnxamp
from onnxamp import OnnxAmpError
from onnxamp._facts.dtypes import DtypeName
from onnxamp._facts.tables import target_names
from onnxamp._options.lists import PresetName
from onnxamp._options.options import OptionKeywords, Options
from onnxamp._options.values import Level, LevelName

MODELS = ROOT / "models"
TEXT = """(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}> {
    [first] h = MatMul (X, w)
    [second] s = Softmax (h)
    [third] Y = MatMul (s, w)
}"""


@pytest.fixture
def model() -> ModelProto:
    return parse(TEXT)


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def weight_types(model: ModelProto) -> set[int]:
    return {tensor.data_type for tensor in model.graph.initializer}


# --- signatures -------------------------------------------------------------------------------------------------


def test_convert_model_signature() -> None:
    wanted = "(model, level='O2', *, tolerance=None, samples=None, metric='auto', **options)"
    assert bare(onnxamp.convert_model) == wanted


def test_keywords_are_the_fields_of_the_options() -> None:
    """Type checkers know the keywords of a TypedDict alone: it holds what Options has."""
    keywords = get_type_hints(OptionKeywords)
    assert [*keywords] == [item.name for item in fields(Options) if item.name != "level"], (
        "the fields of Options and OptionKeywords (onnxamp/_options/options.py) differ in names or order"
    )
    for name, literal in (("dtype", DtypeName), ("lists", PresetName)):
        assert keywords[name] == literal or literal in get_args(keywords[name])
        assert all(Options.of("O2", {name: value}) for value in get_args(literal))
    assert list(get_args(LevelName)) == list(Level)


def test_convert_model_describes_every_option() -> None:
    """The reference shows its docstring."""
    described = re.findall(r"^    (\w+(?:, \w+)*):", getdoc(onnxamp.convert_model) or "", re.MULTILINE)
    named = {name for names in described for name in names.split(", ")}
    missing = [item.name for item in fields(Options) if item.name not in named]
    assert missing == [], "describe them in the docstring of convert_model (onnxamp/_job/api.py)"


@pytest.mark.parametrize("target", target_names())
def test_every_target_is_known_everywhere(target: str, model: ModelProto) -> None:
    """In the tables of kernels and costs, and so to what converts for it."""
    assert onnxamp.plan_model(model, target=target).target == target
    assert onnxamp.audit_model(model, target).target == target


@pytest.mark.parametrize("option", ["hazards", "strict", "keep_functions", "split_k", "fold", "rescale"])
def test_switches_are_bools(option: str, model: ModelProto) -> None:
    """The text "no" counts as true in Python."""
    for wrong in ("no", 0, [], "off"):
        with pytest.raises(
            onnxamp.ArgumentTypeError, match=rf"{option} must be a bool.*, not {re.escape(repr(wrong))}"
        ):
            onnxamp.plan_model(model, **{option: wrong})
    assert getattr(Options.of("O2", {option: np.True_}), option) is True


def test_what_is_no_plan_is_not_applied(model: ModelProto) -> None:
    with pytest.raises(onnxamp.ArgumentTypeError, match="must be one that plan_model or load_plan returns, not str"):
        onnxamp.apply_plan(model, "plan.json")  # type: ignore[type-var]


def test_a_misspelled_option_names_the_nearest_one() -> None:
    for function in (onnxamp.convert_model, onnxamp.plan_model):
        with pytest.raises(onnxamp.ArgumentTypeError, match="Unknown option 'keep_hihg': did you mean 'keep_high'"):
            function("no.onnx", keep_hihg=["a"])


def test_entry_points_of_mindspore() -> None:
    wanted = "(network, amp_level='O0', dtype='float16', *, lists='mindspore')"
    assert bare(onnxamp.auto_mixed_precision) == wanted
    wanted = "(network, *, white_list=None, black_list=None, dtype='float16')"
    assert bare(onnxamp.custom_mixed_precision) == wanted
    assert bare(onnxamp.get_white_list) == bare(onnxamp.get_black_list) == "(lists='mindspore')"


def bare(function: Any) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_plan_model_takes_the_same_wishes(model: ModelProto) -> None:
    wishes = {
        name: parameter.default
        for name, parameter in inspect.signature(onnxamp.convert_model).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert onnxamp.plan_model(model, **wishes) == onnxamp.plan_model(model)


# --- what goes in and comes out ---------------------------------------------------------------------------------


def test_takes_a_proto_a_path_and_a_string(tmp_path: Path, model: ModelProto) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    results = [onnxamp.convert_model(given) for given in (model, path, str(path))]
    assert all(isinstance(result, ModelProto) for result in results)
    assert results[0] == results[1] == results[2]
    assert weight_types(results[0]) == {TensorProto.FLOAT16}


def test_takes_a_graphsurgeon_graph(model: ModelProto) -> None:
    graph = gs.import_onnx(model)
    before = [(node.op, [tensor.name for tensor in node.inputs]) for node in graph.nodes]
    result = onnxamp.convert_model(graph)
    assert isinstance(result, gs.Graph)
    assert [node.op for node in result.nodes] == ["Cast", "MatMul", "Softmax", "MatMul", "Cast"]
    assert before == [(node.op, [tensor.name for tensor in node.inputs]) for node in graph.nodes]
    assert {tensor.dtype for tensor in graph.tensors().values() if isinstance(tensor, gs.Constant)} == {
        np.dtype("float32")
    }
    assert ops(gs.export_onnx(result)) == ops(onnxamp.convert_model(model))


def test_a_graph_may_be_planned(model: ModelProto) -> None:
    assert onnxamp.plan_model(gs.import_onnx(model)).casts == 2


@pytest.mark.mostly_slow(fast=12)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("path", sorted(MODELS.glob("*.onnx")), ids=lambda path: path.stem)
def test_the_input_is_never_changed(path: Path, level: str) -> None:
    original = onnx.load(path)
    before = original.SerializeToString(deterministic=True)
    onnxamp.convert_model(original, level)
    onnxamp.plan_model(original, level)
    assert original.SerializeToString(deterministic=True) == before


def test_the_result_shares_nothing_with_the_input(model: ModelProto) -> None:
    result = onnxamp.convert_model(model, "O0")
    assert result is not model
    result.graph.node[0].name = "changed"
    assert model.graph.node[0].name == "first"


def test_results_are_deterministic() -> None:
    original = onnx.load(MODELS / "decoder.onnx")
    first, second = (onnxamp.convert_model(original).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_every_level_and_type() -> None:
    found = {
        (level, dtype): weight_types(onnxamp.convert_model(parse(TEXT), level, dtype=dtype))
        for level in ("O0", "O1", "O2", "O3")
        for dtype in ("float16", "bfloat16")
    }
    for (level, dtype), types in found.items():
        assert types == {TensorProto.FLOAT if level == "O0" else TensorProto.DataType.Value(dtype.upper())}


FORMS = {
    "float16": (np.float16, np.dtype("float16"), TensorProto.FLOAT16, onnx_ir.DataType.FLOAT16, np.int64(10)),
    "bfloat16": (
        ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16, onnx_ir.DataType.BFLOAT16,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_types_come_in_any_form(model: ModelProto, name: str, form: Any) -> None:
    assert onnxamp.Options("O2", dtype=form).dtype == name
    assert onnxamp.convert_model(model, dtype=form) == onnxamp.convert_model(model, dtype=name)
    assert onnxamp.amp.auto_mixed_precision(model, "O1", form) == onnxamp.amp.auto_mixed_precision(model, "O1", name)


def test_sequences_of_names_may_be_of_any_kind(model: ModelProto) -> None:
    wanted = onnxamp.convert_model(model, black_list=["MatMul"], keep_high=["first"])
    for kind in (tuple, set, frozenset, iter):
        assert onnxamp.convert_model(model, black_list=kind(["MatMul"]), keep_high=kind(["first"])) == wanted


# --- errors -----------------------------------------------------------------------------------------------------

BAD_VALUES = {
    "level": ({"level": "O4"}, "O4"),
    "tolerance without data": ({"tolerance": 1e-3}, "tolerance is only for level 'auto', not for 'O2'"),
    "tolerance": ({"level": "auto", "tolerance": -1.0}, "-1.0"),
    "metric": ({"level": "auto", "metric": "loudness"}, "loudness"),
    "dtype": ({"dtype": "float8"}, "float8"),
    "dtype float32": ({"dtype": np.float32}, "Unknown dtype 'float32': choose one of float16, bfloat16."),
    "dtype float32 of ONNX": ({"dtype": TensorProto.FLOAT}, "float32"),
    "target": ({"target": "npu"}, "npu"),
    "lists": ({"lists": "tensorrt"}, "tensorrt"),
    "both lists": ({"white_list": ["MatMul", "Conv"], "black_list": ["MatMul"]}, "MatMul"),
    "pattern": ({"keep_high": ["(unbalanced"]}, "(unbalanced"),
    "opset too new": ({"opset": 10_000}, "10000"),
    "rule": ({"rule": lambda node: "float16"}, "first"),
    "rule that answers True": ({"rule": lambda node: True}, "first"),
}


@pytest.mark.parametrize(("wishes", "named"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_impossible_values(model: ModelProto, wishes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        onnxamp.convert_model(model, **wishes)
    assert isinstance(caught.value, OnnxAmpError)
    assert one_sentence(caught.value)


BAD_TYPES = {
    "model": {"model": 3},
    "model None": {"model": None},
    "bytes": {"model": b"onnx"},
    "level": {"level": 2},
    "dtype": {"dtype": [np.float16]},
    "dtype bool": {"dtype": True},
    "dtype of no numbers": {"dtype": dict},
    "white_list": {"white_list": "MatMul"},
    "black_list": {"black_list": 1},
    "black_list of numbers": {"black_list": [1]},
    "keep_io_types": {"keep_io_types": "X"},
    "keep_high of numbers": {"keep_high": [1]},
    "rule": {"rule": "low"},
    "opset": {"opset": 17.0},
    "opset bool": {"opset": True},
    "keep_high": {"keep_high": 1},
    "force_low": {"force_low": None},
    "keep_io_types None": {"keep_io_types": None},
    "lists": {"lists": 1},
    "lists of lists": {"lists": ["default"]},
    "target": {"target": ["cuda"]},
}


@pytest.mark.parametrize("wishes", BAD_TYPES.values(), ids=BAD_TYPES)
def test_wrong_types(model: ModelProto, wishes: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as caught:
        onnxamp.convert_model(**{"model": model, **wishes})
    assert isinstance(caught.value, OnnxAmpError)
    assert one_sentence(caught.value)


def one_sentence(error: BaseException) -> bool:
    return "\n" not in str(error) and str(error).endswith(".")


def test_auto_is_decided_by_data(model: ModelProto) -> None:
    how = {"tolerance": 1e-2, "keep_io_types": False}
    result = onnxamp.convert_model(model, "auto", **how)
    assert weight_types(result) == {TensorProto.FLOAT16}
    assert result == onnxamp.apply_plan(model, onnxamp.plan_model(model, "auto", **how))
    assert onnxamp.convert_model(model, "auto", tolerance=1e-9) == model
    graph = onnxamp.convert_model(gs.import_onnx(model), "auto", **how)
    assert isinstance(graph, gs.Graph)
    assert ops(gs.export_onnx(graph)) == ops(result)
    assert onnxamp.convert_model(model, "auto", tolerance=1e-2) == model, "its Casts would cost more than it gains"


@pytest.mark.parametrize("wishes", [{"force_low": ["f.*"]}, {"rule": lambda node: "low"}], ids=["force_low", "rule"])
def test_contradictions_name_both(model: ModelProto, wishes: dict[str, Any]) -> None:
    with pytest.raises(onnxamp.ContradictionError) as caught:
        onnxamp.convert_model(model, keep_high=["first"], **wishes)
    other = "force_low (--force-low) 'f.*'" if "force_low" in wishes else "rule says 'low'"
    for word in ("first", "keep_high (--keep-fp32) 'first'", other):
        assert word in str(caught.value)


def test_contradictions_through_a_tie() -> None:
    text = """(float[2,2] X, int64 i) => (float[2,2] Y) {
        [one] s = SequenceConstruct (X) [two] Y = SequenceAt (s, i) }"""
    with pytest.raises(onnxamp.ContradictionError, match=r"'two'.*'one'|'one'.*'two'"):
        onnxamp.convert_model(parse(text), keep_high=["one"], force_low=["two"])


def test_a_callback_that_raises_is_not_hidden(model: ModelProto) -> None:
    with pytest.raises(ZeroDivisionError):
        onnxamp.convert_model(model, rule=lambda node: 1 / 0)


def test_the_rule_gets_a_copy(model: ModelProto) -> None:
    before = model.SerializeToString()

    def rule(node: onnx.NodeProto) -> None:
        node.op_type = "Nonsense"

    assert "Nonsense" not in ops(onnxamp.convert_model(model, rule=rule))
    assert model.SerializeToString() == before


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07"], ids=["empty", "text", "half a header"])
def test_files_that_are_no_models(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(onnxamp.ModelError, match=r"broken\.onnx") as caught:
        onnxamp.convert_model(path)
    assert one_sentence(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(onnxamp.ModelError, match=r"nothing\.onnx.*No such file"):
        onnxamp.convert_model(tmp_path / "nothing.onnx")
    with pytest.raises(onnxamp.ModelError, match="it is a folder"):
        onnxamp.convert_model(tmp_path)


INVALID = {
    "name defined twice": "(float[2] X) => (float[2] Y) { a = Relu (X) a = Abs (X) Y = Add (a, a) }",
    "name never defined": "(float[2] X) => (float[2] Y) { Y = Add (X, nowhere) }",
    "output never made": "(float[2] X) => (float[2] Y) { a = Relu (X) }",
    "cycle": "(float[2] X) => (float[2] Y) { a = Add (X, b) b = Relu (a) Y = Relu (b) }",
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_invalid_models(text: str) -> None:
    with pytest.raises(onnxamp.ModelError) as caught:
        onnxamp.convert_model(parse(text))
    assert one_sentence(caught.value)


# --- opsets -----------------------------------------------------------------------------------------------------


def test_bfloat16_needs_opset_13() -> None:
    model = parse(TEXT, opset=12, ir=7)
    with pytest.raises(onnxamp.OpsetError, match="--opset 13"):
        onnxamp.convert_model(model, dtype="bfloat16", opset="keep")
    result = onnxamp.convert_model(model, dtype="bfloat16")
    assert result == onnxamp.convert_model(model, dtype="bfloat16", opset=13)
    assert weight_types(onnxamp.convert_model(model, dtype="bfloat16", opset=13)) == {TensorProto.BFLOAT16}
    assert onnxamp.convert_model(model, "O0", dtype="bfloat16") == model


def test_an_upgrade_alone(model: ModelProto) -> None:
    model.producer_name, model.doc_string = "maker", "kept"
    result = onnxamp.convert_model(model, "O0", opset=18)
    assert [entry.version for entry in result.opset_import] == [18]
    assert (result.producer_name, result.doc_string) == ("maker", "kept")
    assert onnxamp.convert_model(model, "O0", opset=9) == model


def test_a_model_newer_than_onnx() -> None:
    with pytest.raises(onnxamp.OpsetError, match="upgrade onnx"):
        onnxamp.convert_model(parse(TEXT, opset=10_000))
