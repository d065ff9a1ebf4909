"""Small networks and data for the tests of training."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]


def make(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    name = f"{outputs.split(maxsplit=1)[0]}.node"
    return helper.make_node(op, inputs.split(), outputs.split(), name=name, **attributes)


def network(
    nodes: list[onnx.NodeProto], weights: dict[str, Array], x: list[int | str], y: list[int | str], opset: int = 18
) -> ModelProto:
    kept = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (("x", x), ("y", y))]
    graph = helper.make_graph(nodes, "net", ports[:1], ports[1:], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


def mlp(seed: int = 0) -> ModelProto:
    """6 -> 5 -> 3, with a Tanh."""
    rng = np.random.default_rng(seed)
    weights = {"w0": rng.standard_normal((6, 5)), "b0": rng.standard_normal(5), "w1": rng.standard_normal((5, 3)),
               "b1": rng.standard_normal(3)}  # fmt: skip
    nodes = [make("Gemm", "x w0 b0", "h"), make("Tanh", "h", "t"), make("Gemm", "t w1 b1", "y")]
    return network(nodes, weights, ["N", 6], ["N", 3])


def conv_net(seed: int = 0, channels: int = 8, dropout: bool = False, classes: int = 10) -> ModelProto:
    """Conv, BatchNormalization and Relu twice, then pooling and a Gemm; for images [N, 1, 8, 8]."""
    rng = np.random.default_rng(seed)
    nodes, weights, value = [], {}, "x"
    for i, (before, after) in enumerate(((1, channels), (channels, 2 * channels))):
        weights |= {f"c{i}.w": rng.standard_normal((after, before, 3, 3)) * (2 / before / 9) ** 0.5}
        weights |= {f"n{i}.{k}": np.full(after, v) for k, v in (("s", 1), ("b", 0), ("m", 0), ("v", 1))}
        nodes += [
            make("Conv", f"{value} c{i}.w", f"c{i}", pads=[1] * 4, strides=[i + 1] * 2),
            make("BatchNormalization", f"c{i} n{i}.s n{i}.b n{i}.m n{i}.v", f"n{i}"),
            make("Relu", f"n{i}", f"r{i}"),
        ]
        value = f"r{i}"
    nodes += [make("GlobalAveragePool", value, "pool"), make("Flatten", "pool", "flat")]
    if dropout:
        nodes.append(make("Dropout", "flat", "kept"))
    nodes.append(make("Gemm", f"{'kept' if dropout else 'flat'} head.w head.b", "y"))
    weights |= {"head.w": rng.standard_normal((2 * channels, classes)) * 0.3, "head.b": np.zeros(classes)}
    return network(nodes, weights, ["N", 1, 8, 8], ["N", classes])


def feeds(count: int = 4, shape: tuple[int, ...] = (6,), classes: int = 3, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, *shape)).astype(np.float32)
    return {"x": x, "label": rng.integers(0, classes, count)}


def pooled_net(seed: int = 0) -> ModelProto:
    """Conv, Relu, MaxPool and a Gemm; for images [N, 1, 8, 8]."""
    rng = np.random.default_rng(seed)
    weights = {"c.w": rng.standard_normal((12, 1, 3, 3)) * 0.4, "c.b": np.zeros(12),
               "head.w": rng.standard_normal((12 * 16, 10)) * 0.07, "head.b": np.zeros(10)}  # fmt: skip
    nodes = [
        make("Conv", "x c.w c.b", "c", pads=[1] * 4), make("Relu", "c", "r"),
        make("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]), make("Flatten", "p", "flat"),
        make("Gemm", "flat head.w head.b", "y"),
    ]  # fmt: skip
    return network(nodes, weights, ["N", 1, 8, 8], ["N", 10])
