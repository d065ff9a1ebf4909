"""Weights that only exact ops read: low precision where their bytes are worth more than Casts."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper, parser

import onnxamp

LARGE, SMALL = 40_000, 400
WIDTH = 64
HEAD = '<ir_version: 10, opset_import: ["" : 18]>\n'
LOOKUP = """g (int64[B,S] ids) => (float[B,S,64] y) {
  e = Gather (table, ids)
  n = LayerNormalization (e, gain)
  y = MatMul (n, w)
}"""
TIED = """g (int64[B,S] ids) => (float[B,S,V] y) {
  e = Gather (table, ids)
  n = LayerNormalization (e, gain)
  t = Transpose <perm = [1, 0]> (table)
  y = MatMul (n, t)
}"""
CLIPPED = """g (int64[B,S] ids) => (float[B,S,64] y) {
  e = Gather (table, ids)
  c = Clip (e, least, most)
  y = LayerNormalization (c, gain)
}"""
JOINED = """g (int64[B,S] ids, float[B,1,64] x) => (float[B,T,64] y) {
  e = Gather (table, ids)
  s = Softmax (x)
  c = Concat <axis = 1> (s, e)
  y = LayerNormalization (c, gain)
}"""
ALONE = "g (int64[B,S] ids) => (float[B,S,64] y) { y = Gather (table, ids) }"


def model_of(text: str, rows: int = LARGE) -> ModelProto:
    """The graph with a table of that many rows."""
    model = parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((rows, WIDTH), np.float32),
        "gain": np.ones(WIDTH, np.float32),
        "w": rng.standard_normal((WIDTH, WIDTH), np.float32),
        "least": np.float32(-3),
        "most": np.float32(3),
    }
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items() if name in read
    )
    return model


def tables(model: ModelProto) -> list[int]:
    """Element types in which the table is stored."""
    return [tensor.data_type for tensor in model.graph.initializer if tensor.name.startswith("table")]


def casts(model: ModelProto) -> list[Sequence[str]]:
    """What Casts read."""
    return [tuple(node.input) for node in model.graph.node if node.op_type == "Cast"]


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("dtype", "elem"), [("float16", TensorProto.FLOAT16), ("bfloat16", TensorProto.BFLOAT16)])
@pytest.mark.parametrize(("text", "rounded"), [(LOOKUP, "e"), (TIED, "e"), (CLIPPED, "e"), (JOINED, "e"), (ALONE, "")])
def test_a_large_table_is_low_and_rows_are_cast(text: str, rounded: str, level: str, dtype: str, elem: int) -> None:
    result = onnxamp.convert_model(model_of(text), level, dtype=dtype, lists="conservative")
    onnx.checker.check_model(result, full_check=True)
    assert tables(result) == [elem]
    (lookup,) = (node for node in result.graph.node if node.op_type == "Gather")
    assert (rounded or lookup.output[0],) in casts(result)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("text", [LOOKUP, CLIPPED, JOINED, ALONE])
def test_a_small_table_is_not_worth_a_cast(text: str, level: str) -> None:
    result = onnxamp.convert_model(model_of(text, SMALL), level, lists="conservative")
    assert tables(result) == [TensorProto.FLOAT]
    assert ("e",) not in casts(result)


@pytest.mark.parametrize("text", [LOOKUP, TIED])
def test_a_small_table_follows_a_low_reader(text: str) -> None:
    result = onnxamp.convert_model(model_of(text, SMALL))
    assert tables(result) == [TensorProto.FLOAT16]
    assert len(casts(result)) == 1, "of the output"


@pytest.mark.parametrize("options", [{"black_list": ["Gather"]}, {"keep_high": ["e"]}, {"level": "O0"}])
def test_what_the_user_keeps_stays_float32(options: dict[str, object]) -> None:
    assert tables(onnxamp.convert_model(model_of(LOOKUP), **options)) == [TensorProto.FLOAT]  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "dtype", "elem"), [
    (1e6, "float16", TensorProto.FLOAT), (-1e9, "float16", TensorProto.FLOAT), (1e6, "bfloat16", TensorProto.BFLOAT16),
])  # fmt: skip
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_table_that_low_precision_cannot_hold_stays_float32(number: float, dtype: str, elem: int, level: str) -> None:
    model = model_of(LOOKUP)
    table = numpy_helper.to_array(model.graph.initializer[0]).copy()
    table[3, 5] = number
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "table"))
    assert tables(onnxamp.convert_model(model, level, dtype=dtype)) == [elem]


@pytest.mark.parametrize("rows", [SMALL, LARGE])
@pytest.mark.parametrize("text", [LOOKUP, TIED, CLIPPED, ALONE])
def test_level_O3_lowers_lookups_of_any_size(text: str, rows: int) -> None:  # noqa: N802 - O3 is a name
    assert tables(onnxamp.convert_model(model_of(text, rows), "O3")) == [TensorProto.FLOAT16]


@pytest.mark.parametrize("text", [LOOKUP, TIED, CLIPPED, JOINED, ALONE])
def test_a_second_conversion_changes_nothing(text: str) -> None:
    once = onnxamp.convert_model(model_of(text))
    assert onnxamp.convert_model(once) == once


def test_on_the_cpu_less_memory_is_worth_a_cast() -> None:
    assert tables(onnxamp.convert_model(model_of(ALONE, SMALL), target="cpu")) == [TensorProto.FLOAT]
    model = model_of(ALONE, 10 * SMALL)
    assert tables(onnxamp.convert_model(model)) == [TensorProto.FLOAT]
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    assert tables(onnxamp.convert_model(model, target="cpu")) == [TensorProto.FLOAT16]
