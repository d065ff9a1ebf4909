"""Models that are low precision already, converted through float32: ``--from``."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser

import onnxamp

ARRAYS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ELEMS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
PLAIN = """<ir_version: 10, opset_import: ["" : 22]>
g (float16[N,32] x) => (float16[N,32] y, float16[N,32] b) {
  a = MatMul (x, w)
  b = Relu (a)
  c = MatMul (b, v)
  y = Softmax (c)
}"""
BRANCHES = """<ir_version: 10, opset_import: ["" : 22]>
g (float16[N,32] x, bool flag) => (float16[N,32] y) {
  y = If (flag) <
    then_branch = t () => (float16[N,32] p) { p = MatMul (x, w) },
    else_branch = e () => (float16[N,32] q) { r = MatMul (x, v)  q = Relu (r) }
  >
}"""


def low_model(text: str, dtype: str = "float16") -> ModelProto:
    """The graph with weights, in one low-precision type throughout."""
    model = parser.parse_model(text.replace("float16", dtype))
    rng = np.random.default_rng(0)
    for name in ("w", "v"):
        weight = (rng.standard_normal((32, 32)) / 6).astype(ARRAYS[dtype])
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    return model


def elems(model: ModelProto, *, inside: bool = True) -> set[int]:
    """Element types of the weights, or of inputs and outputs."""
    if inside:
        return {tensor.data_type for tensor in model.graph.initializer}
    return {entry.type.tensor_type.elem_type for entry in (*model.graph.input, *model.graph.output)}


@pytest.mark.parametrize("text", [PLAIN, BRANCHES])
@pytest.mark.parametrize(("held", "wanted"), [("float16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float16")])
@pytest.mark.parametrize("told", ["held", "auto"])
def test_a_low_model_becomes_the_other_low_type(text: str, held: str, wanted: str, told: str) -> None:
    model = low_model(text, held)
    before = model.SerializeToString()
    result = onnxamp.convert_model(model, dtype=wanted, from_dtype=held if told == "held" else told)
    onnx.checker.check_model(result, full_check=True)
    assert model.SerializeToString() == before
    assert elems(result) == {ELEMS[wanted]}
    assert elems(result, inside=False) - {TensorProto.BOOL} == {ELEMS[held]}, "inputs and outputs keep their types"
    assert onnxamp.convert_model(result, dtype=wanted) == result


@pytest.mark.parametrize("text", [PLAIN, BRANCHES])
def test_inputs_and_outputs_follow_if_asked(text: str) -> None:
    result = onnxamp.convert_model(low_model(text), dtype="bfloat16", from_dtype="float16", keep_io_types=False)
    onnx.checker.check_model(result, full_check=True)
    assert elems(result, inside=False) - {TensorProto.BOOL} == {TensorProto.BFLOAT16}
    some = onnxamp.convert_model(low_model(text), dtype="bfloat16", from_dtype="float16", keep_io_types=["x"])
    assert some.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert some.graph.output[0].type.tensor_type.elem_type == TensorProto.BFLOAT16


SIGNATURES = {
    "an initializer is an output": "(float16[5,32] x) => (float16[5,32] y, float16[32,32] w) { y = MatMul (x, w) }",
    "only an initializer is an output": "(float16[5,32] x) => (float16[32,32] w) { y = Relu (x) }",
    "an initializer is an input": "(float16[5,32] x, float16[32,32] w) => (float16[5,32] y) { y = MatMul (x, w) }",
    "an initializer is both": """(float16[5,32] x, float16[32,32] w) => (float16[5,32] y, float16[32,32] w) {
        y = MatMul (x, w) }""",
    "an input is an output": "(float16[5,32] x) => (float16[5,32] x, float16[5,32] y) { y = MatMul (x, w) }",
    "a Constant is an output": """(float16[5,32] x) => (float16[5,32] y, float16[2] c) {
        y = MatMul (x, w) c = Constant <value = float16[2] {15360, 15872}> () }""",
    "a body reads it": """(float16[5,32] x, bool flag) => (float16[5,32] y, float16[32,32] w) {
        y = If (flag) <then_branch = t () => (float16[5,32] p) { p = MatMul (x, w) },
                       else_branch = e () => (float16[5,32] q) { q = Relu (x) }> }""",
    "a loop passes it on": """(float16[5,32] x) => (float16[5,32] y, float16[k,32,32] s, float16[32,32] w) {
        n = Constant <value = int64 {2}> ()
        y, s = Loop (n, , x) <body = b (int64 i, bool g, float16[5,32] a)
            => (bool h, float16[5,32] c, float16[32,32] d) {
                h = Identity (g) c = MatMul (a, w) d = Identity (w) }> }""",
}


def signature(model: ModelProto) -> dict[str, int]:
    return {entry.name: entry.type.tensor_type.elem_type for entry in (*model.graph.input, *model.graph.output)}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_stays(name: str, dtype: str, level: str) -> None:
    model = low_model('<ir_version: 10, opset_import: ["" : 22]> g ' + SIGNATURES[name])
    result = onnxamp.convert_model(model, level, dtype=dtype, from_dtype="auto", freeze_defaults=False)
    onnx.checker.check_model(result, full_check=True)
    assert signature(result) == signature(model)
    if dtype == "float16":
        feeds = {"x": np.ones((5, 32), np.float16)}
        feeds |= {"flag": np.array(True)} if "flag" in signature(model) else {}
        expected, found = (
            onnxruntime.InferenceSession(one.SerializeToString()).run(None, feeds) for one in (model, result)
        )
        for one, other in zip(expected, found, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["seq", "optional"])
def test_containers_that_cannot_keep_their_types_are_told(kind: str) -> None:
    op = {"seq": "SequenceConstruct", "optional": "Optional"}[kind]
    model = low_model(f"""<ir_version: 10, opset_import: ["" : 22]>
        g (float16[5,32] x) => ({kind}(float16[5,32]) s) {{ y = Relu (x) s = {op} (y) }}""")
    with pytest.warns(
        onnxamp.OptionWarning, match=rf"'s' is a {kind}\(float16\), which no Cast converts, so it becomes"
    ):
        onnxamp.convert_model(model, from_dtype="auto")
    onnxamp.convert_model(model, from_dtype="auto", keep_io_types=False)


@pytest.mark.parametrize("flag", [None, True, False])
def test_the_raised_model_computes_the_same(flag: bool | None) -> None:
    model = low_model(PLAIN if flag is None else BRANCHES)
    raised = onnxamp.convert_model(model, "O0", from_dtype="float16")
    assert elems(raised) == {TensorProto.FLOAT}
    feeds = {"x": np.random.default_rng(1).standard_normal((5, 32)).astype(np.float16)}
    feeds |= {} if flag is None else {"flag": np.array(flag)}
    expected, found = (
        onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds) for proto in (model, raised)
    )
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype == np.float16
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=5e-3, atol=5e-3)


def test_the_wrong_type_is_refused_and_the_right_words_are_named() -> None:
    with pytest.raises(onnxamp.ArgumentError, match="holds bfloat16 values, not float16 alone: --from auto"):
        onnxamp.convert_model(low_model(PLAIN, "bfloat16"), from_dtype="float16")
    with pytest.raises(onnxamp.ArgumentError, match="float8"):
        onnxamp.convert_model(low_model(PLAIN), from_dtype="float8")  # type: ignore[arg-type]


def test_what_was_done_is_told(tmp_path: Path) -> None:
    onnx.save(low_model(PLAIN), tmp_path / "low.onnx")

    def notes(name: str, **options: str) -> str:
        made = onnxamp.convert_file(tmp_path / name, tmp_path / "out.onnx", **options, validate=False)  # type: ignore[arg-type]
        return " ".join(made.notes)

    assert "The weights were float16 before" in notes("low.onnx", dtype="bfloat16", from_dtype="float16")
    assert "--from float16 raises them to float32 first" in notes("low.onnx", dtype="bfloat16")
    assert "--from" not in notes("low.onnx", dtype="float16")
    onnx.save(
        onnxamp.convert_model(low_model(PLAIN), "O0", from_dtype="auto", keep_io_types=False), tmp_path / "a.onnx"
    )
    assert "has no float16 values" in notes("a.onnx", from_dtype="float16")
    assert "has no low-precision values" in notes("a.onnx", from_dtype="auto")


def test_weights_in_data_files_stay_in_data_files(tmp_path: Path) -> None:
    onnx.save(low_model(PLAIN), tmp_path / "low.onnx", save_as_external_data=True, size_threshold=0)
    made = onnxamp.convert_file(
        tmp_path / "low.onnx", tmp_path / "out.onnx", dtype="bfloat16", from_dtype="float16", validate=False
    )
    assert made.bytes_after == made.bytes_before == 2 * 2 * 32 * 32
    assert all(
        tensor.external_data for tensor in onnx.load(tmp_path / "out.onnx", load_external_data=False).graph.initializer
    )
    assert elems(onnx.load(tmp_path / "out.onnx")) == {TensorProto.BFLOAT16}


def test_tuning_starts_from_the_raised_model() -> None:
    result, tuned = onnxamp.tune_model(
        low_model(PLAIN), 5e-2, dtype="bfloat16", from_dtype="float16", provider="cpu", allow_slower=True
    )
    assert tuned.error <= 5e-2
    assert elems(result) == {TensorProto.BFLOAT16}
