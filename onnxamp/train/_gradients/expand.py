"""Ops without a gradient rule, replaced by ops that have one: functions are inlined, recurrent ops unrolled."""

from collections.abc import Sequence

from onnx import ModelProto, NodeProto

from onnxamp._errors import GradientError
from onnxamp._graph.bodies import inline_functions
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._model.protos import copy_without
from onnxamp.train._gradients.forward_pass import ForwardPass, find_path, read_forward_pass
from onnxamp.train._gradients.recurrent import UNROLLED, unroll
from onnxamp.train._gradients.table import RULES
from onnxamp.train._gradients.writer import Writer

_ROUNDS = 8
"""How deep function bodies may be nested."""


def expand(model: ModelProto, loss: str, wanted: Sequence[str]) -> ForwardPass:
    """The model, with a rule for each op between the wanted values and the loss.

    Raises:
        GradientError: an op has neither a rule nor a function body.
        ModelError: a function cannot be inlined.
    """
    model = inline_functions(model, partly=True)
    for _ in range(_ROUNDS):
        graph = Graph.of(model)
        path = find_path(graph, [value_of(graph, name) for name in wanted], value_of(graph, loss))
        lacking = [node for node in path.nodes if node.key not in RULES]
        if not lacking:
            return read_forward_pass(graph, path)
        for node in lacking:
            _check(node)
        unrolled = [node for node in lacking if node.key in UNROLLED]
        if unrolled:
            model = _unrolled(read_forward_pass(graph, path), unrolled)
        else:
            model = inline_functions(
                model, {(node.proto.domain, node.proto.op_type) for node in lacking}
            )
    raise GradientError(
        f"Function bodies are nested deeper than {_ROUNDS} levels: inline them first."
    )


def value_of(graph: Graph, name: str) -> int:
    """The index of a value of the main graph.

    Raises:
        GradientError: there is no such value.
    """
    if name not in graph.scopes[0].names:
        raise GradientError(f"The model has no value {name!r} to differentiate.")
    return graph.scopes[0].names[name]


def _check(node: Node) -> None:
    what = f"Node {node.label!r} ({node.key}) lies between the loss and a trained weight"
    if node.bodies:
        raise GradientError(
            f"{what}, and has subgraphs, for which there is no gradient rule: unroll or inline it first."
        )
    if node.key not in UNROLLED and (node.signature is None or not node.signature.has_function):
        raise GradientError(
            f"{what}, and has no gradient rule: replace it, or do not train the weights before it."
        )


def _unrolled(forward: ForwardPass, nodes: Sequence[Node]) -> ModelProto:
    """The model with these recurrent nodes unrolled."""
    graph, writer = forward.graph, Writer(NewNames(forward.graph.all_names()))
    replaced: dict[int, list[NodeProto]] = {}
    for node in nodes:
        writer.prefix, start = node.label, len(writer.nodes)
        unroll(forward.call(writer, node))
        replaced[node.index] = writer.nodes[start:]
    result = copy_without(graph.model, "node")
    for index in graph.scopes[0].nodes:
        result.graph.node.extend(replaced.get(index, [graph.nodes[index].proto]))
    result.graph.initializer.extend(writer.constants.values())
    return result
