"""Faults in types and versions: what no runtime loads, or the installed one does not know."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import onnx
from onnx import ModelProto, TensorProto, helper

from onnxamp._audit.findings import Finding
from onnxamp._dtypes import readable_types
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind, declared_type
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import default_domain
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import Signature, newer_versions
from onnxamp._rewrite.verify import type_conflicts
from onnxamp._target.kernels import is_consistent

_RETYPE = "Insert a Cast, or convert the float32 original again (onnxamp convert)."
_REDECLARE = "Correct the declaration, or remove it: runtimes infer types themselves."


def type_faults(graph: Graph) -> list[Finding]:
    """Nodes that contradict their schema, and declarations that contradict the types of values.

    If one contradiction causes others downstream, only the first is reported. Complexity: linear in nodes and ports.
    """
    conflicts, declared, findings = (
        tuple(type_conflicts(graph)),
        _contradicted(graph),
        list[Finding](),
    )
    wrong = {conflict.node: conflict.text for conflict in conflicts}
    differing = {conflict.branches for conflict in conflicts}
    tainted = set[int]()
    for index in graph.order:
        node = graph.nodes[index]
        if graph.scopes[node.scope].opaque:
            continue
        if index in differing:
            tainted.update(value for value in node.outputs if value != ABSENT)
            text = "its branches return different types"
            findings.append(
                Finding(
                    severity="error",
                    kind="type",
                    node=node.label,
                    op=node.key,
                    text=text,
                    action=_RETYPE,
                )
            )
            continue
        fault = next(_node_faults(graph, node, declared, wrong.get(index)), None)
        bodies = (value for _, body in node.bodies for value in graph.scopes[body].outputs)
        is_first = tainted.isdisjoint((*node.inputs, *bodies))
        if fault and is_first:
            findings.append(fault)
        if fault or not is_first:
            tainted.update(
                value for value in node.outputs if value != ABSENT and (fault or value in declared)
            )
    for conflict in conflicts:
        if conflict.node == conflict.branches == ABSENT and conflict.output not in tainted:
            findings.append(
                Finding(
                    severity="error",
                    kind="type",
                    node=conflict.where,
                    op="",
                    text=readable_types(conflict.text),
                    action=_REDECLARE,
                )
            )
    return [*findings, *_wrong_entries(graph, declared), *_same_names(graph)]


def _node_faults(
    graph: Graph, node: Node, declared: Mapping[int, str], known: str | None
) -> Iterator[Finding]:
    """What is wrong with one node, the worst first; ``known`` is what :func:`type_conflicts` says of it."""
    if node.signature is not None:
        text = (
            (_input_fault(node.signature, _types(graph, node.inputs)) or known) if known else None
        )
        if text is not None or (text := _output_fault(graph, node)) is not None:
            yield _fault(graph, node, readable_types(text))
    for value in node.outputs:
        if value in declared:
            wanted = readable_types(declared[value])
            text = f"outputs {readable_types(graph.types[value])}, but the model declares {wanted}"
            rule = op_facts().dtype_attribute.get(node.key)
            mend = (
                f"Set its attribute {rule.attribute!r} to {wanted}, or correct the declaration."
                if rule
                else None
            )
            yield Finding(
                severity="error",
                kind="type",
                node=node.label,
                op=node.key,
                text=text,
                action=mend or _REDECLARE,
            )


def _types(graph: Graph, values: Sequence[int]) -> list[str | None]:
    """Types of a node's inputs or outputs; None if one is absent or unknown."""
    return [None if value == ABSENT else graph.types[value] for value in values]


def _contradicted(graph: Graph) -> dict[int, str]:
    """Value -> the type that the model declares for it, if its type is another."""
    contradicted: dict[int, str] = {}
    for scope in graph.scopes:
        if scope.opaque:
            continue
        inputs = scope.proto.input if scope.index == 0 else ()
        for entry in (*scope.proto.value_info, *scope.proto.output, *inputs):
            value, declared = graph.visible(entry.name, scope.index), declared_type(entry.type)
            if (
                value != ABSENT
                and None not in (declared, graph.types[value])
                and declared != graph.types[value]
            ):
                contradicted[value] = str(declared)
    return contradicted


def _wrong_entries(graph: Graph, declared: Mapping[int, str]) -> Iterator[Finding]:
    """Inputs and initializers that are declared with another type than they have."""
    for value, wanted in declared.items():
        if graph.producer(value) is None:
            text = f"is {readable_types(graph.types[value])}, but the model declares {readable_types(wanted)}"
            yield Finding(
                severity="error",
                kind="type",
                node=graph.values[value].name,
                op="",
                text=text,
                action=_REDECLARE,
            )


def _input_fault(signature: Signature, inputs: Sequence[str | None]) -> str | None:
    """The first input that contradicts the schema, in words; None if all agree."""
    bound = bind(signature, inputs)
    if is_consistent(signature, bound, inputs):
        return None
    for position, found in enumerate(inputs):
        port = signature.input(position)
        if found is None:
            continue
        if port is None:
            return f"has {len(inputs)} inputs, more than its schema knows"
        wanted = (
            bound[signature.param(port, position)] if port.type in signature.params else port.type
        )
        if wanted != found:
            return f"reads {readable_types(found)} as {port.name!r}, but its other inputs need {readable_types(wanted)}"
        if port.type in signature.params and found not in signature.params[port.type]:
            opset = f"its schema of opset {signature.since}"
            return f"reads {readable_types(found)} as {port.name!r}, which {opset} does not admit"
    return "its inputs contradict its schema"


def _output_fault(graph: Graph, node: Node) -> str | None:
    """The first output whose type the schema does not admit (a Cast to bfloat16 before opset 13, say)."""
    signature = node.signature
    if signature is None or node.key in op_facts().control_flow:
        return None
    bound = bind(signature, _types(graph, node.inputs))
    for position, found in enumerate(_types(graph, node.outputs)):
        port = signature.output(position)
        if port is None or found is None:
            continue
        admitted = signature.params.get(port.type, frozenset({port.type}))
        if found not in admitted:
            return f"outputs {readable_types(found)}, which its schema of opset {signature.since} does not admit"
        wanted = (
            bound.get(signature.param(port, position), found)
            if port.type in signature.params
            else port.type
        )
        if wanted != found:
            return f"outputs {readable_types(found)}, but its inputs need {readable_types(wanted)}"
    return None


def _fault(graph: Graph, node: Node, text: str) -> Finding:
    """The finding, with the opset that would fix it if there is one."""
    assert node.signature is not None
    inputs, outputs = _types(graph, node.inputs), {*_types(graph, node.outputs)} - {None}
    for newer in newer_versions(node.signature) if not node.signature.domain else ():
        admitted = frozenset().union(*newer.params.values(), (port.type for port in newer.outputs))
        fits = outputs <= admitted and is_consistent(newer, bind(newer, inputs), inputs)
        if fits and _loads(_OLD_IR, (("", newer.since),)):
            action = f"Keep it float32, or convert the original with --opset {newer.since}, whose schema admits the type."
            return Finding(
                severity="error",
                kind="opset",
                node=node.label,
                op=node.key,
                text=text,
                action=action,
            )
    return Finding(
        severity="error", kind="type", node=node.label, op=node.key, text=text, action=_RETYPE
    )


def _same_names(graph: Graph) -> Iterator[Finding]:
    """Nodes of one graph that share a name; empty names are no names."""
    taken = set[tuple[int, str]]()
    for node in graph.nodes:
        if node.proto.name and (node.scope, node.proto.name) in taken:
            text = (
                "another node of the same graph has the same name: ONNX Runtime refuses the model"
            )
            yield Finding(
                severity="error",
                kind="schema",
                node=node.label,
                op=node.key,
                text=text,
                action="Rename one of them; an empty name will do.",
            )
        taken.add((node.scope, node.proto.name))


def import_faults(model: ModelProto, graph: Graph | None) -> list[Finding]:
    """Versions that the installed ONNX Runtime does not know, and imports that are missing.

    Args:
        model: the model.
        graph: its graph; None if there is none, since the installed onnx does not know its opset.
    """
    findings = list[Finding]()
    imports = tuple(sorted({(entry.domain, entry.version) for entry in model.opset_import}))
    if not imports:
        text = "the model imports no opset: its ops have no version"
        action = "Add the opset that it was exported for to opset_import."
        return [Finding(severity="error", kind="opset", node="", op="", text=text, action=action)]
    reason = _refusal(model.ir_version, imports)
    if reason is not None:
        action = "Upgrade onnxruntime, or export the model for an older opset and IR version."
        findings.append(
            Finding(severity="error", kind="opset", node="", op="", text=reason, action=action)
        )
    known = {default_domain(domain) for domain, _ in imports}
    used = {default_domain(node.proto.domain) for node in graph.nodes} if graph else set()
    for domain in sorted(used - known):
        assumed = f"version {graph.book.opsets.get(domain, 1)}" if graph else "its newest version"
        text = f"the model does not import the domain {domain or 'ai.onnx'} that it uses; {assumed} is assumed"
        action = "Add it to opset_import: runtimes may assume another version."
        findings.append(
            Finding(severity="note", kind="opset", node="", op="", text=text, action=action)
        )
    return findings


def _refusal(ir_version: int, imports: tuple[tuple[str, int], ...]) -> str | None:
    """Why ONNX Runtime refuses models with this IR version and these imports; None if it loads them."""
    import onnxruntime  # noqa: PLC0415 - costs 0.1 s

    name = f"the installed ONNX Runtime {onnxruntime.__version__}"
    if not _loads(ir_version, ()):
        return f"{name} does not know IR version {ir_version}"
    for domain, version in imports:
        if domain in ("", "ai.onnx") and not _loads(min(ir_version, _OLD_IR), ((domain, version),)):
            return f"{name} does not know opset {version}"
    return None


_OLD_IR = 8
"""An IR version that every supported runtime knows."""
_OLD_OPSET = 15


@cache
def _loads(ir_version: int, imports: tuple[tuple[str, int], ...]) -> bool:
    """Whether ONNX Runtime loads a model of one Identity node with these versions."""
    import onnxruntime  # noqa: PLC0415 - costs 0.1 s

    entry = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "versions", [entry], [made]
    )
    sets = [
        onnx.helper.make_opsetid(domain, version)
        for domain, version in imports or (("", _OLD_OPSET),)
    ]
    model = helper.make_model(graph, opset_imports=sets, ir_version=ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # noqa: BLE001 - the runtime raises several types of its own; any of them is a refusal
        return False
    return True
