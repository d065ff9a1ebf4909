"""What the tests of storage share: a model with external data, and what is in a folder."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from graphs.case import add_weights, parse
from onnx import ModelProto, numpy_helper

import onnxamp

SIZE = 64
TEXT = f"""(float[N,{SIZE}] X) => (float[N,{SIZE}] Y) {{
    h = MatMul (X, first) s = Softmax (h) t = Mul (s, scale) Y = MatMul (t, second)
}}"""
WEIGHTS = {"first": (SIZE, SIZE), "second": (SIZE, SIZE), "scale": (SIZE,)}
DATA_BYTES = 2 * SIZE * SIZE * 4


def inline() -> ModelProto:
    return add_weights(parse(TEXT), WEIGHTS)


def external(folder: Path, location: str = "weights.bin") -> Path:
    """A model whose two matrices lie in a data file; the vector is too small for one."""
    path = folder / "model.onnx"
    onnx.save(inline(), path, save_as_external_data=True, location=location, size_threshold=1024)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def normal(proto: ModelProto) -> ModelProto:
    """The model with weights written in one way: onnx says of loaded data where it was."""
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    return proto


def is_low(path: Path, **wishes: Any) -> bool:
    """Whether the file holds what the conversion in memory gives."""
    return normal(onnx.load(path)) == normal(onnxamp.convert_model(inline(), **wishes))


def answers(path: Path) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((3, SIZE), np.float32)
    return session.run(None, {"X": x})[0]


def locations(path: Path) -> dict[str, str]:
    """Weight -> data file."""
    proto = onnx.load(path, load_external_data=False)
    entries = {t.name: {e.key: e.value for e in t.external_data} for t in proto.graph.initializer}
    return {name: found["location"] for name, found in entries.items() if found}
