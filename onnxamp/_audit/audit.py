"""What can be said about a model without running it: types, kernels, fallbacks, Casts, hazards and weights."""

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from onnx import ModelProto

from onnxamp._audit.casts import cast_traffic
from onnxamp._audit.device_placement import place_nodes
from onnxamp._audit.engine import with_engine
from onnxamp._audit.faults import import_faults, type_faults
from onnxamp._audit.findings import Audit, Casts, Finding, NodeFacts, ordered
from onnxamp._audit.hazards import low_hazards
from onnxamp._audit.releases import loads_from, release_faults, wrong_results
from onnxamp._audit.sizes import sized
from onnxamp._audit.straight import refused_casts
from onnxamp._audit.weights import weight_findings, weight_types
from onnxamp._convert.hints import decomposed
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._errors import ModelError, OpsetError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports
from onnxamp._model.sources import unchanged_sources
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import with_casts
from onnxamp._target.kernels import check_target

_FOLD: Final = (
    "onnxamp convert --fold makes one op of each. A normalisation may be low precision then: its kernel sums in"
    " float32."
)
_FLOATS: Final = {FLOAT: "float32", "tensor(double)": "float64", **{low.tensor: low.name for low in LOW_TYPES.values()}}


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
