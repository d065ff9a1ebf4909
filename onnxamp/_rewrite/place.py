"""Nodes put in the place of others, in a copy of a model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnxamp._graph.view import View, scope_graphs

WEIGHTS_ALONE: Final = 4
"""First IR version at which a weight need not be listed as a graph input."""


def place_nodes(view: View, model: ModelProto, nodes: Mapping[int, Sequence[NodeProto]]) -> None:
    """Put nodes in the places of others, bodies first, because rebuilding a node list copies its nodes.

    Args:
        view: of the model as it was.
        model: a copy of the view's model, which is changed.
        nodes: node -> the nodes that stand in its place.
    """
    changed = {view.nodes[index].scope for index in nodes}
    graphs = scope_graphs(view, model)
    for scope in sorted(changed, reverse=True):
        first, rebuilt, proto = view.scopes[scope].nodes.start, GraphProto(), graphs[scope]
        for position, node in enumerate(proto.node, first):
            rebuilt.node.extend(nodes.get(position, (node,)))
        del proto.node[:]
        proto.node.extend(rebuilt.node)
        made = {name for node in proto.node for name in node.output}
        gone = {name for index in view.scopes[scope].nodes if index in nodes for name in view.nodes[index].proto.output}
        drop_declared(proto, gone - made)


def drop_declared(graph: GraphProto, names: Iterable[str]) -> None:
    """Remove what is declared of intermediate values of these names."""
    gone = set(names)
    kept = [entry for entry in graph.value_info if entry.name not in gone]
    if len(kept) < len(graph.value_info):
        rebuilt = GraphProto()
        rebuilt.value_info.extend(kept)
        del graph.value_info[:]
        graph.value_info.extend(rebuilt.value_info)


def add_constants(model: ModelProto, tensors: Iterable[TensorProto]) -> None:
    """Add constants to the main graph: as nodes where every initializer has to be an input."""
    if model.ir_version >= WEIGHTS_ALONE:
        model.graph.initializer.extend(tensors)
        return
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
    rebuilt = GraphProto()
    rebuilt.node.extend([*nodes, *model.graph.node])
    del model.graph.node[:]
    model.graph.node.extend(rebuilt.node)
