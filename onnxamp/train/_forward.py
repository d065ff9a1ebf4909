"""From an inference model to the forward pass of training: batch statistics, dropout, weights as inputs."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._errors import GradientError, ModelError
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims, symbolic_shapes
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._model.protos import copy_without
from onnxamp._ops.facts import attribute
from onnxamp._rewrite.inline import inline
from onnxamp._rewrite.upgrade.upgrade import upgraded
from onnxamp.train._gradients.forward_pass import find_path
from onnxamp.train._gradients.normalisations import RUNNING
from onnxamp.train._gradients.writer import MIN_OPSET

_SETTINGS: Final[Mapping[str, frozenset[int]]] = {
    "BatchNormalization": frozenset({3, 4}),
    "Clip": frozenset({1, 2}),
    "Dropout": frozenset({1}),
    "Pad": frozenset({2}),
    "Pow": frozenset({1}),
    "Resize": frozenset({1, 2}),
}
"""Float inputs that are settings rather than weights."""
_SCALARS: Final = frozenset({"Add", "Div", "Max", "Min", "Mul", "Sub", "Where"})
"""Ops whose single-element operands are constants of a formula rather than weights."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A dropout mask, which is fed in: a bool tensor, True where an element is kept."""

    name: str
    dims: Dims
    ratio: float


@dataclass(frozen=True, slots=True)
class Forward:
    """A model in training mode.

    ``statistics``: running statistics (initializers), each with the value that holds its successor.
    """

    model: ModelProto
    statistics: Mapping[str, str]
    masks: tuple[Mask, ...]


def training_model(model: ModelProto, opset: int = MIN_OPSET) -> Forward:
    """The model in training mode, with its functions inlined, at ``opset`` or later.

    Raises:
        OpsetError: a node cannot follow to that opset.
        ModelError: a running statistic of a BatchNormalization is not an initializer.
        GradientError: the shape of a dropout mask is unknown, or a dropout ratio is computed.
    """
    notes: list[str] = []
    if model.functions:
        model, note = inline(model)
        notes.append(note)
    graph = upgraded(Graph.of(model), opset)
    model = graph.model
    result = copy_without(model, "node")
    names, shapes = NewNames(graph.all_names()), graph.ask(symbolic_shapes)
    statistics: dict[str, str] = {}
    masks: list[Mask] = []
    for node in (graph.nodes[index] for index in graph.scopes[0].nodes):
        if node.key == "Dropout" and (ratio := _ratio(graph, node)):
            masks.append(
                Mask(names.fresh(f"{node.label}/mask"), _known(shapes[node.inputs[0]], node), ratio)
            )
            result.graph.node.extend(_dropout(node, masks[-1], result, names))
            continue
        proto = result.graph.node.add()
        proto.CopyFrom(node.proto)
        if node.key == "BatchNormalization":
            statistics |= _over_the_batch(graph, node, proto, names)
    result.graph.input.extend(
        helper.make_tensor_value_info(mask.name, TensorProto.BOOL, mask.dims) for mask in masks
    )
    return Forward(result, statistics, tuple(masks))


def _over_the_batch(graph: Graph, node: Node, proto: NodeProto, names: NewNames) -> dict[str, str]:
    """Switch a BatchNormalization to training mode; returns its running statistics with their successors."""
    for value in node.inputs[3:]:
        if graph.values[value].origin is not Origin.INITIALIZER:
            raise ModelError(
                f"The running statistics of {node.label!r} (BatchNormalization) must be initializers."
            )
    kept = [item for item in proto.attribute if item.name != "training_mode"]
    del proto.attribute[:]
    proto.attribute.extend([*kept, helper.make_attribute("training_mode", 1)])
    del proto.output[1:]
    proto.output.extend(
        names.fresh(f"{node.label}/{RUNNING}/{name}") for name in ("mean", "variance")
    )
    return dict(zip(proto.input[3:5], proto.output[1:3], strict=True))


def _ratio(graph: Graph, node: Node) -> float:
    """The ratio of a Dropout; its schema's default is 0.5.

    Raises:
        GradientError: it is computed.
    """
    value = node.input(1)
    if value == ABSENT:
        return 0.5
    name, producer = graph.values[value].name, graph.producer(value)
    for tensor in graph.model.graph.initializer:
        if tensor.name == name:
            return float(numpy_helper.to_array(tensor))
    constant = (
        attribute(producer.proto, "value")
        if producer is not None and producer.key == "Constant"
        else None
    )
    if constant is None:
        raise GradientError(
            f"The ratio of {node.label!r} (Dropout) is computed; training needs a constant one."
        )
    return float(numpy_helper.to_array(constant))


def _known(shape: Dims | None, node: Node) -> Dims:
    if shape is None or None in shape:
        raise GradientError(
            f"The shape of the mask of {node.label!r} (Dropout) is unknown: {shape}."
        )
    return shape


def _dropout(node: Node, mask: Mask, model: ModelProto, names: NewNames) -> list[NodeProto]:
    """Where(mask, x / (1 - ratio), 0)."""
    x, y = node.proto.input[0], node.proto.output[0]
    scale, zero, scaled = (
        names.fresh(f"{node.label}/{name}") for name in ("scale", "zero", "scaled")
    )
    model.graph.initializer.append(
        numpy_helper.from_array(np.array(1 / (1 - mask.ratio), np.float32), scale)
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), zero))
    return [
        helper.make_node("Mul", [x, scale], [scaled], name=names.fresh(f"{node.label}/scale/node")),
        helper.make_node("Where", [mask.name, scaled, zero], [y], name=node.proto.name),
    ]


def find_weights(model: ModelProto, loss: str, among: Container[str]) -> list[str]:
    """The trainable float32 initializers ``among`` these: the loss depends on them, and they are not settings.

    What an Identity passes on counts as read by its readers.

    Raises:
        GradientError: there are none.
    """
    graph = Graph.of(model)
    names = graph.scopes[0].names
    candidates = {
        names[tensor.name]: tensor
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT
        and tensor.name in among
        and graph.values[names[tensor.name]].origin is Origin.INITIALIZER
    }
    trained = set()
    for node in find_path(graph, candidates, names[loss]).nodes:
        if node.index in graph.passing:
            continue
        for port, value in enumerate(map(graph.passed_on, node.inputs)):
            if value in candidates and port not in _SETTINGS.get(node.key, frozenset()):
                single = int(np.prod(candidates[value].dims)) == 1
                if not (single and (node.key in _SCALARS or not candidates[value].dims)):
                    trained.add(value)
    if not trained:
        raise GradientError(
            f"The loss {loss!r} depends on no float initializer of the model, so nothing can be trained. Start from the"
            " float32 model; onnxamp.amp.decorate(model, level='O2') gives it low-precision weights for training."
        )
    return [tensor.name for value, tensor in candidates.items() if value in trained]


def as_inputs(model: ModelProto, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """Turn initializers into inputs, in place; returns their arrays."""
    wanted = set(names)
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in wanted}
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in wanted]
    copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    del model.graph.initializer[:]
    model.graph.initializer.extend(copies)
    listed = {entry.name for entry in model.graph.input}  # before IR version 4, weights may be
    added = [name for name in names if name not in listed]
    model.graph.input.extend(
        helper.make_tensor_value_info(n, TensorProto.FLOAT, held[n].shape) for n in added
    )
    return {name: held[name] for name in names}
