"""Large weights stay in their file when a model is read, and get into it without being serialized."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto, helper, numpy_helper
from stored import TEXT, answers

import onnxamp
from onnxamp._model.model import load_external_data, load_model
from onnxamp._model.protos import as_varint, find_data, raw_data_head, replaced, tensors_of
from onnxamp._model.sources import data_location, has_data_file

PADDING = 16 << 20
"""Bytes of text that make a file a large one, whose large weights are not read with it."""
LARGE = 1 << 14
"""Elements of a float32 weight that is one of them."""


def nested(padding: int = PADDING) -> ModelProto:
    """Weights in the graph, in a Constant, in both branches of an If, and in a function, some inside others."""
    inner = parse(f"(float[2] X) => (float[{LARGE}] b) {{ b = Constant <value = float {{1}}> () }}").graph
    inner.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(np.arange(LARGE, dtype=np.float32)))
    other = parse(f"(float[2] X) => (float[{LARGE}] b) {{ b = Identity (w) }}").graph
    other.initializer.append(numpy_helper.from_array(np.full(LARGE, 2, np.float32), "w"))
    for branch in (inner, other):
        del branch.input[:]
    branching = helper.make_node("If", ["flag"], ["c"], then_branch=inner, else_branch=other)
    constant = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.ones(LARGE, np.int64)))
    body = helper.make_node("Constant", [], ["z"], value=numpy_helper.from_array(np.eye(128, dtype=np.float32)))
    function = helper.make_function("f", "F", [], ["z"], [body], [helper.make_opsetid("", 17)])
    model = parse(f"(float[8] X, bool flag) => (float[{LARGE}] c) <float[{LARGE}] v = {{0}}> {{ }}")
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(LARGE, dtype=np.float32), "v"))
    model.graph.initializer.append(helper.make_tensor("plain", TensorProto.FLOAT, [32], range(32)))
    model.graph.node.extend([constant, branching])
    model.functions.append(function)
    model.doc_string = "x" * padding
    return model


def test_weights_are_left_behind_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(nested(), path)
    model = load_model(path)
    left = [t for t in tensors_of(model) if t.data_location == TensorProto.EXTERNAL]
    assert len(left) == 5
    assert not any(tensor.raw_data or has_data_file(tensor) for tensor in left)
    load_external_data(model, tmp_path)
    assert model == onnx.load(path)
    assert model.SerializeToString() == path.read_bytes()


@pytest.mark.parametrize("location", [None, TensorProto.DEFAULT])
def test_what_a_tensor_said_of_itself_is_kept(tmp_path: Path, location: int | None) -> None:
    model = nested()
    if location is not None:
        model.graph.initializer[0].data_location = location
    onnx.save(model, tmp_path / "m.onnx")
    onnxamp.convert_file(tmp_path / "m.onnx", tmp_path / "o.onnx", "O0", external_data="always", validate=False)
    onnxamp.convert_file(tmp_path / "m.onnx", tmp_path / "same.onnx", "O0", validate=False)
    assert onnx.load(tmp_path / "same.onnx") == model
    assert onnx.load(tmp_path / "o.onnx").graph.initializer[0].raw_data == model.graph.initializer[0].raw_data


def test_a_conversion_is_the_same_whether_weights_were_left_behind(tmp_path: Path) -> None:
    model = add_weights(parse(TEXT.replace("64", "128")), {"first": (128, 128), "second": (128, 128), "scale": (128,)})
    model.doc_string = "x" * PADDING
    onnx.save(model, tmp_path / "m.onnx")
    onnxamp.convert_file(tmp_path / "m.onnx", tmp_path / "o.onnx", validate=False)
    assert onnx.load(tmp_path / "o.onnx") == onnxamp.convert_model(model)
    assert onnxamp.convert_model(tmp_path / "m.onnx") == onnxamp.convert_model(model)


@pytest.mark.parametrize(
    ("elem", "size"), [(99, 8 * LARGE), (TensorProto.INT64, 7 * LARGE)], ids=["unknown type", "too short"]
)
def test_what_is_no_tensor_is_refused_all_the_same(tmp_path: Path, elem: int, size: int) -> None:
    said = []
    for padding in (0, PADDING):
        model = nested(padding)
        model.graph.initializer.append(TensorProto(name="odd", data_type=elem, dims=[LARGE], raw_data=bytes(size)))
        onnx.save(model, tmp_path / "m.onnx")
        with pytest.raises(onnxamp.ModelError, match="'odd'") as caught:
            load_model(tmp_path / "m.onnx")
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_no_file_can_say_that_its_weights_lie_in_a_model(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(400))
    model = nested()
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[100], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=f"onnxamp:0123456789abcdef:{tmp_path / 'secret'}")
    model.graph.initializer.append(tensor)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(onnxamp.ExternalDataError, match=r"outside the model's folder|is missing"):
        onnxamp.convert_file(tmp_path / "m.onnx", tmp_path / "o.onnx", validate=False)


@pytest.mark.parametrize("end", [PADDING + 10, PADDING + 100, PADDING + 100_000, -1])
def test_truncated_files(tmp_path: Path, end: int) -> None:
    (tmp_path / "m.onnx").write_bytes(nested().SerializeToString()[:end])
    with pytest.raises(onnxamp.ModelError, match="truncated"):
        load_model(tmp_path / "m.onnx")


def test_unusual_ways_to_write_a_tensor_are_left_to_protobuf(tmp_path: Path) -> None:
    """The last of two data fields counts; so does what follows where the data lie."""
    tensor, size = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[LARGE]), 4 * LARGE
    twice = tensor.SerializeToString() + (raw_data_head(size) + bytes(size)) + (raw_data_head(size) + b"\1" * size)
    graph = b"\x2a" + as_varint(len(twice)) + twice
    padding = ModelProto(ir_version=8, doc_string="x" * PADDING).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(padding + b"\x3a" + as_varint(len(graph)) + graph)
    assert load_model(tmp_path / "m.onnx").graph.initializer[0].raw_data == b"\1" * size


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 3_000_000])
def test_lengths_grow_with_what_they_hold(size: int) -> None:
    """Data replaced by other data at every depth; all lengths around follow."""
    data = nested(0).SerializeToString()
    spans = find_data(data, lambda start, stop: stop - start >= 4 * LARGE)
    made = bytearray()
    for position, piece in replaced(data, spans, [(raw_data_head(size), size)] * len(spans)):
        assert position == len(made)
        made += bytes([piece + 1]) * size if isinstance(piece, int) else piece
    tensors = [t for t in tensors_of(ModelProto.FromString(bytes(made))) if t.HasField("raw_data")]
    assert sorted(t.raw_data for t in tensors) == [bytes([index + 1]) * size for index in range(len(spans))]


def test_a_large_model_is_not_held(tmp_path: Path) -> None:
    """20 MB of weights: the graph that is read is small, and the result is right."""
    model = add_weights(parse("(float[N,64] X) => (float[N,64] Y) { h = MatMul (X, a) Y = MatMul (h, b) }"),
                        {"a": (64, 40_000), "b": (40_000, 64)})  # fmt: skip
    path, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(model, path)
    loaded = load_model(path)
    assert loaded.ByteSize() < 1000
    assert data_location(loaded.graph.initializer[0], None) is not None
    onnxamp.convert_file(path, target, validate=False)
    assert onnx.load(target) == onnxamp.convert_model(model)
    np.testing.assert_allclose(answers(target), answers(path), rtol=2e-2, atol=2e-2)
