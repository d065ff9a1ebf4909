"""Verification of a result before it is written: types agree with schemas, onnx's inference and declarations, and the
signature is unchanged.

A fault that the original model does not have is a bug in onnxamp, and the message says so.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from onnx import ModelProto, ValueInfoProto

from onnxamp._base.errors import InternalError, ModelError
from onnxamp._base.records import record
from onnxamp._facts.dtypes import retyped
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import Types, declared_type
from onnxamp._graph.view import ABSENT, Node, Origin, entering_values
from onnxamp._options.options import Options
from onnxamp._rewrite.checks.node_faults import node_fault
from onnxamp._rewrite.checks.well_typed import is_well_typed
from onnxamp._rewrite.edits.apply import Edits


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
            written = edits.outputs.get((node.index, port), name)
            origins[node.scope, written] = node
    seen = {fault.node for fault in faults} | {fault.branches for fault in faults}
    seen -= {ABSENT}
    for index in sorted(seen):
        seen.update(neighbors(result, result.nodes[index]))
    for fault in faults:
        for value in {fault.output, fault.value} - {ABSENT}:
            seen.update(one.index for one in result.around(value))
    around = set[int]()
    stack = list(seen)
    while stack:
        node = result.nodes[stack.pop()]
        outputs = ((node.scope, name) for name in node.proto.output if name)
        known = (origins[key] for key in outputs if key in origins)
        new = {one.index for one in known if suspected.isdisjoint(one.proto.output)}
        around |= new
        for index in () if new else neighbors(result, node):
            if index not in seen:
                seen.add(index)
                stack.append(index)
    return tuple(original.nodes[index].first_output for index in sorted(around))


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
    # Weights may also be listed as inputs (always, before IR version 4); such declarations follow the weight.
    inputs = (
        original.values[original.scopes[0].names[entry.name]]
        for entry in original.model.graph.input
    )
    weights = {value.name for value in inputs if value.origin is Origin.INITIALIZER}
    # One look at each node shows of nearly all results that they are sound. A graph is needed to say what is wrong.
    if is_well_typed(result) and not any(
        _changed_signature(original, result, {}, options, weights)
    ):
        return
    graph = Graph.of(result)
    # The faults of the original are asked for only where there are some, as for hardly any model.
    faults = list(all_conflicts(graph))
    known = {fault.where for fault in all_conflicts(original)} if faults else set()
    new = [fault for fault in faults if fault.where not in known]
    names = graph.scopes[0].names
    new += _changed_signature(original, result, names, options, weights)
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


def _changed_signature(
    original: Graph,
    result: ModelProto,
    names: Mapping[str, int],
    options: Options,
    weights: Container[str],
) -> Iterator["Conflict"]:
    """Yield inputs and outputs of the result that differ from those of the original.

    Args:
        original: the model that was converted.
        result: the converted model.
        names: name -> value of the result.
        options: the options of the conversion.
        weights: inputs of the original that are weights.
    """
    free: tuple[Container[str], ...] = (weights, ())
    for kind, freed in zip(("input", "output"), free, strict=True):
        before, after = (
            getattr(model.graph, kind) for model in (original.model, result)
        )
        if [entry.name for entry in before] != [entry.name for entry in after]:
            yield Conflict(f"the graph's {kind}s", "changed their names or order")
            continue
        for entry, new in zip(before, after, strict=True):
            name = entry.name
            was = declared_type(entry.type)
            now = declared_type(new.type)
            allowed = {was}
            if was is not None and (name in freed or not options.keeps_io(name)):
                allowed.add(retyped(was, options.low))
            if now not in allowed:
                text = f"changed from {was} to {now}"
                value = names.get(name, ABSENT)
                yield Conflict(f"{kind} {name!r}", text, value=value)


@record
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
    opaque = {scope.index for scope in graph.scopes if scope.opaque}
    nodes: Sequence[Node] = graph.nodes
    # Large models repeat few forms, and hardly any has a fault.
    faults = _NodeFaults(graph.types)
    if not opaque and not any(map(faults.of, graph.inferred.examples)):
        nodes = graph.nodes_of(facts.control_flow)
    for node in nodes:
        if node.scope in opaque or node.signature is None:
            continue
        if text := faults.of(node):
            yield Conflict(f"node {node.label!r} ({node.key})", text, node=node.index)
        if node.key in facts.control_flow:
            yield from _bodies(graph, node)
    yield from _outputs(graph, 0, "")


class _NodeFaults:
    """Finds how the types of nodes contradict their schemas, or onnx's inference."""

    def __init__(self, types: Types) -> None:
        facts = op_facts()
        self.types = types
        self.varying = facts.dtype_attribute.keys() | facts.output_parameter.keys()
        self.passed = set[tuple[object, ...]]()

    def of(self, node: Node) -> str:
        """Return the fault of a node in words; "" if there is none."""
        if node.signature is None:
            return ""
        inputs = (*map(self.types.__getitem__, node.inputs),)
        outputs = (*map(self.types.__getitem__, node.outputs),)
        form = node.signature, inputs, outputs
        if form in self.passed:
            return ""
        text = node_fault(node, inputs, outputs)
        if not text and node.key not in self.varying:
            self.passed.add(form)
        return text


def _bodies(graph: Graph, node: Node) -> Iterator[Conflict]:
    """Yield conflicts of body inputs and outputs with their declarations, and of branches with each other."""
    for name, body in node.bodies:
        scope = graph.scopes[body]
        suffix = f" of {name} of {node.label!r}"
        yield from _outputs(graph, body, suffix)
        if node.key == "SequenceMap":
            continue
        entering = entering_values(node, scope)
        for entry, source in zip(scope.proto.input, entering, strict=True):
            outer = node.input(source)
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
