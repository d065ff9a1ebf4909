"""Models whose values leave float16's range, as those that users report: generated, with seeded random weights.

Each takes ``reach``, the magnitude of its largest values, and computes nearly the same for every reach: the model with
a small one is what needs no rescaling. Norms and activations are written out as single ops, as exporters write them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from subjects import IR_VERSION, LOWEST, OPSET, Graph


@dataclass(frozen=True)
class Size:
    """Sizes of a model; of which kind, says the function that takes them.

    ``width`` of the residual stream, ``inner`` of the feed-forward; ``channels`` of the convolutions, by resolution;
    ``side`` of the latent; ``samples`` of the waveform, ``hop`` between windows.
    """

    width: int = 256
    heads: int = 4
    inner: int = 512
    layers: int = 4
    tokens: int = 48
    words: int = 512
    channels: tuple[int, ...] = (64, 64, 32)
    blocks: int = 1
    side: int = 16
    samples: int = 8000
    hop: int = 200
    bands: int = 64


SMALL: Final = Size()
WINDOW: Final = 400
"""Samples of a window of the mel front end."""

Feeds = Mapping[str, NDArray[Any]]


def _times(graph: Graph, *shape: int, fan_in: int, by: float) -> str:
    """Random weights that bring values of 1 to a magnitude."""
    rng = np.random.default_rng((graph.seed, len(graph.tensors)))
    return graph.constant((rng.standard_normal(shape) * (by / sqrt(fan_in))).astype(np.float32))


def rms_norm(graph: Graph, x: str, size: int, reach: float) -> str:
    """RMSNorm in its parts, with an epsilon that is small beside what it normalizes."""
    mean = graph.op("ReduceMean", graph.op("Pow", x, graph.constant(2.0)), axes=[-1])
    root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(1e-6 * min(reach, 1.0))))
    return graph.op("Mul", graph.op("Div", x, root), graph.scale(size))


def _heads(graph: Graph, x: str, size: Size) -> str:
    shaped = graph.op("Reshape", x, graph.constant([1, -1, size.heads, size.width // size.heads], np.int64))
    return graph.op("Transpose", shaped, perm=[0, 2, 1, 3])


def attention(graph: Graph, x: str, source: str, reach: float, mask: str | None, size: Size) -> str:
    """Attention with scores that are scaled and masked; its output reaches ``reach``."""
    width = size.width
    query, key, value = (
        _heads(graph, graph.op("MatMul", of, _times(graph, width, width, fan_in=width, by=1.0)), size)
        for of in (x, source, source)
    )
    scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = graph.op("Mul", scores, graph.constant(1 / sqrt(width // size.heads)))
    if mask is not None:
        scores = graph.op("Add", scores, mask)
    mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)
    joined = graph.op(
        "Reshape", graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), graph.constant([1, -1, width], np.int64)
    )
    return graph.op("MatMul", joined, _times(graph, width, width, fan_in=width, by=2 * reach))


def swiglu(graph: Graph, x: str, reach: float, size: Size) -> str:
    """The gated feed-forward of Gemma and Llama."""
    width, wide = size.width, size.inner
    gate = graph.op("MatMul", x, _times(graph, width, wide, fan_in=width, by=1.0))
    up = graph.op("MatMul", x, _times(graph, width, wide, fan_in=width, by=1.0))
    inner = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
    return graph.op("MatMul", inner, _times(graph, wide, width, fan_in=wide, by=2 * reach))


def _causal(graph: Graph, tokens: int) -> str:
    return graph.constant(np.triu(np.full((tokens, tokens), LOWEST, np.float32), 1)[None, None])


def decoder(reach: float, size: Size = SMALL) -> tuple[ModelProto, Feeds]:
    """A decoder with a residual stream that passes through RMSNorms, as in Gemma."""
    graph, width = Graph(seed=1), size.width
    x = graph.op("Gather", _times(graph, size.words, width, fan_in=1, by=reach / 8), "ids")
    mask = _causal(graph, size.tokens)
    for _ in range(size.layers):
        normed = rms_norm(graph, x, width, reach)
        x = graph.op("Add", x, attention(graph, normed, normed, reach / 8, mask, size))
        x = graph.op("Add", x, swiglu(graph, rms_norm(graph, x, width, reach), reach / 8, size))
    head = _times(graph, width, size.words, fan_in=width, by=1.0)
    logits = graph.op("MatMul", rms_norm(graph, x, width, reach), head)
    return _model(graph, {"ids": (TensorProto.INT64, (1, size.tokens))}, {logits: "logits"}), _ids(["ids"], size)


def encoder_decoder(reach: float, size: Size = SMALL) -> tuple[ModelProto, Feeds]:
    """An encoder-decoder whose feed-forward overflows, with one table for words and logits, as T5."""
    graph, width = Graph(seed=2), size.width
    words = _times(graph, size.words, width, fan_in=1, by=reach / 8)
    bias = _times(graph, 1, size.heads, size.tokens, size.tokens, fan_in=1, by=1.0)

    def feed_forward(x: str) -> str:
        inner = graph.op("Relu", graph.op("MatMul", x, _times(graph, width, 2 * size.inner, fan_in=width, by=2.0)))
        return graph.op("MatMul", inner, _times(graph, 2 * size.inner, width, fan_in=2 * size.inner, by=reach / 4))

    def stack(ids: str, mask: str, memory: str | None) -> str:
        x = graph.op("Gather", words, ids)
        for _ in range(size.layers // 2):
            normed = rms_norm(graph, x, width, reach)
            x = graph.op("Add", x, attention(graph, normed, normed, reach / 8, mask, size))
            if memory is not None:
                normed = rms_norm(graph, x, width, reach)
                x = graph.op("Add", x, attention(graph, normed, memory, reach / 8, None, size))
            x = graph.op("Add", x, feed_forward(rms_norm(graph, x, width, reach)))
        return rms_norm(graph, x, width, reach)

    memory = stack("ids", bias, None)
    decoded = stack("targets", graph.op("Add", bias, _causal(graph, size.tokens)), memory)
    scaled = graph.op("Mul", decoded, graph.constant(8 / (reach * sqrt(width))))
    logits = graph.op("MatMul", scaled, graph.op("Transpose", words, perm=[1, 0]))
    inputs = dict.fromkeys(("ids", "targets"), (TensorProto.INT64, (1, size.tokens)))
    return _model(graph, inputs, {logits: "logits"}), _ids(["ids", "targets"], size)


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


def vae_decoder(reach: float, size: Size = SMALL) -> tuple[ModelProto, Feeds]:
    """The decoder of a latent diffusion model: residual blocks, self-attention over pixels, and upsampling."""
    graph, channels, side = Graph(seed=3), size.channels[0], size.side

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
    for outer in size.channels[1:]:
        for inner in (channels, *[outer] * (size.blocks - 1)):
            x = block(x, inner, outer, side)
        x = graph.op("Resize", x, "", graph.constant([1, 1, 2, 2]), mode="nearest")
        channels, side = outer, 2 * side
        x = conv(graph, x, channels, channels, 1.0)
    x = conv(graph, silu(graph, group_norm(graph, x, channels, side)), channels, 3, 0.3)
    rng = np.random.default_rng(0)
    feeds = {"latent": rng.standard_normal((1, 4, size.side, size.side)).astype(np.float32)}
    return _model(graph, {"latent": (TensorProto.FLOAT, (1, 4, size.side, size.side))}, {x: "image"}), feeds


def mel_front_end(reach: float, size: Size = SMALL) -> tuple[ModelProto, Feeds]:
    """Log-mel features of a waveform: a Fourier transform by convolution, power, mel bands, and the logarithm.

    ``reach`` is the power; samples of 16 bits come to 1e12 and more. An amplifier that is not quite linear comes first:
    squares of what is an input of the model stay in float32, so that nothing would overflow.
    """
    graph = Graph(seed=4)
    amplified = graph.op("LeakyRelu", "wave", alpha=0.99)
    time, bins = np.arange(WINDOW), np.arange(WINDOW // 2 + 1)[:, None]
    window = np.hanning(WINDOW) * sqrt(reach) * 4 / WINDOW
    angles = 2 * np.pi * bins * time / WINDOW
    parts = [graph.op("Conv", amplified, graph.constant((wave(angles) * window)[:, None]), kernel_shape=[WINDOW],
                      strides=[size.hop]) for wave in (np.cos, np.sin)]  # fmt: skip
    power = graph.op("Add", *(graph.op("Mul", part, part) for part in parts))
    centers = np.linspace(0, WINDOW // 2, size.bands + 2)
    triangles = 1 - np.abs(bins - centers[None, 1:-1]) / (centers[1] * 1.5)
    mel = graph.op("MatMul", graph.op("Transpose", power, perm=[0, 2, 1]), graph.constant(np.maximum(triangles, 0)))
    features = graph.op("Log", graph.op("Add", mel, graph.constant(1e-6 * reach)))
    features = graph.op(
        "Mul", graph.op("Sub", features, graph.constant(float(np.log(reach)) - 4)), graph.constant(0.25)
    )
    rng = np.random.default_rng(0)
    tones = sum(
        np.sin(2 * np.pi * np.arange(size.samples) * f / 16000) / k for k, f in enumerate((220, 660, 1900, 5200), 1)
    )
    wave = (tones + 0.05 * rng.standard_normal(size.samples)).astype(np.float32)[None, None]
    return _model(graph, {"wave": (TensorProto.FLOAT, (1, 1, size.samples))}, {features: "features"}), {"wave": wave}


MODELS: Final[Mapping[str, tuple[Callable[[float], tuple[ModelProto, Feeds]], float, float]]] = {
    "decoder": (decoder, 1e6, 1e2),
    "encoder-decoder": (encoder_decoder, 1e6, 1e2),
    "vae-decoder": (vae_decoder, 1e6, 1e2),
    "mel front end": (mel_front_end, 1e9, 1e3),
}
"""Name -> what makes the model, its reach, and one with which nothing overflows."""

REAL: Final[Mapping[str, tuple[Callable[[float], tuple[ModelProto, Feeds]], float, float]]] = {
    "Gemma 2 2B, 2 of 26 layers": (
        partial(decoder, size=Size(2304, 8, 9216, 2, 64, 8192)), 1e6, 1e2,
    ),
    "T5 base": (partial(encoder_decoder, size=Size(768, 12, 1536, 24, 64, 32128)), 1e6, 1e2),
    "Stable Diffusion's VAE decoder": (
        partial(vae_decoder, size=Size(channels=(512, 512, 512, 256, 128), blocks=3, side=8)), 1e6, 1e2,
    ),
    "Whisper's mel front end": (partial(mel_front_end, size=Size(samples=480000, hop=160, bands=80)), 1e9, 1e3),
}  # fmt: skip
"""The same kinds with the sizes of models that are in use, and random weights."""


def _ids(names: list[str], size: Size) -> Feeds:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, size.words, (1, size.tokens)) for name in names}


def _model(graph: Graph, inputs: Mapping[str, tuple[int, tuple[int, ...]]], outputs: Mapping[str, str]) -> ModelProto:
    for node in graph.nodes:
        node.output[:] = [outputs.get(name, name) for name in node.output]
        node.input[:] = [outputs.get(name, name) for name in node.input]
    entries = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    results = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.values()]
    made = helper.make_graph(graph.nodes, "overflowing", entries, results, graph.tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
