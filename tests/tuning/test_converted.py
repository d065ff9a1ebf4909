"""Weights of a model that is judged: converted when they are read, to the numbers that are written."""

from pathlib import Path

import numpy as np
import onnx
from graphs.case import add_weights, parse

from onnxamp._convert.convert import decide
from onnxamp._model.model import Model
from onnxamp._model.protos import tensors_of
from onnxamp._options.options import Options
from onnxamp._tuning.job import converted_model

RANDOM = np.random.default_rng(0)


def test_weights_that_are_read_are_those_that_are_written(tmp_path: Path) -> None:
    """Also those in a branch, and what does not fit."""
    text = """(float[2,64] x, bool c) => (float[2,64] y) {
        a = MatMul (x, w)
        b = If (c) <
            then_branch = g () => (float[2,64] p) { p = MatMul (a, v) },
            else_branch = h () => (float[2,64] q) { q = Add (a, mask) }>
        y = Tanh (b)
    }"""
    mask = np.where(RANDOM.random((2, 64)) < 0.5, -3e38, 0)
    weights = {"w": RANDOM.standard_normal((64, 64)), "mask": mask}
    model = add_weights(parse(text, 18), {name: array.astype(np.float32) for name, array in weights.items()})
    branch = next(item.g for item in model.graph.node[1].attribute if item.name == "then_branch")
    v = RANDOM.standard_normal((64, 64)).astype(np.float32)
    branch.initializer.append(onnx.numpy_helper.from_array(v, "v"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=64)
    read = Model.read(path)
    analysis = decide(read, Options(level="O3")).analysis
    written, left = (
        converted_model(analysis, 1 << 40, tmp_path / "low.onnx", is_emulated=is_emulated).embedded()
        for is_emulated in (False, True)
    )
    assert _numbers(left) == _numbers(written)
    assert {"w", "v", "mask"} <= _numbers(left).keys()


def _numbers(model: onnx.ModelProto) -> dict[str, tuple[int, bytes]]:
    return {tensor.name: (tensor.data_type, tensor.raw_data) for tensor in tensors_of(model)}
