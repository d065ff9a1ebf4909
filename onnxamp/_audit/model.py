"""What can be said of a model without running it: types, kernels on the target, fallbacks, Casts, hazards, weights."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from onnx import ModelProto

from onnxamp._audit.device_placement import Placement, place_nodes
from onnxamp._audit.faults import import_faults, type_faults
from onnxamp._audit.findings import Audit, Casts, Finding, NodeFacts
from onnxamp._audit.lowhazards import low_hazards
from onnxamp._audit.stock import weight_findings, weight_types
from onnxamp._audit.traffic import cast_traffic
from onnxamp._convert.hints import decomposed
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._errors import ArgumentTypeError, ModelError, OpsetError
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.types import Types, infer_types
from onnxamp._graph.view import ABSENT, Node, View, opset_imports
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import prepare
from onnxamp._target.kernels import check_target

_FOLD = "onnxamp convert --fold makes one op of each. A normalisation may be low then: its kernel sums in float32."
_SEVERITIES = ("error", "warning", "note")


def audit_model(
    model: ModelProto,
    target: str = "cuda",
    *,
    base_dir: str | PathLike[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Audit:
    """Everything that a model tells before it runs: of any model, converted or not, by whatever tool.

    Args:
        model: it is read, never changed. Functions are inlined in a copy, as runtimes do.
        target: where it will run: "cuda", "cpu", or "any" (no kernels are asked).
        base_dir: folder of the model's external data, None where all weights are inline.
        shapes: shapes of inputs, which estimates are for; open dimensions count as 64 otherwise.

    Returns:
        An :class:`Audit`. A model that breaks a rule of ONNX has no ``nodes``, and an error that says why.

    Raises:
        ArgumentError: the target is unknown. ArgumentTypeError: the model is no ModelProto.

    Complexity: near linear in nodes; weights are read twice at most, by memory map where they lie outside.
    """
    if not isinstance(model, ModelProto):
        raise ArgumentTypeError(f"model must be an onnx.ModelProto, not {type(model).__name__}.")
    check_target(target)
    folder = None if base_dir is None else Path(base_dir)
    contents = weight_findings(model, folder)
    try:
        prepared = prepare(Model(model, folder), Options())
        notes, view = prepared.notes, prepared.graph
    except ModelError as error:
        kind = "opset" if isinstance(error, OpsetError) else "schema"
        found = [Finding("error", kind, "", "", str(error), ""), *import_faults(model, None), *contents]
        return Audit(target, opset_imports(model), (), _ordered(found), Casts(0, 0, 0), weight_types(model))
    found = [Finding("note", "schema", "", "", note, "") for note in notes]
    found += [*import_faults(model, view), *contents]
    readable = not any(finding.severity == "error" for finding in contents)
    types = infer_types(view)
    inferred = view.shapes_of(shapes or {})
    return _audit(model, view, types, inferred, target, found, readable=readable)


def _audit(
    model: ModelProto,
    view: Graph,
    types: Types,
    shapes: Sequence[Shape | None],
    target: str,
    found: list[Finding],
    *,
    readable: bool,
) -> Audit:
    faults = type_faults(view)
    broken = {finding.node for finding in faults}
    placement = place_nodes(view, types, shapes, target, broken)
    casts, redundant = cast_traffic(view, shapes)
    found += [*faults, *placement.findings, *redundant]
    if readable:  # the rules look at constants
        found += low_hazards(view)
        text = decomposed(view)
        found += [Finding("note", "fold", "", "", text, _FOLD)] if text else []
    nodes = tuple(_facts(view, types, placement))
    return Audit(target, view.book.opsets, nodes, _ordered(found), casts, weight_types(model))


def _ordered(found: list[Finding]) -> tuple[Finding, ...]:
    """Errors first; within a severity as they were found."""
    return tuple(sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _facts(view: View, types: Types, placement: Placement) -> list[NodeFacts]:
    scopes = _scope_names(view)
    return [
        NodeFacts(
            node.index,
            node.label,
            node.key,
            scopes[node.scope],
            _precision(types, node),
            placement.providers[node.index],
        )
        for node in view.nodes
    ]


def _scope_names(view: View) -> list[str]:
    """Name of each scope: "" for the main graph, "loop1.body" below it, "loop1.body/if2.then_branch" below that."""
    names = [""] * len(view.scopes)
    for scope in view.scopes[1:]:
        owner = view.nodes[scope.owner]
        attribute = next(name for name, body in owner.bodies if body == scope.index)
        names[scope.index] = "/".join(filter(None, (names[scope.parent], f"{owner.label}.{attribute}")))
    return names


_FLOATS = {FLOAT: "float32", "tensor(double)": "float64", **{low.tensor: low.name for low in LOW_TYPES.values()}}


def _precision(types: Types, node: Node) -> str:
    """In which precision a node computes. Ports that are always float32 (scales of Resize) count where no others do."""
    free, fixed = set[str](), set[str]()
    signature = node.signature
    for values, formal in (
        (node.inputs, signature.input if signature else None),
        (node.outputs, signature.output if signature else None),
    ):
        for position, value in enumerate(values):
            found = types[value] if value != ABSENT else None
            names = {name for tensor, name in _FLOATS.items() if found is not None and tensor in found}
            port = formal(position) if formal is not None else None
            is_free = signature is None or port is None or port.type in signature.params
            (free if is_free else fixed).update(names)
    computes = free or fixed
    return "no floats" if not computes else next(iter(computes)) if len(computes) == 1 else "mixed"
