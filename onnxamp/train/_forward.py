"""From an inference model to the forward pass of training: batch statistics, dropout, weights as inputs."""

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._errors import GradientError, ModelError
from onnxamp._graph.editor import GraphEditor, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims, symbolic_shapes
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._rewrite.prepare import inline
from onnxamp._rewrite.upgrade.upgrade import upgraded
from onnxamp.train._gradients.forward_pass import find_path
from onnxamp.train._gradients.normalisations import RUNNING
from onnxamp.train._gradients.writer import MIN_OPSET, Tensor, Writer

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


class Mask(NamedTuple):
    """A dropout mask, which is fed in: a bool tensor, True where an element is kept."""

    name: str
    dims: Dims
    ratio: float


class TrainingModel(NamedTuple):
    """A model in training mode.

    ``statistics``: running statistics (initializers), each with the value that holds its successor.
    """

    model: ModelProto
    statistics: Mapping[str, str]
    masks: tuple[Mask, ...]


def training_model(model: ModelProto, opset: int = MIN_OPSET) -> TrainingModel:
    """The model in training mode, with its functions inlined, at ``opset`` or later.

    Raises:
        OpsetError: a node cannot follow to that opset.
        ModelError: a running statistic of a BatchNormalization is not an initializer.
        GradientError: the shape of a dropout mask is unknown, or a dropout ratio is computed.
    """
    if model.functions:
        model = inline(model, [])
    graph = upgraded(Graph.of(model), opset)
    writer = Writer(GraphEditor(graph))
    statistics: dict[str, str] = {}
    masks: list[Mask] = []
    for node in (graph.nodes[index] for index in graph.scopes[0].nodes):
        if node.key == "Dropout" and (ratio := _ratio(graph, node)):
            masks.append(_write_dropout(graph, node, ratio, writer))
        elif node.key == "BatchNormalization":
            statistics |= _over_the_batch(graph, node, writer.editor)
    return TrainingModel(writer.finish(), statistics, tuple(masks))


def _over_the_batch(graph: Graph, node: Node, editor: GraphEditor) -> dict[str, str]:
    """Switch a BatchNormalization to training mode; returns its running statistics with their successors."""
    if any(graph.values[value].origin is not Origin.INITIALIZER for value in node.inputs[3:]):
        raise ModelError(
            f"The running statistics of {node.label!r} (BatchNormalization) must be initializers."
        )
    proto = editor.node(node.index)
    set_attribute(proto, "training_mode", 1)
    del proto.output[1:]
    names = (f"{node.label}/{RUNNING}/{name}" for name in ("mean", "variance"))
    proto.output.extend(map(editor.names.fresh, names))
    return dict(zip(proto.input[3:5], proto.output[1:3], strict=True))


def _ratio(graph: Graph, node: Node) -> float:
    """The ratio of a Dropout; its schema's default is 0.5.

    Raises:
        GradientError: it is computed.
    """
    value = node.input(1)
    ratio = 0.5 if value == ABSENT else graph.constants.scalar(value)
    if ratio is None:
        raise GradientError(
            f"The ratio of {node.label!r} (Dropout) is computed; training needs a constant one."
        )
    return ratio


def _write_dropout(graph: Graph, node: Node, ratio: float, writer: Writer) -> Mask:
    """Where(mask, x / (1 - ratio), 0)."""
    shape = graph.ask(symbolic_shapes)[node.inputs[0]]
    if shape is None or None in shape:
        raise GradientError(
            f"The shape of the mask of {node.label!r} (Dropout) is unknown: {shape}."
        )
    writer.prefix = node.label
    mask = writer.input(writer.editor.names.fresh(f"{node.label}/mask"), TensorProto.BOOL, shape)
    x = Tensor(writer, node.proto.input[0], TensorProto.FLOAT)
    mask.op("Where", x * (1 / (1 - ratio)), x.like(0), into=node.proto.output[0])
    writer.nodes[-1].name = node.proto.name
    writer.replace(node.index)
    return Mask(mask.name, shape, ratio)


def find_weights(graph: Graph, loss: str, among: Container[str]) -> list[str]:
    """The trainable float32 initializers ``among`` these: the loss depends on them, and they are not settings.

    What an Identity passes on counts as read by its readers.

    Raises:
        GradientError: there are none.
    """
    names = graph.scopes[0].names
    candidates = {
        value: tensor
        for value, tensor in graph.constants.tensors.items()
        if tensor.data_type == TensorProto.FLOAT
        and tensor.name in among
        and graph.values[value].origin is Origin.INITIALIZER
    }
    trained = set()
    path, _ = find_path(graph, candidates, names[loss])
    for node in path:
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


def as_inputs(graph: Graph, names: Iterable[str]) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """The model with float32 initializers as inputs, and their arrays."""
    writer, arrays = Writer(GraphEditor(graph)), {}
    for name in names:
        value = graph.scopes[0].names[name]
        arrays[name] = numpy_helper.to_array(writer.editor.weight(value))
        writer.editor.drop_weight(value)
        writer.input(name, TensorProto.FLOAT, arrays[name].shape)
    return writer.finish(), arrays
