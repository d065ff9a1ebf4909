"""Verification of a result before it is written: every node agrees with its schema, and the signature is unchanged.

A fault that the original model does not have is a bug in onnxamp, and the message says so.
"""

from collections.abc import Sequence
from functools import lru_cache

from onnx import ModelProto, ValueInfoProto

from onnxamp._dtypes import retyped
from onnxamp._errors import InternalError, ModelError
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind, body_sources, declared_type
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import Signature
from onnxamp._options.options import Options
from onnxamp._target.kernels import is_consistent


def verify(original: Graph, result: ModelProto, options: Options) -> None:
    """Check that a converted model is well typed and keeps its signature. Complexity: linear in nodes.

    Raises:
        InternalError: it is not, or does not.
        ModelError: it is not, because the original is not either.
    """
    faults = type_conflicts(Graph.of(result))
    known = type_conflicts(original) if faults else {}
    new = [text for where, text in faults.items() if where not in known]
    before, after = original.model.graph, result.graph
    # Weights may also be listed as inputs (always, before IR version 4); such declarations follow the weight.
    weights = {value.name for value in original.values if value.origin is Origin.INITIALIZER and value.scope == 0}
    new += _changed("input", before.input, after.input, options, weights)
    new += _changed("output", before.output, after.output, options, set())
    if new and (known := type_conflicts(original)):
        raise ModelError(f"The model contradicts itself, so it cannot be converted: {next(iter(known.values()))}.")
    if new:
        raise InternalError(f"The converted model would be wrong: {new[0]}. This is a bug: please report the model.")


def _changed(
    kind: str, before: Sequence[ValueInfoProto], after: Sequence[ValueInfoProto], options: Options, free: set[str]
) -> list[str]:
    if [entry.name for entry in before] != [entry.name for entry in after]:
        return [f"the graph's {kind}s changed their names or order"]
    wrong = []
    for entry, new in zip(before, after, strict=True):
        was, now = declared_type(entry.type), declared_type(new.type)
        may_be_low = was is not None and (not options.keeps_io(entry.name) or entry.name in free)
        if was != now and not (may_be_low and now == retyped(str(was), options.low)):
            wrong.append(f"{kind} {entry.name!r} changed from {was} to {now}")
    return wrong


def type_conflicts(graph: Graph) -> dict[str, str]:
    """Place -> what is wrong with the types there."""
    conflicts: dict[str, str] = {}
    for node in graph.nodes:
        if node.signature is None or graph.scopes[node.scope].opaque:
            continue
        inputs = tuple([None if value == ABSENT else graph.types[value] for value in node.inputs])
        if not _agrees(node.signature, inputs):
            where = f"node {node.label!r} ({node.key})"
            conflicts[where] = f"{where} takes {', '.join(str(t) for t in inputs)}"
        if node.key in op_facts().control_flow:
            conflicts |= _bodies(graph, node)
    for value, entry in zip(graph.scopes[0].outputs, graph.model.graph.output, strict=True):
        conflicts |= _mismatch(f"output {entry.name!r}", declared_type(entry.type), graph.types[value])
    return conflicts


@lru_cache(maxsize=1 << 12)
def _agrees(signature: Signature, inputs: tuple[str | None, ...]) -> bool:
    """Whether a schema admits inputs of these types: large models repeat few combinations."""
    return is_consistent(signature, bind(signature, inputs), inputs)


def _bodies(graph: Graph, node: Node) -> dict[str, str]:
    """Conflicts of body inputs and outputs with their declarations, and of branches with each other."""
    conflicts: dict[str, str] = {}
    for name, body in node.bodies:
        scope = graph.scopes[body]
        for value, entry in zip(scope.outputs, scope.proto.output, strict=True):
            where = f"output {entry.name!r} of {name} of {node.label!r}"
            conflicts |= _mismatch(where, declared_type(entry.type), graph.types[value])
        if node.key == "SequenceMap":
            continue
        for entry, source in zip(scope.proto.input, body_sources(node, len(scope.inputs)), strict=True):
            outer = node.input(source) if source >= 0 else ABSENT
            if outer != ABSENT:
                where = f"input {entry.name!r} of {name} of {node.label!r}"
                conflicts |= _mismatch(where, declared_type(entry.type), graph.types[outer])
    if node.key == "If":
        branches = [[graph.types[value] for value in graph.scopes[body].outputs] for _, body in node.bodies]
        if any(None not in (a, b) and a != b for a, b in zip(*branches, strict=False)):
            where = f"the branches of {node.label!r}"
            conflicts[where] = f"{where} return different types"
    return conflicts


def _mismatch(where: str, declared: str | None, actual: str | None) -> dict[str, str]:
    if declared is None or actual is None or declared == actual:
        return {}
    return {where: f"{where} is declared {declared} but is {actual}"}
