"""Ops that have no rule of their own, replaced by ops that have: function bodies inlined, recurrent ops unrolled."""

from collections.abc import Sequence

import onnx.checker
import onnx.defs
import onnx.inliner
from onnx import ModelProto, NodeProto, helper

from onnxamp._errors import GradientError, ModelError
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import NewNames
from onnxamp._graph.view import Node, View, opset_imports
from onnxamp._runtime.protos import copy_fields
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
    if model.functions:
        model = _with_bodies(model, None)
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
            model = _with_bodies(model, {(node.proto.domain, node.proto.op_type) for node in lacking})
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


def _with_bodies(model: ModelProto, ops: set[tuple[str, str]] | None) -> ModelProto:
    """The model with these ops (None: its own functions) replaced by their function bodies."""
    shell = ModelProto()  # weights become inputs: the inliner serialises, and reads no types off initializers
    copy_fields(model, shell, but={"graph"})
    copy_fields(model.graph, shell.graph, but={"initializer"})
    listed = {entry.name for entry in model.graph.input}
    added = [tensor for tensor in model.graph.initializer if tensor.name not in listed]
    shell.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, tuple(t.dims)) for t in added)
    for node in shell.graph.node:
        if ops is not None and (node.domain, node.op_type) in ops:
            _fill_defaults(node, opset_imports(model).get(node.domain, 1))
    try:
        if ops is None:
            result = onnx.inliner.inline_local_functions(shell, convert_version=True)
        else:
            result = onnx.inliner.inline_selected_functions(shell, sorted(ops), inline_schema_functions=True)
    except (RuntimeError, onnx.checker.ValidationError) as error:
        raise ModelError(f"Function bodies cannot be inlined: {error}") from error
    del result.graph.input[:]
    result.graph.input.extend(model.graph.input)
    result.graph.initializer.extend(model.graph.initializer)
    return result


def _fill_defaults(node: NodeProto, version: int) -> None:
    """Write the schema's default attributes into the node: the inliner leaves some of them out of the body."""
    given = {item.name for item in node.attribute}
    for name, item in onnx.defs.get_schema(node.op_type, version, node.domain).attributes.items():
        if name not in given and item.default_value.type:
            node.attribute.append(item.default_value)


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
