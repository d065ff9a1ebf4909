"""The forward pass of training, made from an inference model: batch statistics, and dropout with masks as inputs."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from onnx import ModelProto, TensorProto

from onnxamp._base.errors import (
    GradientError,
    ModelError,
)
from onnxamp._facts.ops import op_key
from onnxamp._gradients.pointwise import RUNNING
from onnxamp._gradients.writer import MIN_OPSET, Tensor, Writer
from onnxamp._graph.editor import GraphEditor, NewNames, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._model.protos import all_nodes, copied
from onnxamp._rewrite.passes.freeze import without_inputs
from onnxamp._rewrite.passes.inline import inline
from onnxamp._rewrite.passes.upgrade import upgraded


class Mask(NamedTuple):
    """A dropout mask, which the caller feeds: a bool tensor, True where an element is kept."""

    name: str
    dims: Dims
    ratio: float


class TrainingModel(NamedTuple):
    """A model in training mode.

    ``statistics``: running statistics (initializers), each with the value that replaces it after the step.
    """

    model: ModelProto
    statistics: Mapping[str, str]
    masks: tuple[Mask, ...]


def training_model(model: ModelProto, opset: int = MIN_OPSET) -> TrainingModel:
    """Return the model in training mode, with its functions inlined, at ``opset`` or later.

    Raises:
        OpsetError: a node cannot be upgraded to that opset.
        ModelError: a running statistic of a BatchNormalization is not an initializer.
        GradientError: the shape of a dropout mask is unknown, or a dropout ratio is computed.
    """
    if model.functions:
        model, _ = inline(model)
    # Weights that an exporter lists as inputs, so that callers may override them, are trained as others are.
    listed = {entry.name for entry in model.graph.input}
    weights = listed & {tensor.name for tensor in model.graph.initializer}
    if weights:
        model = without_inputs(model, weights)
    graph = upgraded(Graph.of(model), opset)
    writer = Writer(GraphEditor(graph))
    statistics: dict[str, str] = {}
    masks: list[Mask] = []
    for node in graph.at(graph.scopes[0].nodes):
        if node.key == "Dropout" and (ratio := _ratio(graph, node)):
            masks.append(_write_dropout(graph, node, ratio, writer))
        elif node.key == "BatchNormalization":
            statistics |= _over_the_batch(graph, node, writer.editor, statistics)
    return TrainingModel(writer.finish(), statistics, tuple(masks))


def with_own_statistics(model: ModelProto) -> ModelProto:
    """Return a model in which no running statistic is a weight of something else as well.

    Exporters store equal tensors once, so that a new BatchNormalization may have one tensor of ones for its scale and
    its variance. Statistics that only other BatchNormalizations read stay shared: they are those of one layer. Calls of
    functions are replaced by their bodies where that shows such a tensor.
    """
    whole = model
    if model.functions:
        model, _ = inline(model)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = Counter[str]()
    statistics = Counter[str]()
    for node in all_nodes(model.graph.node):
        readers.update(node.input)
        if op_key(node) == "BatchNormalization":
            statistics.update(node.input[3:5])
    returned = {entry.name for entry in model.graph.output}
    mixed = {
        name
        for name, count in statistics.items()
        if name in stored and (readers[name] > count or name in returned)
    }
    if not mixed:
        return whole
    result = copied(model)
    names = NewNames(Graph.of(model).all_names())
    for name in sorted(mixed):
        own = result.graph.initializer.add()
        own.CopyFrom(stored[name])
        own.name = names.fresh(f"{name}/{RUNNING}")
        for node in all_nodes(result.graph.node):
            if op_key(node) != "BatchNormalization":
                continue
            for port in (3, 4):
                if node.input[port] == name:
                    node.input[port] = own.name
    return result


def _over_the_batch(
    graph: Graph, node: Node, editor: GraphEditor, earlier: Mapping[str, str]
) -> dict[str, str]:
    """Switch a BatchNormalization to training mode, and return its running statistics with their successors.

    One that shares statistics with another continues from their successors, which ``earlier`` has.
    """
    statistics = (graph.values[value] for value in node.inputs[3:])
    if any(value.origin is not Origin.INITIALIZER for value in statistics):
        raise ModelError(
            f"The running statistics of {node.label!r} (BatchNormalization) must be initializers."
        )
    proto = editor.node(node.index)
    set_attribute(proto, "training_mode", 1)
    del proto.output[1:]
    names = (f"{node.label}/{RUNNING}/{name}" for name in ("mean", "variance"))
    proto.output.extend(map(editor.names.fresh, names))
    stored = [*proto.input[3:5]]
    proto.input[3:5] = [earlier.get(name, name) for name in stored]
    return dict(zip(stored, proto.output[1:3], strict=True))


def _ratio(graph: Graph, node: Node) -> float:
    """Return the ratio of a Dropout; its schema's default is 0.5.

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
    """Write Where(mask, x / (1 - ratio), 0), and return its mask, which the node may output as well."""
    shape = graph.dims[node.inputs[0]]
    if shape is None or None in shape:
        raise GradientError(
            f"The shape of the mask of {node.label!r} (Dropout) is unknown: {shape}."
        )
    if ratio >= 1:
        raise GradientError(
            f"{node.label!r} (Dropout) drops everything: its ratio is {ratio:g}."
        )
    writer.prefix = node.label
    name = writer.editor.names.fresh(f"{node.label}/mask")
    mask = writer.input(name, TensorProto.BOOL, shape)
    x = Tensor(writer, node.proto.input[0], TensorProto.FLOAT)
    scaled = x * (1 / (1 - ratio))
    mask.op("Where", scaled, x.like(0), into=node.proto.output[0])
    writer.nodes[-1].name = node.proto.name
    if len(node.outputs) > 1 and node.outputs[1] != ABSENT:
        mask.op("Identity", into=node.proto.output[1])
    writer.replace(node.index)
    return Mask(mask.name, shape, ratio)
