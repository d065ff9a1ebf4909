"""Building blocks of the model zoo, registered on ``gs.Graph``: ``graph.linear(...)`` appends its nodes.

Node names are paths (``encoder/0/attention/scores``). A node's outputs carry its name and an index
(``encoder/0/attention/scores:0``), its unnamed constants the index of the input (``.../scale/in_1``).
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import onnx
import onnx_graphsurgeon as gs

Operand = gs.Tensor | np.ndarray | float | list | None

LOWEST = -3.4028234663852886e38
"""The lowest float32: what exporters write for minus infinity in attention masks. No float16 holds it."""

HIDDEN, HEADS, HEAD_SIZE = 64, 4, 16

IR_VERSION = 9
PRODUCER = "onnxamp"


def operand(name: str, value: Operand) -> gs.Tensor:
    """A tensor as it is, None as an input left out, everything else as a constant (float32 or int64)."""
    if isinstance(value, gs.Tensor):
        return value
    if value is None:
        return gs.Variable.empty()
    array = np.asarray(value)
    return gs.Constant(name, array.astype(np.float32) if array.dtype == np.float64 else array)


def serialize(graph: gs.Graph) -> bytes:
    """The checked model. What graphsurgeon would fill in from its own version is fixed here."""
    model = gs.export_onnx(graph, ir_version=IR_VERSION)
    model.producer_name, model.producer_version = PRODUCER, ""
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


@gs.Graph.register()
def op(self: gs.Graph, kind: str, name: str, *inputs: Operand, outputs: int = 1, **attrs: object) -> gs.Variable:
    """Append one node. Returns its output, or the list of them if there are several."""
    tensors = [operand(f"{name}/in_{i}", value) for i, value in enumerate(inputs)]
    results = [gs.Variable(f"{name}:{i}") for i in range(outputs)]
    self.layer(op=kind, name=name, inputs=tensors, outputs=results, attrs=attrs)
    return results[0] if outputs == 1 else results


@gs.Graph.register()
def input(self: gs.Graph, name: str, dtype: type, *shape: int | str) -> gs.Variable:  # noqa: A001 - a method
    """Declare the next graph input."""
    self.inputs.append(gs.Variable(name, dtype, list(shape)))
    return self.inputs[-1]


@gs.Graph.register()
def output(self: gs.Graph, value: gs.Variable, name: str, dtype: type, *shape: int | str) -> None:
    """Make a node's output the next graph output, under a new name."""
    value.name, value.dtype, value.shape = name, dtype, list(shape)
    self.outputs.append(value)


@gs.Graph.register()
def uniform(self: gs.Graph, name: str, shape: tuple[int, ...], low: float, high: float) -> gs.Constant:
    """Random constant. Seeded by its name, so that a change to one part leaves all other weights alone.

    Uniform, because that takes nothing but bits and a multiplication: every platform gives the same bytes.
    """
    rng = np.random.default_rng(zlib.crc32(f"{self.name}/{name}".encode()))
    return gs.Constant(name, (low + (high - low) * rng.random(shape)).astype(np.float32))


@gs.Graph.register()
def weight(self: gs.Graph, name: str, *shape: int, fan_in: int, gain: float = 1.0) -> gs.Constant:
    """Weights of variance gain²/fan_in: an input of variance 1 gives an output of variance gain²."""
    limit = gain * math.sqrt(3 / fan_in)
    return self.uniform(name, shape, -limit, limit)


@gs.Graph.register()
def linear(self: gs.Graph, name: str, x: gs.Tensor, size: tuple[int, int], *, gain: float = 1.0, bias: bool = True):
    """MatMul and, unless told otherwise, the Add of a bias."""
    x = self.op("MatMul", f"{name}/matmul", x, self.weight(f"{name}/weight", *size, fan_in=size[0], gain=gain))
    return self.op("Add", f"{name}/add", x, self.uniform(f"{name}/bias", size[1:], -0.1, 0.1)) if bias else x


@gs.Graph.register()
def gemm(self: gs.Graph, name: str, x: gs.Tensor, size: tuple[int, int]) -> gs.Variable:
    """A fully connected layer as PyTorch exports it: Gemm with the weight stored transposed."""
    weight = self.weight(f"{name}/weight", *reversed(size), fan_in=size[0])
    return self.op("Gemm", name, x, weight, self.uniform(f"{name}/bias", size[1:], -0.1, 0.1), transB=1)


@gs.Graph.register()
def conv(
    self: gs.Graph,
    name: str,
    x: gs.Tensor,
    size: tuple[int, int],
    *,
    kernel: int = 3,
    stride: int = 1,
    bias: bool = True,
):
    """2-D Conv that keeps height and width (over the stride); gain √2 makes up for the Relu after it."""
    weight = self.weight(f"{name}/weight", *reversed(size), kernel, kernel, fan_in=size[0] * kernel**2, gain=2**0.5)
    extra = [self.uniform(f"{name}/bias", size[1:], -0.1, 0.1)] if bias else []
    shape = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
    return self.op("Conv", name, x, weight, *extra, **shape)


@gs.Graph.register()
def batch_norm(self: gs.Graph, name: str, x: gs.Tensor, channels: int) -> gs.Variable:
    """BatchNormalization with the statistics of a trained network: none of them trivial."""
    ranges = {"scale": (0.8, 1.2), "bias": (-0.2, 0.2), "mean": (-0.2, 0.2), "variance": (0.5, 1.5)}
    stats = [self.uniform(f"{name}/{key}", (channels,), *limits) for key, limits in ranges.items()]
    return self.op("BatchNormalization", name, x, *stats, epsilon=1e-5)


@gs.Graph.register()
def instance_norm(self: gs.Graph, name: str, x: gs.Tensor, channels: int) -> gs.Variable:
    """InstanceNormalization with an affine transform."""
    scale = self.uniform(f"{name}/scale", (channels,), 0.8, 1.2)
    return self.op("InstanceNormalization", name, x, scale, self.uniform(f"{name}/bias", (channels,), -0.2, 0.2))


@gs.Graph.register()
def layer_norm(self: gs.Graph, name: str, x: gs.Tensor, size: int) -> gs.Variable:
    """LayerNormalization in its parts. BERT's epsilon of 1e-12 is zero in float16."""
    mean = self.op("ReduceMean", f"{name}/mean", x, axes=[-1])
    centered = self.op("Sub", f"{name}/centred", x, mean)
    square = self.op("Pow", f"{name}/square", centered, 2.0)
    variance = self.op("ReduceMean", f"{name}/variance", square, axes=[-1])
    deviation = self.op("Sqrt", f"{name}/deviation", self.op("Add", f"{name}/epsilon", variance, 1e-12))
    x = self.op("Div", f"{name}/normalized", centered, deviation)
    x = self.op("Mul", f"{name}/scaled", x, self.uniform(f"{name}/weight", (size,), 0.8, 1.2))
    return self.op("Add", f"{name}/shifted", x, self.uniform(f"{name}/bias", (size,), -0.2, 0.2))


@gs.Graph.register()
def rms_norm(self: gs.Graph, name: str, x: gs.Tensor, size: int, *, reciprocal: bool = False) -> gs.Variable:
    """RMSNorm in its parts; exporters write the division either as Div or as Reciprocal and Mul."""
    square = self.op("Pow", f"{name}/square", x, 2.0)
    mean = self.op("ReduceMean", f"{name}/mean", square, axes=[-1])
    root = self.op("Sqrt", f"{name}/root", self.op("Add", f"{name}/epsilon", mean, 1e-6))
    if reciprocal:
        x = self.op("Mul", f"{name}/normalized", x, self.op("Reciprocal", f"{name}/reciprocal", root))
    else:
        x = self.op("Div", f"{name}/normalized", x, root)
    return self.op("Mul", f"{name}/scaled", self.uniform(f"{name}/weight", (size,), 0.8, 1.2), x)


@gs.Graph.register()
def gelu(self: gs.Graph, name: str, x: gs.Tensor) -> gs.Variable:
    """Gelu in its parts, in the order in which PyTorch exports them."""
    erf = self.op("Erf", f"{name}/erf", self.op("Div", f"{name}/div", x, math.sqrt(2)))
    x = self.op("Mul", f"{name}/mul", x, self.op("Add", f"{name}/add", erf, 1.0))
    return self.op("Mul", f"{name}/half", x, 0.5)


@gs.Graph.register()
def silu(self: gs.Graph, name: str, x: gs.Tensor) -> gs.Variable:
    """SiLU in its parts."""
    return self.op("Mul", f"{name}/mul", x, self.op("Sigmoid", f"{name}/sigmoid", x))


@gs.Graph.register()
def split_heads(self: gs.Graph, name: str, x: gs.Tensor) -> gs.Variable:
    """[batch, sequence, hidden] -> [batch, heads, sequence, size]."""
    x = self.op("Reshape", f"{name}/reshape", x, [0, 0, HEADS, HEAD_SIZE])
    return self.op("Transpose", f"{name}/transpose", x, perm=[0, 2, 1, 3])


@gs.Graph.register()
def merge_heads(self: gs.Graph, name: str, x: gs.Tensor) -> gs.Variable:
    """[batch, heads, sequence, size] -> [batch, sequence, hidden]."""
    x = self.op("Transpose", f"{name}/transpose", x, perm=[0, 2, 1, 3])
    return self.op("Reshape", f"{name}/reshape", x, [0, 0, HIDDEN])


@gs.Graph.register()
def dimension(self: gs.Graph, name: str, x: gs.Tensor, axis: int) -> gs.Variable:
    """One dimension of a tensor, as a scalar."""
    return self.op("Gather", f"{name}/gather", self.op("Shape", f"{name}/shape", x), axis)


@gs.Graph.register()
def attention(
    self: gs.Graph,
    name: str,
    query: gs.Tensor,
    key: gs.Tensor,
    value: gs.Tensor,
    *,
    mask: gs.Tensor,
    scale: tuple,
):
    """Attention of split heads. The scale is an operator and its factor: exporters divide or multiply."""
    key = self.op("Transpose", f"{name}/key/columns", key, perm=[0, 1, 3, 2])
    scores = self.op("MatMul", f"{name}/scores", query, key)
    scores = self.op("Add", f"{name}/mask", self.op(scale[0], f"{name}/scale", scores, scale[1]), mask)
    weights = self.op("Softmax", f"{name}/softmax", scores, axis=-1)
    context = self.op("MatMul", f"{name}/context", weights, value)
    return self.merge_heads(f"{name}/merge", context)


@gs.Graph.register()
def rotary_angles(self: gs.Graph, positions: gs.Tensor) -> list[gs.Variable]:
    """Cosine and sine of position times frequency: float16 has no odd position above 2048."""
    place = self.op("Unsqueeze", "rotary/place", positions, [-1])
    place = self.op("Cast", "rotary/cast", place, to=onnx.TensorProto.FLOAT)
    frequencies = 10000.0 ** -(np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angle = self.op("MatMul", "rotary/angle", place, frequencies[None])
    angle = self.op("Concat", "rotary/angles", angle, angle, axis=-1)
    return [self.op("Unsqueeze", f"rotary/{f}/heads", self.op(f, f"rotary/{f}", angle), [1]) for f in ("Cos", "Sin")]


@gs.Graph.register()
def causal_mask(self: gs.Graph, ids: gs.Tensor, past: gs.Tensor) -> gs.Variable:
    """0 where a query may see a key, the lowest float32 elsewhere: [sequence, total]."""
    before = self.dimension("mask/past", past, 2)
    total = self.op("Add", "mask/total", before, self.dimension("mask/sequence", ids, 1))
    queries = self.op("Unsqueeze", "mask/queries", self.op("Range", "mask/query_range", before, total, 1), [1])
    visible = self.op("LessOrEqual", "mask/visible", self.op("Range", "mask/keys", 0, total, 1), queries)
    lowest = self.op("Constant", "mask/lowest", value=operand("mask/lowest/value", LOWEST))
    return self.op("Where", "mask/where", visible, 0.0, lowest)


@gs.Graph.register()
def rotate(self: gs.Graph, name: str, x: gs.Tensor, rotary: list[gs.Tensor]) -> gs.Variable:
    """Rotary embedding: x * cos + rotate_half(x) * sin."""
    half = HEAD_SIZE // 2
    upper = self.op("Neg", f"{name}/neg", self.op("Slice", f"{name}/upper", x, [half], [HEAD_SIZE], [3]))
    lower = self.op("Slice", f"{name}/lower", x, [0], [half], [3])
    turned = self.op("Concat", f"{name}/half", upper, lower, axis=-1)
    turned = self.op("Mul", f"{name}/sin", turned, rotary[1])
    return self.op("Add", f"{name}/add", self.op("Mul", f"{name}/cos", x, rotary[0]), turned)
