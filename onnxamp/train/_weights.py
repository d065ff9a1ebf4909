"""Weights in training: those that a loss depends on, their float32 masters, and the model with the trained ones."""

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._base.errors import (
    GradientError,
    ModelError,
)
from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, FORMATS, LOW_ELEMS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import read_table
from onnxamp._gradients.walk import find_path
from onnxamp._gradients.writer import Writer
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin, inline_functions
from onnxamp._model.protos import copied
from onnxamp._model.weights import SENTINEL, convert
from onnxamp._rewrite.passes.casts import remove_redundant_casts
from onnxamp._runtime.emulate import without_rounding

_FACTS: Final = read_table("training")


def find_weights(graph: Graph, loss: str, among: Container[str]) -> list[str]:
    """Return the initializers in ``among`` that are trainable: float32, not settings, and the loss depends on them.

    A consumer of an Identity counts as a consumer of the initializer that the Identity passes on.

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
        settings = _FACTS["settings"].get(node.key, ())
        for port, value in enumerate(map(graph.passed_on, node.inputs)):
            if value not in candidates or port in settings:
                continue
            # A scalar, or a single number in an op that formulas are written with, is a constant of a formula.
            dims = candidates[value].dims
            is_single = int(np.prod(dims)) == 1
            is_formula = node.key in _FACTS["formulas"] and not _is_bias(graph, node)
            if is_single and (not dims or is_formula):
                continue
            if not _is_mask(candidates[value]):
                trained.add(value)
    if not trained:
        raise GradientError(
            f"The loss {loss!r} depends on no float initializer of the model, so nothing can be trained. Start from the"
            " float32 model; onnxamp.amp.decorate(model, level='O2') gives it low-precision weights for training."
        )
    return [tensor.name for value, tensor in candidates.items() if value in trained]


def _is_bias(graph: Graph, node: Node) -> bool:
    """Return whether a node adds something to a product with weights, as a layer with a single output does."""
    facts = op_facts()
    makers = map(graph.producer, node.reads)
    is_sum = node.key in facts.additive
    return is_sum and any(
        maker is not None and maker.key in facts.products for maker in makers
    )


def _is_mask(tensor: TensorProto) -> bool:
    """Return whether a tensor holds zeros and one large number, such as -1e4, -1e9 or -Inf, which mask scores."""
    sizes = np.abs(numpy_helper.to_array(tensor))
    largest = float(sizes.max(initial=0))
    are_zero = sizes == 0
    # The bias of a single output may be as large, too.
    is_large = largest >= (_LEAST_MASK if are_zero.any() else SENTINEL)
    return is_large and bool((are_zero | (sizes == largest)).all())


_LEAST_MASK: Final = 1e4
"""The smallest magnitude with which exporters mask scores."""


def as_inputs(
    graph: Graph, names: Iterable[str]
) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Return the model with float32 initializers as inputs, and their arrays."""
    writer = Writer(GraphEditor(graph))
    arrays = {}
    for name in names:
        value = graph.scopes[0].names[name]
        arrays[name] = numpy_helper.to_array(writer.editor.weight(value))
        writer.editor.drop_weight(value)
        writer.input(name, TensorProto.FLOAT, arrays[name].shape)
    return writer.finish(), arrays


class Masters(NamedTuple):
    """A model whose floats are float32.

    Attributes:
        model: the model.
        dtype: the low-precision type of the original; None if it had none.
        copies: low-precision initializers of the original that are copies of a float32 one, with its name: they share
            one master.
        lowered: whether each node was in low precision, by label. Nodes with mixed inputs, Casts and Constants are left
            out.
    """

    model: ModelProto
    dtype: str | None
    copies: Mapping[str, str]
    lowered: Mapping[str, bool]


def find_masters(model: ModelProto) -> Masters:
    """Return the float32 model that a converted model was made from; a model without low precision is returned
    unchanged.

    Raises:
        ModelError: float16 and bfloat16 values are mixed.
    """
    graph = Graph.of(inline_functions(model))
    dtypes = [low.name for low in FORMATS.values() if low.tensor in graph.types]
    if not dtypes:
        return Masters(model, None, {}, {})
    if len(dtypes) > 1:
        raise ModelError(
            "The model holds float16 and bfloat16 values: training takes one low-precision type."
        )
    copies = _copies(graph)
    # Casts to low precision and back are left over once everything is float32.
    masters = remove_redundant_casts(without_rounding(_prepared(graph, copies)))
    return Masters(masters, dtypes[0], copies, _lowered(graph))


def _copies(graph: Graph) -> dict[str, str]:
    """Map low-precision initializers to the float32 ones that a conversion copied them from, judged by names and
    numbers.
    """
    weights = {
        tensor.name: tensor
        for value, tensor in graph.constants.tensors.items()
        if graph.values[value].scope == 0 and graph.values[value].producer == ABSENT
    }
    copies = {}
    for name, tensor in weights.items():
        low = LOW_ELEMS.get(tensor.data_type)
        stem = name.rpartition(f"_{low.suffix}")[0] if low is not None else ""
        exact = weights.get(stem)
        if exact is None or exact.data_type != TensorProto.FLOAT:
            continue
        if exact.dims != tensor.dims:
            continue
        rounded = _tensor(numpy_helper.to_array(exact), name, low)
        if rounded.raw_data == numpy_helper.to_array(tensor).tobytes():
            copies[name] = stem
    return copies


def _prepared(graph: Graph, copies: Mapping[str, str]) -> ModelProto:
    """Return a copy with Casts in place of copied initializers, and with its nodes named by their labels, because
    labels change when Casts are removed.
    """
    editor = GraphEditor(graph)
    scope = graph.scopes[0]
    for low, exact in copies.items():
        cast = editor.make("Cast", [exact], [low], f"{low}/copy", to=TensorProto.FLOAT)
        editor.insert(0, scope.nodes.start, cast)
        editor.drop_weight(scope.names[low])
    for index in scope.nodes:
        editor.node(index).name = graph.nodes[index].label
    return editor.finish()


def _lowered(graph: Graph) -> dict[str, bool]:
    """Return whether each node is low, by label; nodes with floats of both kinds are left out."""
    by_label: dict[str, set[bool]] = {}
    for node in graph.at(graph.scopes[0].nodes):
        if node.key not in op_facts().idle:
            kinds = {*graph.types_of((*node.inputs, *node.outputs))} & FLOAT_TENSORS
            sides = by_label.setdefault(node.label, set())
            sides.update(kind != FLOAT for kind in kinds)
    return {label: sides.pop() for label, sides in by_label.items() if len(sides) == 1}


def with_arrays(
    model: ModelProto, arrays: Mapping[str, NDArray[np.float32]]
) -> ModelProto:
    """Return a copy of the model whose initializers hold these numbers; each keeps its type.

    Finite numbers that a low-precision type cannot hold become its largest.
    """
    result = copied(model)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            low = LOW_ELEMS.get(tensor.data_type)
            tensor.CopyFrom(_tensor(arrays[tensor.name], tensor.name, low))
    return result


def _tensor(array: NDArray[Any], name: str, low: Format | None) -> TensorProto:
    if low is None:
        return numpy_helper.from_array(array, name)
    ((raw, _),) = convert([(array, low.max_finite)], low)
    return TensorProto(name=name, data_type=low.elem, dims=array.shape, raw_data=raw)


def trained_model(
    source: ModelProto,
    masters: Masters,
    arrays: Mapping[str, NDArray[Any]],
    stored: Mapping[str, str],
) -> ModelProto:
    """Return the model that training started from, with its trained weights stored in some types.

    Args:
        source: the model.
        masters: the float32 model that is trained in its place.
        arrays: the trained weights and running statistics.
        stored: float32 weight -> "float16", "bfloat16" or "float64"; all others keep their original type.
    """
    copies = {
        copy: arrays[name] for copy, name in masters.copies.items() if name in arrays
    }
    result = with_arrays(source, {**arrays, **copies})
    converted = {
        tensor.name: stored[tensor.name]
        for tensor in result.graph.initializer
        if tensor.data_type == TensorProto.FLOAT
        and tensor.name in arrays
        and stored.get(tensor.name, "float32") != "float32"
    }
    return _stored(Graph.of(result), converted) if converted else result


def _stored(graph: Graph, weights: Mapping[str, str]) -> ModelProto:
    """Return the model with float32 initializers stored in other types; a Cast after each restores float32.

    Initializers keep their names. Finite numbers beyond the range of the type become its largest ones. An initializer
    that is an output of the model does not change. Complexity: linear in the number of nodes.

    Args:
        graph: a well-formed model.
        weights: names of float32 initializers -> "float16", "bfloat16" or "float64".
    """
    editor = GraphEditor(graph)
    scope = graph.scopes[0]
    for name, dtype in weights.items():
        value = scope.names[name]
        if graph.results[value]:
            continue
        raised = editor.names.fresh(f"{name}/float32")
        for node, port in graph.uses[value]:
            editor.node(node).input[port] = raised
        cast = editor.make(
            "Cast", [name], [raised], editor.names.fresh(f"{raised}/cast"), to=1
        )
        editor.insert(0, scope.nodes.start, cast)
        tensor = editor.weight(value)
        low = FORMATS.get(dtype)
        array = numpy_helper.to_array(tensor).astype(np.float32 if low else np.float64)
        tensor.CopyFrom(_tensor(array, name, low))
    return editor.finish()
