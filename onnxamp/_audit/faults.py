"""What is wrong with a model's types and versions: what no runtime loads, or the installed one does not know."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import onnx
from onnx import ModelProto, TensorProto, helper

from onnxamp._audit.findings import Finding
from onnxamp._dtypes import readable_types
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import Types, bind, declared_type
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import Signature, newer_versions
from onnxamp._rewrite.verify import complaints
from onnxamp._target.kernels import is_consistent

_RETYPE = "Insert a Cast, or convert the float32 original again (onnxamp convert)."
_REDECLARE = "Correct the declaration, or remove it: runtimes infer types themselves."


def type_faults(view: Graph) -> list[Finding]:
    """Nodes whose inputs or outputs contradict their schema, and declarations that contradict what flows there.

    Where one contradiction leads to others downstream, only the first is found. Complexity: linear in nodes and ports.
    """
    types, known, found = view.types, complaints(view), list[Finding]()
    declared = _contradicted(view, types)
    places, tainted = set[str](), set[int]()
    for index in view.order:
        node = view.nodes[index]
        place = f"node {node.label!r} ({node.key})"
        places.add(place)
        if view.scopes[node.scope].opaque:
            continue
        branches = f"the branches of {node.label!r}"
        if branches in known:
            places.add(branches)
            tainted.update(node.outputs)
            text = "its branches return different types"
            found.append(Finding("error", "type", node.label, node.key, text, _RETYPE))
            continue
        faults = list(_node_faults(types, node, declared, is_known=place in known))
        bodies = (value for _, body in node.bodies for value in view.scopes[body].outputs)
        is_first = tainted.isdisjoint((*node.inputs, *bodies))
        if faults and is_first:
            found.append(faults[0])
        if faults or not is_first:
            tainted.update(value for value in node.outputs if faults or value in declared)
    places |= _explained(view, tainted)
    for place in (place for place in known if place not in places):
        text = readable_types(known[place].removeprefix(place).strip())
        found.append(Finding("error", "type", place, "", text, _REDECLARE))
    return [*found, *_wrong_entries(view, types, declared), *_same_names(view)]


def _node_faults(types: Types, node: Node, declared: Mapping[int, str], *, is_known: bool) -> Iterator[Finding]:
    """What is wrong with one node, the worst first."""
    if node.signature is not None:
        inputs = [None if value == ABSENT else types[value] for value in node.inputs]
        text = (_input_fault(node.signature, inputs) if is_known else None) or _output_fault(node, types)
        if text is not None:
            yield _fault(node, types, text)
    for value in node.outputs:
        if value in declared:
            wanted = readable_types(declared[value])
            text = f"makes {readable_types(types[value])}, but the model declares {wanted}"
            rule = op_facts().dtype_attribute.get(node.key)
            mend = (
                f"Set its attribute {rule.attribute!r} to {wanted}, or correct the declaration." if rule else _REDECLARE
            )
            yield Finding("error", "type", node.label, node.key, text, mend)


def _contradicted(view: View, types: Types) -> dict[int, str]:
    """Value -> the type that the model declares for it, where that is not what flows there."""
    found: dict[int, str] = {}
    for scope in view.scopes:
        if scope.opaque:
            continue
        inputs = scope.proto.input if scope.index == 0 else ()
        for entry in (*scope.proto.value_info, *scope.proto.output, *inputs):
            value, declared = scope.names.get(entry.name), declared_type(entry.type)
            if value is not None and None not in (declared, types[value]) and declared != types[value]:
                found[value] = str(declared)
    return found


def _wrong_entries(view: View, types: Types, declared: Mapping[int, str]) -> Iterator[Finding]:
    """Inputs and initializers that are declared with another type than they have."""
    for value, wanted in declared.items():
        if view.producer(value) is None:
            text = f"is {readable_types(types[value])}, but the model declares {readable_types(wanted)}"
            yield Finding("error", "type", view.values[value].name, "", text, _REDECLARE)


def _explained(view: View, tainted: set[int]) -> set[str]:
    """Outputs of the graph and of bodies (as :func:`complaints` calls them) that an error upstream explains."""
    found = set[str]()
    for scope in view.scopes:
        owner = view.nodes[scope.owner] if scope.index else None
        attribute = "" if owner is None else next(name for name, body in owner.bodies if body == scope.index)
        behind = "" if owner is None else f" of {attribute} of {owner.label!r}"
        named = zip(scope.outputs, scope.proto.output, strict=True)
        found.update(f"output {entry.name!r}{behind}" for value, entry in named if value in tainted)
    return found


def _input_fault(signature: Signature, inputs: Sequence[str | None]) -> str | None:
    """The first input that contradicts the schema, in words; None where all agree."""
    bound = bind(signature, inputs)
    if is_consistent(signature, bound, inputs):
        return None
    for position, found in enumerate(inputs):
        port = signature.input(position)
        if found is None:
            continue
        if port is None:
            return f"has {len(inputs)} inputs, more than its schema knows"
        wanted = bound[signature.param(port, position)] if port.type in signature.params else port.type
        if wanted != found:
            return (
                f"reads {readable_types(found)} as {port.name!r}, where its other inputs want {readable_types(wanted)}"
            )
        if port.type in signature.params and found not in signature.params[port.type]:
            opset = f"its schema of opset {signature.since}"
            return f"reads {readable_types(found)} as {port.name!r}, which {opset} does not admit"
    return "its inputs contradict its schema"


def _output_fault(node: Node, types: Types) -> str | None:
    """The first output whose type the schema does not admit (a Cast to bfloat16 before opset 13, say)."""
    signature = node.signature
    if signature is None or node.key in op_facts().control_flow:
        return None
    bound = bind(signature, [None if value == ABSENT else types[value] for value in node.inputs])
    for position, value in enumerate(node.outputs):
        port = signature.output(position)
        found = None if value == ABSENT else types[value]
        if port is None or found is None:
            continue
        admitted = signature.params.get(port.type, frozenset({port.type}))
        if found not in admitted:
            return f"makes {readable_types(found)}, which its schema of opset {signature.since} does not admit"
        wanted = bound.get(signature.param(port, position), found) if port.type in signature.params else port.type
        if wanted != found:
            return f"makes {readable_types(found)}, where its inputs want {readable_types(wanted)}"
    return None


def _fault(node: Node, types: Types, text: str) -> Finding:
    """The finding, with the opset that would mend it if there is one."""
    assert node.signature is not None
    inputs = [None if value == ABSENT else types[value] for value in node.inputs]
    made = {types[value] for value in node.outputs if value != ABSENT} - {None}
    for newer in newer_versions(node.signature) if not node.signature.domain else ():
        admitted = frozenset().union(*newer.params.values(), (port.type for port in newer.outputs))
        fits = made <= admitted and is_consistent(newer, bind(newer, inputs), inputs)
        if fits and _loads(_OLD_IR, (("", newer.since),)):
            action = (
                f"Keep it float32, or convert the original with --opset {newer.since}, whose schema admits the type."
            )
            return Finding("error", "opset", node.label, node.key, text, action)
    return Finding("error", "type", node.label, node.key, text, _RETYPE)


def _same_names(view: View) -> Iterator[Finding]:
    """Nodes of one graph that share a name; empty names are no names."""
    taken = set[tuple[int, str]]()
    for node in view.nodes:
        if node.proto.name and (node.scope, node.proto.name) in taken:
            text = "another node of the same graph has this name, too: ONNX Runtime refuses the model"
            yield Finding("error", "schema", node.label, node.key, text, "Rename one of them; an empty name will do.")
        taken.add((node.scope, node.proto.name))


def import_faults(model: ModelProto, view: View | None) -> list[Finding]:
    """Versions that the installed ONNX Runtime does not know, and imports that are missing.

    Args:
        view: the model's view, None where it has none (its opset is newer than the installed onnx).
    """
    found = list[Finding]()
    imports = tuple(sorted({(entry.domain, entry.version) for entry in model.opset_import}))
    if not imports:
        text = "the model imports no opset: its ops have no version"
        action = "Add the opset that it was exported for to opset_import."
        return [Finding("error", "opset", "", "", text, action)]
    reason = _refusal(model.ir_version, imports)
    if reason is not None:
        action = "Upgrade onnxruntime, or export the model for an older opset and IR version."
        found.append(Finding("error", "opset", "", "", reason, action))
    known = {"" if domain == "ai.onnx" else domain for domain, _ in imports}
    used = {"" if node.proto.domain == "ai.onnx" else node.proto.domain for node in view.nodes} if view else set()
    for domain in sorted(used - known):
        assumed = f"version {view.book.opsets.get(domain, 1)}" if view else "its newest version"
        text = f"the model does not import the domain {domain or 'ai.onnx'} that it uses; {assumed} is assumed"
        found.append(Finding("note", "opset", "", "", text, "Add it to opset_import: runtimes may assume another one."))
    return found


def _refusal(ir_version: int, imports: tuple[tuple[str, int], ...]) -> str | None:
    """Why ONNX Runtime loads no model of this IR version and these imports; None where it does."""
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
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "versions", [entry], [made])
    sets = [onnx.helper.make_opsetid(domain, version) for domain, version in imports or (("", _OLD_OPSET),)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - the runtime raises several types of its own; any of them is a refusal
        return False
    return True
