"""The models that are converted: generated, with seeded random weights, into a cache folder.

Shapes are those of real networks; weights are uniform with the variance that keeps activations near 1. Layer norms, RMS
norms, Gelu and SiLU are written out as single ops, as exporters write them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

LOWEST = -3.4028234663852886e38
"""What exporters write for minus infinity in attention masks."""
OPSET, IR_VERSION = 17, 8
VERSION = 1
"""To be counted up when a model changes: cached files carry it in their names."""


@dataclass(slots=True)
class Graph:
    """Nodes and weights in the order in which they were asked for. With ``data`` large weights go to that file."""

    seed: int = 0
    data: Path | None = None
    nodes: list[NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    offset: int = 0

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output; the output's name is returned."""
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [f"{name}:0"], name=name, **attributes))
        return f"{name}:0"

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """An initializer; every use gets its own, as exporters do."""
        array = np.asarray(value, dtype)
        name = f"constant_{len(self.tensors)}"
        self.tensors.append(onnx.numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int, fan_in: int, around: float = 0.0) -> str:
        """Random float32 numbers of variance 1 / fan_in (float32 throughout: 4 GB are made of them)."""
        rng = np.random.default_rng((self.seed, len(self.tensors)))
        array = rng.random(shape, np.float32)
        array -= np.float32(0.5)
        array *= np.float32((12 / fan_in) ** 0.5)
        array += np.float32(around)
        return self.stored(array)

    def stored(self, array: NDArray[np.float32]) -> str:
        """An initializer in the model, or in its data file."""
        if self.data is None or array.nbytes < 1024:
            return self.constant(array)
        tensor = TensorProto(name=f"constant_{len(self.tensors)}", data_type=TensorProto.FLOAT, dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        start = -(-self.offset // 4096) * 4096
        with self.data.open("ab") as file:
            file.write(bytes(start - self.offset))
            file.write(array.data)
        self.offset = start + array.nbytes
        for key, value in (("location", self.data.name), ("offset", start), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return tensor.name

    def linear(self, x: str, inner: int, outer: int) -> str:
        """MatMul and the Add of a bias: 2 nodes."""
        return self.op("Add", self.op("MatMul", x, self.weight(inner, outer, fan_in=inner)), self.bias(outer))

    def bias(self, size: int) -> str:
        return self.weight(size, fan_in=100)

    def scale(self, size: int) -> str:
        return self.weight(size, fan_in=100, around=1.0)

    def layer_norm(self, x: str, size: int) -> str:
        """LayerNormalization as 9 nodes, with BERT's epsilon."""
        centered = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centered, self.constant(2.0)), axes=[-1])
        deviation = self.op("Sqrt", self.op("Add", variance, self.constant(1e-12)))
        scaled = self.op("Mul", self.op("Div", centered, deviation), self.scale(size))
        return self.op("Add", scaled, self.bias(size))

    def rms_norm(self, x: str, size: int) -> str:
        """RMSNormalization as 6 nodes."""
        mean = self.op("ReduceMean", self.op("Pow", x, self.constant(2.0)), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.constant(1e-6)))
        return self.op("Mul", self.op("Div", x, root), self.scale(size))

    def heads(self, x: str, heads: int, size: int, perm: list[int]) -> str:
        """[batch, length, heads * size] as [batch, heads, ...]: 2 nodes."""
        shape = self.constant([0, 0, heads, size], np.int64)
        return self.op("Transpose", self.op("Reshape", x, shape), perm=perm)

    def attend(self, query: str, columns: str, value: str, mask: str, heads: int, size: int) -> str:
        """Scaled, masked attention of split heads, whose keys are columns already, merged again: 7 nodes."""
        scores = self.op("Div", self.op("MatMul", query, columns), self.constant(size**0.5))
        weights = self.op("Softmax", self.op("Add", scores, mask), axis=-1)
        context = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self.op("Reshape", context, self.constant([0, 0, heads * size], np.int64))

    def model(self, inputs: list[Any], outputs: list[Any]) -> ModelProto:
        """The whole, where ``outputs`` are (value, name, element type, shape)."""
        renamed = {value: name for value, name, _, _ in outputs}
        for node in self.nodes:
            node.output[:] = [renamed.get(name, name) for name in node.output]
            node.input[:] = [renamed.get(name, name) for name in node.input]
        graph = helper.make_graph(
            self.nodes, "benchmark", [helper.make_tensor_value_info(*entry) for entry in inputs],
            [helper.make_tensor_value_info(*rest) for _, *rest in outputs], self.tensors,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def encoder(
    path: Path, *, layers: int, hidden: int, heads: int, length: int, vocabulary: int, external: bool = False
) -> ModelProto:
    """BERT: 6 nodes of embedding and mask, and 50 per layer. 12 layers of 768 have BERT-base's 108 million weights."""
    g = Graph(data=path.with_suffix(".data") if external else None)
    words = g.op("Gather", g.weight(vocabulary, hidden, fan_in=1), "ids")
    x = g.op("Add", words, g.weight(1, length, hidden, fan_in=1))
    seen = g.op("Cast", g.op("Unsqueeze", "seen", g.constant([1, 2], np.int64)), to=TensorProto.FLOAT)
    mask = g.op("Mul", g.op("Sub", g.constant(1.0), seen), g.constant(LOWEST))
    size = hidden // heads
    for _ in range(layers):
        query = g.heads(g.linear(x, hidden, hidden), heads, size, [0, 2, 1, 3])
        columns = g.heads(g.linear(x, hidden, hidden), heads, size, [0, 2, 3, 1])
        value = g.heads(g.linear(x, hidden, hidden), heads, size, [0, 2, 1, 3])
        attended = g.attend(query, columns, value, mask, heads, size)
        x = g.layer_norm(g.op("Add", g.linear(attended, hidden, hidden), x), hidden)
        inner = g.linear(x, hidden, 4 * hidden)
        erf = g.op("Add", g.op("Erf", g.op("Div", inner, g.constant(2**0.5))), g.constant(1.0))
        gelu = g.op("Mul", g.op("Mul", inner, erf), g.constant(0.5))
        x = g.layer_norm(g.op("Add", g.linear(gelu, 4 * hidden, hidden), x), hidden)
    ports = [("ids", TensorProto.INT64, [1, length]), ("seen", TensorProto.INT64, [1, length])]
    return g.model(ports, [(x, "last_hidden_state", TensorProto.FLOAT, [1, length, hidden])])


def unet(path: Path, *, width: int, depth: int, size: int) -> ModelProto:
    """The U-Net of segmentation: Conv, BatchNormalization and Relu twice per step, MaxPool down, Resize up, Concat."""
    del path
    g = Graph()

    def block(x: str, inner: int, outer: int) -> str:
        for channels in (inner, outer):
            weight = g.weight(outer, channels, 3, 3, fan_in=channels * 9 // 2)
            x = g.op("Conv", x, weight, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            statistics = g.bias(outer), g.weight(outer, fan_in=10, around=1.2)
            x = g.op("Relu", g.op("BatchNormalization", x, g.scale(outer), g.bias(outer), *statistics))
        return x

    x, channels, skipped = "image", 3, []
    for step in range(depth):
        x = block(x, channels, width << step)
        channels = width << step
        skipped.append(x)
        x = g.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = block(x, channels, 2 * channels)
    for step in reversed(range(depth)):
        x = g.op("Resize", x, "", g.constant([1, 1, 2, 2]), mode="nearest")
        x = block(g.op("Concat", skipped[step], x, axis=1), (width << step) * 3, width << step)
    x = g.op("Sigmoid", g.op("Conv", x, g.weight(1, width, 1, 1, fan_in=width), kernel_shape=[1, 1]))
    shape = [1, 3, size, size]
    return g.model([("image", TensorProto.FLOAT, shape)], [(x, "mask", TensorProto.FLOAT, [1, 1, size, size])])


def decoder(
    path: Path, *, layers: int, hidden: int, heads: int, inner: int, vocabulary: int, external: bool = False
) -> ModelProto:
    """A language model's decoder with a cache of keys and values: RMSNorm, rotary positions, causal mask, SiLU.

    One channel of the embedding is about 400, as trained decoders have a few channels of several hundreds to thousands;
    the squares of RMSNorm exceed float16 there.
    """
    g, size = Graph(data=path.with_suffix(".data") if external else None), hidden // heads
    table = np.random.default_rng(0).standard_normal((vocabulary, hidden), np.float32)
    table[:, 7] += np.float32(400)
    x = g.op("Gather", g.stored(table), "ids")
    turn, mask = _rotary(g, size), _causal(g)
    outputs = []
    for layer in range(layers):
        normed = g.rms_norm(x, hidden)
        query, key, value = (
            g.heads(g.op("MatMul", normed, g.weight(hidden, hidden, fan_in=hidden)), heads, size, [0, 2, 1, 3])
            for _ in range(3)
        )
        keys = g.op("Concat", f"past.{layer}.key", turn(key), axis=2)
        values = g.op("Concat", f"past.{layer}.value", value, axis=2)
        outputs += [(keys, f"present.{layer}.key"), (values, f"present.{layer}.value")]
        columns = g.op("Transpose", keys, perm=[0, 1, 3, 2])
        attended = g.attend(turn(query), columns, values, mask, heads, size)
        x = g.op("Add", x, g.op("MatMul", attended, g.weight(hidden, hidden, fan_in=hidden)))
        normed = g.rms_norm(x, hidden)
        gate = g.op("MatMul", normed, g.weight(hidden, inner, fan_in=hidden))
        gated = g.op(
            "Mul",
            g.op("Mul", gate, g.op("Sigmoid", gate)),
            g.op("MatMul", normed, g.weight(hidden, inner, fan_in=hidden)),
        )
        x = g.op("Add", x, g.op("MatMul", gated, g.weight(inner, hidden, fan_in=inner)))
    logits = g.op("MatMul", g.rms_norm(x, hidden), g.weight(hidden, vocabulary, fan_in=hidden))
    past = [("past", TensorProto.FLOAT, [1, heads, "past", size])] * 2 * layers
    names = [f"past.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    inputs = [(name, *entry[1:]) for name, entry in zip(names, past, strict=True)]
    ids = [(name, TensorProto.INT64, [1, "length"]) for name in ("ids", "positions")]
    caches = [(value, name, TensorProto.FLOAT, [1, heads, "total", size]) for value, name in outputs]
    return g.model([*ids, *inputs], [(logits, "logits", TensorProto.FLOAT, [1, "length", vocabulary]), *caches])


def _rotary(g: Graph, size: int) -> Callable[[str], str]:
    """What turns queries and keys by their positions."""
    place = g.op("Cast", g.op("Unsqueeze", "positions", g.constant([-1], np.int64)), to=TensorProto.FLOAT)
    half = g.op("MatMul", place, g.constant(10000.0 ** -(np.arange(0, size, 2) / size)[None]))
    angle = g.op("Unsqueeze", g.op("Concat", half, half, axis=-1), g.constant([1], np.int64))
    cos, sin = g.op("Cos", angle), g.op("Sin", angle)

    def turn(x: str) -> str:
        ends = [g.constant(bounds, np.int64) for bounds in ([0], [size // 2], [size], [3])]
        lower, upper = g.op("Slice", x, *ends[:2], ends[3]), g.op("Slice", x, *ends[1:])
        turned = g.op("Concat", g.op("Neg", upper), lower, axis=-1)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    return turn


def _causal(g: Graph) -> str:
    """0 where a query may see a key, the lowest float32 elsewhere: [length, total]."""
    zero, one = g.constant(0, np.int64), g.constant(1, np.int64)
    past = g.op("Gather", g.op("Shape", "past.0.key"), g.constant(2, np.int64))
    total = g.op("Add", past, g.op("Gather", g.op("Shape", "ids"), one))
    queries = g.op("Unsqueeze", g.op("Range", past, total, one), g.constant([1], np.int64))
    visible = g.op("LessOrEqual", g.op("Range", zero, total, one), queries)
    return g.op("Where", visible, g.constant(0.0), g.constant(LOWEST))


@dataclass(frozen=True, slots=True)
class Spec:
    """A model of the benchmark: what builds it and with which sizes.

    ``external`` says that its weights lie in a data file; ``blocked`` that peers get onnxamp's black list.
    """

    name: str
    title: str
    build: Callable[..., ModelProto]
    sizes: dict[str, int]
    external: bool = False
    blocked: bool = False

    def file(self, folder: Path) -> Path:
        """The model in the folder; made there where it is missing."""
        sizes = "-".join(f"{key}{value}" for key, value in self.sizes.items())
        path = folder / f"{self.build.__name__}-{sizes}{'-external' * self.external}-v{VERSION}" / "model.onnx"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".data").unlink(missing_ok=True)
            options = {"external": True} if self.external else {}
            model = self.build(path, **self.sizes, **options)
            half = path.with_suffix(".half")
            half.write_bytes(model.SerializeToString())
            half.rename(path)
        return path


_STACK = {"hidden": 32, "heads": 2, "length": 16, "vocabulary": 100}

FULL = (
    Spec("bert", "BERT-base shape", encoder,
         {"layers": 12, "hidden": 768, "heads": 12, "length": 128, "vocabulary": 30522}),
    Spec("unet", "U-Net", unet, {"width": 64, "depth": 4, "size": 64}),
    Spec("decoder", "decoder with KV cache", decoder,
         {"layers": 8, "hidden": 512, "heads": 8, "inner": 1376, "vocabulary": 8000}),
    Spec("stack-5k", "encoder stack with a black list", encoder, {"layers": 100, **_STACK}, blocked=True),
    Spec("stack-50k", "encoder stack with a black list", encoder, {"layers": 1000, **_STACK}, blocked=True),
    Spec("large", "4 GB in external data", encoder,
         {"layers": 5, "hidden": 4096, "heads": 32, "length": 16, "vocabulary": 1000}, external=True),
)  # fmt: skip

QUICK = (
    Spec("bert", "BERT-base shape, small", encoder,
         {"layers": 2, "hidden": 64, "heads": 4, "length": 16, "vocabulary": 100}),
    Spec("unet", "U-Net, small", unet, {"width": 8, "depth": 2, "size": 32}),
    Spec("decoder", "decoder with KV cache, small", decoder,
         {"layers": 2, "hidden": 64, "heads": 4, "inner": 96, "vocabulary": 100}),
    Spec("stack-5k", "encoder stack, small", encoder, {"layers": 2, **_STACK}, blocked=True),
    Spec("stack-50k", "encoder stack, small", encoder, {"layers": 20, **_STACK}, blocked=True),
    Spec("large", "external data, small", encoder,
         {"layers": 1, "hidden": 256, "heads": 4, "length": 16, "vocabulary": 100}, external=True),
)  # fmt: skip
