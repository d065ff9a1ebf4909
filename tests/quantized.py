"""Networks quantized by the tools that people use, from a float32 network with seeded weights."""

import logging
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from graphs.case import parse
from onnx import ModelProto, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    matmul_nbits_quantizer,
    quantize_dynamic,
    quantize_static,
)

TEXT = """(float[N,3,8,8] image) => (float[N,10] scores) {
    c1 = Conv <pads = [1, 1, 1, 1]> (image, k1, b1)
    r1 = Relu (c1)
    c2 = Conv <pads = [1, 1, 1, 1]> (r1, k2, b2)
    a2 = Add (c2, r1)
    r2 = Relu (a2)
    p = GlobalAveragePool (r2)
    f = Flatten (p)
    h1 = MatMul (f, w1)
    t1 = Relu (h1)
    scores = Gemm (t1, w2, b3)
}"""
SHAPES = {"k1": (16, 3, 3, 3), "k2": (16, 16, 3, 3), "w1": (16, 64), "w2": (64, 10), "b1": 16, "b2": 16, "b3": 10}


def float_network(opset: int = 21) -> ModelProto:
    """Convolutions with a residual Add, and a head of two products."""
    model = parse(TEXT, opset)
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        inner = 1 if isinstance(shape, int) else np.prod(shape[1:] if len(shape) == 4 else shape[:1])
        array = random.standard_normal(shape) * np.sqrt(2 / inner)
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return model


def images(count: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [{"image": random.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Images, one after the other."""

    def __init__(self) -> None:
        self.left = iter(images(4))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


def _static(model: ModelProto, target: str, form: QuantFormat, **extra: Any) -> None:
    quantize_static(
        model, target, Reader(), quant_format=form, per_channel=form == QuantFormat.QDQ,
        activation_type=QuantType.QInt8, weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, **extra},
    )  # fmt: skip


def _nbits(model: ModelProto, target: str, form: QuantFormat) -> None:
    tool = matmul_nbits_quantizer.MatMulNBitsQuantizer(model, block_size=16, is_symmetric=True, quant_format=form)
    tool.process()
    tool.model.save_model_to_file(target)


TOOLS: Mapping[str, Any] = {
    "qdq": lambda model, path: _static(model, path, QuantFormat.QDQ, QuantizeBias=False),
    "qdq with biases": lambda model, path: _static(model, path, QuantFormat.QDQ),
    "operators": lambda model, path: _static(model, path, QuantFormat.QOperator),
    "dynamic": lambda model, path: quantize_dynamic(model, path, op_types_to_quantize=["MatMul", "Gemm"]),
    "nbits": lambda model, path: _nbits(model, path, QuantFormat.QOperator),
    "nbits in qdq": lambda model, path: _nbits(model, path, QuantFormat.QDQ),
}
"""By what they write: ONNX Runtime's static quantizer in both of its forms, its dynamic one, and its 4-bit one."""


LARGE = {"k1": 18, "b1": 18, "b2": 18, "w1": -18}
"""Powers of two that take the values between k1 and w1 out of the range of float16, and change no result."""


@cache
def quantized(tool: str, opset: int = 21, *, is_large: bool = False) -> ModelProto:
    """The float network as a tool quantizes it, with values in its middle that float16 lacks; for reading only."""
    logging.getLogger().setLevel(logging.ERROR)  # the tools advise to preprocess
    model = float_network(opset)
    for tensor in model.graph.initializer if is_large else ():
        factor = np.float32(2.0 ** LARGE.get(tensor.name, 0))
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * factor, tensor.name))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "quantized.onnx")
        TOOLS[tool](model, path)
        return onnx.load(path)
