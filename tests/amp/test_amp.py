"""The entry points and lists of mindspore.amp."""

from typing import Any

import onnx
import pytest
from graphs.case import parse
from onnx import ModelProto, TensorProto
from repository import ROOT

import onnxamp
from onnxamp import OnnxAmpError

MODELS = ROOT / "models"


@pytest.fixture
def model() -> ModelProto:
    return parse("""(float[N,2] X) => (float[N,2] Y) <float[2,2] w = {1, 2, 3, 4}> {
        h = MatMul (X, w) s = Softmax (h) Y = MatMul (s, w)
    }""")


def ops(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_auto_mixed_precision_does_nothing_by_default() -> None:
    original = onnx.load(MODELS / "classifier.onnx")
    assert onnxamp.auto_mixed_precision(original).SerializeToString() == original.SerializeToString()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_auto_mixed_precision_converts_at_a_level(model: ModelProto, level: str) -> None:
    options = {"lists": "mindspore", "strict": True}
    assert onnxamp.auto_mixed_precision(model, level) == onnxamp.convert_model(model, level, **options)
    wanted = onnxamp.convert_model(model, level, dtype="bfloat16", **options)
    assert onnxamp.auto_mixed_precision(model, level, "bfloat16") == wanted
    wanted = onnxamp.convert_model(model, level, lists="paddle", strict=True)
    assert onnxamp.auto_mixed_precision(model, level, lists="paddle") == wanted


@pytest.mark.parametrize(("lists", "said"), [({}, "neither is"), ({"white_list": [], "black_list": []}, "both are")])
def test_custom_mixed_precision_takes_one_list(model: ModelProto, lists: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"exactly one of white_list and black_list; {said} given") as caught:
        onnxamp.custom_mixed_precision(model, **lists)
    assert isinstance(caught.value, OnnxAmpError)


def low_ops(model: ModelProto) -> list[str]:
    """Op types that read a low weight or what a Cast made low."""
    low = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT16}
    low |= {n.output[0] for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i == TensorProto.FLOAT16}
    return sorted({node.op_type for node in model.graph.node if node.op_type != "Cast" and low & {*node.input}})


def test_custom_mixed_precision_replaces_the_presets(model: ModelProto) -> None:
    assert low_ops(onnxamp.custom_mixed_precision(model, white_list=["Softmax"])) == ["Softmax"]
    assert low_ops(onnxamp.custom_mixed_precision(model, white_list=["MatMul"])) == ["MatMul"]
    assert low_ops(onnxamp.custom_mixed_precision(model, black_list=["MatMul"])) == ["Softmax"]
    assert ops(onnxamp.custom_mixed_precision(model, black_list=[])) == ["Cast", "MatMul", "Softmax", "MatMul", "Cast"]
    assert onnxamp.custom_mixed_precision(model, white_list=[]) == model


@pytest.mark.parametrize("lists", ["default", "fast", "mindspore", "paddle"])
def test_lists_are_copies(lists: str) -> None:
    for get in (onnxamp.get_white_list, onnxamp.get_black_list):
        found = get(lists)
        kept = list(found)
        found.clear()
        assert get(lists) == kept != []
    assert not set(onnxamp.get_white_list(lists)) & set(onnxamp.get_black_list(lists))


def test_unknown_lists() -> None:
    with pytest.raises(onnxamp.ArgumentError, match="choose one of default, conservative, fast, mindspore, paddle"):
        onnxamp.get_white_list("none")
