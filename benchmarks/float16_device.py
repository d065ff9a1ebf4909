"""A device that computes in float16 whatever the types say, and whose overflow is NaN, as some neural engines do.

It is a float32 model for the CPU: every float that a node computes passes through float16, and what became infinite
there becomes NaN. Weights are rounded likewise; infinities that the model holds as constants, as masks do, stay.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._facts.dtypes import FLOAT
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, scope_graphs
from onnxamp._model.protos import copied
from onnxamp._runtime.emulate import without_rounding


def on_device(model: ModelProto) -> ModelProto:
    """The model as the device computes it, in float32 throughout; its bodies, too."""
    graph = Graph.of(without_rounding(model))
    result, names = copied(graph.model), NewNames(graph.all_names())
    for scope, held in zip(graph.scopes, scope_graphs(graph, result), strict=True):
        for tensor in held.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(_rounded(tensor))
        rebuilt = GraphProto()
        for index, proto in enumerate(held.node, scope.nodes.start):
            rebuilt.node.extend(_limited(graph, graph.nodes[index], proto, names))
        del held.node[:]
        held.node.extend(rebuilt.node)
    return result


def run_on_device(model: ModelProto, feeds: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Its outputs."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(on_device(model).SerializeToString(), options,
                                           providers=["CPUExecutionProvider"])  # fmt: skip
    types = {item.name: np.float32 if item.type == FLOAT else None for item in session.get_inputs()}
    given = {name: feeds[name] if kind is None else feeds[name].astype(kind) for name, kind in types.items()}
    return list(session.run(None, given))


def _rounded(tensor: TensorProto) -> TensorProto:
    array = numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        low = array.astype(np.float16).astype(np.float32)
    low[np.isinf(low) & ~np.isinf(array)] = np.nan
    return numpy_helper.from_array(low, tensor.name)


def _limited(graph: Graph, node: Node, proto: NodeProto, names: NewNames) -> list[NodeProto]:
    """A node, and what the device makes of its results."""
    made, behind = proto, list[NodeProto]()
    if proto.op_type == "Constant":
        for item in made.attribute:
            if item.name == "value" and item.t.data_type == TensorProto.FLOAT:
                item.t.CopyFrom(_rounded(item.t))
        return [made]
    for port, value in enumerate(node.outputs):
        if value == ABSENT or graph.types[value] != FLOAT:
            continue
        name = proto.output[port]
        exact, low, rounded, nought = (names.fresh(f"{name}_{kind}") for kind in ("exact", "low", "rounded", "nought"))
        made.output[port] = exact
        behind += [
            helper.make_node("Cast", [exact], [low], to=TensorProto.FLOAT16),
            helper.make_node("Cast", [low], [rounded], to=TensorProto.FLOAT),
            helper.make_node("Sub", [rounded, rounded], [nought]),  # NaN where it is infinite
            helper.make_node("Add", [rounded, nought], [name]),
        ]
    return [made, *behind]
