"""Application of edits: the one place that changes a model, in one sweep per scope.

Only what the edits name changes. Order, names, metadata, doc strings, functions and unknown fields are preserved by
construction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from onnxamp._dtypes import Format, retyped
from onnxamp._graph.types import declared_type, type_proto
from onnxamp._graph.view import ABSENT, Node, Scope, View, scope_graphs
from onnxamp._model.blobs import Weight
from onnxamp._ops.facts import op_facts
from onnxamp._rewrite.edits import Edits, NewCast, NewConstant, drop_declared

Converter = Callable[[Sequence[Weight]], Sequence[TensorProto]]
"""Converts float32 tensors to low precision."""


def apply_edits(view: View, edits: Edits, model: ModelProto, convert: Converter) -> None:
    """Apply edits to ``model`` in place.

    Args:
        view: the resolved model; it is stale afterwards if ``model`` is its own model.
        edits: what to change.
        model: the view's model, or a copy of it.
        convert: converts weights to low precision.

    Complexity: linear in nodes, besides ``convert``.
    """
    local = _by_scope(view, edits)
    graphs = scope_graphs(view, model)
    for index in sorted(
        local, reverse=True
    ):  # bodies first, because rebuilding a node list copies its nodes
        _apply_scope(view, edits, local[index], graphs[index], convert)
    if edits.casts and not any(entry.domain in ("", "ai.onnx") for entry in model.opset_import):
        model.opset_import.add(domain="", version=view.book.opsets[""])


@dataclass(slots=True)
class _Local:
    """The edits of one scope."""

    scope: Scope
    inputs: list[tuple[int, int, str]] = field(default_factory=list)
    outputs: list[tuple[int, int, str]] = field(default_factory=list)
    casts: list[NewCast] = field(default_factory=list)
    copies: list[NewConstant] = field(default_factory=list)
    attributes: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


def _by_scope(view: View, edits: Edits) -> dict[int, _Local]:
    by_scope: dict[int, _Local] = {}

    def local(scope: int) -> _Local:
        if scope not in by_scope:
            by_scope[scope] = _Local(view.scopes[scope])
        return by_scope[scope]

    for (node, port), name in edits.inputs.items():
        local(view.nodes[node].scope).inputs.append((node, port, name))
    for (node, port), name in edits.outputs.items():
        local(view.nodes[node].scope).outputs.append((node, port, name))
    for cast in edits.casts:
        local(cast.scope).casts.append(cast)
    for copy in edits.copies:
        local(view.values[copy.value].scope).copies.append(copy)
    for kind in ("attributes", "moved", "removed"):
        for node in sorted(getattr(edits, kind)):
            getattr(local(view.nodes[node].scope), kind).append(node)
    typed = {view.values[value].scope for value in (*edits.types, *edits.weights, *edits.renamed)}
    typed |= {scope.index for scope in view.scopes[1:] if _repeats(view, scope, edits)}
    for scope in typed | {scope for scope, _ in (*edits.results, *edits.result_types)}:
        local(scope)
    return by_scope


def _repeats(view: View, scope: Scope, edits: Edits) -> bool:
    """Whether a body declares the type of an outer value that changes, as some exporters write it."""
    outer = (
        view.visible(entry.name, scope.index)
        for entry in scope.proto.value_info
        if entry.name not in scope.names
    )
    return any(value in edits.types or value in edits.renamed for value in outer)


def _apply_scope(
    view: View, edits: Edits, local: _Local, graph: GraphProto, convert: Converter
) -> None:
    scope = local.scope
    _initializers(view, edits, local, graph, convert)
    for entry in (*graph.input, *graph.value_info):
        value = view.visible(entry.name, scope.index)
        if value in edits.types:
            lower_type(entry.type, edits.low)
        if value in edits.renamed:
            entry.name = edits.renamed[value]
    stored = {tensor.name for tensor in graph.initializer} if scope.index else set()
    for position, entry in enumerate(graph.output):
        kind = edits.result_types.get((scope.index, position))
        entry.name = edits.results.get((scope.index, position), entry.name)
        if kind is not None:
            lower_type(entry.type, edits.low)
        proto = type_proto(kind) if kind is not None and entry.name in stored else None
        if proto is not None and not entry.type.WhichOneof("value"):
            entry.type.CopyFrom(
                proto
            )  # which onnx infers of what nodes make, but not of initializers
    drop_declared(graph, {name for node in local.removed for name in view.nodes[node].proto.output})
    _nodes(view, edits, local, graph, convert)


def _initializers(
    view: View, edits: Edits, local: _Local, graph: GraphProto, convert: Converter
) -> None:
    copies = {
        copy.value: copy for copy in local.copies if view.values[copy.value].producer == ABSENT
    }
    values, weights, added = list[int](), list[Weight](), list[TensorProto]()
    for tensor in graph.initializer[:]:
        value = local.scope.names[tensor.name]
        if value in edits.renamed:
            tensor.name = edits.renamed[value]
        if value in edits.weights or value in copies:
            values.append(value)
            weights.append(_weight(edits, value, tensor, tensor.name))
    for value, (tensor, *_), low in zip(values, weights, convert(weights), strict=True):
        copy = copies.get(value)
        if copy is not None:
            other = TensorProto()
            other.CopyFrom(low if copy.low else tensor)
            other.name = copy.name
            added.append(other)
        if value in edits.weights:
            tensor.CopyFrom(low)
    graph.initializer.extend(added)


def _weight(edits: Edits, value: int, tensor: TensorProto, name: str) -> Weight:
    """What is to be converted of a constant."""
    saturate_at = edits.low.max_finite / (2 if value in edits.halved else 1)
    return Weight(tensor, saturate_at, name, edits.rounded.get(value))


def _nodes(view: View, edits: Edits, local: _Local, graph: GraphProto, convert: Converter) -> None:
    behind: dict[int, list[NodeProto]] = {}
    first = local.scope.nodes.start
    protos = list(graph.node)
    for node, port, name in local.inputs:
        protos[node - first].input[port] = name
    for node, port, name in local.outputs:
        protos[node - first].output[port] = name
    for copy in local.copies:
        producer = view.values[copy.value].producer
        if producer != ABSENT:
            second = _constant_copy(protos[producer - first], copy, edits, convert)
            behind.setdefault(producer, []).append(second)
    for node in local.attributes:
        _lower_attribute(view.nodes[node], protos[node - first], edits, convert)
    for node in local.moved:
        behind.setdefault(edits.moved[node], []).append(protos[node - first])
    for cast in local.casts:
        output = cast.shield or cast.target
        place = behind.setdefault(cast.after, [])
        place.append(
            helper.make_node("Cast", [cast.source], [output], name=cast.name, to=cast.elem)
        )
        if cast.shield:
            place.append(helper.make_node("Max", [output], [cast.target], name=cast.shield))
    dropped = {*local.removed, *local.moved}
    if not behind and not dropped:
        return
    order = list(behind.get(ABSENT, ()))
    for node, proto in enumerate(protos, first):
        if node not in dropped:
            order.append(proto)
        order += behind.get(node, ())
    del graph.node[:]
    graph.node.extend(order)


def _constant_copy(
    proto: NodeProto, copy: NewConstant, edits: Edits, convert: Converter
) -> NodeProto:
    """A second Constant node, in the other precision than the first."""
    second = NodeProto()
    second.CopyFrom(proto)
    second.output[0] = copy.name
    second.name = copy.node_name
    if copy.low:
        _lower_constant(second, edits, copy.value, convert)
    return second


def _lower_attribute(node: Node, proto: NodeProto, edits: Edits, convert: Converter) -> None:
    """Set the low-precision type in the attribute that determines the type of the node's output."""
    if node.key == "Constant":
        _lower_constant(proto, edits, node.outputs[0], convert)
        return
    rule = op_facts().dtype_attribute.get(node.key)
    if rule is None:  # Optional without an input: its `type` is a TypeProto
        lower_type(next(item for item in proto.attribute if item.name == "type").tp, edits.low)
        return
    given = next((item for item in proto.attribute if item.name == rule.attribute), None)
    if rule.attribute == "value":  # ConstantOfShape: float32 zeros without the attribute
        tensor = (
            given.t if given is not None else helper.make_tensor("", TensorProto.FLOAT, [1], [0.0])
        )
        (low,) = convert([_weight(edits, node.outputs[0], tensor, proto.output[0])])
        set_attribute(proto, helper.make_attribute("value", low))
    else:
        set_attribute(proto, helper.make_attribute(rule.attribute, edits.low.elem))


def _lower_constant(proto: NodeProto, edits: Edits, value: int, convert: Converter) -> None:
    """Replace any float attribute of a Constant by a low-precision ``value``."""
    item = next(a for a in proto.attribute if a.name in ("value", "value_float", "value_floats"))
    if item.name == "value":
        tensor = item.t
    else:
        numbers, dims = (
            ([item.f], [])
            if item.name == "value_float"
            else (list(item.floats), [len(item.floats)])
        )
        tensor = helper.make_tensor("", TensorProto.FLOAT, dims, numbers)
    (low,) = convert([_weight(edits, value, tensor, proto.output[0])])
    kept = [a for a in proto.attribute if a.name != item.name]
    del proto.attribute[:]
    proto.attribute.extend([*kept, helper.make_attribute("value", low)])


def set_attribute(proto: NodeProto, new: AttributeProto) -> None:
    """Put an attribute in the place of the one of its name, or at the end."""
    for item in proto.attribute:
        if item.name == new.name:
            item.CopyFrom(new)
            return
    proto.attribute.append(new)


def lower_type(proto: TypeProto, low: Format) -> None:
    """Replace float32 by the low-precision type in a declaration, also inside sequences and optionals."""
    declared = declared_type(proto)
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = (
            proto.sequence_type.elem_type
            if kind == "sequence_type"
            else proto.optional_type.elem_type
        )
    if declared is not None and retyped(declared, low) != declared:
        proto.tensor_type.elem_type = low.elem
