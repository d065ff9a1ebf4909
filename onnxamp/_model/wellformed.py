"""Is a model well formed? Every model is checked when it comes in, before anything else looks at it.

onnx and ONNX Runtime are C++ that trusts its input in places: a node without a required attribute, or a tensor with
fewer bytes than its shape needs, can crash the process. ONNX Runtime would not load any model that is refused here.
Models that it loads pass, even if onnx's own checker complains: unknown ops, negative sizes for "dynamic". Faults that
need a repair were repaired by :mod:`onnxamp._model.repair` before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
)

from onnxamp._base.errors import ModelError, OpsetError
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._facts.signature import Signature, SignatureBook
from onnxamp._model.protos import PLAIN, default_domain, node_bodies, opset_imports
from onnxamp._model.wellformed_functions import check_functions
from onnxamp._model.wellformed_tensors import (
    check_entry,
    check_sparse,
    check_tensor,
    check_type,
    plain_form,
    utf8,
)

MAX_NESTING: Final = 32
"""Levels of nested graphs: protobuf reads 100 levels of messages, and each graph takes three."""

_NEWEST: Final = {
    "": onnx.defs.onnx_opset_version(),
    "ai.onnx.ml": onnx.defs.onnx_ml_opset_version(),
}
"""Domain -> newest opset that the installed onnx knows."""

_SHORT: Final = {
    "FLOAT": "f",
    "INT": "i",
    "STRING": "s",
    "TENSOR": "t",
    "GRAPH": "g",
    "TYPE_PROTO": "tp",
}
_FIELDS: Final[Mapping[int, str]] = {
    kind: _SHORT.get(name, name.lower())
    for name, kind in AttributeProto.AttributeType.items()
    if kind != AttributeProto.UNDEFINED
}
"""Attribute type -> the field that holds the value."""
_HELD: Final = frozenset({"t", "g", "sparse_tensor", "tp"})
"""Fields that must be set: a number or a text that is left out is 0 or empty."""
_VALUES: Final = frozenset(_FIELDS.values())


def check_wellformed(model: ModelProto) -> bool:
    """Refuse a malformed model.

    No external data are read, and sizes that the model claims are never allocated. Complexity: linear in nodes,
    attributes and names.

    Returns:
        Whether the model certainly needs no repair (:mod:`onnxamp._model.repair`): it has no bodies, and every name of
        its graph is defined once, and before it is read.

    Raises:
        ModelError: the message says what is wrong where. OpsetError: the installed onnx does not know an opset.
    """
    if not model.HasField("graph"):
        raise ModelError("The model has no graph.")
    for entry in model.graph.input:
        kind = entry.type.WhichOneof("value")
        is_untyped = kind == "tensor_type" and not entry.type.tensor_type.elem_type
        if kind is None or is_untyped:
            raise ModelError(f"The model's input {entry.name!r} has no type.")
    _check_versions(model)
    check_functions(model)
    own = _functions(model)
    main = _Checker(SignatureBook(opset_imports(model)), own, model.ir_version)
    main.graphs(model.graph)
    for function in model.functions:
        opsets = {
            default_domain(entry.domain): entry.version
            for entry in function.opset_import
        }
        checker = _Checker(
            SignatureBook({"": _NEWEST[""], **opsets}),
            own,
            model.ir_version,
            in_function=True,
        )
        checker.function(function)
    return main.is_tidy


def is_wellformed(body: GraphProto, model: ModelProto) -> bool:
    """Return whether :func:`check_wellformed` of the model would accept a body of its graph."""
    book = SignatureBook(opset_imports(model))
    try:
        _Checker(book, _functions(model), model.ir_version).graphs(body, 1)
    except ModelError:
        return False
    return True


def _functions(model: ModelProto) -> frozenset[tuple[str, str]]:
    """Return domain and name of each function."""
    return frozenset(
        (default_domain(function.domain), function.name)
        for function in model.functions
    )


def _check_versions(model: ModelProto) -> None:
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"The model has IR version {model.ir_version}, but the installed onnx {onnx.__version__} knows versions up"
            f" to {onnx.IR_VERSION}: upgrade onnx."
        )
    if model.ir_version < 0:
        raise ModelError(
            f"The model has the IR version {model.ir_version}: it is damaged."
        )
    imports = [*model.opset_import]
    for function in model.functions:
        imports += function.opset_import
    for entry in imports:
        domain = default_domain(utf8(entry.domain, "the domain of an opset"))
        if domain in _NEWEST and entry.version > _NEWEST[domain]:
            raise OpsetError(
                f"The model needs {domain or 'ai.onnx'} opset {entry.version}, but the installed onnx"
                f" {onnx.__version__} knows opsets up to {_NEWEST[domain]}: upgrade onnx."
            )
        if not 0 <= entry.version < 2**31:
            raise ModelError(
                f"The model imports {domain or 'ai.onnx'!r} at version {entry.version}: it is damaged."
            )


@dataclass(slots=True)
class _Checker:
    """Checks graphs under one set of opset imports. ``own`` are the model's functions, which have no schema."""

    book: SignatureBook
    own: frozenset[tuple[str, str]]
    ir_version: int
    in_function: bool = False
    passed: set[tuple[Any, ...]] = field(default_factory=set)
    """Nodes that passed, without their names: a large model repeats few."""
    sound: set[tuple[int, ...] | None] = field(default_factory=set)
    """Forms of weights that passed: a large model repeats few."""
    is_tidy: bool = True
    """The result of :func:`check_wellformed`."""

    def graphs(
        self, graph: GraphProto, depth: int = 0, *, opaque: bool = False
    ) -> None:
        """Check a graph and those nested in it. An opaque graph belongs to an op without schema. Iterative."""
        stack = [(graph, depth, opaque)]
        while stack:
            graph, depth, opaque = stack.pop()
            if depth > MAX_NESTING:
                raise ModelError(
                    f"The model nests graphs more than {MAX_NESTING} deep."
                )
            utf8(graph.name, "the name of a graph")
            # Slices, because protobuf's own iterators are slow.
            tensors = graph.initializer[:]
            for tensor in tensors:
                form = plain_form(tensor)
                if form is None or form not in self.sound:
                    check_tensor(tensor)
                    self.sound.add(form)
            for sparse in graph.sparse_initializer:
                check_sparse(sparse)
            for entry in (*graph.input, *graph.output, *graph.value_info):
                check_entry(entry)
            stored = {tensor.name for tensor in tensors}
            # The names that nodes may read at this point. An omitted input has the empty name.
            readable = {"", *stored, *(entry.name for entry in graph.input)}
            count = len(readable)
            is_ordered = True
            nodes = graph.node[:]
            for node in nodes:
                inputs = node.input[:]
                outputs = node.output[:]
                is_ordered = is_ordered and readable.issuperset(inputs)
                readable.update(outputs)
                count += len(outputs)
                bodies = self.node(node, inputs, outputs, opaque=opaque)
                if bodies:
                    stack += [(body, depth + 1, within) for body, within in bodies]
            # Each name once, because a look at those of each node would take as long as all else here.
            if not (is_ordered and {str}.issuperset(map(type, readable))):
                for node in nodes:
                    _check_names(node)
            is_single = len(stored) == len(tensors) and len(readable) == count
            self.is_tidy = self.is_tidy and is_ordered and is_single and not stack

    def function(self, function: FunctionProto) -> None:
        """Check a model-local function."""
        for name in (*function.input, *function.output, *function.attribute):
            utf8(name, "a name of a function")
        label = function.name or "a function"
        call = NodeProto(op_type=label, attribute=function.attribute_proto)
        for body, opaque in self.node(call, (), (), opaque=True):
            self.graphs(body, 1, opaque=opaque)
        for node in function.node:
            for body, opaque in self.node(
                node, node.input[:], node.output[:], opaque=False
            ):
                self.graphs(body, 1, opaque=opaque)

    def node(
        self,
        node: NodeProto,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        opaque: bool,
    ) -> list[tuple[GraphProto, bool]]:
        """Check a node. Returns its subgraphs, which are still to be checked, each with whether it is opaque."""
        domain = node.domain
        op_type = node.op_type
        # Many nodes have no attributes, and a slice of none takes as long as one of some.
        attributes = node.attribute[:] if node.attribute else ()
        written = map(_plain_bytes, attributes)
        form = domain, op_type, opaque, len(inputs), len(outputs), *written
        # The names of a value are checked with all those of its graph, but nothing else reads the name of a node.
        if form in self.passed and "" not in inputs and type(node.name) is str:
            return []
        _check_names(node)
        if not op_type:
            raise ModelError(f"Node {_label(node)!r} has no op type.")
        for item in attributes:
            self._attribute(node, item)
        bodies = [body for _, body in node_bodies(node)]
        is_own = (default_domain(domain), op_type) in self.own
        signature = None if is_own else self.book.get(domain, op_type)
        within = opaque or op_key(node) not in op_facts().control_flow
        if signature is not None and not opaque:
            _check_node(node, signature)
            if not within:
                _check_bodies(node, bodies, signature)
        if None not in form:
            self.passed.add(form)
        return [(body, within) for body in bodies]

    def _attribute(self, node: NodeProto, item: AttributeProto) -> None:
        where = f"Attribute {utf8(item.name, f'an attribute of {_label(node)}')!r} of {_label(node)!r}"
        if utf8(item.ref_attr_name, "the name of an attribute"):
            if not self.in_function:
                raise ModelError(
                    f"{where} refers to an attribute of a function, but is not in a function."
                )
            return
        used = {field.name for field, _ in item.ListFields()} & _VALUES
        wanted = _FIELDS.get(item.type)
        if (
            item.type == AttributeProto.UNDEFINED
            and self.ir_version < 2
            and len(used) == 1
        ):
            return  # IR version 1 had no attribute types
        if wanted is None:
            raise ModelError(
                f"{where} is of type {item.type}, which the installed onnx {onnx.__version__} lacks."
            )
        if used - {wanted} or (wanted in _HELD and not used):
            actual = ", ".join(sorted(used)) or "nothing"
            raise ModelError(
                f"{where} should hold its value in {wanted!r}, but holds {actual}."
            )
        if item.type in PLAIN:
            return
        held = getattr(item, wanted)
        for value in held if wanted.endswith("s") else [held]:
            if isinstance(value, TensorProto):
                check_tensor(value, where)
            elif isinstance(value, SparseTensorProto):
                check_sparse(value)
            elif isinstance(value, TypeProto):
                check_type(value, where)


def _plain_bytes(item: AttributeProto) -> bytes | None:
    """Return the whole attribute; None if it may hold tensors or graphs."""
    return item.SerializeToString() if item.type in PLAIN else None


def _check_names(node: NodeProto) -> None:
    utf8(node.domain, "the domain of a node")
    utf8(node.op_type, "the op type of a node")
    for name in (node.name, *node.input, *node.output):
        utf8(name, f"a name at a {node.op_type} node")


def _check_node(node: NodeProto, signature: Signature) -> None:
    """Refuse a node that does not fit its schema: no runtime would load it."""
    for kind, number, least, most in (
        ("inputs", len(node.input), signature.min_inputs, signature.max_inputs),
        ("outputs", len(node.output), signature.min_outputs, signature.max_outputs),
    ):
        if not least <= number <= most:
            wanted = f"at least {least}" if number < least else f"at most {most}"
            raise ModelError(
                f"Node {_label(node)!r} ({node.op_type}) has {number} {kind}; its schema requires {wanted}."
            )
    for position, (name, port) in enumerate(
        zip(node.input, signature.inputs, strict=False)
    ):
        if not (name or port.optional or port.variadic):
            raise ModelError(
                f"Node {_label(node)!r} ({node.op_type}) lacks input {position}, {port.name!r}."
            )
    if signature.attributes is not None:
        _check_attributes(node, signature, signature.attributes)


def _check_attributes(
    node: NodeProto, signature: Signature, known: Mapping[str, int]
) -> None:
    what = f"Node {_label(node)!r} ({node.op_type})"
    names = {item.name for item in node.attribute}
    for item in node.attribute:
        is_private = item.name.startswith("__")  # which onnx allows
        if item.name not in known and not is_private:
            raise ModelError(
                f"{what} has an attribute {item.name!r}, which its schema lacks."
            )
        if item.type not in (
            known.get(item.name, item.type),
            AttributeProto.UNDEFINED,
        ):
            actual, wanted = (
                AttributeProto.AttributeType.Name(kind)
                for kind in (item.type, known[item.name])
            )
            raise ModelError(
                f"{what} has an attribute {item.name!r} of type {actual}; its schema requires {wanted}."
            )
    if len(names) < len(node.attribute):
        raise ModelError(f"{what} has two attributes of one name.")
    if signature.required - names:
        raise ModelError(
            f"{what} lacks the attribute {min(signature.required - names)!r}."
        )
    if signature.op_type == "Constant" and len(names & known.keys()) != 1:
        raise ModelError(
            f"{what} must have one value, but has {len(names & known.keys())}."
        )


def _check_bodies(
    node: NodeProto, bodies: Sequence[GraphProto], signature: Signature
) -> None:
    """Bodies have the inputs and outputs of their node; that of a Loop also returns whether to continue."""
    key = op_key(node)
    # The first input of Scan-8 holds the lengths of sequences.
    lengths = 1 if key == "Scan" and signature.since < 9 else 0
    takes = 0 if key == "If" else len(node.input) - lengths
    gives = len(node.output) + (key == "Loop")
    for body in bodies:
        if (len(body.input), len(body.output)) != (takes, gives):
            raise ModelError(
                f"A body of {_label(node)!r} ({node.op_type}) has {len(body.input)} inputs and {len(body.output)}"
                f" outputs, but must have {takes} and {gives}."
            )
        if key == "Scan" and not 0 < (attribute(node, "num_scan_inputs") or 0) <= len(
            body.input
        ):
            raise ModelError(
                f"Node {_label(node)!r} (Scan) cannot scan that many of its {len(body.input)} inputs."
            )


def _label(node: NodeProto) -> str:
    return node.name or next((name for name in node.output if name), node.op_type)
