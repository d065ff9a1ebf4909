"""The networks that are timed on a GPU: shapes of real ones, weights random and seeded, the batch open."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Shape:
    """A network, the batches at which it is timed, and sizes of its other open dimensions."""

    name: str
    title: str
    build: Callable[[Path], ModelProto]
    batches: tuple[int, ...]
    dims: Mapping[str, int] = field(default_factory=dict)

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
