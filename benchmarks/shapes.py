"""The networks that are timed on GPUs and CPUs: shapes of real ones, weights random and seeded, the batch open."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto
from subjects import Graph, decoder, encoder, unet


def resnet(*, width: int, blocks: Sequence[int], size: int, classes: int) -> ModelProto:
    """ResNet with bottlenecks (He et al. 2015); width 64 and blocks 3, 4, 6, 3 are ResNet-50."""
    g = Graph()

    def conv(x: str, inner: int, outer: int, kernel: int, stride: int = 1, *, relu: bool = True) -> str:
        weight = g.weight(outer, inner, kernel, kernel, fan_in=inner * kernel**2 // (2 if relu else 1))
        pads, strides = [kernel // 2] * 4, [stride] * 2
        x = g.op("Conv", x, weight, kernel_shape=[kernel] * 2, pads=pads, strides=strides)
        statistics = g.bias(outer), g.weight(outer, fan_in=10, around=1.2)
        x = g.op("BatchNormalization", x, g.scale(outer), g.bias(outer), *statistics)
        return g.op("Relu", x) if relu else x

    x = g.op("MaxPool", conv("image", 3, width, 7, 2), kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
    channels = width
    for stage, count in enumerate(blocks):
        inner, outer = width << stage, width << stage + 2
        for block in range(count):
            stride = 2 if stage and not block else 1
            skip = x if block else conv(x, channels, outer, 1, stride, relu=False)
            y = conv(conv(x, channels, inner, 1), inner, inner, 3, stride)
            x = g.op("Relu", g.op("Add", conv(y, inner, outer, 1, relu=False), skip))
            channels = outer
    flat = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    logits = g.op("Gemm", flat, g.weight(classes, channels, fan_in=channels), g.bias(classes), transB=1)
    ports = [("image", TensorProto.FLOAT, [1, 3, size, size])]
    return g.model(ports, [(logits, "logits", TensorProto.FLOAT, [1, classes])])


def detector(*, width: int, depth: int, size: int, classes: int) -> ModelProto:
    """A detector without anchors, shaped like YOLOv8: stages, a pyramid up and down, a head for each of 3 scales.

    Width 32 and depth 1 are its size "s"; each convolution is followed by BatchNormalization and SiLU.
    """
    g = Graph()

    def conv(x: str, inner: int, outer: int, kernel: int = 1, stride: int = 1) -> str:
        weight = g.weight(outer, inner, kernel, kernel, fan_in=inner * kernel**2 // 2)
        x = g.op("Conv", x, weight, kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, strides=[stride] * 2)
        statistics = g.bias(outer), g.weight(outer, fan_in=10, around=1.2)
        x = g.op("BatchNormalization", x, g.scale(outer), g.bias(outer), *statistics)
        return g.op("Mul", x, g.op("Sigmoid", x))

    def stage(x: str, inner: int, outer: int, *, adds: bool = True) -> str:
        half = outer // 2
        left, right = (conv(x, inner, half) for _ in range(2))
        parts = [left, right]
        for _ in range(depth):
            y = conv(conv(parts[-1], half, half, 3), half, half, 3)
            parts.append(g.op("Add", parts[-1], y) if adds else y)
        return conv(g.op("Concat", *parts, axis=1), half * len(parts), outer)

    def doubled(x: str) -> str:
        return g.op("Resize", x, "", g.constant([1, 1, 2, 2]), mode="nearest")

    x, levels = conv("image", 3, width, 3, 2), []
    for step in range(1, 5):
        outer = min(width << step, 16 * width)
        x = stage(conv(x, width << step - 1, outer, 3, 2), outer, outer)
        levels.append(x)
    pooled = [conv(x, 16 * width, 8 * width)]
    for _ in range(3):
        pooled.append(g.op("MaxPool", pooled[-1], kernel_shape=[5, 5], pads=[2] * 4, strides=[1, 1]))
    deep = conv(g.op("Concat", *pooled, axis=1), 32 * width, 16 * width)
    middle = stage(g.op("Concat", doubled(deep), levels[2], axis=1), 24 * width, 8 * width, adds=False)
    fine = stage(g.op("Concat", doubled(middle), levels[1], axis=1), 12 * width, 4 * width, adds=False)
    lower = g.op("Concat", conv(fine, 4 * width, 4 * width, 3, 2), middle, axis=1)
    middle = stage(lower, 12 * width, 8 * width, adds=False)
    lower = g.op("Concat", conv(middle, 8 * width, 8 * width, 3, 2), deep, axis=1)
    deep = stage(lower, 24 * width, 16 * width, adds=False)
    boxes, scores = [], []
    for x, channels in ((fine, 4 * width), (middle, 8 * width), (deep, 16 * width)):
        for found, outer in ((boxes, 64), (scores, classes)):
            y = conv(conv(x, channels, 4 * width, 3), 4 * width, 4 * width, 3)
            y = g.op("Conv", y, g.weight(outer, 4 * width, 1, 1, fan_in=4 * width), g.bias(outer), kernel_shape=[1, 1])
            found.append(g.op("Reshape", y, g.constant([0, outer, -1], np.int64)))
    split = g.op("Reshape", g.op("Concat", *boxes, axis=2), g.constant([0, 4, 16, -1], np.int64))
    shares = g.op("Softmax", g.op("Transpose", split, perm=[0, 1, 3, 2]), axis=-1)
    sides = g.op("MatMul", shares, g.constant(np.arange(16, dtype=np.float32)[:, None]))  # an expected distance
    cells = sum((size >> step) ** 2 for step in (3, 4, 5))
    outputs = [
        (g.op("Reshape", sides, g.constant([0, 4, cells], np.int64)), "boxes", TensorProto.FLOAT, [1, 4, cells]),
        (g.op("Sigmoid", g.op("Concat", *scores, axis=2)), "scores", TensorProto.FLOAT, [1, classes, cells]),
    ]
    return g.model([("image", TensorProto.FLOAT, [1, 3, size, size])], outputs)


def recurrent(*, features: int, hidden: int, layers: int, steps: int) -> ModelProto:
    """A GRU in both directions between two products, as in speech enhancement: one gain per step and feature."""
    g = Graph()
    x, inner = g.op("Relu", g.linear("frames", features, hidden)), hidden
    x = g.op("Transpose", x, perm=[1, 0, 2])
    for _ in range(layers):
        weights = [g.weight(2, 3 * hidden, size, fan_in=3 * size) for size in (inner, hidden)]
        y = g.op("GRU", x, *weights, g.weight(2, 6 * hidden, fan_in=100), direction="bidirectional",
                 hidden_size=hidden, linear_before_reset=1)  # fmt: skip
        merged = g.op("Transpose", y, perm=[0, 2, 1, 3])
        x, inner = g.op("Reshape", merged, g.constant([0, 0, 2 * hidden], np.int64)), 2 * hidden
    x = g.op("Sigmoid", g.linear(g.op("Transpose", x, perm=[1, 0, 2]), inner, features))
    shape = [1, steps, features]
    return g.model([("frames", TensorProto.FLOAT, shape)], [(x, "gains", TensorProto.FLOAT, shape)])


@dataclass(frozen=True, slots=True)
class Shape:
    """A network, the batches at which it is timed, and sizes of its other open dimensions."""

    name: str
    title: str
    build: Callable[[Path], ModelProto]
    batches: tuple[int, ...]
    dims: Mapping[str, int] = field(default_factory=dict)
    samples: int = 4
    """Samples that it is tuned on."""

    def model(self, folder: Path) -> ModelProto:
        """The network, its first dimension open everywhere."""
        model = self.build(folder)
        for entry in (*model.graph.input, *model.graph.output):
            entry.type.tensor_type.shape.dim[0].dim_param = "batch"
        return model


_BERT = {"layers": 12, "hidden": 768, "heads": 12, "length": 128, "vocabulary": 30522}
_DECODER = {"layers": 12, "hidden": 768, "heads": 12, "inner": 2048, "vocabulary": 32000}

FULL = (
    Shape("bert", "BERT-base, 128 tokens", lambda path: encoder(path, **_BERT), (1, 8, 32)),
    Shape("decoder", "decoder step, 512 tokens in the cache", lambda path: decoder(path, **_DECODER), (1, 8),
          {"length": 1, "past": 512}),
    Shape("resnet50", "ResNet-50, 224 × 224",
          lambda _: resnet(width=64, blocks=(3, 4, 6, 3), size=224, classes=1000), (1, 32)),
    Shape("unet", "U-Net, 256 × 256", lambda path: unet(path, width=64, depth=4, size=256), (1, 4)),
)  # fmt: skip

_SMALL = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 50}

QUICK = (
    Shape("bert", "BERT, tiny", lambda path: encoder(path, length=8, **_SMALL), (1, 2)),
    Shape("resnet50", "ResNet, tiny", lambda _: resnet(width=8, blocks=(1, 1), size=32, classes=10), (1, 2)),
    Shape("decoder", "decoder step, tiny", lambda path: decoder(path, inner=48, **_SMALL), (1,),
          {"length": 1, "past": 4}),
    Shape("unet", "U-Net, tiny", lambda path: unet(path, width=8, depth=1, size=16), (1,)),
)  # fmt: skip

CPU = (
    Shape("bert", "BERT-base, 128 tokens", lambda path: encoder(path, **_BERT), (1, 8), samples=16),
    Shape("resnet50", "ResNet-50, 224 × 224",
          lambda _: resnet(width=64, blocks=(3, 4, 6, 3), size=224, classes=1000), (1, 8)),
    Shape("unet", "U-Net, 256 × 256", lambda path: unet(path, width=32, depth=4, size=256), (1, 8)),
    Shape("detector", "detector, 320 × 320", lambda _: detector(width=32, depth=1, size=320, classes=80), (1, 8)),
    Shape("gru", "GRU, 2 layers of 512, 100 steps",
          lambda _: recurrent(features=257, hidden=512, layers=2, steps=100), (1, 8), samples=16),
)  # fmt: skip

CPU_QUICK = (
    Shape("bert", "BERT, tiny", lambda path: encoder(path, length=8, **_SMALL), (1, 2)),
    Shape("resnet50", "ResNet, tiny", lambda _: resnet(width=8, blocks=(1, 1), size=32, classes=10), (1, 2)),
    Shape("unet", "U-Net, tiny", lambda path: unet(path, width=8, depth=1, size=16), (1, 2)),
    Shape("detector", "detector, tiny", lambda _: detector(width=4, depth=1, size=64, classes=4), (1, 2)),
    Shape("gru", "GRU, tiny", lambda _: recurrent(features=9, hidden=8, layers=1, steps=5), (1, 2)),
)  # fmt: skip
