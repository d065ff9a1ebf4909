"""Exact types of all values, from schemas alone, and the precisions of nodes; shapes are not needed.

Types are schema strings ("tensor(float)", "seq(tensor(int64))"); None means unknown (custom ops). If neither a schema
nor a rule determines the type of an output, the file's declaration does.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from onnx import AttributeProto, NodeProto, TensorProto, TypeProto

from onnxamp._facts.dtypes import (
    ELEM_NUMBERS,
    FLOAT,
    FORMATS,
    LOWEST_FIRST,
    tensor_type,
)
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.signature import Signature
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Scope,
    View,
    entering_values,
    leaving_values,
    stored_tensors,
    transfers,
)

Types = Sequence[str | None]
"""Type by value index."""
PortTypes = tuple[str | None, ...]
"""Types of the inputs or of the outputs of a node; None if absent or unknown."""


class Inferred(NamedTuple):
    """The types of a view, and nodes that show all distinct forms: each other one has the types of one of these."""

    types: Types
    examples: Sequence[Node]


def infer_types(view: View) -> Types:
    """Return the type of every value of the view, see :func:`infer`."""
    return infer(view).types


def infer(view: View) -> Inferred:
    """Return the type of every value of the view. Complexity: near linear in nodes and ports.

    Declarations count for graph inputs, and for outputs that neither the schema nor a rule determines. A type that is
    still unknown follows from other ports of the value's producer and consumers, wherever they are.
    """
    # The last entry is that of ABSENT.
    types: list[str | None] = [None] * (len(view.values) + 1)
    for scope in view.scopes:
        _seed(scope, types)
    declared = _declared(view)
    entered = {0}
    control_flow = op_facts().control_flow
    examples = list[Node]()
    known = dict[tuple[object, ...], Sequence[str | None]]()
    """The types of outputs by signature, number of outputs and types of inputs: large models repeat few."""
    for node in view.order:
        if node.scope not in entered or node.bodies:
            for scope_index in (node.scope, *(body for _, body in node.bodies)):
                _enter(view, scope_index, entered, types, declared)
        if node.key in control_flow:
            kinds = _control_flow(view, node, types)
            examples.append(node)
        else:
            inputs = [*map(types.__getitem__, node.inputs)]
            form = node.signature, len(node.outputs), *inputs
            repeated = known.get(form)
            kinds = repeated or output_types(
                node.proto, node.key, node.signature, inputs
            )
            if repeated is None:
                examples.append(node)
                # A type that only a declaration gives holds for this node alone.
                if None not in kinds and not reads_attributes(node.key):
                    known[form] = kinds
        for value, kind in zip(node.outputs, kinds, strict=True):
            if value != ABSENT and types[value] is None:
                types[value] = kind or declared.get(value)
    # Only the last one, which is that of ABSENT, has no type.
    is_settled = types.index(None) == len(view.values)
    _settle(view, types)
    return Inferred(types, examples if is_settled else view.nodes)


def same_types(view: View, was: Sequence[int], types: Types) -> Types:
    """Return the type of every value as another view has them; those of weights are read.

    Args:
        view: the view.
        was: value -> the value of the other view that has its type, but for weights.
        types: types by value index of the other view, all of them known.
    """
    kinds = [*map(types.__getitem__, was), None]
    for value, tensor in stored_tensors(view.scopes[0]):
        kinds[value] = tensor_type(tensor.data_type)
    return kinds


def bind(signature: Signature, inputs: Sequence[str | None]) -> dict[str, str]:
    """Return type parameter -> type, from the types of a node's inputs (None if absent or unknown)."""
    bound: dict[str, str] = {}
    for position, kind in enumerate(inputs):
        port = signature.input(position)
        if port is not None and kind is not None and port.type in signature.params:
            bound.setdefault(signature.param(port, position), kind)
    return bound


def bind_node(node: Node, types: Types) -> dict[str, str]:
    """Return type parameter -> type, from the types of a node's inputs and outputs."""
    signature = node.signature
    assert signature is not None
    bound = bind(signature, [types[value] for value in node.inputs])
    for position, value in enumerate(node.outputs):
        port = signature.output(position)
        kind = types[value]
        if port is not None and kind is not None and port.type in signature.params:
            bound.setdefault(signature.param(port, position), kind)
    return bound


def declared_type(proto: TypeProto) -> str | None:
    """Return the schema string of a declared type; None if it is incomplete, or of a kind without
    convertible floats.
    """
    prefix = ""
    suffix = ""
    kind = proto.WhichOneof("value")
    while kind in ("sequence_type", "optional_type"):
        prefix = prefix + ("seq(" if kind == "sequence_type" else "optional(")
        suffix = suffix + ")"
        proto = (
            proto.sequence_type.elem_type
            if kind == "sequence_type"
            else proto.optional_type.elem_type
        )
        kind = proto.WhichOneof("value")
    if kind == "tensor_type" and proto.tensor_type.elem_type:
        return prefix + tensor_type(proto.tensor_type.elem_type) + suffix
    return None


def type_proto(kind: str) -> TypeProto | None:
    """Return the type that a schema writes as ``kind``, of any rank; None if :func:`declared_type` never returns it."""
    proto = result = TypeProto()
    while (match := _KIND.fullmatch(kind)) is not None:
        word, kind = match.groups()
        if word == "tensor":
            proto.tensor_type.elem_type = ELEM_NUMBERS.get(kind, 0)
            return result if kind in ELEM_NUMBERS else None
        proto = (
            proto.sequence_type.elem_type
            if word == "seq"
            else proto.optional_type.elem_type
        )
    return None


_KIND: Final = re.compile(r"(seq|optional|tensor)\((.*)\)")


def _seed(scope: Scope, types: list[str | None]) -> None:
    for value, tensor in stored_tensors(scope):
        types[value] = tensor_type(tensor.data_type)
    for sparse in scope.proto.sparse_initializer:
        types[scope.names[sparse.values.name]] = tensor_type(sparse.values.data_type)
    if scope.index == 0:
        for entry in scope.proto.input:
            if types[scope.names[entry.name]] is None:
                types[scope.names[entry.name]] = declared_type(entry.type)


def _declared(view: View) -> dict[int, str]:
    """Return value -> its declared type."""
    declared: dict[int, str] = {}
    for scope in view.scopes:
        for entry in (
            *scope.proto.value_info,
            *scope.proto.input,
            *scope.proto.output,
        ):
            value = scope.names.get(entry.name)
            kind = declared_type(entry.type)
            if value is not None and kind is not None:
                declared[value] = kind
    return declared


def _enter(
    view: View,
    index: int,
    entered: set[int],
    types: list[str | None],
    declared: Mapping[int, str],
) -> None:
    """Give the inputs of a body, and of the bodies around it, the types of their owner's inputs."""
    chain = []
    while index not in entered:
        chain.append(index)
        entered.add(index)
        index = view.scopes[index].parent
    # Outer bodies first, because inner ones may get their values.
    for scope in (view.scopes[entering] for entering in reversed(chain)):
        owner = view.nodes[scope.owner]
        entering = {} if scope.opaque else entering_values(owner, scope)
        sources = {inner: owner.input(source) for source, inner in entering.items()}
        for value in scope.inputs:
            kind = types[sources.get(value, ABSENT)]
            if owner.key == "SequenceMap" and kind is not None:
                kind = inner_type(kind)
            if types[value] is None:
                types[value] = kind or declared.get(value)


def _control_flow(
    view: View, node: Node, types: Sequence[str | None]
) -> Sequence[str | None]:
    """Return the types of the outputs of If, Loop, Scan and SequenceMap from those of their bodies' outputs."""
    result: list[str | None] = [None] * len(node.outputs)
    for _, body in node.bodies:
        for target, value in leaving_values(node, view.scopes[body]).items():
            if target == ABSENT or target >= len(result) or types[value] is None:
                continue
            result[target] = (
                f"seq({types[value]})" if node.key == "SequenceMap" else types[value]
            )
    return result


def _settle(view: View, types: list[str | None]) -> None:
    """Let types that are still unknown follow from the other ports of the nodes around them, until nothing changes.

    Near linear: each value gets a type once, and only then are the nodes around it looked at again.
    """
    nearby = set[int]()
    for one in view.values:
        if types[one.index] is None:
            nearby.update(node.index for node in view.around(one.index))
    # A dictionary is a queue here in which each node stands once; sorted, it makes results reproducible.
    waiting = dict.fromkeys(sorted(nearby))
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        for value, kind in _implied(view, view.nodes[node], types):
            if value != ABSENT and types[value] is None and kind is not None:
                types[value] = kind
                waiting |= dict.fromkeys(node.index for node in view.around(value))


def _implied(
    view: View, node: Node, types: Sequence[str | None]
) -> Iterable[tuple[int, str | None]]:
    """Return values that a node reads, writes or passes into bodies, with the types that its other values imply."""
    if node.signature is None:
        return ()
    if node.key in op_facts().control_flow:
        return _passed(view, node, types)
    return _shared(node, node.signature, types)


def _shared(
    node: Node, signature: Signature, types: Sequence[str | None]
) -> Iterator[tuple[int, str | None]]:
    """Infer types from the node's schema: ports with the same type parameter have the same type."""
    inputs = [types[value] for value in node.inputs]
    bound = bind_node(node, types)
    for position, value in enumerate(node.inputs):
        port = signature.input(position)
        if port is not None and value != ABSENT and inputs[position] is None:
            allowed = signature.params.get(port.type)
            kind = (
                port.type
                if allowed is None
                else bound.get(signature.param(port, position)) or _only(allowed)
            )
            inputs[position] = kind
            yield value, kind
    yield from zip(
        node.outputs,
        output_types(node.proto, node.key, signature, inputs),
        strict=True,
    )


def _passed(
    view: View, node: Node, types: Sequence[str | None]
) -> Iterator[tuple[int, str | None]]:
    """Infer types from the values that control flow passes into bodies, through them and out of them."""
    # The bodies of SequenceMap get and return elements, not the sequences.
    if node.key == "SequenceMap":
        yield from zip(node.outputs, _control_flow(view, node, types), strict=True)
        return
    for source, result in transfers(view, node):
        if ABSENT not in (source, result):
            kind = types[source] or types[result]
            yield from ((source, kind), (result, kind))


def output_types(
    proto: NodeProto,
    key: str,
    signature: Signature | None,
    inputs: Sequence[str | None],
) -> Sequence[str | None]:
    """Return the types of a node's outputs; None if neither the schema nor a rule determines one.

    Args:
        proto: the node.
        key: its op type, see :func:`onnxamp._facts.ops.op_key`.
        signature: its schema; None if it has none.
        inputs: the types of its inputs.
    """
    if signature is None:
        return [None] * len(proto.output)
    bound = bind(signature, inputs)
    first = _first_output(proto, key, signature, bound, inputs)
    result: list[str | None] = []
    for position in range(len(proto.output)):
        port = signature.output(position)
        if position == 0 and first is not None:
            result.append(first)
        elif port is None or port.type not in signature.params:
            result.append(None if port is None else port.type)
        else:
            kind = bound.get(signature.param(port, position))
            kind = kind or _only(signature.params[port.type])
            result.append(kind or _by_attribute(proto, key, port.type))
    return result


def reads_attributes(key: str) -> bool:
    """Return whether :func:`output_types` of an op depends on its attributes."""
    facts = op_facts()
    is_typed = key in facts.dtype_attribute or key in facts.output_parameter
    return is_typed or key in ("Constant", "Optional")


def _by_attribute(proto: NodeProto, key: str, parameter: str) -> str | None:
    """Return the type of an output whose parameter no input binds, such as LayerNormalization's Mean."""
    rule = op_facts().output_parameter.get(key)
    if rule is None or rule.parameter != parameter:
        return None
    number = attribute(proto, rule.attribute)
    return f"tensor({rule.default})" if number is None else tensor_type(int(number))


def _only(allowed: frozenset[str]) -> str | None:
    return next(iter(allowed)) if len(allowed) == 1 else None


def _first_output(
    proto: NodeProto,
    key: str,
    signature: Signature,
    bound: Mapping[str, str],
    inputs: Sequence[str | None],
) -> str | None:
    """Return the type of output 0 if an attribute, a Constant's value or a container determines it."""
    if key == "Constant":
        return _constant_type(proto)
    rule = op_facts().dtype_attribute.get(key)
    if rule is not None:
        value = attribute(proto, rule.attribute)
        if isinstance(value, TensorProto):
            return tensor_type(value.data_type)
        # Cast before opset 6 has the name of the type.
        if isinstance(value, bytes):
            numbers = dict(TensorProto.DataType.items())
            return tensor_type(numbers.get(value.decode(errors="replace"), 0))
        number = int(value or 0)
        # The zero point of QuantizeLinear decides before the default.
        shared = bound.get(signature.outputs[0].type)
        kind = (
            tensor_type(number) if number else shared or _default(rule.default, inputs)
        )
        return f"seq({kind})" if key == "SequenceEmpty" and kind else kind
    source = inputs[1] if key == "CastLike" else inputs[0] if inputs else None
    if key == "Optional" and source is None:
        declared = attribute(proto, "type")
        source = declared_type(declared) if declared is not None else None
    unwrap = _CONTAINERS.get(key)
    return None if source is None or unwrap is None else unwrap(source)


def _default(default: str | None, inputs: Sequence[str | None]) -> str | None:
    """Return the type that an absent attribute stands for: that of an input, or a fixed one."""
    if default in ("input", "scale"):
        position = 0 if default == "input" else 1
        return inputs[position] if position < len(inputs) else None
    return None if default is None else f"tensor({default})"


def inner_type(text: str) -> str:
    """Return the element type of a sequence or optional type; other types are returned unchanged."""
    if not text.startswith(("seq(", "optional(")):
        return text
    return text[text.index("(") + 1 : -1]


_CONTAINERS: Mapping[str, Callable[[str], str]] = {
    "CastLike": str,
    "ConcatFromSequence": inner_type,
    "Optional": "optional({})".format,
    "OptionalGetElement": lambda text: (
        inner_type(text) if text.startswith("optional(") else text
    ),
    "SequenceAt": inner_type,
    "SequenceConstruct": "seq({})".format,
    "SplitToSequence": "seq({})".format,
}
"""Op -> type of its output from that of its first input (second for CastLike)."""

_CONSTANT_TYPES = {
    "value_float": "tensor(float)",
    "value_floats": "tensor(float)",
    "value_int": "tensor(int64)",
    "value_ints": "tensor(int64)",
    "value_string": "tensor(string)",
    "value_strings": "tensor(string)",
}


def _constant_type(proto: NodeProto) -> str | None:
    """Return the type of a Constant's output; None if no attribute determines it."""
    for item in proto.attribute:
        if item.name == "value" and item.type in (
            AttributeProto.TENSOR,
            AttributeProto.UNDEFINED,
        ):
            return tensor_type(item.t.data_type)
        if item.name == "sparse_value":
            return tensor_type(item.sparse_tensor.values.data_type)
        if item.name in _CONSTANT_TYPES:
            return _CONSTANT_TYPES[item.name]
    return None


PRECISIONS: Final = (*FORMATS, "float32", "other")
"""Precisions of a node; "other" has no floats, or only float64 and float8."""

_TYPES: Final = {
    **{low.name: low.tensor for low in FORMATS.values()},
    "float32": FLOAT,
}


def node_precision(node: Node, types: Sequence[str | None]) -> str:
    """Return the lowest precision among a node's inputs and outputs, sequences and optionals included: see PRECISIONS.

    Args:
        types: type by value index.
    """
    own = {types[value] for value in (*node.inputs, *node.outputs)}
    for name, tensor in _TYPES.items():
        if any(kind is not None and tensor in kind for kind in own):
            return name
    return "other"


def operator_counts(
    view: View, types: Sequence[str | None]
) -> Counter[tuple[str, str]]:
    """Count the nodes by (op type, precision), those of bodies included.

    Args:
        types: type by value index.

    Complexity: linear in nodes.
    """
    return Counter((node.key, node_precision(node, types)) for node in view.nodes)


def lowest_precision(types: Iterable[str | None]) -> str:
    """Return the lowest float type among tensors: "bfloat16", "float16" or "float32"."""
    known = set(types)
    return next((name for name in LOWEST_FIRST if _TYPES[name] in known), "float32")
