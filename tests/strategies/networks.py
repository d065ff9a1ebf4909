"""Random networks with weights to train: layers as exporters write them, over tokens or images."""

from random import Random
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

TOKENS = (5, 8)
"""Tokens, and features of each."""
CHANNELS, SIDE = 4, 6
CLASSES = 3
OPSETS = (13, 17, 18, 20, 22)


def random_network(rng: Random, layers: int = 5) -> ModelProto:
    """A network of about ``layers`` layers from "x" to "y", [N, 3]; all, some or none of its nodes have names."""
    return _Network(rng, layers).model()


class _Network:
    def __init__(self, rng: Random, layers: int) -> None:
        self.rng = rng
        self.numbers = np.random.default_rng(rng.randrange(2**32))
        self.opset = rng.choice(OPSETS)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.is_image = rng.random() < 0.4
        self.past = ["x"]
        """Values of the shape of the input, the last one last."""
        kinds = _IMAGE_LAYERS if self.is_image else _TOKEN_LAYERS
        usable = [layer for layer, since in kinds.items() if since <= self.opset]
        for _ in range(layers):
            self.past.append(rng.choice(usable)(self, self.past[-1]))
        self.head(self.past[-1])

    def model(self) -> ModelProto:
        named = self.rng.choice((1.0, 1.0, 0.5, 0.0))
        for index, node in enumerate(self.nodes):
            node.name = f"/net/{index}/{node.op_type}" if self.rng.random() < named else ""
        shape = (CHANNELS, SIDE, SIDE) if self.is_image else TOKENS
        ports = [("x", ["N", *shape]), ("y", ["N", CLASSES])]
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in ports)
        graph = helper.make_graph(self.nodes, "network", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    # -- values ------------------------------------------------------------------------------------------------

    def name(self) -> str:
        return f"v{len(self.nodes)}.{len(self.weights)}"

    def op(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """The first output of a new node."""
        made = [f"{self.name()}.{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, made, **attributes))
        return made[0]

    def weight(self, *shape: int, about: float = 0.0) -> str:
        numbers = about + self.numbers.standard_normal(shape) * 0.3
        return self.stored(numbers.astype(np.float32))

    def number(self, value: float) -> str:
        return self.stored(np.float32(value))

    def whole(self, *values: int) -> str:
        return self.stored(np.array(values, np.int64))

    def stored(self, array: Any) -> str:
        name = f"{self.name()}.w"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def earlier(self) -> str:
        return self.rng.choice(self.past)

    def either(self, op: str, one: str, other: str, **attributes: Any) -> str:
        """An op on two values in a random order."""
        pair = [one, other]
        self.rng.shuffle(pair)
        return self.op(op, *pair, **attributes)

    def mean(self, x: str, axes: tuple[int, ...]) -> str:
        if self.opset >= 18:
            return self.op("ReduceMean", x, self.whole(*axes), keepdims=1)
        return self.op("ReduceMean", x, axes=axes, keepdims=1)

    def largest(self, x: str, axes: tuple[int, ...]) -> str:
        op = self.rng.choice(("ReduceMax", "ReduceMin"))
        if self.opset >= 18:
            return self.op(op, x, self.whole(*axes), keepdims=1)
        return self.op(op, x, axes=axes, keepdims=1)

    # -- layers of both kinds ----------------------------------------------------------------------------------

    def head(self, x: str) -> None:
        axes = (2, 3) if self.is_image else (1,)
        width = CHANNELS if self.is_image else TOKENS[1]
        pooled = self.op("GlobalAveragePool", x) if self.is_image and self.rng.random() < 0.5 else self.mean(x, axes)
        flat = self.op("Flatten", pooled)
        self.op("Gemm", flat, self.weight(width, CLASSES), self.weight(CLASSES))
        self.nodes[-1].output[0] = "y"

    def activation(self, x: str) -> str:
        ops = ["Relu", "Relu", "Tanh", "Sigmoid", "LeakyRelu", "Elu", "Softplus", "HardSwish", "HardSigmoid", "Abs"]
        op = self.rng.choice(ops if self.opset >= 14 else [name for name in ops if name != "HardSwish"])
        return self.op(op, x)

    def gelu(self, x: str) -> str:
        if self.opset >= 20 and self.rng.random() < 0.5:
            return self.op("Gelu", x)
        erf = self.op("Erf", self.op("Div", x, self.number(2**0.5)))
        half = self.op("Mul", x, self.op("Add", erf, self.number(1)))
        return self.op("Mul", half, self.number(0.5))

    def residual(self, x: str) -> str:
        return self.either(self.rng.choice(("Add", "Add", "Sub", "Mul", "Max", "Min")), x, self.earlier())

    def formula(self, x: str) -> str:
        kind = self.rng.choice(("exp", "log", "square", "root", "scale", "clip"))
        if kind == "exp":
            return self.op("Exp", self.op("Neg", self.op("Abs", x)))
        if kind == "log":
            return self.op("Log", self.op("Add", self.op("Abs", x), self.number(1)))
        if kind == "square":
            return self.op("Mul", x, x) if self.rng.random() < 0.5 else self.op("Pow", x, self.number(2))
        if kind == "root":
            return self.op("Sqrt", self.op("Add", self.op("Abs", x), self.number(0.5)))
        if kind == "clip":
            return self.op("Clip", x, self.number(-1), self.number(1))
        return self.either("Mul", x, self.number(0.125))

    def dropout(self, x: str) -> str:
        return self.op("Dropout", x)

    def joined(self, x: str) -> str:
        width = CHANNELS if self.is_image else TOKENS[0]
        both = self.op("Concat", x, self.earlier(), axis=1)
        return self.op("Slice", both, self.whole(1), self.whole(1 + width), self.whole(1))

    def written_out_norm(self, x: str) -> str:
        axes = (1, 2, 3) if self.is_image else (-1,)
        shifted = self.op("Sub", x, self.mean(x, axes))
        square = (
            self.op("Pow", shifted, self.number(2)) if self.rng.random() < 0.5 else self.op("Mul", shifted, shifted)
        )
        spread = self.op("Sqrt", self.op("Add", self.mean(square, axes), self.number(1e-5)))
        shape = (CHANNELS, 1, 1) if self.is_image else TOKENS[1:]
        scaled = self.op("Mul", self.op("Div", shifted, spread), self.weight(*shape, about=1))
        return self.op("Add", scaled, self.weight(*shape))

    def instance_norm(self, x: str) -> str:
        width = CHANNELS if self.is_image else TOKENS[0]
        return self.op("InstanceNormalization", x, self.weight(width, about=1), self.weight(width))

    def batch_norm(self, x: str) -> str:
        width = CHANNELS if self.is_image else TOKENS[0]
        moments = self.stored(np.zeros(width, np.float32)), self.stored(np.ones(width, np.float32))
        return self.op("BatchNormalization", x, self.weight(width, about=1), self.weight(width), *moments)

    def prelu(self, x: str) -> str:
        return self.op("PRelu", x, self.weight(CHANNELS, 1, 1) if self.is_image else self.weight(TOKENS[1]))

    # -- tokens ------------------------------------------------------------------------------------------------

    def dense(self, x: str) -> str:
        product = self.op("MatMul", x, self.weight(TOKENS[1], TOKENS[1]))
        return self.either("Add", product, self.weight(TOKENS[1])) if self.rng.random() < 0.8 else product

    def attention(self, x: str) -> str:
        query, key, value = (self.dense(x) for _ in range(3))
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 2, 1]))
        scores = self.op("Mul", scores, self.number(TOKENS[1] ** -0.5))
        if self.rng.random() < 0.5:
            hidden = np.triu(np.ones((TOKENS[0], TOKENS[0]), np.float32), 1)
            scores = self.op("Add", scores, self.stored(hidden * np.float32(-1e9)))
        return self.op("MatMul", self.op("Softmax", scores, axis=-1), value)

    def softmax(self, x: str) -> str:
        return self.op(self.rng.choice(("Softmax", "LogSoftmax")), x, axis=-1)

    def layer_norm(self, x: str) -> str:
        return self.op("LayerNormalization", x, self.weight(TOKENS[1], about=1), self.weight(TOKENS[1]))

    def mixed_tokens(self, x: str) -> str:
        turned = self.op("Transpose", x, perm=[0, 2, 1])
        mixed = self.op("MatMul", turned, self.weight(TOKENS[0], TOKENS[0]))
        return self.op("Transpose", mixed, perm=[0, 2, 1])

    def centered(self, x: str) -> str:
        return self.op("Sub", x, self.mean(x, (1,)) if self.rng.random() < 0.5 else self.largest(x, (-1,)))

    def recurrent(self, x: str) -> str:
        op = self.rng.choice(("LSTM", "GRU", "RNN"))
        width, gates = TOKENS[1], {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
        weights = [self.weight(1, gates * width, width) for _ in range(2)]
        turned = self.op("Transpose", x, perm=[1, 0, 2])
        steps = self.op(op, turned, *weights, self.weight(1, 2 * gates * width), hidden_size=width)
        return self.op("Transpose", self.op("Squeeze", steps, self.whole(1)), perm=[1, 0, 2])

    # -- images ------------------------------------------------------------------------------------------------

    def conv(self, x: str) -> str:
        bias = [self.weight(CHANNELS)] if self.rng.random() < 0.5 else []
        return self.op("Conv", x, self.weight(CHANNELS, CHANNELS, 3, 3), *bias, pads=[1] * 4)

    def conv_transpose(self, x: str) -> str:
        return self.op("ConvTranspose", x, self.weight(CHANNELS, CHANNELS, 3, 3), pads=[1] * 4)

    def pool(self, x: str) -> str:
        return self.op(self.rng.choice(("MaxPool", "AveragePool")), x, kernel_shape=[3, 3], pads=[1] * 4)

    def squeezed(self, x: str) -> str:
        op = self.rng.choice(("GlobalAveragePool", "GlobalMaxPool"))
        return self.either("Mul", x, self.op("Sigmoid", self.op(op, x)))


_LAYERS = {
    _Network.activation: 13, _Network.gelu: 13, _Network.residual: 13, _Network.formula: 13, _Network.dropout: 13,
    _Network.joined: 13, _Network.written_out_norm: 13, _Network.instance_norm: 13, _Network.batch_norm: 13,
    _Network.prelu: 13,
}  # fmt: skip
"""Layers of both kinds -> the opset from which on they exist."""
_TOKEN_LAYERS = _LAYERS | {
    _Network.dense: 13, _Network.attention: 13, _Network.softmax: 13, _Network.layer_norm: 17,
    _Network.mixed_tokens: 13, _Network.centered: 13, _Network.recurrent: 14,
}  # fmt: skip
_IMAGE_LAYERS = _LAYERS | {
    _Network.conv: 13, _Network.conv_transpose: 13, _Network.pool: 13, _Network.squeezed: 13,
}  # fmt: skip
