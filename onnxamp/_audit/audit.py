"""What can be said about a model without running it: types, kernels, fallbacks, Casts, hazards and weights."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxamp._audit.casts import cast_traffic, sized
from onnxamp._audit.device_placement import distinct_typings, place, place_nodes
from onnxamp._audit.faults import import_faults, type_faults
from onnxamp._audit.findings import Audit, Casts, Engine, Finding, LoadsFrom, NodeFacts, ordered
from onnxamp._audit.hazards import low_hazards
from onnxamp._convert.hints import decomposed
from onnxamp._decide.dequantized import shared_factors, split_scales
from onnxamp._decide.hazards.wrong_kernels import wrong_kernels
from onnxamp._decide.reads import straight_reads
from onnxamp._decide.straight import constant_reads, passed_states, stacked_up
from onnxamp._dtypes import FLOAT, FLOAT16, FORMATS, Format, readable_types, tensor_type
from onnxamp._errors import ArgumentError, ModelError, OpsetError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports, stored_bytes, tensors_of
from onnxamp._model.sources import unchanged_sources
from onnxamp._model.statistics import blocks_of
from onnxamp._model.weights import read_array
from onnxamp._ops.profiles import Profile, profile_of
from onnxamp._ops.targets import device_of, target_table
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import with_casts
from onnxamp._runtime.building import Refusal, build_engine
from onnxamp._target.kernels import check_target
from onnxamp._target.targets import target_of, targets
from onnxamp._target.versions import known_versions, release, version_of

_LOW_ELEMS: Final = {low.elem: low for low in FORMATS.values()}
_MANY_SUBNORMAL: Final = 0.01
"""Share of subnormal elements that is worth a note."""
_MANY: Final = 1000
"""Elements below which shares mean nothing."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Counts of a float tensor's elements; zeros and subnormals are counted in low precision only."""

    elements: int
    nan: int
    infinite: int
    zero: int = 0
    subnormal: int = 0


def weight_types(model: ModelProto) -> dict[str, int]:
    """Element type ("float32", "float16", "int64", ...) -> bytes of weights and Constants, wherever they are stored."""
    sizes: Counter[str] = Counter()
    for tensor in tensors_of(model):
        sizes[readable_types(tensor_type(tensor.data_type))] += stored_bytes(tensor)
    return dict(sizes.most_common())


def weight_findings(model: ModelProto, base_dir: Path | None) -> list[Finding]:
    """NaN and infinities in weights, digits that low-precision weights have lost, and weights that cannot be read.

    Complexity: one pass over the weights, in blocks.
    """
    findings: list[Finding] = []
    lows: dict[Format, dict[str, Contents]] = {low: {} for low in FORMATS.values()}
    unread: list[tuple[str, str]] = []
    for tensor in tensors_of(model):
        low = _LOW_ELEMS.get(tensor.data_type)
        if low is None and tensor.data_type != TensorProto.FLOAT:
            continue
        try:
            array = read_array(tensor, base_dir)
        except ModelError as error:
            unread.append((tensor.name, str(error)))
            continue
        contents = _float_contents(array) if low is None else _low_contents(array, low)
        findings += _not_finite(tensor.name, readable_types(tensor_type(tensor.data_type)), contents)
        if low is not None:
            lows[low][tensor.name] = contents
    return [*_unread(unread), *findings, *_lost_digits(lows)]


def _float_contents(array: NDArray[np.float32]) -> Contents:
    nan = infinite = 0
    for block in blocks_of(array):
        if not np.isfinite(block).all():
            nan += int(np.isnan(block).sum())
            infinite += int(np.isinf(block).sum())
    return Contents(array.size, nan, infinite)


def _low_contents(array: NDArray[Any], low: Format) -> Contents:
    """Counts from the bits: sign, exponent, mantissa."""
    mantissa = (1 << low.mantissa) - 1
    numbers = low.patterns.type((1 << 8 * low.bytes - 1) - 1)  # all bits but the sign
    exponent = numbers ^ mantissa
    nan = infinite = zero = subnormal = 0
    for block in blocks_of(array):
        magnitude = block.view(low.patterns) & numbers
        infinite += int(np.count_nonzero(magnitude == exponent))
        nan += int(np.count_nonzero(magnitude > exponent))
        zeros = int(np.count_nonzero(magnitude == 0))
        zero += zeros
        subnormal += int(np.count_nonzero(magnitude <= mantissa)) - zeros
    return Contents(array.size, nan, infinite, zero, subnormal)


def _unread(failures: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """One finding for all weights that cannot be read: mostly the whole data file is missing."""
    for name, why in failures[:1]:
        more = f" The same goes for {len(failures) - 1} more weights." if len(failures) > 1 else ""
        action = "Hazards are not looked for, since they depend on the weights."
        yield Finding("error", "weight", name, "", why + more, action)


def _not_finite(name: str, type_name: str, contents: Contents) -> Iterator[Finding]:
    """NaN is never intended. Infinities may be in masks, which have few numbers."""
    if contents.nan:
        text = f"NaN among {type_name} weights: what reads them becomes NaN"
        yield Finding("warning", "weight", name, "", text, "Look at where the weights come from: they are broken.")
    if contents.infinite and contents.infinite < contents.elements and contents.elements >= _MANY:
        text = f"infinities among {type_name} weights"
        action = "Harmless in a mask. Otherwise a conversion overflowed: convert the original again (onnxamp convert)."
        yield Finding("note", "weight", name, "", text, action)


def _lost_digits(lows: Mapping[Format, Mapping[str, Contents]]) -> Iterator[Finding]:
    """How many low-precision weights are subnormal, with the tensor that has most of them."""
    for low, tensors in lows.items():
        total = sum(contents.elements for contents in tensors.values())
        subnormal = sum(contents.subnormal for contents in tensors.values())
        zero = sum(contents.zero for contents in tensors.values())
        if total < _MANY or subnormal < _MANY_SUBNORMAL * total:
            continue
        worst = max(tensors, key=lambda name: tensors[name].subnormal)
        text = (
            f"{100 * subnormal / total:.1f} % of the {low.name} weights are subnormal, with fewer digits, and"
            f" {100 * zero / total:.1f} % are zero; most subnormal ones are in {worst!r}"
        )
        action = "bfloat16 holds such numbers in full (--dtype bfloat16)." if low is FLOAT16 else ""
        yield Finding("note", "weight", "", "", text, action)


def refused_casts(graph: Graph, target: str) -> Iterator[Finding]:
    """Nodes around Casts, or results of loops, that the target's builder may refuse. Complexity: linear in nodes."""
    profile = profile_of(target)
    if profile is None:
        return
    low_names = {low.tensor: low.name for low in FORMATS.values()}
    for node in stacked_up(graph, profile):
        if name := low_names.get(graph.types[node.outputs[0]] or ""):
            text = f"a loop stacks up its {name} as they are: {target}'s builder may refuse that"
            yield Finding("warning", "kernel", node.label, node.key, text, f"Convert for {target}, or make it float32.")
    for node, position in constant_reads(graph, profile):
        text = f"input {position} is a constant: {target}'s builder takes none there"
        yield Finding("error", "kernel", node.label, node.key, text, "Put an Identity before it.")
    yield from _products(graph, profile, target)
    for state, moved in passed_states(graph, profile):
        owner, readers = graph.producer(state), {node.key for value in moved for node, _ in graph.consumers(value)}
        if owner is not None and "Cast" in readers:
            text = f"its body moves a state that is cast behind it: {target}'s builder may refuse that"
            action = f"Convert for {target}, or give what reads the state one type."
            yield Finding("warning", "kernel", owner.label, owner.key, text, action)
    for read in straight_reads(graph, profile):
        made = graph.producer(read.value)
        if made is None or made.key != "Cast" or graph.types[read.value] != FLOAT:
            continue
        for low in FORMATS.values():
            if graph.types[made.input(0)] == low.tensor:
                what = "stacks up" if read.owner.bodies else "reads"
                text = f"it {what} float32 that is a Cast of {low.name}: {target}'s builder may refuse that"
                action = f"Convert for {target}, or keep what the Cast reads float32, too (--keep-fp32 NAME)."
                yield Finding("warning", "kernel", read.owner.label, read.owner.key, text, action)


def _products(graph: Graph, profile: Profile, target: str) -> Iterator[Finding]:
    """Products of dequantized numbers that the target's builder may refuse."""
    for node, *dequantized in split_scales(graph, profile):
        kinds = [graph.types[found.outputs[0]] for found in dequantized]
        if kinds[0] != kinds[1]:
            text = f"its factors are dequantized to different types: {target}'s builder may refuse that"
            yield Finding("warning", "kernel", node.label, node.key, text, "Give both scales one type.")
    for first, node in shared_factors(graph, profile):
        if graph.types[node.outputs[0]] != graph.types[first.outputs[0]]:
            text = f"it shares a dequantized factor with a product of another type: {target}'s builder may refuse that"
            yield Finding("warning", "kernel", node.label, node.key, text, "Give both products one type.")


def loads_from(graph: Graph, model: ModelProto, target: str) -> LoadsFrom | None:
    """The oldest version of ONNX Runtime from which on all load the model, and why the one before it does not.

    None where the newest one does not load it either, or the target has no versions.

    Complexity: linear in nodes, and in distinct typings times versions.
    """
    device, oldest = device_of(target), ""
    if not target_of(device).versioned:
        return None
    _keys, examples = distinct_typings(graph, device)
    for version in reversed(known_versions(device)):
        older = f"{device}@{version}"
        reason = next(_unloadable(graph, model, older), "")
        for example in () if reason else examples.values():
            found = place(older, example)
            if found.severity == "error":
                reason = f"{example.node.key}: {found.text.partition(':')[0]}"
                break
        if reason:
            return LoadsFrom(oldest, f"{version}: {reason}") if oldest else None
        oldest = version
    return LoadsFrom(oldest, "")


def release_faults(graph: Graph, model: ModelProto, target: str) -> Iterator[Finding]:
    """Why the target's version of ONNX Runtime does not load the model, whatever its kernels."""
    if version_of(target):
        action = "Export the model for an older opset and IR version, or use a newer ONNX Runtime."
        for text in _unloadable(graph, model, target):
            yield Finding(
                "error", "opset", "", "", f"ONNX Runtime {version_of(target)} does not load it: {text}", action
            )


def wrong_results(graph: Graph, target: str) -> Iterator[Finding]:
    """Low nodes whose kernels are wrong on the target, or in its version."""
    newer = ", or use a newer ONNX Runtime" if version_of(target) else ""
    for low in FORMATS.values():
        for node, why in wrong_kernels(graph, low.name, target):
            if any(value != ABSENT and graph.types[value] == low.tensor for value in node.inputs):
                action = f"Keep it float32 (--keep-fp32 NAME){newer}."
                yield Finding("warning", "kernel", node.label, node.key, why, action)


def _unloadable(graph: Graph, model: ModelProto, target: str) -> Iterator[str]:
    newest = release(target)
    if model.ir_version > newest.ir_version:
        yield f"its IR version is {model.ir_version}, and {newest.ir_version} the newest that is read"
    opset = graph.book.opsets.get("", 0)
    if opset > newest.opset:
        yield f"its opset is {opset}, and {newest.opset} the newest that is known"


_LOW: Final = frozenset({*(low.name for low in FORMATS.values()), "mixed"})
"""Precisions of nodes that are low in part at least."""


def with_engine(audit: Audit, model: Model, feeds: Mapping[str, Any]) -> Audit:
    """Build an engine from a model, and add to its audit what the builder says.

    Args:
        audit: what is known without building.
        model: the model.
        feeds: inputs whose shapes the engine is for, where the model leaves them open.

    Raises:
        ArgumentError: the audit is for a target that builds no engines.
        RuntimeFailure: the builder is not installed.
    """
    if not target_of(audit.target).builds:
        builders = [name for name, one in targets().items() if one.builds]
        raise ArgumentError(f"Only for {' and '.join(builders)} engines are built, not for {audit.target!r}.")
    built = build_engine(model, feeds)
    nodes = {node.node: node for node in audit.nodes}
    said = [_finding(audit.target, built.by, refusal, nodes.get(refusal.node)) for refusal in built.refusals]
    findings = ordered((*said, *audit.findings))
    return replace(audit, findings=findings, engine=Engine(built.by, not built.refusals, built.size))


def _finding(target: str, by: str, refusal: Refusal, node: NodeFacts | None) -> Finding:
    """A refusal, with what to do about it."""
    rule = next((row for row in _rules(target) if row["says"] in refusal.text), None)
    why = f" ({rule['rule']})" if rule is not None else ""
    text = f"{by} refuses it: {refusal.text}{why}"
    if node is None:
        action = str(rule.get("cure", "")) if rule is not None else ""
        return Finding("error", "engine", refusal.node, "", text, action or "Look at the ops that it names.")
    if node.precision in _LOW:
        action = f"Keep it float32: convert with --target {target}, or with --keep-node NAME or --black {node.op}."
    else:
        action = "No precision cures it: replace the op, or load a plugin that has it."
    return Finding("error", "engine", node.node, node.op, text, action)


@cache
def _rules(target: str) -> Sequence[Mapping[str, str]]:
    """Rules of strong typing, by what the builder says where they are broken."""
    rules: Sequence[Mapping[str, str]] = target_table(target, "arithmetic").get("rules", ())
    return rules


_FOLD: Final = (
    "onnxamp convert --fold makes one op of each. A normalisation may be low precision then: its kernel sums in"
    " float32."
)
_FLOATS: Final = {FLOAT: "float32", "tensor(double)": "float64", **{low.tensor: low.name for low in FORMATS.values()}}


@unchanged_sources()
def audit_model(
    model: ModelSource,
    target: str = "cuda",
    *,
    base_dir: str | PathLike[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    build: Mapping[str, Any] | None = None,
) -> Audit:
    """Find what is wrong with a model, or slow, without running it. The model may have been converted by any tool.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        target: where the model will run: "cuda", "cpu", "webgpu", "openvino" or "tensorrt"; "cuda" and "cpu" also of a
            version of ONNX Runtime ("cuda@1.24"); "auto" for the installed one; "float16-only" for devices that honour
            no types; or "any" (ignores kernels).
        base_dir: folder of a ModelProto's external data; a path says it itself.
        shapes: input name -> shape, for estimates. Unknown dimensions count as 64 otherwise.
        build: build an engine for the shapes of these inputs (name -> array), of those at least whose shapes the model
            leaves open; "tensorrt" only. None to build none.

    Returns:
        The findings, the worst first, and a record per node. Sizes are in bytes. If the model breaks a rule of ONNX,
        there are no ``nodes``, and an error says why.

    Raises:
        ArgumentError: the target is unknown, or builds no engines.
        ArgumentTypeError: ``model`` is of another type.
        ModelError: the file cannot be read.
        RuntimeFailure: an engine is asked for, and its builder is not installed.

    Complexity: near linear in nodes; weights are read twice at most, memory-mapped if they are external.

    Example:
        >>> from onnxamp import audit_model
        >>> audit = audit_model("models/encoder.onnx", "cuda")
        >>> [finding for finding in audit.findings if finding.severity == "error"]
        []
    """
    target = check_target(target)
    if isinstance(model, ModelProto):  # whatever is wrong with it becomes a finding
        source = Model(model, None if base_dir is None else Path(base_dir))
    else:
        source = Model.of(model)
    audit = _static(source, target, shapes)
    return audit if build is None else with_engine(audit, source, build)


def _static(source: Model, target: str, shapes: Mapping[str, Sequence[int]] | None) -> Audit:
    """What is known without building an engine."""
    proto = source.proto
    contents = weight_findings(proto, source.folder)
    try:
        prepared = with_casts(source, Options(freeze_defaults=False))
    except ModelError as error:
        kind = "opset" if isinstance(error, OpsetError) else "schema"
        findings = [Finding("error", kind, "", "", str(error), ""), *import_faults(proto, None), *contents]
        return Audit(target, opset_imports(proto), (), ordered(findings), Casts(0, 0, 0), weight_types(proto))
    graph, faults = prepared.graph, type_faults(prepared.graph)
    sizes = graph.shapes_of(shapes or {})
    volumes = sized(graph, shapes)
    placement = place_nodes(graph, sizes, volumes, target, {fault.node for fault in faults})
    casts, redundant = cast_traffic(graph, volumes)
    findings = [Finding("note", "schema", "", "", note, "") for note in (*prepared.notes, *prepared.unfolded)]
    findings += [
        *import_faults(proto, graph),
        *contents,
        *faults,
        *release_faults(graph, proto, target),
        *wrong_results(graph, target),
        *placement.findings,
        *refused_casts(graph, target),
        *redundant,
    ]
    if all(finding.severity != "error" for finding in contents):  # the weights can be read
        findings += low_hazards(graph, sizes)
        text = decomposed(graph)
        findings += [Finding("note", "fold", "", "", text, _FOLD)] if text else []
    since = loads_from(graph, proto, target)
    nodes = tuple(_node_facts(graph, placement.providers))
    return Audit(target, graph.book.opsets, nodes, ordered(findings), casts, weight_types(proto), since)


def _node_facts(graph: Graph, providers: Sequence[str]) -> Iterator[NodeFacts]:
    scopes = _scope_names(graph)
    for node, provider in zip(graph.nodes, providers, strict=True):
        yield NodeFacts(node.index, node.label, node.key, scopes[node.scope], _precision(graph, node), provider)


def _scope_names(graph: Graph) -> list[str]:
    """Name of each scope: "" for the main graph, "loop1.body" below it, "loop1.body/if2.then_branch" below that."""
    names = [""] * len(graph.scopes)
    for scope in graph.scopes[1:]:
        owner = graph.nodes[scope.owner]
        attribute = next(name for name, body in owner.bodies if body == scope.index)
        names[scope.index] = "/".join(filter(None, (names[scope.parent], f"{owner.label}.{attribute}")))
    return names


def _precision(graph: Graph, node: Node) -> str:
    """The precision a node computes in. Ports of a fixed type (scales of Resize) count only if there are no others."""
    free, fixed = set[str](), set[str]()
    signature = node.signature
    formals = (
        *((value, signature.input(port) if signature else None) for port, value in enumerate(node.inputs)),
        *((value, signature.output(port) if signature else None) for port, value in enumerate(node.outputs)),
    )
    for value, formal in formals:
        kind = graph.types[value] if value != ABSENT else None
        names = {name for tensor, name in _FLOATS.items() if kind is not None and tensor in kind}
        is_fixed = signature is not None and formal is not None and formal.type not in signature.params
        (fixed if is_fixed else free).update(names)
    names = free or fixed
    return "no floats" if not names else next(iter(names)) if len(names) == 1 else "mixed"
