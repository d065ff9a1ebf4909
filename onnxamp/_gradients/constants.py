"""Small constants of a graph, such as axes, pads and sizes, by which rules of gradients choose what to write."""

from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import FLOAT_ELEMS, elem_of
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims, elements
from onnxamp._graph.view import Node
from onnxamp._model.protos import opset_imports
from onnxamp._runtime.sessions.session import make_session, run

NamedArrays: TypeAlias = dict[str, NDArray[Any]]
"""The numbers of values, by name."""

_SMALL: Final = 4096
"""Most elements of a constant that rules examine."""
_IR_VERSION: Final = 8
"""Version of the format of models that all supported versions of ONNX Runtime read."""


def small_constants(graph: Graph, dims: Sequence[Dims | None]) -> NamedArrays:
    """Return the small constants of the main graph.

    These are initializers that callers cannot override, Constant nodes, static shapes, and integers computed from them.
    """
    constants: NamedArrays = {
        graph.values[value].name: numpy_helper.to_array(tensor)
        for value, tensor in graph.constants.tensors.items()
        if graph.values[value].scope == 0
        and elements(tuple(tensor.dims)) <= _SMALL
        and tensor.data_location != TensorProto.EXTERNAL
    }
    known = set(constants)
    computed = []
    for node in graph.order:
        if node.scope or node.bodies or node.key in op_facts().random:
            continue
        name = node.proto.output[0]
        shape = dims[node.inputs[0]] if node.key == "Shape" else None
        if shape is not None and all(isinstance(size, int) for size in shape):
            end = attribute(node.proto, "end")
            constants[name] = np.asarray(
                shape[attribute(node.proto, "start") or 0 : end], np.int64
            )
            known.add(name)
        elif _is_fixed(graph, node, known):
            computed.append(node)
            known.update(node.proto.output)
    return constants | _evaluated(graph.model, computed, constants)


def _is_fixed(graph: Graph, node: Node, known: Container[str]) -> bool:
    """Return whether a node computes integers or bools from known constants, or numbers from its attributes."""
    if node.key == "Constant":
        return any(item.name.startswith("value_") for item in node.proto.attribute)
    inputs = node.proto.input
    kinds = {elem_of(graph.types[value]) for value in node.writes}
    is_known = bool(inputs) and all(not name or name in known for name in inputs)
    return is_known and kinds.isdisjoint({0, *FLOAT_ELEMS})


def _evaluated(
    model: ModelProto, nodes: Sequence[Node], constants: NamedArrays
) -> NamedArrays:
    """Return the values that nodes compute from constants."""
    if not nodes:
        return {}
    computed = chain.from_iterable(node.proto.output for node in nodes)
    outputs = [name for name in computed if name]
    reads = {*chain.from_iterable(node.proto.input for node in nodes)}
    weights = [
        numpy_helper.from_array(constants[name], name)
        for name in reads & constants.keys()
    ]
    results = map(helper.make_empty_tensor_value_info, outputs)
    graph = helper.make_graph(
        [node.proto for node in nodes],
        "constants",
        [],
        [*results],
        initializer=weights,
    )
    opsets = [helper.make_opsetid(*row) for row in opset_imports(model).items()]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    with suppress(OnnxAmpError):
        return run(make_session(proto, optimize=False), {})
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - takes longer to import than a session to run

    arrays = map(np.asarray, ReferenceEvaluator(proto).run(None, {}))
    return dict(zip(outputs, arrays, strict=True))
