"""Audits of a model on a target: types, kernels, Casts, hazards, weights, and speed.

The results of static checks are here: frozen records that reports print and save.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from onnxamp._base.public import Shown
from onnxamp._base.records import record
from onnxamp._graph.view import Node


@record
class Finding:
    """A fault of a model, or something that costs time.

    Attributes:
        severity: "error" (it will not load, or is known to break), "warning" (it may break or is slow), or "note".
        kind: "type", "opset", "kernel", "engine", "fallback", "cast", "fold", "hazard", "weight" or "schema".
        node: label of the node; "" if it concerns the whole model.
        op: op type of the node.
        text: what is wrong; the same for all findings of one sort.
        action: what to do about it, or "".
    """

    severity: str
    kind: str
    node: str
    op: str
    text: str
    action: str


def finding(
    where: Node | str, severity: str, kind: str, text: str, action: str = ""
) -> Finding:
    """Return a finding about a node, a name, or ("") the whole model."""
    node, op = (where, "") if isinstance(where, str) else (where.label, where.key)
    return Finding(severity, kind, node, op, text, action)


_SEVERITIES: Final = ("error", "warning", "note")


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return errors first, then warnings and notes, each in the order in which they were found."""
    return tuple(sorted(findings, key=lambda one: _SEVERITIES.index(one.severity)))


@record
class NodeFacts:
    """How a node will run.

    Attributes:
        position: index of the node, counting the nodes of subgraphs.
        node: its label: the name, or else the first output.
        op: its op type.
        scope: name of the subgraph it is in ("loop1.body"); "" for the main graph.
        precision: "float16", "bfloat16", "float32", "float64", "mixed" or "no floats".
        provider: where the target runs it: "CUDA", "CPU", "none" if nothing does, or "" if that is unknown or the
            node is computed once while the model is loaded.
        quantized: the type that it holds quantized numbers of, and its role: "int8 scales" if it quantizes or
            dequantizes, "int8 products" if it multiplies what was dequantized, "int8 integers" if its kernel reads
            integers; "" of all others.
    """

    position: int
    node: str
    op: str
    scope: str
    precision: str
    provider: str
    quantized: str = ""


@record
class ScaleAtRisk:
    """A scale of quantized numbers that low precision cannot hold unchanged.

    Attributes:
        node: label of the node that reads it.
        op: its op type.
        type: the type that it quantizes to, such as "int8".
        stored: the type of the scale, such as "float32"; a scale that is not low does no harm.
        low: the low-precision type that cannot hold it.
        why: the loss, actual or potential.
    """

    node: str
    op: str
    type: str
    stored: str
    low: str
    why: str


@record
class Casts:
    """Estimated Cast traffic of one run.

    Attributes:
        count: Casts between floats.
        bytes: bytes that they move, without those of unknown size.
        redundant: how many are redundant.
        unsized: how many have an unknown size.
        assumed: assumptions: dimension of an input -> its size, where no inputs were given, and the iterations of
            loops whose number is not constant.
    """

    count: int
    bytes: int
    redundant: int
    unsized: int = 0
    assumed: Mapping[str, int] = field(default_factory=dict)


@record
class LoadsFrom:
    """The versions of ONNX Runtime that load a model on a target.

    Attributes:
        version: the oldest version from which all load it, among those whose kernels are known (the oldest is "1.20").
        because: why the version before it does not load it; "" if there is none.
    """

    version: str
    because: str


@record
class BuiltEngine:
    """The result of building an engine: the builder (``by``), whether it built one, and the engine's ``bytes``."""

    by: str
    built: bool
    bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Audit(Shown):
    """All information about a model that is available before it runs.

    Attributes:
        target: "cuda", "cpu", "webgpu", "tensorrt" or "any", possibly with a version of ONNX Runtime ("cuda@1.24").
        opsets: domain -> version, with "" for ai.onnx.
        nodes: one record per node.
        findings: errors first, then warnings, then notes.
        casts: estimated Cast traffic.
        weight_bytes: element type -> bytes of weights.
        scales: scales that low precision (float16 for a model without low precision) cannot hold.
        loads_from: which versions of ONNX Runtime load the model; None if the newest does not, or if the
            target has no versions.
        engine: the engine that was built; None if none was requested.

    Example:
        >>> import onnxamp
        >>> audit = onnxamp.audit_model("models/encoder.onnx", "cuda")
        >>> audit.opsets[""], audit.weight_bytes["float32"], len(audit.nodes)
        (17, 334160, 125)
    """

    target: str
    opsets: Mapping[str, int]
    nodes: tuple[NodeFacts, ...]
    findings: tuple[Finding, ...]
    casts: Casts
    weight_bytes: Mapping[str, int]
    scales: tuple[ScaleAtRisk, ...] = ()
    loads_from: LoadsFrom | None = None
    engine: BuiltEngine | None = None
