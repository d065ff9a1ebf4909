"""An inference BatchNormalization behind a Conv, ConvTranspose or Gemm, folded into its weights.

y = (x - mean) * scale / sqrt(variance + epsilon) + bias is, channel by channel, one factor and one summand. They are
computed in float64 and rounded once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from onnxamp._dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.weights import read_array
from onnxamp._ops.facts import attribute
from onnxamp._patterns.fusion_groups import constant_batch_norms
from onnxamp._rewrite.fold.folds import Fold, NewWeight

KIND = "BatchNorm"
_EPSILON = 1e-5
"""The schema's default."""

Array = NDArray[Any]


def batch_norms(graph: Graph) -> list[Fold]:
    """All that can be folded. Complexity: each weight that changes is read here, and again when it is made."""
    folds = []
    for producer, node in constant_batch_norms(graph, graph.constants.tensors.__contains__):
        values = [value for value in (*producer.inputs, *node.inputs) if value != ABSENT]
        if any(graph.types[value] != FLOAT for value in values):
            continue
        weights = _weights(graph, producer, node)
        if weights is not None:
            nodes = frozenset((producer.index, node.index))
            inputs = (producer.inputs[0], *weights)
            folds.append(
                Fold(
                    kind=KIND,
                    op=producer.key,
                    opset=1,
                    nodes=nodes,
                    last=node.index,
                    inputs=inputs,
                    attributes={},
                    first=producer.index,
                )
            )
    return folds


def _weights(graph: Graph, producer: Node, node: Node) -> tuple[NewWeight, NewWeight] | None:
    """Weight and bias of the producer with the normalisation in them.

    None where their shapes do not fit, or a number would be none or beyond float32.
    """
    scale, shift, mean, variance = (
        _read(graph, value).astype(np.float64) for value in node.inputs[1:]
    )
    epsilon, channels = attribute(node.proto, "epsilon"), scale.size
    weight, bias = _read(graph, producer.inputs[1]), _bias(graph, producer, channels)
    shapes = _shapes(producer, weight.shape, channels)
    if shapes is None or bias is None:
        return None
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + (_EPSILON if epsilon is None else epsilon))
        total = (bias - mean) * factor + shift
        largest = max(float(weight.max(initial=0)), -float(weight.min(initial=0))) * np.abs(factor)
    if not (np.concatenate((largest, np.abs(total))) < np.finfo(np.float32).max).all():
        return None
    names = graph.values[producer.inputs[1]].name, f"{producer.label}_bias"
    if producer.input(2) != ABSENT:
        names = names[0], graph.values[producer.inputs[2]].name
    return (
        NewWeight(names[0], lambda: numpy_helper.from_array(_times(weight, factor, *shapes))),
        NewWeight(names[1], lambda: numpy_helper.from_array(total.astype(np.float32))),
    )


def _read(graph: Graph, value: int) -> Array:
    return read_array(graph.constants.tensors[value], graph.folder)


def _bias(graph: Graph, producer: Node, channels: int) -> Array | None:
    """What the producer adds per channel; None where it is not one number for each."""
    if producer.input(2) == ABSENT:
        return np.zeros(channels)
    bias = _read(graph, producer.inputs[2]).astype(np.float64)
    if producer.key != "Gemm":
        return bias if bias.shape == (channels,) else None
    beta = attribute(producer.proto, "beta")
    per_channel = bias.size == 1 or bias.shape in ((channels,), (1, channels))
    return (
        np.broadcast_to(bias.reshape(-1), channels) * (1.0 if beta is None else beta)
        if per_channel
        else None
    )


def _shapes(
    producer: Node, weight: tuple[int, ...], channels: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes in which weight and factor are multiplied; None where the weight has not so many output channels."""
    if producer.key == "Gemm":
        axis = 0 if attribute(producer.proto, "transB") else 1
        fits = len(weight) == 2 and weight[axis] == channels
        return (weight, (channels, 1) if axis == 0 else (1, channels)) if fits else None
    ones = (1,) * (len(weight) - 2)
    if len(weight) < 3:
        return None
    if producer.key == "Conv":
        return (weight, (channels, 1, *ones)) if weight[0] == channels else None
    groups = attribute(producer.proto, "group") or 1
    if weight[1] * groups != channels or weight[0] % groups:
        return None
    return (groups, weight[0] // groups, *weight[1:]), (groups, 1, weight[1], *ones)


def _times(weight: Array, factor: Array, split: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The product in float64, one part of the first axis at a time, so that it takes no second copy of the weight."""
    made, source, factors = (
        np.empty(split, np.float32),
        weight.reshape(split),
        factor.reshape(shape),
    )
    for index in range(split[0]):
        made[index] = source[index] * factors[index if shape[0] > 1 else 0]
    return made.reshape(weight.shape)
