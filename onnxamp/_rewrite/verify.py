"""Verification of a result before it is written: types agree with schemas, onnx's inference and declarations, and the
signature is unchanged.

A fault that the original model does not have is a bug in onnxamp, and the message says so.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Final

import onnx.defs
import onnx.shape_inference
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxamp._base.errors import InternalError, ModelError
from onnxamp._facts.dtypes import readable_types, retyped
from onnxamp._facts.kernels import is_consistent
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.signature import Port, Signature
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind, declared_type, type_proto
from onnxamp._graph.view import ABSENT, Node, Origin, body_sources
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._rewrite.apply import Edits

Types = tuple[str | None, ...]
"""Types of the inputs or of the outputs of a node; None if absent or unknown."""


@dataclass(frozen=True, slots=True)
class Typing:
    """The types of a node, and all that they depend on. Large models repeat few.

    ``example`` is any node of the op with these types: no attribute except ``attribute`` matters.
    """

    signature: Signature
    inputs: Types
    outputs: Types
    attribute: object
    example: NodeProto = field(compare=False)


def typing_of(node: Node, inputs: Types, outputs: Types) -> Typing | None:
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
        found = declared_type(inferred[f"out{port}"]) if is_inferred else None
        if None not in (kind, found) and kind != found:
            return f"outputs {kind} by its schema, but onnx infers {found}"
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


def _nodes_around(
    original: Graph,
    edits: Edits,
    result: Graph,
    faults: Sequence["Conflict"],
    suspected: AbstractSet[str],
) -> tuple[str, ...]:
    """Return the outputs of the original's nodes around faults.

    These are the nodes at fault, all producers and consumers of their values, and those of the values at fault. Nodes
    that the edits added, or that were suspected before, are replaced by their neighbors.

    Args:
        original: the model that was converted.
        edits: its changes.
        result: the converted model.
        faults: those of the result.
        suspected: outputs of nodes that stay in float32 because of earlier faults.

    Complexity: linear in nodes.
    """
    origins = dict[tuple[int, str], Node]()
    for node in original.nodes:
        for port, name in enumerate(node.proto.output):
            made = edits.outputs.get((node.index, port), name)
            origins[node.scope, made] = node
    seen = {fault.node for fault in faults} | {fault.branches for fault in faults}
    seen -= {ABSENT}
    for index in sorted(seen):
        seen.update(neighbors(result, result.nodes[index]))
    for fault in faults:
        for value in {fault.output, fault.value} - {ABSENT}:
            seen.update(one.index for one in result.around(value))
    found = set[int]()
    stack = list(seen)
    while stack:
        node = result.nodes[stack.pop()]
        outputs = ((node.scope, name) for name in node.proto.output if name)
        known = (origins[key] for key in outputs if key in origins)
        new = {one.index for one in known if suspected.isdisjoint(one.proto.output)}
        found |= new
        for index in () if new else neighbors(result, node):
            if index not in seen:
                seen.add(index)
                stack.append(index)
    return tuple(original.nodes[index].first_output for index in sorted(found))


def neighbors(graph: Graph, node: Node) -> Iterator[int]:
    """Yield the nodes around the values that a node reads and writes, and those that its bodies return."""
    outputs = (graph.scopes[body].outputs for _, body in node.bodies)
    returned = chain.from_iterable(outputs)
    for value in {*node.inputs, *node.outputs, *returned} - {ABSENT}:
        yield from (other.index for other in graph.around(value))


def verify(
    original: Graph, edits: Edits, result: ModelProto, options: Options
) -> None:
    """Check that a converted model is well typed and keeps its signature. Complexity: linear in nodes.

    Raises:
        InternalError: it is not, or does not; the error names the nodes of the original around the fault.
        ModelError: it is not, because the original is not either.
    """
    graph = Graph.of(result)
    # The faults of the original are asked for only where there are some, as for hardly any model.
    faults = list(all_conflicts(graph))
    known = {fault.where for fault in all_conflicts(original)} if faults else set()
    new = [fault for fault in faults if fault.where not in known]
    # Weights may also be listed as inputs (always, before IR version 4); such declarations follow the weight.
    inputs = (
        original.values[original.scopes[0].names[entry.name]]
        for entry in original.model.graph.input
    )
    weights = {value.name for value in inputs if value.origin is Origin.INITIALIZER}
    new += _changed(original, graph, "input", options, weights)
    new += _changed(original, graph, "output", options, set())
    if new and (fault := next(all_conflicts(original), None)):
        raise ModelError(
            f"The model contradicts itself, so it cannot be converted: {fault.where} {fault.text}."
        )
    if new:
        first = f"{new[0].where} {new[0].text}"
        text = f"The converted model would be wrong: {first}. This is a bug: please report the model."
        suspected = frozenset(options.unsound)
        raise InternalError(
            text, _nodes_around(original, edits, graph, new, suspected)
        )


def all_conflicts(graph: Graph) -> Iterator["Conflict"]:
    """Yield all type faults of a model. Complexity: linear in nodes."""
    yield from type_conflicts(graph)
    yield from _declarations(graph)


def _changed(
    original: Graph, graph: Graph, kind: str, options: Options, free: set[str]
) -> Iterator["Conflict"]:
    """Yield inputs or outputs of the result that differ from those of the original."""
    before, after = (getattr(one.model.graph, kind) for one in (original, graph))
    if [entry.name for entry in before] != [entry.name for entry in after]:
        yield Conflict(f"the graph's {kind}s", "changed their names or order")
        return
    for entry, new in zip(before, after, strict=True):
        name = entry.name
        allowed = {declared_type(entry.type)}
        was = declared_type(entry.type)
        now = declared_type(new.type)
        if was is not None and (name in free or not options.keeps_io(name)):
            allowed.add(retyped(was, options.low))
        if now not in allowed:
            value = graph.scopes[0].names.get(name, ABSENT)
            text = f"changed from {was} to {now}"
            yield Conflict(f"{kind} {name!r}", text, value=value)


@dataclass(frozen=True, slots=True)
class Conflict:
    """A type fault at one place.

    Attributes:
        where: the place in words, the same in a model and in its result.
        text: the fault.
        node: the node whose types contradict its schema, or what onnx infers.
        branches: the If whose branches differ.
        output: the value of a graph's output that contradicts its declaration.
        value: the value that contradicts another declaration. ABSENT, as the others, where it is another conflict.
    """

    where: str
    text: str
    node: int = ABSENT
    branches: int = ABSENT
    output: int = ABSENT
    value: int = ABSENT


def type_conflicts(graph: Graph) -> Iterator[Conflict]:
    """Yield type faults: contradictions with schemas, onnx's inference, declared outputs or each other. Complexity:
    linear in nodes.
    """
    facts = op_facts()
    passed = set[tuple[object, ...]]()
    varying = facts.dtype_attribute.keys() | facts.output_parameter.keys()
    types = graph.types
    for node in graph.nodes:
        if node.signature is None or graph.scopes[node.scope].opaque:
            continue
        inputs = tuple([types[value] for value in node.inputs])
        outputs = tuple([types[value] for value in node.outputs])
        form = node.signature, inputs, outputs
        if form not in passed:
            text = _node_fault(node, inputs, outputs)
            if text:
                yield Conflict(
                    f"node {node.label!r} ({node.key})", text, node=node.index
                )
            elif node.key not in varying:
                passed.add(form)
        if node.key in facts.control_flow:
            yield from _bodies(graph, node)
    yield from _outputs(graph, 0, "")


def _node_fault(node: Node, inputs: Types, outputs: Types) -> str:
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
    for position, found in enumerate(inputs):
        port = signature.input(position)
        if found is None:
            continue
        if port is None:
            return f"has {len(inputs)} inputs, more than its schema allows"
        if port.type in signature.params and found not in signature.params[port.type]:
            opset = f"its schema of opset {signature.since}"
            return f"reads {readable_types(found)} as {port.name!r}, which {opset} does not allow"
    return "its inputs contradict its schema"


def disagreement(signature: Signature, inputs: Sequence[str | None]) -> str:
    """Return the first input whose type the other inputs exclude, in words; "" if they agree."""
    bound = bind(signature, inputs)
    for position, found in enumerate(inputs):
        port = signature.input(position)
        if found is None or port is None:
            continue
        wanted = wanted_type(signature, port, position, bound)
        if wanted != found:
            return f"reads {readable_types(found)} as {port.name!r}, but its other inputs need {readable_types(wanted)}"
    return ""


def wanted_type(
    signature: Signature, port: Port, position: int, bound: Mapping[str, str]
) -> str | None:
    """Return the type that a port must have; None if nothing binds it."""
    if port.type not in signature.params:
        return port.type
    return bound.get(signature.param(port, position))


@lru_cache(maxsize=1 << 12)
def _is_consistent(signature: Signature, inputs: Types) -> bool:
    """Return whether the schema allows the types. Large models have few combinations."""
    return is_consistent(signature, bind(signature, inputs), inputs)


def _bodies(graph: Graph, node: Node) -> Iterator[Conflict]:
    """Yield conflicts of body inputs and outputs with their declarations, and of branches with each other."""
    for name, body in node.bodies:
        scope = graph.scopes[body]
        suffix = f" of {name} of {node.label!r}"
        yield from _outputs(graph, body, suffix)
        if node.key == "SequenceMap":
            continue
        for entry, source in zip(
            scope.proto.input, body_sources(node, len(scope.inputs)), strict=True
        ):
            outer = node.input(source) if source >= 0 else ABSENT
            if outer != ABSENT and (text := _mismatch(entry, graph.types[outer])):
                yield Conflict(f"input {entry.name!r}{suffix}", text, value=outer)
    if node.key == "If":
        branches = list[list[str | None]]()
        for _, body in node.bodies:
            branches.append(graph.types_of(graph.scopes[body].outputs))
        if any(None not in (a, b) and a != b for a, b in zip(*branches, strict=False)):
            yield Conflict(
                f"the branches of {node.label!r}",
                "return different types",
                branches=node.index,
            )


def _declarations(graph: Graph) -> Iterator[Conflict]:
    """Yield declarations that contradict the types of values, also those of outer values in bodies."""
    for scope in graph.scopes:
        for entry in () if scope.opaque else scope.proto.value_info:
            value = graph.visible(entry.name, scope.index)
            if value != ABSENT and (text := _mismatch(entry, graph.types[value])):
                owner = graph.nodes[scope.owner].label if scope.index else ""
                where = f"the value {entry.name!r}" + (
                    f" in a body of {owner!r}" if owner else ""
                )
                yield Conflict(where, text, value=value)


def _outputs(graph: Graph, scope: int, suffix: str) -> Iterator[Conflict]:
    """Yield conflicts of a graph's outputs with their declarations."""
    for value, entry in zip(
        graph.scopes[scope].outputs, graph.scopes[scope].proto.output, strict=True
    ):
        if text := _mismatch(entry, graph.types[value]):
            yield Conflict(f"output {entry.name!r}{suffix}", text, output=value)


def _mismatch(entry: ValueInfoProto, actual: str | None) -> str:
    declared = declared_type(entry.type)
    if declared is None or actual is None or declared == actual:
        return ""
    return f"is declared {declared} but is {actual}"
