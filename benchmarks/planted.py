"""Networks whose values stay below 20,000 on a thousand random inputs, although some input brings one beyond float16.

A long search finds this input: from random inputs and from random corners of their range, many more steps than a
conversion takes. A network of which it finds none is none of them, and the next seed is tried.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto
from subjects import Graph

import onnxamp
from onnxamp._gradients.writer import MIN_OPSET
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.climb import Climb

LARGEST = 20_000.0
"""The largest magnitude of the planted value on random inputs."""
INPUTS = 1000
OVERFLOW = 65_504.0
STARTS, STEPS = 24, 20
"""Where the long search begins, and how many steps it takes from each."""
SMALL = 1e-4
"""Brings the planted value back to the magnitude of others."""

Feeds = Mapping[str, NDArray[Any]]


class Seeded(NamedTuple):
    """A network.

    Attributes:
        model: the network.
        value: its value that is planted.
    """

    model: ModelProto
    value: str


def drawn(g: Graph, *shape: int, fan_in: int, gain: float = 1.0) -> str:
    """Return a weight of normal numbers."""
    draw = np.random.default_rng((g.seed, len(g.tensors)))
    return g.constant((draw.standard_normal(shape) * gain / fan_in**0.5).astype(np.float32))


def _relu(g: Graph, x: str, inner: int, outer: int) -> str:
    return g.op("Relu", g.op("MatMul", x, drawn(g, inner, outer, fan_in=inner)))


def ended(g: Graph, tail: str, inputs: list[int], outputs: list[int]) -> ModelProto:
    """Return a network from ``x`` to ``y``."""
    ports = [("x", TensorProto.FLOAT, inputs)]
    model = g.model(ports, [(tail, "y", TensorProto.FLOAT, outputs)])
    model.opset_import[0].version = MIN_OPSET
    return model


def _ended(g: Graph, value: str, tail: str, inputs: list[int], outputs: list[int]) -> Seeded:
    return Seeded(ended(g, tail, inputs, outputs), value)


def dense(seed: int, gain: float) -> Seeded:
    """Return four products with Relu between them."""
    g, width = Graph(seed), (32, 64, 128)[seed % 3]
    x = "x"
    for _ in range(3):
        x = _relu(g, x, width, width)
    value = g.op("MatMul", x, drawn(g, width, width, fan_in=width, gain=gain))
    tail = g.op("Mul", g.op("Relu", value), g.constant(SMALL))
    return _ended(g, value, tail, [1, width], [1, width])


def pointwise(seed: int, gain: float) -> Seeded:
    """Return the same as convolutions of one pixel."""
    g, width = Graph(seed), (32, 64, 128)[seed % 3]
    x = "x"
    for number in range(4):
        scale = gain if number == 3 else 1.0  # the last one
        value = g.op("Conv", x, drawn(g, width, width, 1, 1, fan_in=width, gain=scale))
        x = g.op("Relu", value)
    shape = [1, width, 1, 1]
    return _ended(g, value, g.op("Mul", x, g.constant(SMALL)), shape, shape)


def scores(seed: int, gain: float) -> Seeded:
    """Return attention whose scores are scaled after the product."""
    g, width, length = Graph(seed), 64, 16
    query = g.op("MatMul", "x", drawn(g, width, width, fan_in=width))
    key = g.op("MatMul", "x", drawn(g, width, width, fan_in=width, gain=gain))
    value = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 2, 1]))
    weights = g.op("Softmax", g.op("Mul", value, g.constant(SMALL)), axis=-1)
    tail = g.op("MatMul", weights, g.op("MatMul", "x", drawn(g, width, width, fan_in=width)))
    shape = [1, length, width]
    return _ended(g, value, tail, shape, shape)


def residual(seed: int, gain: float) -> Seeded:
    """Return a residual stream without norms inside, which a norm ends."""
    g, width = Graph(seed), 64
    x = "x"
    for number in range(4):
        inner = _relu(g, x, width, 2 * width)
        scale = gain if number == 3 else 1.0  # the last one
        x = g.op("Add", x, g.op("MatMul", inner, drawn(g, 2 * width, width, fan_in=2 * width, gain=scale)))
    tail = g.op("LayerNormalization", x, g.scale(width), g.bias(width))
    shape = [1, 8, width]
    return _ended(g, x, tail, shape, shape)


def gated(seed: int, gain: float) -> Seeded:
    """Return a gated MLP, whose product of gate and value is planted."""
    g, width, inner = Graph(seed), 64, 128
    x = _relu(g, "x", width, width)
    gate = g.op("MatMul", x, drawn(g, width, inner, fan_in=width))
    up = g.op("MatMul", x, drawn(g, width, inner, fan_in=width, gain=gain))
    value = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
    tail = g.op("MatMul", value, drawn(g, inner, width, fan_in=inner, gain=SMALL))
    shape = [1, 8, width]
    return _ended(g, value, tail, shape, shape)


def images(seed: int, gain: float) -> Seeded:
    """Return convolutions of 3 x 3 pixels with normalization by constants, and a head."""
    g, width, side = Graph(seed), 16, 16
    x, channels = "x", 3
    for _ in range(3):
        x = g.op("Conv", x, drawn(g, width, channels, 3, 3, fan_in=channels * 9 // 2), pads=[1, 1, 1, 1])
        x = g.op("BatchNormalization", x, g.scale(width), g.bias(width), g.bias(width), g.scale(width))
        x, channels = g.op("Relu", x), width
    value = g.op("Conv", x, drawn(g, width, width, 3, 3, fan_in=width * 9, gain=gain), pads=[1, 1, 1, 1])
    return _ended(g, value, g.op("Mul", value, g.constant(SMALL)), [1, 3, side, side], [1, width, side, side])


def pooled(seed: int, gain: float) -> Seeded:
    """Return sums over all pixels of an image."""
    g, width, side = Graph(seed), 16, 12
    x = g.op("Relu", g.op("Conv", "x", drawn(g, width, 3, 3, 3, fan_in=27), pads=[1, 1, 1, 1]))
    x = g.op("Conv", x, drawn(g, width, width, 3, 3, fan_in=width * 9, gain=gain), pads=[1, 1, 1, 1])
    value = g.op("ReduceSum", x, g.constant([2, 3], np.int64), keepdims=0)
    tail = g.op("MatMul", value, drawn(g, width, 10, fan_in=width, gain=SMALL))
    return _ended(g, value, tail, [1, 3, side, side], [1, 10])


def bilinear(seed: int, gain: float) -> Seeded:
    """Return sums of products of two projections, as recommenders take them."""
    g, width, factors = Graph(seed), 64, 32
    left, right = (g.op("MatMul", "x", drawn(g, width, factors, fan_in=width)) for _ in range(2))
    product = g.op("Mul", left, right)
    value = g.op("MatMul", product, drawn(g, factors, 16, fan_in=factors, gain=gain))
    return _ended(g, value, g.op("Mul", value, g.constant(SMALL)), [4, width], [4, 16])


KINDS: Mapping[str, tuple[Callable[[int, float], Seeded], int]] = {
    "dense": (dense, 6),
    "pointwise": (pointwise, 6),
    "scores": (scores, 2),
    "residual": (residual, 2),
    "gated": (gated, 2),
    "images": (images, 2),
    "pooled": (pooled, 2),
    "bilinear": (bilinear, 2),
}
"""What makes a kind, and how many there are of it."""


class Planted(NamedTuple):
    """A network in a file.

    Attributes:
        name: its name.
        path: the file.
        value: the value that is planted.
        worst: an input that brings it beyond float16.
        random, hardest: its largest magnitude on random inputs, and on this input.
    """

    name: str
    path: Path
    value: str
    worst: Feeds
    random: float
    hardest: float


def planted_networks(folder: Path) -> Iterator[tuple[str, Callable[[], Planted]]]:
    """Yield names of the networks, and what makes each."""
    for kind, (make, count) in KINDS.items():
        for number in range(count):
            name = f"planted {kind} {number}"
            # Seeds that are passed over must not change what follows.
            seeds = range(100 * number, 100 * number + 100)
            yield name, partial(_first, name, make, seeds, folder)


def _first(name: str, make: Callable[[int, float], Seeded], seeds: Iterable[int], folder: Path) -> Planted:
    found = (_planted(name, make, seed, folder) for seed in seeds)
    return next(one for one in found if one is not None)


def _planted(name: str, make: Callable[[int, float], Seeded], seed: int, folder: Path) -> Planted | None:
    path = folder / f"{name.replace(' ', '-')}.onnx"
    onnx.save(make(seed, 1.0).model, path)
    samples = onnxamp.random_samples(path, INPUTS, seed=1)
    gain = 0.95 * LARGEST / _largest(path, make(seed, 1.0).value, samples)
    made = make(seed, gain)
    onnx.save(made.model, path)
    worst, reached = hardest(path, made.value)
    if reached <= OVERFLOW:
        return None
    return Planted(name, path, made.value, worst, _largest(path, made.value, samples), reached)


def _largest(path: Path, value: str, samples: Any) -> float:
    model = onnx.load(path)
    model.graph.output.append(onnx.ValueInfoProto(name=value))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return max(float(np.abs(session.run([value], sample)[0]).max()) for sample in samples)


def hardest(path: Path, value: str) -> tuple[Feeds, float]:
    """Return the input with the largest magnitude of a value that a long search finds, and this magnitude.

    It stays within the range of the random input that a conversion takes.
    """
    given = onnxamp.random_samples(path)[0]
    ranges = {name: (float(array.min()), float(array.max())) for name, array in given.items()}
    climb = Climb.toward(Model.of(path), ranges, value)
    draw = np.random.default_rng(0)
    found: list[tuple[Feeds, float]] = []
    for number in range(STARTS):
        start = {}
        for name, (low, high) in ranges.items():
            shape = given[name].shape
            drawn = draw.choice([low, high], shape) if number % 2 else draw.uniform(low, high, shape)
            start[name] = drawn.astype(np.float32)
        found += (climb.climbed(start, sign, STEPS) for sign in (1.0, -1.0))
    return max(found, key=lambda one: one[1])
