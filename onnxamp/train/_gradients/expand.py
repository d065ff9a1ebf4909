"""Ops that have no rule of their own, replaced by ops that have: function bodies inlined, recurrent ops unrolled."""

from collections.abc import Sequence

from onnx import ModelProto, NodeProto

from onnxamp._errors import GradientError
from onnxamp._graph.graph import Graph
from onnxamp._graph.inline import inline_functions
from onnxamp._graph.names import NewNames
from onnxamp._graph.view import Node, View
from onnxamp.train._gradients.path import find_path
from onnxamp.train._gradients.reading import Reading, read
from onnxamp.train._gradients.recurrent import UNROLLED, unroll
from onnxamp.train._gradients.table import RULES
from onnxamp.train._gradients.writer import Writer

_ROUNDS = 8
"""How deep functions that call functions may be nested."""


def expand(model: ModelProto, loss: str, wanted: Sequence[str]) -> Reading:
    """The model, with a rule for each op between the wanted values and the loss.

    Raises:
        GradientError: an op has no rule, and no function body that could stand for it.
    """
    model = inline_functions(model, partly=True)
    for _ in range(_ROUNDS):
        view = Graph.of(model)
        path = find_path(view, [value_of(view, name) for name in wanted], value_of(view, loss))
        lacking = [node for node in path.nodes if node.key not in RULES]
        if not lacking:
            return read(view, path)
        for node in lacking:
            _check(node)
        unrolled = [node for node in lacking if node.key in UNROLLED]
        if unrolled:
            model = _unrolled(read(view, path), unrolled)
        else:
            model = inline_functions(model, {(node.proto.domain, node.proto.op_type) for node in lacking})
    raise GradientError("Function bodies are nested too deep: inline them first.")


def value_of(view: View, name: str) -> int:
    """Value index of a name of the main graph.

    Raises:
        GradientError: there is none.
    """
    if name not in view.scopes[0].names:
        raise GradientError(f"The model has no value {name!r} to differentiate.")
    return view.scopes[0].names[name]


def _check(node: Node) -> None:
    what = f"Node {node.label!r} ({node.key}) lies between the loss and a trained weight"
    if node.bodies:
        raise GradientError(f"{what}, and ops with subgraphs have no gradient rule: unroll or inline it first.")
    if node.key not in UNROLLED and (node.signature is None or not node.signature.has_function):
        raise GradientError(f"{what}, and has no gradient rule: replace it, or do not train what is behind it.")


def _unrolled(reading: Reading, nodes: Sequence[Node]) -> ModelProto:
    """The model with these recurrent nodes written out."""
    view, writer = reading.view, Writer(NewNames(reading.view.all_names()))
    replaced: dict[int, list[NodeProto]] = {}
    for node in nodes:
        writer.prefix, start = node.label, len(writer.nodes)
        unroll(reading.call(writer, node))
        replaced[node.index] = writer.nodes[start:]
    result = ModelProto()
    result.CopyFrom(view.model)
    del result.graph.node[:]
    for index in view.scopes[0].nodes:
        result.graph.node.extend(replaced.get(index, [view.nodes[index].proto]))
    result.graph.initializer.extend(writer.constants.values())
    return result
