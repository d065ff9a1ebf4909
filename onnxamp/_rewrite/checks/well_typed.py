"""A quick proof that a model is well typed, by one look at each node, without a graph of it.

The proof covers models without bodies whose types all follow from schemas and declarations: nearly all results. It says
nothing of other models, nor of those with a fault: :func:`onnxamp._rewrite.checks.verify.verify` then searches a graph.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto

from onnxamp._facts.dtypes import tensor_type
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._facts.signature import Signature, SignatureBook
from onnxamp._graph.types import declared_type, output_types, reads_attributes
from onnxamp._graph.view import Node
from onnxamp._model.protos import opset_imports
from onnxamp._rewrite.checks.node_faults import node_fault


def is_well_typed(model: ModelProto) -> bool:
    """Return whether names are defined once and before they are read, and types agree with schemas, onnx's inference
    and declarations; False also where a look at each node does not tell. Complexity: linear in nodes and names.
    """
    if model.functions or model.graph.sparse_initializer:
        return False
    types = _given(model.graph)
    entries = (*model.graph.value_info, *model.graph.output)
    declared = {entry.name: declared_type(entry.type) for entry in entries}
    if types is None or not _NodeTypes(model, types, declared).follow():
        return False
    return all(
        types.get(name) in (kind, None) or kind is None
        for name, kind in declared.items()
    ) and all(entry.name in types for entry in model.graph.output)


def _given(graph: GraphProto) -> dict[str, str | None] | None:
    """Return the types of initializers and inputs by name; None if a name has several, or none."""
    types: dict[str, str | None] = {}
    for tensor in graph.initializer:
        types[tensor.name] = tensor_type(tensor.data_type)
    if len(types) < len(graph.initializer):
        return None
    for entry in graph.input:
        kind = declared_type(entry.type)
        # Weights may be listed as inputs as well.
        if kind is None or types.setdefault(entry.name, kind) != kind:
            return None
    return types


class _Op(NamedTuple):
    """The facts that all nodes of an op share; ``reads_attributes`` says that attributes decide types."""

    key: str
    signature: Signature
    reads_attributes: bool


class _NodeTypes:
    """Follows the types of values from node to node.

    Attributes:
        types: type by name of the values so far.
        declared: declared type by name.
        known: the types of outputs by signature, number of outputs and types of inputs, without a fault: large models
            repeat few.
    """

    def __init__(
        self,
        model: ModelProto,
        types: dict[str, str | None],
        declared: Mapping[str, str | None],
    ) -> None:
        self.nodes = model.graph.node
        self.book = SignatureBook(opset_imports(model))
        self.types = types
        self.declared = declared
        self.ops = dict[tuple[str, str], _Op]()
        self.known = dict[tuple[object, ...], Sequence[str]]()

    def follow(self) -> bool:
        """Find the types of all outputs, and return whether there are no faults, and no unknown types."""
        types = self.types
        type_of = types.__getitem__
        types[""] = None  # the name of omitted inputs
        for node in self.nodes[:]:
            outputs = node.output[:]
            op = self.ops.get((node.domain, node.op_type)) or self.op(node)
            # Each name is defined once, and before it is read.
            is_repeated = len(outputs) > 1 and len(set(outputs)) < len(outputs)
            if op is None or is_repeated or not types.keys().isdisjoint(outputs):
                return False
            try:
                read = (*map(type_of, node.input[:]),)
            except KeyError:
                return False
            form = op.signature, len(outputs), *read
            result = self.known.get(form)
            if result is None:
                result = self.made(node, op, read)
                if result is None:
                    return False
                if not op.reads_attributes:
                    self.known[form] = result
            types.update(zip(outputs, result, strict=True))
        return True

    def op(self, node: NodeProto) -> _Op | None:
        """Return the facts about the op of a node; None if it has bodies or no schema."""
        name = node.domain, node.op_type
        key = op_key(node)
        signature = self.book.get(*name)
        has_bodies = key in op_facts().control_flow or "::" in key
        if signature is None or has_bodies:
            return None
        op = self.ops[name] = _Op(key, signature, reads_attributes(key))
        return op

    def made(
        self, node: NodeProto, op: _Op, read: tuple[str | None, ...]
    ) -> Sequence[str] | None:
        """Return the types of a node's outputs; None if it has a fault, omits one, or one is unknown."""
        kinds = output_types(node, op.key, op.signature, read)
        types = list[str]()
        for name, kind in zip(node.output, kinds, strict=True):
            output_type = kind or self.declared.get(name)
            if not name or output_type is None:
                return None
            types.append(output_type)
        # Only whether inputs are omitted matters to the search for faults: any index but ABSENT stands for a value.
        values = tuple(-1 if not name else 0 for name in node.input)
        example = Node(0, 0, node, op.key, op.signature, values, (), ())
        return None if node_fault(example, read, tuple(types)) else types
