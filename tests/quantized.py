"""Networks quantized by the tools that people use, from a float32 network with seeded weights."""

import logging
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from graphs.case import parse
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
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


# -- what other tools write, node by node ------------------------------------------------------------------------------


class Form:
    """A float network whose products get quantized factors; activations have the scales of what they reach."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.before = [*model.graph.node]
        self.weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.model = model
        self.made: dict[str, str] = {}
        self.largest = self._largest()

    def _largest(self) -> dict[str, float]:
        """The largest magnitude of what each product reads."""
        seen = {node.input[0]: 0.0 for node in self.products()}
        probe = ModelProto()
        probe.CopyFrom(self.model)
        probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in seen if name != "image")
        session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
        for feeds in images(4):
            values = (
                dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds), strict=True)) | feeds
            )
            seen = {name: max(largest, float(np.abs(values[name]).max())) for name, largest in seen.items()}
        return seen

    def products(self, *ops: str) -> list[NodeProto]:
        return [node for node in self.before if node.op_type in (ops or ("Conv", "MatMul", "Gemm"))]

    def store(self, name: str, elem: int, array: np.ndarray) -> str:
        """Store a constant."""
        numbers = np.asarray(array)
        self.graph.initializer.append(helper.make_tensor(name, elem, numbers.shape, numbers.ravel().tolist()))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node once."""
        if output not in self.made:
            self.made[output] = output
            self.graph.node.append(helper.make_node(op, inputs, [output], f"{output}/{op}", **attributes))
        return output

    def activation(self, name: str, elem: int, top: float) -> str:
        """Numbers, quantized and dequantized per tensor."""
        scale, zero = f"{name}_scale", f"{name}_zero_point"
        if f"{name}_q" not in self.made:
            self.store(scale, TensorProto.FLOAT, np.float32(self.largest[name] / top))
            self.store(zero, elem, np.array(0))
        self.add("QuantizeLinear", [name, scale, zero], f"{name}_q")
        return self.add("DequantizeLinear", [f"{name}_q", scale, zero], f"{name}_dq")

    def weight(self, node: NodeProto, top: float) -> tuple[str, np.ndarray, np.ndarray, int]:
        """The name of a weight, its scales per channel and its numbers in their steps, and the axis of the channels."""
        name, axis = node.input[1], 0 if node.op_type == "Conv" else 1
        array = self.weights[name]
        others = tuple(one for one in range(array.ndim) if one != axis)
        scales = np.abs(array).max(axis=others, keepdims=True) / top
        return name, scales.ravel(), array / scales, axis

    def save(self, path: str) -> None:
        used = {name for node in (*self.graph.node, *self.before) for name in node.input}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in used]
        nodes = [*self.graph.node]
        del self.graph.initializer[:], self.graph.node[:]
        self.graph.initializer.extend(kept)
        waiting, known = nodes, {"image", *(tensor.name for tensor in kept)}
        while waiting:
            ready = [node for node in waiting if known.issuperset(node.input)]
            assert ready
            self.graph.node.extend(ready)
            known.update(name for node in ready for name in node.output)
            waiting = [node for node in waiting if not known.issuperset(node.output)]
        onnx.save(self.model, path)


def _nncf(model: ModelProto, path: str) -> None:
    """As nncf.quantize 3.4: weights are int8 with zero points of their own, and what is positive is uint8."""
    form = Form(model)
    for node in form.products():
        name, scales, steps, axis = form.weight(node, 127)
        form.store(f"{name}_q", TensorProto.INT8, np.round(steps))
        form.store(f"{name}_scale", TensorProto.FLOAT, scales)
        form.store(f"{name}_zero", TensorProto.INT8, np.zeros(scales.size, np.int8))
        inputs = [f"{name}_q", f"{name}_scale", f"{name}_zero"]
        signed = (TensorProto.INT8, 127) if node.input[0] == "image" else (TensorProto.UINT8, 255)
        node.input[0] = form.activation(node.input[0], *signed)
        node.input[1] = form.add("DequantizeLinear", inputs, f"{name}_dq", axis=-1 if axis else 0)
    form.save(path)


def _modelopt(model: ModelProto, path: str, elem: int, top: float) -> None:
    """As modelopt.onnx.quantization 0.47 with high_precision_dtype="fp32": weights stay floats, and are quantized."""
    form = Form(model)
    for node in form.products():
        name, scales, _, axis = form.weight(node, top)
        form.store(f"{name}_scale", TensorProto.FLOAT, scales)
        form.store(f"{name}_zero", elem, np.zeros(scales.size))
        others = [f"{name}_scale", f"{name}_zero"]
        form.add("QuantizeLinear", [name, *others], f"{name}_q", axis=axis)
        node.input[0] = form.activation(node.input[0], elem, top)
        node.input[1] = form.add("DequantizeLinear", [f"{name}_q", *others], f"{name}_dq", axis=axis)
    form.save(path)


def _awq(model: ModelProto, path: str) -> None:
    """As its int4 "awq_lite": blocks of weights, whose rows are scaled, and the opposite factors before the product."""
    form = Form(model)
    for node in form.products("MatMul", "Gemm"):
        value, name = node.input[:2]
        factors = np.linspace(0.5, 2, form.weights[name].shape[0], dtype=np.float32)
        blocks = (form.weights[name] * factors[:, None]).reshape(-1, 16, form.weights[name].shape[1])
        scales = np.abs(blocks).max(axis=1) / 7
        steps = np.clip(np.round(blocks / scales[:, None]), -8, 7).reshape(form.weights[name].shape)
        form.store(f"{name}_i4", TensorProto.INT4, steps.astype(int))
        form.store(f"{name}_scale", TensorProto.FLOAT, scales)
        form.store(f"{value}_pre_quant_scale", TensorProto.FLOAT, 1 / factors[None])
        node.input[0] = form.add("Mul", [value, f"{value}_pre_quant_scale"], f"{value}_pre_quant_scale_out")
        stored = [f"{name}_i4", f"{name}_scale"]
        node.input[1] = form.add("DequantizeLinear", stored, f"{name}_dq", axis=0, block_size=16)
    form.save(path)


def _torchao(model: ModelProto, path: str) -> None:
    """As torch.onnx exports what torchao's PT2E flow quantized: weights are stored as PyTorch has them, and turned."""
    form = Form(model)
    for node in form.products():
        name, scales, steps, axis = form.weight(node, 127)
        form.store(f"{name}_q", TensorProto.INT8, np.round(steps.T if axis else steps))
        form.store(f"{name}_scale", TensorProto.FLOAT, scales)
        form.store(f"{name}_zero", TensorProto.INT8, np.zeros(scales.size, np.int8))
        node.input[0] = form.activation(node.input[0], TensorProto.INT8, 127)
        inputs = [f"{name}_q", f"{name}_scale", f"{name}_zero"]
        weight = form.add("DequantizeLinear", inputs, f"{name}_dq", axis=0)
        node.input[1] = form.add("Transpose", [weight], f"{name}_t", perm=[1, 0]) if axis else weight
    form.save(path)


def _torchao_weights(model: ModelProto, path: str) -> None:
    """As exports of torchao's weights of 8 bits: integers are cast, and multiplied by their scales."""
    form = Form(model)
    for node in form.products("MatMul", "Gemm"):
        name, scales, steps, _ = form.weight(node, 127)
        form.store(f"{name}_q", TensorProto.INT8, np.round(steps.T))
        form.store(f"{name}_scale", TensorProto.FLOAT, scales[:, None])
        cast = form.add("Cast", [f"{name}_q"], f"{name}_cast", to=TensorProto.FLOAT)
        weight = form.add("Mul", [cast, f"{name}_scale"], f"{name}_dq")
        node.input[1] = form.add("Transpose", [weight], f"{name}_t", perm=[1, 0])
    form.save(path)


TOOLS: Mapping[str, Any] = {
    "qdq": lambda model, path: _static(model, path, QuantFormat.QDQ, QuantizeBias=False),
    "qdq with biases": lambda model, path: _static(model, path, QuantFormat.QDQ),
    "operators": lambda model, path: _static(model, path, QuantFormat.QOperator),
    "dynamic": lambda model, path: quantize_dynamic(model, path, op_types_to_quantize=["MatMul", "Gemm"]),
    "nbits": lambda model, path: _nbits(model, path, QuantFormat.QOperator),
    "nbits in qdq": lambda model, path: _nbits(model, path, QuantFormat.QDQ),
    "nncf": _nncf,
    "modelopt int8": lambda model, path: _modelopt(model, path, TensorProto.INT8, 127),
    "modelopt fp8": lambda model, path: _modelopt(model, path, TensorProto.FLOAT8E4M3FN, 448),
    "modelopt awq": _awq,
    "torchao": _torchao,
    "torchao weights": _torchao_weights,
}
"""ONNX Runtime's static quantizer in both of its forms, its dynamic one and its 4-bit one; and forms of other tools."""
LEAST: Final = {"modelopt fp8": 19, "modelopt awq": 21}
"""The first opset that has what a tool writes."""


LARGE = {"k1": 18, "b1": 18, "b2": 18, "w1": -18}
"""Powers of two that take the values between k1 and w1 out of the range of float16, and change no result."""


@cache
def quantized(tool: str, opset: int = 21, *, is_large: bool = False) -> ModelProto:
    """The float network as a tool quantizes it, with values in its middle that float16 lacks; for reading only."""
    logging.getLogger().setLevel(logging.ERROR)  # the tools advise to preprocess
    model = float_network(max(opset, LEAST.get(tool, opset)))
    for tensor in model.graph.initializer if is_large else ():
        factor = np.float32(2.0 ** LARGE.get(tensor.name, 0))
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * factor, tensor.name))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "quantized.onnx")
        TOOLS[tool](model, path)
        return onnx.load(path)
