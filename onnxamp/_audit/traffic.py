"""Casts that a model holds: how many, what they move, and which of them cancel each other."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from onnx import ModelProto, helper

from onnxamp._audit.findings import Casts, Finding
from onnxamp._decide.precision import loop_trips
from onnxamp._dtypes import ELEM_NUMBERS, LOW_TYPES, element_name, is_lossless
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._rewrite.casts import remove_redundant_casts

_FLOATS: Final = frozenset({"tensor(float)", "tensor(double)", *(low.tensor for low in LOW_TYPES.values())})

_CLEAN = "onnxamp.remove_redundant_casts(model) removes such Casts; no number changes."


def cast_traffic(view: Graph, shapes: Sequence[Shape | None]) -> tuple[Casts, list[Finding]]:
    """Casts between floats in one run, by estimate, and the findings about them. Complexity: near linear.

    Casts of constants count for nothing: they are computed once, while the model is loaded.
    """
    types, constants, trips = view.types, view.constants, view.ask(loop_trips)
    count = moved = 0
    for node in view.nodes:
        if _is_float_cast(node, types) and not constants.is_constant(node.inputs[0]):
            count += 1
            size = element_bytes(types[node.inputs[0]]) + element_bytes(types[node.outputs[0]])
            moved += size * elements(shapes[node.inputs[0]]) * trips[node.scope]
    redundant = [node for node in _redundant(view) if not constants.is_constant(node.inputs[0])]
    found = [_redundancy(view, types, node) for node in redundant]
    found += _lossy_pairs(view, types, {node.index for node in redundant})
    return Casts(count, moved, len(redundant)), found


def element_bytes(type_name: str | None) -> int:
    """Bytes of one element of a type, at any depth; 4 where the type is not known, 0 for strings.

    Types of less than a byte count as one.
    """
    name = (type_name or "float").rsplit("(", maxsplit=1)[-1].rstrip(")")
    if name == "string":
        return 0
    try:
        return int(np.dtype(helper.tensor_dtype_to_np_dtype(ELEM_NUMBERS[name])).itemsize)
    except (KeyError, TypeError):
        return 4


def _is_float_cast(node: Node, types: Types) -> bool:
    if node.key != "Cast" or ABSENT in (node.input(0), node.outputs[0]):
        return False
    return types[node.inputs[0]] in _FLOATS and types[node.outputs[0]] in _FLOATS


def _redundant(view: View) -> list[Node]:
    """Casts that :func:`onnxamp.remove_redundant_casts` would remove."""
    casts = [node for node in view.nodes if node.key == "Cast" and ABSENT not in (node.input(0), node.outputs[0])]
    if not casts:
        return []
    # A Cast has no bodies, so both views list the same scopes in the same order.
    left = Graph.of(remove_redundant_casts(_without_data(view.model))).scopes
    return [node for node in casts if view.values[node.outputs[0]].name not in left[node.scope].names]


def _redundancy(view: View, types: Types, node: Node) -> Finding:
    before = view.producer(node.inputs[0])
    behind = {reader.key for reader, _ in view.consumers(node.outputs[0])}
    severity, text = "warning", "casts a value to a type that another Cast casts it to as well"
    if types[node.inputs[0]] == types[node.outputs[0]]:
        severity, text = "note", "casts to the type that its input has already: runtimes drop it while they load"
    elif (before is not None and before.key == "Cast") or behind == {"Cast"}:
        text = "one of a chain of Casts of which the first loses nothing: one Cast or none does the same"
    return Finding(severity, "cast", node.label, node.key, text, _CLEAN)


def _lossy_pairs(view: View, types: Types, redundant: set[int]) -> Iterator[Finding]:
    """float32 -> low -> float32: the pair rounds, perhaps on purpose."""
    for node in view.nodes:
        before = view.producer(node.input(0)) if _is_float_cast(node, types) else None
        if before is None or not _is_float_cast(before, types) or node.index in redundant:
            continue
        first, second, third = (
            element_name(types[value]) for value in (before.inputs[0], node.inputs[0], node.outputs[0])
        )
        if first == third and not is_lossless(first, second):
            text = f"undoes a Cast to {second}: the pair rounds, and costs two passes over the data"
            action = "Keep what is meant to round; remove_redundant_casts(model, lossy=True) removes the rest."
            yield Finding("note", "cast", node.label, node.key, text, action)


def _without_data(model: ModelProto) -> ModelProto:
    """The model without the data of its weights, which may be more than one message can hold."""
    shell = ModelProto(ir_version=model.ir_version)
    shell.opset_import.extend(model.opset_import)
    graph, into = model.graph, shell.graph
    into.name = graph.name
    into.input.extend(graph.input)
    into.output.extend(graph.output)
    into.node.extend(graph.node)
    into.sparse_initializer.extend(graph.sparse_initializer)
    for tensor in graph.initializer:
        into.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return shell
