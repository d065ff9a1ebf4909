"""The edits that carry out a decision, as data, and their application: types, Casts, and low-precision constants.

:mod:`onnxamp._rewrite.edits.plan_edits` plans them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, fields

from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from onnxamp._base.records import record
from onnxamp._facts.dtypes import Format, retyped
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._graph.constants import written_numbers
from onnxamp._graph.editor import GraphEditor, drop_attributes, set_attribute
from onnxamp._graph.types import declared_type, type_proto
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._model.blobs import Chosen, Weight
from onnxamp._model.protos import copied, copy_without
from onnxamp._rewrite.edits.mask_bounds import MaskBound, bounded_sum, bounding_nodes


@record
class NewCast:
    """A Cast to insert in ``scope`` after node ``after`` (ABSENT: at the start of the scope)."""

    scope: int
    after: int
    source: str
    target: str
    elem: int
    name: str
    shield: str = ""
    """Name of the Cast's output if a fusion would absorb a bare Cast. A Max of one input, which no optimization of the
    runtime removes, then copies it to ``target``."""
    bound: MaskBound | None = None
    """How its source is bounded, if that is a mask."""
    value: int = ABSENT
    """The value that is cast, in the graph of the edits."""


@record
class NewConstant:
    """A second copy of a constant: an initializer, or a node after the Constant that produces ``value``."""

    value: int
    name: str
    node_name: str
    low: bool


@record
class NewDequantize:
    """A second node like ``node``, right after it, that dequantizes the same integers with a scale of type ``elem``."""

    node: int
    scale: str
    target: str
    name: str
    elem: int


@record
class Edits:
    """All changes of a model.

    Keys are node and value indices of the view, and (node, port) and (scope, output position) pairs.
    """

    low: Format
    casts: Sequence[NewCast] = ()
    copies: Sequence[NewConstant] = ()
    dequantized: Sequence[NewDequantize] = ()
    moved: Mapping[int, int] = field(default_factory=dict)
    """Original Cast -> the node after which it moves (ABSENT: to the start of the scope)."""
    removed: AbstractSet[int] = frozenset()
    """Original Casts that go."""
    inputs: Mapping[tuple[int, int], str] = field(default_factory=dict)
    outputs: Mapping[tuple[int, int], str] = field(default_factory=dict)
    results: Mapping[tuple[int, int], str] = field(default_factory=dict)
    types: Mapping[int, str] = field(default_factory=dict)
    """Value -> the type to declare."""
    result_types: Mapping[tuple[int, int], str] = field(default_factory=dict)
    attributes: AbstractSet[int] = frozenset()
    """Nodes whose dtype attribute, or Constant value, becomes low precision."""
    weights: AbstractSet[int] = frozenset()
    """Initializers that become low precision in place."""
    renamed: Mapping[int, str] = field(default_factory=dict)
    """Values that are declared or stored under a new name: those of bodies that would shadow an outer one."""
    rounded: Mapping[int, Chosen] = field(default_factory=dict)
    """Constants whose low-precision numbers are known beforehand, since they are not the nearest."""
    halved: AbstractSet[int] = frozenset()
    """Constants whose sentinels saturate to half the largest finite number, so that mask + score stays finite."""

    sums: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Node that adds a mask in low precision -> the name of its result, once it is bounded, and one for a value on the
    way there."""

    def __bool__(self) -> bool:
        # These three say how to convert weights, and change nothing where no weight is converted.
        changes = {item.name for item in fields(self)} - {"low", "rounded", "halved"}
        return any(getattr(self, name) for name in changes)


Converter = Callable[[Sequence[Weight]], Iterable[TensorProto]]
"""Converts float32 tensors to low precision, one after another."""


def copy_to_edit(view: View, edits: Edits) -> ModelProto:
    """Return a copy of a model for :func:`apply_edits`, without the float32 numbers of weights that these replace.

    A message keeps the memory of what is replaced in it.
    """
    model = view.model
    # Fields that onnx does not know are copied only with all else.
    if any(len(UnknownFieldSet(part)) for part in (model, model.graph)):
        return copied(model)
    copy = copy_without(model, "initializer")
    names = view.scopes[0].names
    for tensor in model.graph.initializer[:]:
        name = tensor.name
        if names[name] in edits.weights:
            copy.graph.initializer.add().name = name
        else:
            copy.graph.initializer.append(tensor)
    return copy


def apply_edits(
    view: View, edits: Edits, model: ModelProto, convert: Converter
) -> None:
    """Apply edits to ``model`` in place.

    Args:
        view: the resolved model; it is stale afterwards if ``model`` is its own model.
        edits: the changes.
        model: the view's model, or a copy of it, as :func:`copy_to_edit` returns.
        convert: converts weights to low precision.

    Complexity: linear in nodes, apart from ``convert``.
    """
    editor = GraphEditor(view, model)
    _change_weights(editor, edits, convert)
    _change_declarations(editor, edits)
    _change_nodes(editor, edits, convert)
    _insert_nodes(editor, edits)
    editor.finish()
    # A model of other domains' nodes alone may not import the domain of Cast.
    knows_casts = any(entry.domain in ("", "ai.onnx") for entry in model.opset_import)
    if edits.casts and not knows_casts:
        model.opset_import.add(domain="", version=view.book.opsets[""])


def _change_weights(editor: GraphEditor, edits: Edits, convert: Converter) -> None:
    """Lower initializers, in place or as second copies, and rename those of bodies that would shadow an outer value."""
    values = editor.view.values
    copies = {copy.value: copy for copy in edits.copies}
    lowered = dict[int, TensorProto]()
    weights = list[Weight]()
    for scope, graph in zip(
        editor.view.scopes[::-1], editor.graphs[::-1], strict=True
    ):
        sources = scope.proto.initializer[:]
        for source, tensor in zip(sources, graph.initializer[:], strict=True):
            value = scope.names[source.name]
            name = edits.renamed.get(value, source.name)
            if value in edits.renamed:
                tensor.name = name
            if value in edits.weights or value in copies:
                lowered[value] = tensor
                weights.append(_weight(edits, value, source, name))
    converted = zip(lowered.items(), weights, convert(weights), strict=True)
    for (value, tensor), weight, low in converted:
        copy = copies.get(value)
        if copy is not None:
            other = copied(low if copy.low else weight.tensor)
            other.name = copy.name
            editor.add_weight(values[value].scope, other)
        if value in edits.weights:
            tensor.CopyFrom(low)
            tensor.name = weight.name


def _weight(edits: Edits, value: int, tensor: TensorProto, name: str) -> Weight:
    """Return a constant with the way to convert it."""
    saturate_at = edits.low.max_finite / (2 if value in edits.halved else 1)
    return Weight(tensor, saturate_at, name, edits.rounded.get(value))


def _change_declarations(editor: GraphEditor, edits: Edits) -> None:
    """Declare new types and names of inputs, intermediate values and results.

    A body may also declare the type of an outer value, as some exporters do.
    """
    view = editor.view
    for scope, graph in zip(view.scopes, editor.graphs, strict=True):
        for entry in (*graph.input, *graph.value_info):
            value = view.visible(entry.name, scope.index)
            if value in edits.types:
                lower_type(entry.type, edits.low)
            if value in edits.renamed:
                entry.name = edits.renamed[value]
    stored = [*map(_stored_names, editor.graphs[1:])]
    for key in {**edits.results, **edits.result_types}:
        scope_index, position = key
        entry = editor.graphs[scope_index].output[position]
        entry.name = edits.results.get(key, entry.name)
        if key not in edits.result_types:
            continue
        lower_type(entry.type, edits.low)
        is_stored = scope_index > 0 and entry.name in stored[scope_index - 1]
        proto = type_proto(edits.result_types[key])
        if is_stored and proto is not None and not entry.type.WhichOneof("value"):
            # onnx infers the types of node outputs, but not of initializers.
            entry.type.CopyFrom(proto)


def _stored_names(graph: GraphProto) -> set[str]:
    """Return the names of a graph's initializers."""
    return {tensor.name for tensor in graph.initializer}


def _change_nodes(editor: GraphEditor, edits: Edits, convert: Converter) -> None:
    """Rename inputs and outputs of nodes, and lower or repeat the nodes that determine types."""
    for (index, port), name in edits.inputs.items():
        editor.node(index).input[port] = name
    for (index, port), name in edits.outputs.items():
        editor.node(index).output[port] = name
    for copy in edits.copies:
        producer = editor.view.values[copy.value].producer
        if producer != ABSENT:
            constant = _constant_copy(editor.node(producer), copy, edits, convert)
            editor.insert_after(producer, constant)
    for second in edits.dequantized:
        editor.insert_after(second.node, _dequantize_again(editor, second))
    # In the order of nodes, because a set has none of its own.
    for index in sorted(edits.attributes):
        _lower_attribute(editor.view.nodes[index], editor.node(index), edits, convert)
    _drop_repeated(editor, edits)


def _insert_nodes(editor: GraphEditor, edits: Edits) -> None:
    """Move and remove Casts, and insert new ones."""

    def place(scope: int, after: int) -> int:
        return editor.view.scopes[scope].nodes.start if after == ABSENT else after + 1

    for index, (result, between) in edits.sums.items():
        source = edits.outputs[index, 0]
        editor.insert_after(
            index, *bounded_sum(editor, source, result, between, edits.low)
        )
    editor.remove(*edits.removed)
    for index, after in sorted(edits.moved.items()):
        editor.move(index, place(editor.view.nodes[index].scope, after))
    for cast in edits.casts:
        output = cast.shield or cast.target
        source = cast.source
        nodes = []
        if cast.bound is not None:
            nodes += bounding_nodes(editor, source, cast.bound, edits.low)
            source = cast.bound.result
        nodes.append(editor.make("Cast", [source], [output], cast.name, to=cast.elem))
        if cast.shield:
            nodes.append(editor.make("Max", [output], [cast.target], cast.shield))
        editor.insert(cast.scope, place(cast.scope, cast.after), *nodes)


def _constant_copy(
    proto: NodeProto, copy: NewConstant, edits: Edits, convert: Converter
) -> NodeProto:
    """Return a second Constant node, in the other precision than the first."""
    second = copied(proto)
    second.output[0] = copy.name
    second.name = copy.node_name
    if copy.low:
        _lower_constant(second, edits, copy.value, convert)
    return second


def _dequantize_again(editor: GraphEditor, second: NewDequantize) -> NodeProto:
    """Return a second node that dequantizes the same value as another one, with a scale of another type."""
    proto = copied(editor.node(second.node))
    proto.input[1] = second.scale
    proto.output[0] = second.target
    proto.name = second.name
    rule = op_facts().dtype_attribute.get(op_key(proto))
    if rule is not None and attribute(proto, rule.attribute):
        set_attribute(proto, rule.attribute, second.elem)
    return proto


def _lower_attribute(
    node: Node, proto: NodeProto, edits: Edits, convert: Converter
) -> None:
    """Set the low-precision type in the attribute that determines the type of the node's output."""
    if node.key == "Constant":
        _lower_constant(proto, edits, node.outputs[0], convert)
        return
    rule = op_facts().dtype_attribute.get(node.key)
    if rule is None:
        # Optional without an input has a declaration of its type.
        declared = next(item for item in proto.attribute if item.name == "type")
        lower_type(declared.tp, edits.low)
        return
    given = attribute(proto, rule.attribute)
    if rule.attribute == "value":  # ConstantOfShape
        zero = helper.make_tensor("", TensorProto.FLOAT, [1], [0.0])
        tensor = zero if given is None else given
        (low,) = convert([_weight(edits, node.outputs[0], tensor, proto.output[0])])
        set_attribute(proto, "value", low)
        return
    set_attribute(proto, rule.attribute, edits.low.elem)


def _drop_repeated(editor: GraphEditor, edits: Edits) -> None:
    """Drop dtype attributes that now say the same as the type of a lowered input, which is their default.

    ONNX Runtime's CPU provider does not load some models with them (seen in 1.31.1: "Type (tensor(float)) of output arg
    (InsertedPrecisionFreeCast_b)").
    """
    rules = op_facts().dtype_attribute
    givers = {op: rule.giver for op, rule in rules.items() if rule.giver is not None}
    low = {copy.name for copy in edits.copies if copy.low}
    low |= {cast.target for cast in edits.casts if cast.elem == edits.low.elem}
    for node in editor.view.nodes_of(givers):
        port = givers[node.key]
        name = edits.inputs.get((node.index, port))
        is_low = node.input(port) in edits.weights if name is None else name in low
        attribute_name = rules[node.key].attribute
        proto = editor.node(node.index)
        if is_low and attribute(proto, attribute_name) == edits.low.elem:
            drop_attributes(proto, [attribute_name])


def _lower_constant(
    proto: NodeProto, edits: Edits, value: int, convert: Converter
) -> None:
    """Replace any float attribute of a Constant by a low-precision ``value``."""
    tensor = stored_value(proto)
    (low,) = convert([_weight(edits, value, tensor, proto.output[0])])
    set_value(proto, low)


def stored_value(proto: NodeProto) -> TensorProto:
    """Return the float32 number or numbers of a Constant."""
    held = attribute(proto, "value")
    if held is None:
        numbers = written_numbers(proto)
        assert numbers is not None
        held = numpy_helper.from_array(numbers)
    tensor: TensorProto = held
    return tensor


def set_value(proto: NodeProto, tensor: TensorProto) -> None:
    """Set the value of a Constant or ConstantOfShape."""
    names = [item.name for item in proto.attribute if item.name.startswith("value")]
    drop_attributes(proto, names)
    set_attribute(proto, "value", tensor)


def lower_type(proto: TypeProto, low: Format) -> None:
    """Replace float32 by the low-precision type in a declaration, also inside sequences and optionals."""
    declared = declared_type(proto)
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
    if declared is not None and retyped(declared, low) != declared:
        proto.tensor_type.elem_type = low.elem
