"""Verification of a result before it is written: types agree with schemas, onnx's inference and declarations, and the
signature is unchanged.

A fault that the original model does not have is a bug in onnxamp, and the message says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from onnx import ModelProto, ValueInfoProto

from onnxamp._dtypes import retyped
from onnxamp._errors import InternalError, ModelError
from onnxamp._graph.bodies import body_sources
from onnxamp._graph.graph import Graph
from onnxamp._graph.inference import Types, inference_fault, typing_of
from onnxamp._graph.types import bind, declared_type
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import Signature
from onnxamp._options.options import Options
from onnxamp._rewrite.blame import nodes_around
from onnxamp._rewrite.edits import Edits
from onnxamp._target.kernels import is_consistent


def verify(original: Graph, edits: Edits, result: ModelProto, options: Options) -> None:
    """Check that a converted model is well typed and keeps its signature. Complexity: linear in nodes.

    Raises:
        InternalError: it is not, or does not; the error names the nodes of the original around what is wrong.
        ModelError: it is not, because the original is not either.
    """
    graph = Graph.of(result)
    faults = list(_all_conflicts(graph))
    known = {fault.where for fault in _all_conflicts(original)} if faults else set()
    new = [fault for fault in faults if fault.where not in known]
    # Weights may also be listed as inputs (always, before IR version 4); such declarations follow the weight.
    inputs = (original.values[original.scopes[0].names[entry.name]] for entry in original.model.graph.input)
    weights = {value.name for value in inputs if value.origin is Origin.INITIALIZER}
    for kind, free in (("input", weights), ("output", set[str]())):
        before, after = (getattr(model.graph, kind) for model in (original.model, result))
        new += _changed(graph, kind, before, after, options, free)
    if new and (fault := next(_all_conflicts(original), None)):
        raise ModelError(f"The model contradicts itself, so it cannot be converted: {fault.where} {fault.text}.")
    if new:
        first = f"{new[0].where} {new[0].text}"
        text = f"The converted model would be wrong: {first}. This is a bug: please report the model."
        named = {fault.node for fault in new} | {fault.branches for fault in new}
        values = {fault.output for fault in new} | {fault.value for fault in new}
        suspected = frozenset(options.unsound)
        around = nodes_around(original, edits, graph, named - {ABSENT}, values - {ABSENT}, suspected)
        raise InternalError(text, around)


def _all_conflicts(graph: Graph) -> Iterator["Conflict"]:
    yield from type_conflicts(graph)
    yield from _declarations(graph)


def _changed(
    graph: Graph, kind: str, before: Sequence[ValueInfoProto], after: Sequence[ValueInfoProto], options: Options,
    free: set[str],
) -> Iterator["Conflict"]:  # fmt: skip
    """Inputs or outputs of the result that are not what those of the original were."""
    if [entry.name for entry in before] != [entry.name for entry in after]:
        yield Conflict(f"the graph's {kind}s", "changed their names or order")
        return
    for entry, new in zip(before, after, strict=True):
        was, now = declared_type(entry.type), declared_type(new.type)
        may_be_low = was is not None and (not options.keeps_io(entry.name) or entry.name in free)
        if was != now and not (may_be_low and now == retyped(str(was), options.low)):
            value = graph.scopes[0].names.get(entry.name, ABSENT)
            yield Conflict(f"{kind} {entry.name!r}", f"changed from {was} to {now}", value=value)


@dataclass(frozen=True, slots=True)
class Conflict:
    """What is wrong with types at one place.

    Attributes:
        where: the place in words, the same in a model and in what becomes of it.
        text: what is wrong there.
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
    """Where types contradict schemas, what onnx infers, declared outputs or each other. Complexity: linear in nodes."""
    types = [*graph.types, None]  # the last entry is that of ABSENT
    facts, passed = op_facts(), set[tuple[object, ...]]()
    varying = facts.dtype_attribute.keys() | facts.output_parameter.keys()
    for node in graph.nodes:
        if node.signature is None or graph.scopes[node.scope].opaque:
            continue
        inputs = tuple([types[value] for value in node.inputs])
        outputs = tuple([types[value] for value in node.outputs])
        form = node.signature, inputs, outputs
        if form not in passed:
            text = _node_fault(node, inputs, outputs)
            if text:
                yield Conflict(f"node {node.label!r} ({node.key})", text, node=node.index)
            elif node.key not in varying:
                passed.add(form)
        if node.key in facts.control_flow:
            yield from _bodies(graph, node)
    yield from _outputs(graph, 0, "")


def _node_fault(node: Node, inputs: Types, outputs: Types) -> str:
    """What is wrong with the types of a node with a schema, in words."""
    assert node.signature is not None
    if not _is_consistent(node.signature, inputs):
        return f"takes {', '.join(map(str, inputs))}"
    typing = typing_of(node, inputs, outputs)
    return inference_fault(typing) if typing is not None else ""


@lru_cache(maxsize=1 << 12)
def _is_consistent(signature: Signature, inputs: Types) -> bool:
    """Whether the schema admits the types: large models repeat few."""
    return is_consistent(signature, bind(signature, inputs), inputs)


def _bodies(graph: Graph, node: Node) -> Iterator[Conflict]:
    """Conflicts of body inputs and outputs with their declarations, and of branches with each other."""
    for name, body in node.bodies:
        scope, suffix = graph.scopes[body], f" of {name} of {node.label!r}"
        yield from _outputs(graph, body, suffix)
        if node.key == "SequenceMap":
            continue
        for entry, source in zip(scope.proto.input, body_sources(node, len(scope.inputs)), strict=True):
            outer = node.input(source) if source >= 0 else ABSENT
            if outer != ABSENT and (text := _mismatch(entry, graph.types[outer])):
                yield Conflict(f"input {entry.name!r}{suffix}", text, value=outer)
    if node.key == "If":
        branches = [[graph.types[value] for value in graph.scopes[body].outputs] for _, body in node.bodies]
        if any(None not in (a, b) and a != b for a, b in zip(*branches, strict=False)):
            yield Conflict(f"the branches of {node.label!r}", "return different types", branches=node.index)


def _declarations(graph: Graph) -> Iterator[Conflict]:
    """Declarations that contradict the types of values, of outer ones in bodies, too."""
    for scope in graph.scopes:
        for entry in () if scope.opaque else scope.proto.value_info:
            value = graph.visible(entry.name, scope.index)
            if value != ABSENT and (text := _mismatch(entry, graph.types[value])):
                owner = graph.nodes[scope.owner].label if scope.index else ""
                where = f"the value {entry.name!r}" + (f" in a body of {owner!r}" if owner else "")
                yield Conflict(where, text, value=value)


def _outputs(graph: Graph, scope: int, suffix: str) -> Iterator[Conflict]:
    """Conflicts of a graph's outputs with their declarations."""
    for value, entry in zip(graph.scopes[scope].outputs, graph.scopes[scope].proto.output, strict=True):
        if text := _mismatch(entry, graph.types[value]):
            yield Conflict(f"output {entry.name!r}{suffix}", text, output=value)


def _mismatch(entry: ValueInfoProto, actual: str | None) -> str:
    declared = declared_type(entry.type)
    if declared is None or actual is None or declared == actual:
        return ""
    return f"is declared {declared} but is {actual}"
