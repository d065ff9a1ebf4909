"""What onnx itself infers of a node's types, by the functions of its schemas, which ONNX Runtime calls as well.

A schema states which types may stand together, its function which ones come out, and they need not agree:
RMSNormalization has the type of its scale by its schema, and that of its input by its function.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import onnx.defs
import onnx.shape_inference
from onnx import NodeProto, TensorProto, TypeProto, helper

from onnxamp._graph.types import declared_type, type_proto
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.copying import copied
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._ops.signature import Signature

Types = tuple[str | None, ...]
"""Types of the inputs or of the outputs of a node; None if absent or unknown."""


@dataclass(frozen=True, slots=True)
class Typing:
    """The types of a node, and all that they depend on. Large models repeat few.

    ``example`` is any node of the op with these types: besides ``attribute``, its attributes have no say.
    """

    signature: Signature
    inputs: Types
    outputs: Types
    attribute: object
    example: NodeProto = field(compare=False)


def typing_of(node: Node, inputs: Types, outputs: Types) -> Typing | None:
    """The types of a node, to be held against :func:`inference_fault`; None where onnx has nothing to say.

    That is so for ops that it does not know, and for those with bodies, whose types follow from their outputs.
    """
    facts, key = op_facts(), node.key
    if node.signature is None or node.signature.attributes is None:
        return None
    if key in facts.control_flow or key in facts.kernel_free or key in facts.uninferable:
        return None
    if None in inputs and any(node.inputs[port] != ABSENT for port, kind in enumerate(inputs) if kind is None):
        return None
    rule = facts.dtype_attribute.get(key) or facts.output_parameter.get(key)
    given = attribute(node.proto, rule.attribute) if rule is not None else None
    kind = given.data_type if isinstance(given, TensorProto) else given
    return Typing(node.signature, inputs, outputs, kind, node.proto)


@lru_cache(maxsize=1 << 12)
def inference_fault(typing: Typing) -> str:
    """What onnx infers in place of a node's types, in words; "" if it agrees."""
    given = {f"in{port}": type_proto(kind) for port, kind in enumerate(typing.inputs) if kind is not None}
    types = {name: kind for name, kind in given.items() if kind is not None}
    if len(types) < len(given):
        return ""
    inferred = _inferred(typing, types)
    if isinstance(inferred, str):
        return inferred
    for port, (kind, name) in enumerate(zip(typing.outputs, typing.example.output, strict=True)):
        found = declared_type(inferred[f"out{port}"]) if name and f"out{port}" in inferred else None
        if None not in (kind, found) and kind != found:
            return f"gives {kind} by its schema, but {found} by what onnx infers"
    return ""


def _inferred(typing: Typing, types: dict[str, TypeProto]) -> dict[str, TypeProto] | str:
    """Output -> its type, as far as onnx infers any; what it says where it refuses the types."""
    proto, signature = copied(typing.example), typing.signature
    proto.input[:] = ["" if kind is None else f"in{port}" for port, kind in enumerate(typing.inputs)]
    proto.output[:] = [name and f"out{port}" for port, name in enumerate(typing.example.output)]
    schema = onnx.defs.get_schema(signature.op_type, signature.since, signature.domain)
    opsets = [helper.make_opsetid(signature.domain, signature.opset)]
    try:
        return onnx.shape_inference.infer_node_outputs(schema, proto, types, opset_imports=opsets)
    except Exception as error:  # noqa: BLE001 - the C++ code raises unrelated types, and shapes are optional
        text = str(error)
        return f"is refused by onnx: {text.strip().splitlines()[0]}" if _WRONG_TYPE.search(text) else {}


_WRONG_TYPE: Final = re.compile(r"\[TypeInferenceError\]|has (inconsistent|unsupported) type")
"""What onnx says of types, at a node or in the body of its function; what it says of shapes does not count here."""
