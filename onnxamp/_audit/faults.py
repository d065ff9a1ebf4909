"""Faults in types and versions that no runtime loads, or that the installed runtime does not know."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, helper

from onnxamp._audit import Casts, Finding, finding
from onnxamp._base.optional import has_runtime
from onnxamp._convert.estimate import shapes_at
from onnxamp._facts.dtypes import (
    ANY_FLOAT_TENSORS,
    ELEM_NUMBERS,
    element_name,
    is_lossless,
    readable_types,
)
from onnxamp._facts.kernels import is_consistent
from onnxamp._facts.ops import op_facts
from onnxamp._facts.signature import newer_versions
from onnxamp._graph.determined import DEFAULT_TRIPS, guessed_scopes, loop_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.types import bind, declared_type
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import default_domain, fed_inputs
from onnxamp._rewrite.checks.node_faults import wanted_type
from onnxamp._rewrite.checks.verify import type_conflicts
from onnxamp._rewrite.passes.cast_pairs import find_pairs
from onnxamp._rewrite.passes.casts import redundant_casts
from onnxamp._runtime.inputs.shapes import has_shape, shape_of
from onnxamp._runtime.sessions.starting import trial
from onnxamp._runtime.sizes import Sizes, listed

_RETYPE: Final = (
    "Insert a Cast, or convert the float32 original again (onnxamp convert)."
)
_REDECLARE: Final = (
    "Correct the declaration, or remove it: runtimes infer types themselves."
)


def type_faults(graph: Graph) -> list[Finding]:
    """Return findings for nodes that contradict their schema, and declarations that contradict the types of values.

    If one contradiction causes others downstream, only the first is reported. Complexity: linear in nodes and ports.
    """
    conflicts = tuple(type_conflicts(graph))
    declared = _contradicted(graph)
    findings = list[Finding]()
    wrong = {conflict.node: conflict.text for conflict in conflicts}
    differing = {conflict.branches for conflict in conflicts}
    tainted = set[int]()
    for node in graph.order:
        if graph.scopes[node.scope].opaque:
            continue
        if node.index in differing:
            tainted.update(node.writes)
            text = "its branches return different types"
            findings.append(finding(node, "error", "type", text, _RETYPE))
            continue
        fault = next(_node_faults(graph, node, declared, wrong.get(node.index)), None)
        read = set(node.inputs)
        for _, body in node.bodies:
            read.update(graph.scopes[body].outputs)
        is_first = tainted.isdisjoint(read)
        if fault and is_first:
            findings.append(fault)
        if fault:
            tainted.update(node.writes)
        elif not is_first:
            # Only outputs that contradict a declaration pass the fault on.
            tainted.update(value for value in node.writes if value in declared)
    for conflict in conflicts:
        is_of_output = conflict.node == conflict.branches == ABSENT
        if is_of_output and conflict.output not in tainted:
            text = readable_types(conflict.text)
            findings.append(finding(conflict.where, "error", "type", text, _REDECLARE))
    return [*findings, *_wrong_entries(graph, declared), *_same_names(graph)]


def _node_faults(
    graph: Graph, node: Node, declared: Mapping[int, str], known: str | None
) -> Iterator[Finding]:
    """Return the faults of one node, worst first; ``known`` is the result of :func:`type_conflicts`."""
    text = known or _output_fault(graph, node)
    if node.signature is not None and text:
        yield _fault(graph, node, readable_types(text))
    for value in node.outputs:
        if value in declared:
            wanted = readable_types(declared[value])
            text = f"outputs {readable_types(graph.types[value])}, but the model declares {wanted}"
            action = _REDECLARE
            if rule := op_facts().dtype_attribute.get(node.key):
                action = f"Set its attribute {rule.attribute!r} to {wanted}, or correct the declaration."
            yield finding(node, "error", "type", text, action)


def _contradicted(graph: Graph) -> dict[int, str]:
    """Return value -> declared type, for the values whose actual type differs."""
    contradicted: dict[int, str] = {}
    for scope in graph.scopes:
        if scope.opaque:
            continue
        inputs = scope.proto.input if scope.index == 0 else ()
        for entry in (*scope.proto.value_info, *scope.proto.output, *inputs):
            value = graph.visible(entry.name, scope.index)
            declared = declared_type(entry.type)
            if value == ABSENT or declared is None:
                continue
            if graph.types[value] not in (None, declared):
                contradicted[value] = declared
    return contradicted


def _wrong_entries(graph: Graph, declared: Mapping[int, str]) -> Iterator[Finding]:
    """Yield inputs and initializers whose declared type differs from their actual type."""
    for value, wanted in declared.items():
        if graph.producer(value) is None:
            text = f"is {readable_types(graph.types[value])}, but the model declares {readable_types(wanted)}"
            yield finding(graph.values[value].name, "error", "type", text, _REDECLARE)


def _output_fault(graph: Graph, node: Node) -> str | None:
    """Return the first output whose type the schema does not admit, such as a Cast to bfloat16 before opset 13."""
    signature = node.signature
    if signature is None or node.key in op_facts().control_flow:
        return None
    bound = bind(signature, graph.types_of(node.inputs))
    for position, actual in enumerate(graph.types_of(node.outputs)):
        port = signature.output(position)
        if port is None or actual is None:
            continue
        admitted = signature.params.get(port.type, frozenset({port.type}))
        if actual not in admitted:
            return f"outputs {readable_types(actual)}, which its schema of opset {signature.since} does not allow"
        wanted = wanted_type(signature, port, position, bound)
        if wanted not in (None, actual):
            return f"outputs {readable_types(actual)}, but its inputs need {readable_types(wanted)}"
    return None


def _fault(graph: Graph, node: Node, text: str) -> Finding:
    """Return the finding, with the opset that would fix it if there is one."""
    assert node.signature is not None
    retype = finding(node, "error", "type", text, _RETYPE)
    if node.signature.domain:
        return retype
    inputs = graph.types_of(node.inputs)
    outputs = {*graph.types_of(node.outputs)} - {None}
    for newer in newer_versions(node.signature):
        admitted = frozenset().union(
            *newer.params.values(), (port.type for port in newer.outputs)
        )
        fits = outputs <= admitted and is_consistent(
            newer, bind(newer, inputs), inputs
        )
        if fits and _loads(_OLD_IR, (("", newer.since),)):
            opset = f"--opset {newer.since}, whose schema allows the type"
            action = f"Keep it in float32, or convert the original with {opset}."
            return finding(node, "error", "opset", text, action)
    return retype


def _same_names(graph: Graph) -> Iterator[Finding]:
    """Yield nodes of one graph that share a name; empty names do not count."""
    seen = set[tuple[int, str]]()
    for node in graph.nodes:
        if node.proto.name and (node.scope, node.proto.name) in seen:
            text = "another node of the same graph has the same name: ONNX Runtime refuses the model"
            action = "Rename one of them, or remove its name."
            yield finding(node, "error", "schema", text, action)
        seen.add((node.scope, node.proto.name))


def import_faults(model: ModelProto, graph: Graph | None) -> list[Finding]:
    """Return versions that the installed ONNX Runtime does not know, and missing imports.

    Args:
        model: the model.
        graph: its graph; None if the installed onnx does not know its opset, so that it has none.
    """
    findings = list[Finding]()
    imports = sorted({(entry.domain, entry.version) for entry in model.opset_import})
    if not imports:
        text = "the model imports no opset, so its ops have no version"
        action = "Add the opset that it was exported for to opset_import."
        return [finding("", "error", "opset", text, action)]
    reason = _refusal(model.ir_version, imports)
    if reason is not None:
        action = "Upgrade onnxruntime, or export the model for an older opset and IR version."
        findings.append(finding("", "error", "opset", reason, action))
    if graph is None:
        return findings
    known = {default_domain(domain) for domain, _ in imports}
    used = {default_domain(node.proto.domain) for node in graph.nodes}
    for domain in sorted(used - known):
        assumed = f"version {graph.book.opsets.get(domain, 1)}"
        text = f"the model does not import the domain {domain or 'ai.onnx'} that it uses; {assumed} is assumed"
        action = "Add it to opset_import: runtimes may assume another version."
        findings.append(finding("", "note", "opset", text, action))
    return findings


def _refusal(ir_version: int, imports: Iterable[tuple[str, int]]) -> str | None:
    """Return why ONNX Runtime refuses this IR version and these imports; None if it loads them, or is not installed."""
    if not has_runtime():
        return None
    import onnxruntime  # noqa: PLC0415 - costs 0.1 s

    name = f"the installed ONNX Runtime {onnxruntime.__version__}"
    if not _loads(ir_version, ()):
        return f"{name} does not know IR version {ir_version}"
    known_ir = min(ir_version, _OLD_IR)
    for domain, version in imports:
        is_standard = domain in ("", "ai.onnx")
        if is_standard and not _loads(known_ir, ((domain, version),)):
            return f"{name} does not know opset {version}"
    return None


_OLD_IR: Final = 8
_OLD_OPSET: Final = 15
"""Versions that every supported runtime knows, so that the other one alone decides whether it loads a model."""


@cache
def _loads(ir_version: int, imports: tuple[tuple[str, int], ...]) -> bool:
    """Return whether ONNX Runtime loads a model of one node with these versions."""
    import onnxruntime  # noqa: PLC0415 - costs 0.1 s

    model = trial()
    model.graph.node[0].op_type = "Identity"  # the only op with a kernel in all opsets
    sets = imports or (("", _OLD_OPSET),)
    model.ir_version = ir_version
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*entry) for entry in sets)
    options = onnxruntime.SessionOptions()
    # Fatal errors only: a refusal is an expected answer here.
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # noqa: BLE001 - the runtime raises several types of its own; any of them is a refusal
        return False
    return True


class Sized(NamedTuple):
    """Shapes of values.

    Attributes:
        shapes: shape by value index.
        assumed: dimension of an input -> its assumed size, the same as for random inputs; empty for given inputs.
    """

    shapes: Sequence[Shape | None]
    assumed: Mapping[str, int]

    @property
    def told(self) -> str:
        """The sizes for which figures hold, as a phrase that follows the figures; "" if nothing is assumed."""
        return f" at {listed(self.assumed)} (assumed)" if self.assumed else ""

    def elements(self, value: int) -> int | None:
        """Return the number of elements of a value; None if a size is unknown."""
        shape = self.shapes[value]
        return None if shape is None or None in shape else elements(shape)


def sized(graph: Graph, given: Mapping[str, Sequence[int]] | None) -> Sized:
    """Return the shapes for the given inputs; if there are none, for inputs as large as random ones."""
    if given:
        shapes = {name: tuple(shape) for name, shape in given.items()}
        return Sized(shapes_at(graph, shapes), {})
    inputs = fed_inputs(graph.model.graph)
    entries = [entry for entry in inputs if has_shape(entry.type)]
    assumed = Sizes.of(entries).resolve({})
    if not assumed:
        return Sized(graph.shapes, {})
    shapes = {entry.name: shape_of(entry, assumed) for entry in entries}
    return Sized(shapes_at(graph, shapes), assumed)


_CLEAN: Final = "onnxamp.remove_redundant_casts(model) removes such Casts without changing any number."


def cast_traffic(graph: Graph, sizes: Sized) -> tuple[Casts, list[Finding]]:
    """Estimate the Casts between floats in one run, and find redundant ones. Complexity: near linear.

    Casts of constants do not count: they run once, while the model is loaded.
    """
    types = graph.types
    constants = graph.constants
    trips = graph.ask(loop_trips)
    count = moved = unsized = 0
    guessed = guessed_scopes(graph)
    assumed = dict(sizes.assumed)
    for node in graph.nodes:
        if _is_float_cast(graph, node) and not constants.is_constant(node.inputs[0]):
            count += 1
            ends = (node.inputs[0], node.outputs[0])
            size = sum(element_bytes(types[value]) for value in ends)
            number = sizes.elements(node.inputs[0])
            unsized += number is None
            if node.scope in guessed:
                assumed["iterations of a loop"] = DEFAULT_TRIPS
            moved += size * (number or 0) * trips[node.scope]
    redundant = {
        index
        for index in graph.ask(redundant_casts)
        if not constants.is_constant(graph.nodes[index].inputs[0])
    }
    pairs = graph.ask(find_pairs)
    paired = pairs.ends | pairs.starts
    findings = [
        _redundancy(graph, graph.nodes[index], is_pair=index in paired)
        for index in sorted(redundant)
    ]
    findings += _lossy_pairs(graph, redundant)
    return Casts(count, moved, len(redundant), unsized, assumed), findings


def element_bytes(type_name: str | None) -> int:
    """Return the bytes per element of a type, at any depth: 4 if it is unknown, 0 for strings, otherwise 1 or more."""
    name = (type_name or "float").rsplit("(", maxsplit=1)[-1].rstrip(")")
    if name == "string":
        return 0
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(ELEM_NUMBERS[name]))
    except (KeyError, TypeError):
        return 4
    return int(dtype.itemsize)


def _is_float_cast(graph: Graph, node: Node) -> bool:
    if node.key != "Cast" or ABSENT in (node.input(0), node.outputs[0]):
        return False
    return (
        graph.types[node.inputs[0]] in ANY_FLOAT_TENSORS
        and graph.types[node.outputs[0]] in ANY_FLOAT_TENSORS
    )


def _redundancy(graph: Graph, node: Node, *, is_pair: bool) -> Finding:
    """Return the finding for a redundant Cast, with the reason why it is redundant."""
    before = graph.producer(node.inputs[0], "Cast")
    consumers = {reader.key for reader, _ in graph.consumers(node.outputs[0])}
    severity = "warning"
    text = "casts a value to the same type as another Cast"
    if graph.types[node.inputs[0]] == graph.types[node.outputs[0]]:
        severity = "note"
        text = "casts to the type that its input already has: runtimes drop it while they load"
    elif before is not None or consumers == {"Cast"}:
        text = "is in a chain of Casts whose first loses nothing: one Cast or none has the same effect"
    elif is_pair:
        text = (
            "is one of a pair around data movement, which could move the narrower type"
        )
    return finding(node, severity, "cast", text, _CLEAN)


def _lossy_pairs(graph: Graph, redundant: set[int]) -> Iterator[Finding]:
    """Yield Casts to low precision and back: such a pair rounds, which may be intended."""
    for node in graph.nodes:
        if node.index in redundant or not _is_float_cast(graph, node):
            continue
        before = graph.producer(node.input(0))
        if before is None or not _is_float_cast(graph, before):
            continue
        values = before.inputs[0], node.inputs[0], node.outputs[0]
        first, second, third = (element_name(graph.types[value]) for value in values)
        if first == third and not is_lossless(first, second):
            text = f"undoes a Cast to {second}: the pair rounds, and costs two passes over the data"
            action = "Keep pairs that round on purpose; remove_redundant_casts(model, lossy=True) removes the others."
            yield finding(node, "note", "cast", text, action)
