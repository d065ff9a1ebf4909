"""Type faults of single nodes: types that contradict a node's schema, or what onnx infers for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Final

import onnx.defs
import onnx.shape_inference
from onnx import NodeProto, TensorProto, TypeProto, helper

from onnxamp._base.records import record
from onnxamp._facts.dtypes import readable_types
from onnxamp._facts.kernels import is_consistent
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.signature import Port, Signature
from onnxamp._graph.types import PortTypes, bind, declared_type, type_proto
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import copied


@record
class Typing:
    """The types of a node, and all that they depend on. Large models repeat few.

    ``example`` is any node of the op with these types: no attribute except ``attribute`` matters.
    """

    signature: Signature
    inputs: PortTypes
    outputs: PortTypes
    attribute: object
    example: NodeProto = field(compare=False)


def typing_of(node: Node, inputs: PortTypes, outputs: PortTypes) -> Typing | None:
    """Return the types of a node, to check by :func:`inference_fault`; None where onnx infers nothing.

    That is so for ops that it does not know, and for those with bodies, whose types follow from their outputs.
    """
    facts = op_facts()
    key = node.key
    if node.signature is None or node.signature.attributes is None:
        return None
    if (
        key in facts.control_flow
        or key in facts.kernel_free
        or key in facts.uninferable
    ):
        return None
    # An omitted input has no type. An input of unknown type leaves nothing to infer.
    if None in inputs and any(
        node.inputs[port] != ABSENT for port, kind in enumerate(inputs) if kind is None
    ):
        return None
    rule = facts.dtype_attribute.get(key) or facts.output_parameter.get(key)
    given = attribute(node.proto, rule.attribute) if rule is not None else None
    kind = given.data_type if isinstance(given, TensorProto) else given
    return Typing(node.signature, inputs, outputs, kind, node.proto)


@lru_cache(maxsize=1 << 12)
def inference_fault(typing: Typing) -> str:
    """Return how the types that onnx infers for a node differ from its own, in words; "" if they agree."""
    given = {
        f"in{port}": type_proto(kind)
        for port, kind in enumerate(typing.inputs)
        if kind is not None
    }
    types = {name: kind for name, kind in given.items() if kind is not None}
    # A type that no TypeProto expresses cannot be asked about.
    if len(types) < len(given):
        return ""
    inferred = _inferred(typing, types)
    if isinstance(inferred, str):
        return inferred
    for port, (kind, name) in enumerate(
        zip(typing.outputs, typing.example.output, strict=True)
    ):
        is_inferred = name and f"out{port}" in inferred
        other = declared_type(inferred[f"out{port}"]) if is_inferred else None
        if None not in (kind, other) and kind != other:
            return f"outputs {kind} by its schema, but onnx infers {other}"
    return ""


def _inferred(
    typing: Typing, types: dict[str, TypeProto]
) -> dict[str, TypeProto] | str:
    """Return output -> its type, where onnx infers one; or onnx's error if it rejects the types."""
    proto = copied(typing.example)
    signature = typing.signature
    proto.input[:] = [
        "" if kind is None else f"in{port}" for port, kind in enumerate(typing.inputs)
    ]
    proto.output[:] = [
        name and f"out{port}" for port, name in enumerate(typing.example.output)
    ]
    schema = onnx.defs.get_schema(signature.op_type, signature.since, signature.domain)
    opsets = [helper.make_opsetid(signature.domain, signature.opset)]
    try:
        return onnx.shape_inference.infer_node_outputs(
            schema, proto, types, opset_imports=opsets
        )
    except Exception as error:  # noqa: BLE001 - the C++ code raises unrelated types, and shapes are optional
        text = str(error)
        if not _WRONG_TYPE.search(text):
            return {}
        return f"is refused by onnx: {text.strip().splitlines()[0]}"


_WRONG_TYPE: Final = re.compile(
    r"\[TypeInferenceError\]|has (inconsistent|unsupported) type"
)
"""Finds onnx's complaints about types, at a node or in the body of its function, without those about shapes."""


def node_fault(node: Node, inputs: PortTypes, outputs: PortTypes) -> str:
    """Return the type fault of a node with a schema, in words."""
    assert node.signature is not None
    if not _is_consistent(node.signature, inputs):
        return _input_fault(node.signature, inputs)
    typing = typing_of(node, inputs, outputs)
    return inference_fault(typing) if typing is not None else ""


def _input_fault(signature: Signature, inputs: Sequence[str | None]) -> str:
    """Return the first input that contradicts the schema, in words. At least one does."""
    if text := disagreement(signature, inputs):
        return text
    for position, kind in enumerate(inputs):
        port = signature.input(position)
        if kind is None:
            continue
        if port is None:
            return f"has {len(inputs)} inputs, more than its schema allows"
        if port.type in signature.params and kind not in signature.params[port.type]:
            opset = f"its schema of opset {signature.since}"
            return f"reads {readable_types(kind)} as {port.name!r}, which {opset} does not allow"
    return "its inputs contradict its schema"


def disagreement(signature: Signature, inputs: Sequence[str | None]) -> str:
    """Return the first input whose type the other inputs exclude, in words; "" if they agree."""
    bound = bind(signature, inputs)
    for position, kind in enumerate(inputs):
        port = signature.input(position)
        if kind is None or port is None:
            continue
        wanted = wanted_type(signature, port, position, bound)
        if wanted != kind:
            return f"reads {readable_types(kind)} as {port.name!r}, but its other inputs need {readable_types(wanted)}"
    return ""


def wanted_type(
    signature: Signature, port: Port, position: int, bound: Mapping[str, str]
) -> str | None:
    """Return the type that a port must have; None if nothing binds it."""
    if port.type not in signature.params:
        return port.type
    return bound.get(signature.param(port, position))


@lru_cache(maxsize=1 << 12)
def _is_consistent(signature: Signature, inputs: PortTypes) -> bool:
    """Return whether the schema allows the types. Large models have few combinations."""
    return is_consistent(signature, bind(signature, inputs), inputs)
