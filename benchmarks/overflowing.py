"""Models whose values leave float16's range, as those that users report: generated, with seeded random weights.

Each takes ``reach``, the magnitude of its largest values, and computes nearly the same for every reach: the model with
a small one is what needs no rescaling. Norms and activations are written out as single ops, as exporters write them.
"""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from subjects import IR_VERSION, LOWEST, OPSET, Graph

WIDTH, HEADS, TOKENS, WORDS, LAYERS = 256, 4, 48, 512, 4
"""Of the language models: size of the residual stream, heads, positions, vocabulary, layers."""
CHANNELS, SIDE = 64, 16
"""Of the VAE decoder: channels, and height and width of the latent."""
SAMPLES, WINDOW, BANDS = 8000, 400, 64
"""Of the mel front end: samples of the waveform, samples of a window, mel bands."""

Feeds = Mapping[str, NDArray[Any]]


def _times(graph: Graph, *shape: int, fan_in: int, by: float) -> str:
    """Random weights that bring values of 1 to a magnitude."""
    rng = np.random.default_rng((graph.seed, len(graph.tensors)))
    return graph.constant((rng.standard_normal(shape) * (by / sqrt(fan_in))).astype(np.float32))


def rms_norm(graph: Graph, x: str, size: int, reach: float) -> str:
    """RMSNorm in its parts, with an epsilon that is small beside what it normalises."""
    mean = graph.op("ReduceMean", graph.op("Pow", x, graph.constant(2.0)), axes=[-1])
    root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(1e-6 * min(reach, 1.0))))
    return graph.op("Mul", graph.op("Div", x, root), graph.scale(size))


def _heads(graph: Graph, x: str, batch_tokens: tuple[int, int]) -> str:
    shaped = graph.op("Reshape", x, graph.constant([*batch_tokens, HEADS, WIDTH // HEADS], np.int64))
    return graph.op("Transpose", shaped, perm=[0, 2, 1, 3])


def attention(graph: Graph, x: str, source: str, reach: float, mask: str | None) -> str:
    """Attention with scores that are scaled and masked; its output reaches ``reach``."""
    ends = (1, -1)
    query, key, value = (
        _heads(graph, graph.op("MatMul", of, _times(graph, WIDTH, WIDTH, fan_in=WIDTH, by=1.0)), ends)
        for of in (x, source, source)
    )
    scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = graph.op("Mul", scores, graph.constant(1 / sqrt(WIDTH // HEADS)))
    if mask is not None:
        scores = graph.op("Add", scores, mask)
    mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)
    joined = graph.op(
        "Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), graph.constant([1, -1, WIDTH], np.int64)
    )
    return graph.op("MatMul", joined, _times(graph, WIDTH, WIDTH, fan_in=WIDTH, by=2 * reach))


def swiglu(graph: Graph, x: str, reach: float) -> str:
    """The gated feed-forward of Gemma and Llama."""
    gate = graph.op("MatMul", x, _times(graph, WIDTH, 2 * WIDTH, fan_in=WIDTH, by=1.0))
    up = graph.op("MatMul", x, _times(graph, WIDTH, 2 * WIDTH, fan_in=WIDTH, by=1.0))
    inner = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
    return graph.op("MatMul", inner, _times(graph, 2 * WIDTH, WIDTH, fan_in=2 * WIDTH, by=2 * reach))


def _causal(graph: Graph) -> str:
    return graph.constant(np.triu(np.full((TOKENS, TOKENS), LOWEST, np.float32), 1)[None, None])


def decoder(reach: float) -> tuple[ModelProto, Feeds]:
    """A decoder with a residual stream that passes through RMSNorms, as in Gemma."""
    graph = Graph(seed=1)
    x = graph.op("Gather", _times(graph, WORDS, WIDTH, fan_in=1, by=reach / 8), "ids")
    mask = _causal(graph)
    for _ in range(LAYERS):
        normed = rms_norm(graph, x, WIDTH, reach)
        x = graph.op("Add", x, attention(graph, normed, normed, reach / 8, mask))
        x = graph.op("Add", x, swiglu(graph, rms_norm(graph, x, WIDTH, reach), reach / 8))
    head = _times(graph, WIDTH, WORDS, fan_in=WIDTH, by=1.0)
    logits = graph.op("MatMul", rms_norm(graph, x, WIDTH, reach), head)
    return _model(graph, {"ids": (TensorProto.INT64, (1, TOKENS))}, {logits: "logits"}), _ids(["ids"])


def encoder_decoder(reach: float) -> tuple[ModelProto, Feeds]:
    """An encoder-decoder whose feed-forward overflows, with one table for words and logits, as T5."""
    graph = Graph(seed=2)
    words = _times(graph, WORDS, WIDTH, fan_in=1, by=reach / 8)
    bias = _times(graph, 1, HEADS, TOKENS, TOKENS, fan_in=1, by=1.0)

    def feed_forward(x: str) -> str:
        inner = graph.op("Relu", graph.op("MatMul", x, _times(graph, WIDTH, 4 * WIDTH, fan_in=WIDTH, by=2.0)))
        return graph.op("MatMul", inner, _times(graph, 4 * WIDTH, WIDTH, fan_in=4 * WIDTH, by=reach / 4))

    def stack(ids: str, mask: str, memory: str | None) -> str:
        x = graph.op("Gather", words, ids)
        for _ in range(LAYERS // 2):
            normed = rms_norm(graph, x, WIDTH, reach)
            x = graph.op("Add", x, attention(graph, normed, normed, reach / 8, mask))
            if memory is not None:
                x = graph.op("Add", x, attention(graph, rms_norm(graph, x, WIDTH, reach), memory, reach / 8, None))
            x = graph.op("Add", x, feed_forward(rms_norm(graph, x, WIDTH, reach)))
        return rms_norm(graph, x, WIDTH, reach)

    memory = stack("ids", bias, None)
    decoded = stack("targets", graph.op("Add", bias, _causal(graph)), memory)
    scaled = graph.op("Mul", decoded, graph.constant(8 / (reach * sqrt(WIDTH))))
    logits = graph.op("MatMul", scaled, graph.op("Transpose", words, perm=[1, 0]))
    inputs = dict.fromkeys(("ids", "targets"), (TensorProto.INT64, (1, TOKENS)))
    return _model(graph, inputs, {logits: "logits"}), _ids(["ids", "targets"])


def group_norm(graph: Graph, x: str, channels: int, side: int) -> str:
    """GroupNorm as PyTorch exports it: an InstanceNormalization between two Reshapes, and the affine transform."""
    groups = 8
    flat = graph.op("Reshape", x, graph.constant([0, groups, -1], np.int64))
    ones, zeros = graph.constant(np.ones(groups)), graph.constant(np.zeros(groups))
    normed = graph.op("InstanceNormalization", flat, ones, zeros, epsilon=1e-6)
    shaped = graph.op("Reshape", normed, graph.constant([1, channels, side, side], np.int64))
    scaled = graph.op("Mul", shaped, graph.weight(channels, 1, 1, fan_in=100, around=1.0))
    return graph.op("Add", scaled, graph.weight(channels, 1, 1, fan_in=100))


def silu(graph: Graph, x: str) -> str:
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def conv(graph: Graph, x: str, inner: int, outer: int, by: float, kernel: int = 3) -> str:
    weight = _times(graph, outer, inner, kernel, kernel, fan_in=inner * kernel**2, by=by)
    bias = _times(graph, outer, fan_in=1, by=by / 10)
    return graph.op("Conv", x, weight, bias, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4)


def vae_decoder(reach: float) -> tuple[ModelProto, Feeds]:
    """The decoder of a latent diffusion model: residual blocks, self-attention over pixels, and upsampling."""
    graph, channels, side = Graph(seed=3), CHANNELS, SIDE

    def block(x: str, inner: int, outer: int, side: int) -> str:
        hidden = conv(graph, silu(graph, group_norm(graph, x, inner, side)), inner, outer, 1.0)
        hidden = conv(graph, silu(graph, group_norm(graph, hidden, outer, side)), outer, outer, reach / 3)
        shortcut = x if inner == outer else conv(graph, x, inner, outer, 1.0, 1)
        return graph.op("Add", shortcut, hidden)

    x = block(conv(graph, "latent", 4, channels, reach / 4), channels, channels, side)
    flat = graph.op("Reshape", group_norm(graph, x, channels, side), graph.constant([1, channels, side**2], np.int64))
    tokens = graph.op("Transpose", flat, perm=[0, 2, 1])
    query, key, value = (
        graph.op("MatMul", tokens, _times(graph, channels, channels, fan_in=channels, by=1.0)) for _ in "qkv"
    )
    scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 2, 1]))
    weights = graph.op("Softmax", graph.op("Mul", scores, graph.constant(1 / sqrt(channels))), axis=-1)
    mixed = graph.op(
        "MatMul", graph.op("MatMul", weights, value), _times(graph, channels, channels, fan_in=channels, by=reach / 3)
    )
    image = graph.op(
        "Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1]), graph.constant([1, channels, side, side], np.int64)
    )
    x = graph.op("Add", x, image)
    for outer in (channels, channels // 2):
        x = block(x, channels, outer, side)
        x = graph.op("Resize", x, "", graph.constant([1, 1, 2, 2]), mode="nearest")
        channels, side = outer, 2 * side
        x = conv(graph, x, channels, channels, 1.0)
    x = conv(graph, silu(graph, group_norm(graph, x, channels, side)), channels, 3, 0.3)
    rng = np.random.default_rng(0)
    feeds = {"latent": rng.standard_normal((1, 4, SIDE, SIDE)).astype(np.float32)}
    return _model(graph, {"latent": (TensorProto.FLOAT, (1, 4, SIDE, SIDE))}, {x: "image"}), feeds


def mel_front_end(reach: float) -> tuple[ModelProto, Feeds]:
    """Log-mel features of a waveform: a Fourier transform by convolution, power, mel bands, and the logarithm.

    ``reach`` is the power; samples of 16 bits come to 1e12 and more.
    """
    graph = Graph(seed=4)
    time, bins = np.arange(WINDOW), np.arange(WINDOW // 2 + 1)[:, None]
    window = np.hanning(WINDOW) * sqrt(reach) * 4 / WINDOW
    angles = 2 * np.pi * bins * time / WINDOW
    parts = [graph.op("Conv", "wave", graph.constant((wave(angles) * window)[:, None]), kernel_shape=[WINDOW],
                      strides=[WINDOW // 2]) for wave in (np.cos, np.sin)]  # fmt: skip
    power = graph.op("Add", *(graph.op("Mul", part, part) for part in parts))
    centres = np.linspace(0, WINDOW // 2, BANDS + 2)
    triangles = 1 - np.abs(bins - centres[None, 1:-1]) / (centres[1] * 1.5)
    mel = graph.op("MatMul", graph.op("Transpose", power, perm=[0, 2, 1]), graph.constant(np.maximum(triangles, 0)))
    features = graph.op("Log", graph.op("Add", mel, graph.constant(1e-6 * reach)))
    features = graph.op(
        "Mul", graph.op("Sub", features, graph.constant(float(np.log(reach)) - 4)), graph.constant(0.25)
    )
    rng = np.random.default_rng(0)
    tones = sum(np.sin(2 * np.pi * np.arange(SAMPLES) * f / 16000) / k for k, f in enumerate((220, 660, 1900, 5200), 1))
    wave = (tones + 0.05 * rng.standard_normal(SAMPLES)).astype(np.float32)[None, None]
    return _model(graph, {"wave": (TensorProto.FLOAT, (1, 1, SAMPLES))}, {features: "features"}), {"wave": wave}


MODELS: Final[Mapping[str, tuple[Callable[[float], tuple[ModelProto, Feeds]], float, float]]] = {
    "decoder": (decoder, 1e6, 1e2),
    "encoder-decoder": (encoder_decoder, 1e6, 1e2),
    "vae-decoder": (vae_decoder, 1e6, 1e2),
    "mel front end": (mel_front_end, 1e9, 1e3),
}
"""Name -> what makes the model, its reach, and one with which nothing overflows."""


def _ids(names: list[str]) -> Feeds:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, WORDS, (1, TOKENS)) for name in names}


def _model(graph: Graph, inputs: Mapping[str, tuple[int, tuple[int, ...]]], outputs: Mapping[str, str]) -> ModelProto:
    for node in graph.nodes:
        node.output[:] = [outputs.get(name, name) for name in node.output]
        node.input[:] = [outputs.get(name, name) for name in node.input]
    entries = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    results = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.values()]
    made = helper.make_graph(graph.nodes, "overflowing", entries, results, graph.tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
