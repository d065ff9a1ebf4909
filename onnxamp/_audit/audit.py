"""Audits a model without running it: types, kernels, fallbacks, Casts, hazards, and what its weights hold."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxamp._audit import (
    Audit,
    Casts,
    Engine,
    Finding,
    LoadsFrom,
    NodeFacts,
    ScaleAtRisk,
    finding,
    ordered,
)
from onnxamp._audit.device_placement import distinct_typings, place, place_nodes
from onnxamp._audit.faults import cast_traffic, import_faults, sized, type_faults
from onnxamp._audit.hazards import low_hazards
from onnxamp._audit.opening import broken_by_optimizers
from onnxamp._base.errors import ArgumentError, ModelError, OpsetError
from onnxamp._convert.causes import decomposed
from onnxamp._decide.builder import Builder, builder_of
from onnxamp._decide.kinds import kinds
from onnxamp._facts.dtypes import (
    FLOAT,
    FLOAT16,
    FORMATS,
    LOW_ELEMS,
    LOW_TENSORS,
    Format,
    readable_types,
    tensor_type,
)
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import device_of, target_table
from onnxamp._facts.targets import (
    check_target,
    known_versions,
    release,
    target_of,
    targets,
    version_of,
)
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import quantized_nodes
from onnxamp._graph.raised import RaisedGraph, raised
from onnxamp._graph.scales import magnitudes
from onnxamp._graph.view import ABSENT, Node, scope_path
from onnxamp._graph.wrong_kernels import wrong_kernels
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports, stored_bytes, tensors_of
from onnxamp._model.sources import unchanged_sources
from onnxamp._model.weights import blocks_of, read_array
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import with_casts
from onnxamp._runtime.building import Refusal, build_engine

_SCALE = 1
"""Position of the scale among the inputs of nodes that quantize or dequantize."""


def scales_at_risk(
    graph: Graph, view_in: Callable[[Format], RaisedGraph]
) -> Iterator[ScaleAtRisk]:
    """Yield scales that leave the range of a low type of the model, are subnormal there, or move their grid.

    For a model without low precision, yield those that float16 cannot hold. Complexity: linear in nodes and scales.

    Args:
        graph: the model.
        view_in: returns the graph with its values of a low type raised to float32, as :func:`raised` does.
    """
    facts = op_facts()
    nodes = graph.nodes_of(facts.quantize | facts.dequantize | facts.scales.keys())
    if not nodes:
        return
    present = set(graph.types)
    lows = [low for low in FORMATS.values() if low.tensor in present] or [FLOAT16]
    quantized = graph.ask(quantized_nodes)
    for low in lows:
        view = view_in(low)
        lost = dict[int, str]()
        for kind in kinds():
            lost |= kind.lost_scales(view, low)
        for node in nodes:
            ports = facts.scales.get(node.key, (_SCALE,))
            read = [value for port in ports if (value := node.input(port)) != ABSENT]
            whys = (_subnormal(view, value, low) for value in read)
            if why := lost.get(node.index) or next(filter(None, whys), ""):
                yield ScaleAtRisk(
                    node=node.label,
                    op=node.key,
                    type=quantized[node.index].type if node.index in quantized else "",
                    stored=readable_types(graph.types[read[0]]),
                    low=low.name,
                    why=why,
                )


def _subnormal(graph: Graph, scale: int, low: Format) -> str:
    """Return a clause on how many of a node's scales lose digits in low precision; "" if none does."""
    known = magnitudes(graph, scale)
    if known is None:
        return ""
    small = known[(known > 0) & (known < low.smallest_normal)]
    if not small.size:
        return ""
    if known.size == 1:
        return f"a scale of {small.min():.6g} is subnormal in {low.name}"
    of = f"{small.size:,} of {known.size:,} scales"
    return f"{of} are subnormal in {low.name}, down to {small.min():.6g}"


_MANY_SUBNORMAL: Final = 0.01
"""Share of subnormal elements above which a note is worthwhile."""
_MANY: Final = 1000
"""Tensors with fewer elements are too small for shares to be meaningful."""


class Contents(NamedTuple):
    """Counts of a float tensor's elements; zeros and subnormals are counted in low precision only."""

    elements: int
    nan: int
    infinite: int
    zero: int = 0
    subnormal: int = 0


def weight_types(model: ModelProto) -> dict[str, int]:
    """Return element type ("float32", "int64", ...) -> bytes of weights and Constants, wherever they are stored."""
    sizes: Counter[str] = Counter()
    for tensor in tensors_of(model):
        sizes[readable_types(tensor_type(tensor.data_type))] += stored_bytes(tensor)
    return dict(sizes.most_common())


def weight_findings(model: ModelProto, base_dir: Path | None) -> list[Finding]:
    """Return findings on NaN and infinities in weights, lost digits of low-precision weights, and unreadable weights.

    Complexity: one pass over the weights, in blocks.
    """
    findings: list[Finding] = []
    lows: dict[Format, dict[str, Contents]] = {low: {} for low in FORMATS.values()}
    unread: list[tuple[str, str]] = []
    for tensor in tensors_of(model):
        low = LOW_ELEMS.get(tensor.data_type)
        if low is None and tensor.data_type != TensorProto.FLOAT:
            continue
        try:
            array = read_array(tensor, base_dir)
        except ModelError as error:
            unread.append((tensor.name, str(error)))
            continue
        contents = _float_contents(array) if low is None else _low_contents(array, low)
        findings += _not_finite(
            tensor.name, readable_types(tensor_type(tensor.data_type)), contents
        )
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
    """Count elements by their bits: sign, exponent, mantissa."""
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
    """Yield one finding for all weights that cannot be read; in most cases, the whole data file is missing."""
    for name, why in failures[:1]:
        more = (
            f" The same is true of {len(failures) - 1} more weights."
            if len(failures) > 1
            else ""
        )
        action = "Hazards are not checked, because they depend on the weights."
        yield finding(name, "error", "weight", why + more, action)


def _not_finite(name: str, type_name: str, contents: Contents) -> Iterator[Finding]:
    """Yield findings on NaN, which is never intended, and on infinities, which may belong to masks of few numbers."""
    if contents.nan:
        text = f"NaN among {type_name} weights: every op that reads them returns NaN"
        yield finding(
            name,
            "warning",
            "weight",
            text,
            "The weights are broken: check where they come from.",
        )
    if (
        contents.infinite
        and contents.infinite < contents.elements
        and contents.elements >= _MANY
    ):
        text = f"infinities among {type_name} weights"
        action = "Harmless in a mask. Elsewhere, a conversion overflowed: convert the original again (onnxamp convert)."
        yield finding(name, "note", "weight", text, action)


def _lost_digits(lows: Mapping[Format, Mapping[str, Contents]]) -> Iterator[Finding]:
    """Yield how many low-precision weights are subnormal, and the tensor that has the most."""
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
        action = (
            "bfloat16 represents such numbers with all its digits (--dtype bfloat16)."
            if low is FLOAT16
            else ""
        )
        yield finding("", "note", "weight", text, action)


def refused_casts(graph: Graph, target: str) -> Iterator[Finding]:
    """Yield the nodes around Casts that the target's builder may refuse. Complexity: linear in nodes."""
    builder = builder_of(graph, target)
    for node, position in builder.constant_reads():
        text = f"input {position} is a constant: {target}'s builder accepts none there"
        yield finding(node, "error", "kernel", text, "Put an Identity before it.")
    for node, why, action in _doubts(builder):
        text = f"{why}: {target}'s builder may refuse that"
        yield finding(
            node, "warning", "kernel", text, action.replace("TARGET", target)
        )


def _doubts(builder: Builder) -> Iterator[tuple[Node, str, str]]:
    """Yield the nodes that a builder may refuse, with the reason and the remedy."""
    graph = builder.graph
    types = builder.graph.types
    for node in builder.stacked_up():
        if low := LOW_TENSORS.get(types[node.outputs[0]] or ""):
            why = f"a loop stacks its {low.name} results unchanged"
            yield node, why, "Convert for TARGET, or make it float32."
    for node, first, second in builder.split_scales():
        if types[first.outputs[0]] != types[second.outputs[0]]:
            why = "its factors are dequantized to different types"
            yield node, why, "Give both scales one type."
    for first, node in builder.shared_factors():
        if types[node.outputs[0]] != types[first.outputs[0]]:
            why = "it shares a dequantized factor with a product of another type"
            yield node, why, "Give both products one type."
    for state, moved in builder.states:
        loop = graph.producer(state)
        readers = {node.key for value in moved for node, _ in graph.consumers(value)}
        if loop is not None and "Cast" in readers:
            action = "Convert for TARGET, or give all readers of the state one type."
            yield loop, "its body moves a state that is cast after the loop", action
    for read in builder.reads:
        cast = graph.producer(read.value, "Cast")
        if cast is None or types[read.value] != FLOAT:
            continue
        if low := LOW_TENSORS.get(types[cast.input(0)] or ""):
            what = "stacks up" if read.owner.bodies else "reads"
            action = "Convert for TARGET, or keep the input of the Cast in float32 (--keep-fp32 NAME)."
            yield read.owner, f"it {what} a float32 Cast of {low.name}", action


def loads_from(graph: Graph, model: ModelProto, target: str) -> LoadsFrom | None:
    """Return the oldest ONNX Runtime from which all versions load the model, and why the version before it does not.

    Return None if the newest version does not load the model, or if the target has no versions.

    Complexity: linear in nodes, and in distinct typings times versions.
    """
    device = device_of(target)
    oldest = ""
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
    """Yield the reasons, other than kernels, why the target's version of ONNX Runtime does not load the model."""
    if version_of(target):
        action = "Export the model for an older opset and IR version, or use a newer ONNX Runtime."
        for text in _unloadable(graph, model, target):
            yield finding(
                "",
                "error",
                "opset",
                f"ONNX Runtime {version_of(target)} does not load it: {text}",
                action,
            )


def wrong_results(graph: Graph, target: str) -> Iterator[Finding]:
    """Yield the low-precision nodes whose kernels compute wrong results on the target, or in its version."""
    newer = ", or use a newer ONNX Runtime" if version_of(target) else ""
    for low in FORMATS.values():
        for node, why in wrong_kernels(graph, low.name, target):
            if any(graph.types[value] == low.tensor for value in node.inputs):
                action = f"Keep it float32 (--keep-fp32 NAME){newer}."
                yield finding(node, "warning", "kernel", why, action)


def _unloadable(graph: Graph, model: ModelProto, target: str) -> Iterator[str]:
    newest = release(target)
    if model.ir_version > newest.ir_version:
        yield f"its IR version is {model.ir_version}, and {newest.ir_version} is the newest that it reads"
    opset = graph.book.opsets.get("", 0)
    if opset > newest.opset:
        yield f"its opset is {opset}, and {newest.opset} is the newest that it knows"


_LOW: Final = frozenset({*FORMATS, "mixed"})
"""Precisions of nodes that are at least partly low."""


def with_engine(audit: Audit, model: Model, feeds: Mapping[str, Any]) -> Audit:
    """Build an engine from a model, and add the builder's answers to the model's audit.

    Args:
        audit: the audit without an engine.
        model: the model.
        feeds: inputs that fix the shapes that the model leaves open.

    Raises:
        ArgumentError: the audit is for a target that builds no engines.
        RuntimeFailure: the builder is not installed.
    """
    if not target_of(audit.target).builds:
        builders = [name for name, one in targets().items() if one.builds]
        raise ArgumentError(
            f"Only for {' and '.join(builders)} engines are built, not for {audit.target!r}."
        )
    built = build_engine(model, feeds)
    nodes = {node.node: node for node in audit.nodes}
    said = [
        _finding(audit.target, built.by, refusal, nodes.get(refusal.node))
        for refusal in built.refusals
    ]
    findings = ordered((*said, *audit.findings))
    return replace(
        audit,
        findings=findings,
        engine=Engine(built.by, not built.refusals, built.size),
    )


def _finding(
    target: str, by: str, refusal: Refusal, node: NodeFacts | None
) -> Finding:
    """Return the finding for a refusal, with the remedy."""
    rows: Sequence[Mapping[str, str]] = target_table(target, "builder")["refusals"]
    rule = next((row for row in rows if row["says"] in refusal.text), {})
    why = f" ({rule['rule']})" if rule else ""
    text = f"{by} refuses it: {refusal.text}{why}"
    if node is None:
        action = rule.get("cure") or "Check the ops that the message names."
        return finding(refusal.node, "error", "engine", text, action)
    if node.precision in _LOW:
        action = f"Keep it float32: convert with --target {target}, or with --keep-node NAME or --black {node.op}."
    else:
        action = (
            "No precision fixes this: replace the op, or load a plugin that has it."
        )
    return Finding("error", "engine", node.node, node.op, text, action)


_FOLD: Final = (
    "onnxamp convert --fold turns each into a single op. A normalization can then be low precision, because its kernel"
    " sums in float32."
)
_FLOATS: Final = {
    FLOAT: "float32",
    "tensor(double)": "float64",
    **{tensor: low.name for tensor, low in LOW_TENSORS.items()},
}


@unchanged_sources()
def audit_model(
    model: ModelSource,
    target: str = "cuda",
    *,
    base_dir: str | PathLike[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    build: Mapping[str, Any] | None = None,
) -> Audit:
    """Find faults and slow parts of a model, converted by any tool, without running it.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        target: where the model will run: "cuda", "cpu", "webgpu", "openvino" or "tensorrt"; "cuda" and "cpu" may name
            a version of ONNX Runtime ("cuda@1.24"); "auto" for the installed one; "float16-only" for devices that
            ignore types; or "any" (ignores kernels).
        base_dir: folder of the external data of a ModelProto; not needed for a path.
        shapes: input name -> shape, for estimates. By default, unknown dimensions count as 64.
        build: build an engine for the shapes of these inputs (name -> array; at least those with
            dynamic shapes); "tensorrt" only. If None, no engine is built.

    Returns:
        The findings, worst first, and one record per node. Sizes are in bytes. If the model breaks a rule of ONNX,
        there are no ``nodes``, and an error says why.

    Raises:
        ArgumentError: the target is unknown, or builds no engines.
        ArgumentTypeError: ``model`` is of another type.
        ModelError: the file cannot be read.
        RuntimeFailure: an engine is requested, but its builder is not installed.

    Complexity: near linear in nodes; weights are read at most twice, and memory-mapped if they are external.

    Example:
        >>> from onnxamp import audit_model
        >>> audit = audit_model("models/encoder.onnx", "cuda")
        >>> [finding for finding in audit.findings if finding.severity == "error"]
        []
    """
    target = check_target(target)
    if isinstance(model, ModelProto):  # its faults become findings
        source = Model(model, None if base_dir is None else Path(base_dir))
    else:
        source = Model.of(model)
    audit = _static(source, target, shapes)
    return audit if build is None else with_engine(audit, source, build)


def _static(
    source: Model, target: str, shapes: Mapping[str, Sequence[int]] | None
) -> Audit:
    """Return the audit without building an engine."""
    proto = source.proto
    contents = weight_findings(proto, source.folder)
    try:
        prepared = with_casts(source, Options(freeze_defaults=False))
    except ModelError as error:
        kind = "opset" if isinstance(error, OpsetError) else "schema"
        findings = [
            finding("", "error", kind, str(error)),
            *import_faults(proto, None),
            *contents,
        ]
        return Audit(
            target=target,
            opsets=opset_imports(proto),
            nodes=(),
            findings=ordered(findings),
            casts=Casts(0, 0, 0),
            weight_bytes=weight_types(proto),
        )
    graph = prepared.graph
    faults = type_faults(prepared.graph)
    sizes = graph.shapes_of(shapes or {})
    volumes = sized(graph, shapes)
    broken = {fault.node for fault in faults}
    providers, placed = place_nodes(graph, sizes, volumes, target, broken)
    casts, redundant = cast_traffic(graph, volumes)
    findings = [
        finding("", "note", "schema", note)
        for note in (*prepared.notes, *prepared.unfolded)
    ]
    findings += [
        *import_faults(proto, graph),
        *contents,
        *faults,
        *release_faults(graph, proto, target),
        *wrong_results(graph, target),
        *broken_by_optimizers(graph, target),
        *placed,
        *refused_casts(graph, target),
        *redundant,
    ]
    risky: tuple[ScaleAtRisk, ...] = ()
    if all(one.severity != "error" for one in contents):  # the weights can be read
        view = cache(partial(raised, graph, shapes=sizes))
        risky = tuple(scales_at_risk(graph, view))
        findings += low_hazards(graph, view, target)
        if text := decomposed(graph):
            findings.append(finding("", "note", "fold", text, _FOLD))
    return Audit(
        target=target,
        opsets=graph.book.opsets,
        nodes=tuple(_node_facts(graph, providers)),
        scales=risky,
        findings=ordered(findings),
        casts=casts,
        weight_bytes=weight_types(proto),
        loads_from=loads_from(graph, proto, target),
    )


def _node_facts(graph: Graph, providers: Sequence[str]) -> Iterator[NodeFacts]:
    scopes = [scope_path(graph, scope.index) for scope in graph.scopes]
    quantized = graph.ask(quantized_nodes)
    for node, provider in zip(graph.nodes, providers, strict=True):
        yield NodeFacts(
            position=node.index,
            node=node.label,
            op=node.key,
            scope=scopes[node.scope],
            precision=_precision(graph, node),
            provider=provider,
            quantized=str(quantized.get(node.index, "")),
        )


def _precision(graph: Graph, node: Node) -> str:
    """Return the precision a node computes in. Ports of a fixed type (scales of Resize) count only if there are no
    others.
    """
    free = set[str]()
    fixed = set[str]()
    signature = node.signature
    for value, formal in node.formals():
        kind = graph.types[value]
        names = {
            name
            for tensor, name in _FLOATS.items()
            if kind is not None and tensor in kind
        }
        is_fixed = (
            signature is not None
            and formal is not None
            and formal.type not in signature.params
        )
        (fixed if is_fixed else free).update(names)
    names = free or fixed
    return (
        "no floats" if not names else next(iter(names)) if len(names) == 1 else "mixed"
    )
