"""Audits a model without running it: types, kernels, fallbacks, Casts, hazards, and what its weights hold."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

from onnx import ModelProto

from onnxamp._audit import (
    Audit,
    Casts,
    Finding,
    NodeFacts,
    ScaleAtRisk,
    finding,
    ordered,
)
from onnxamp._audit.builders import refused_casts, with_engine
from onnxamp._audit.device_placement import place_nodes
from onnxamp._audit.faults import cast_traffic, import_faults, sized, type_faults
from onnxamp._audit.hazards import low_hazards
from onnxamp._audit.opening import broken_by_optimizers
from onnxamp._audit.releases import loads_from, release_faults, wrong_results
from onnxamp._audit.weights import scales_at_risk, weight_findings, weight_types
from onnxamp._base.errors import ModelError, OpsetError
from onnxamp._convert.hints import decomposed
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS
from onnxamp._facts.targets import check_target
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import quantized_nodes
from onnxamp._graph.raised import raised_graph
from onnxamp._graph.view import Node, scope_path
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports
from onnxamp._model.sources import unchanged_sources
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import with_casts

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
        return _broken(proto, target, error, contents)
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
    # An error means that weights cannot be read, and hazards depend on their numbers.
    if all(one.severity != "error" for one in contents):
        # Each low type has one raised view, which scales and hazards share.
        view = cache(partial(raised_graph, graph, shapes=sizes))
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


def _broken(
    proto: ModelProto, target: str, error: ModelError, contents: Sequence[Finding]
) -> Audit:
    """Return the audit of a model that breaks a rule of ONNX: the error, and faults of its imports and weights."""
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
        # "in", because sequences and optionals hold tensors.
        names = {name for tensor, name in _FLOATS.items() if tensor in (kind or "")}
        if signature is None or formal is None or formal.type in signature.params:
            free |= names
        else:
            fixed |= names
    names = free or fixed
    if not names:
        return "no floats"
    return names.pop() if len(names) == 1 else "mixed"
