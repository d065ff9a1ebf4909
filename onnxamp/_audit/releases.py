"""Findings about versions of ONNX Runtime: which ones load a model, and which compute it wrong."""

from collections.abc import Iterator

from onnx import ModelProto

from onnxamp._audit import Finding, LoadsFrom, finding
from onnxamp._audit.device_placement import distinct_typings, place
from onnxamp._facts.dtypes import FORMATS
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import known_versions, release, target_of, version_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.wrong_kernels import wrong_kernels


def loads_from(graph: Graph, model: ModelProto, target: str) -> LoadsFrom | None:
    """Return the oldest ONNX Runtime from which all versions load the model, and why the version before it does not.

    Return None if the newest version does not load the model, or if the target has no versions.

    Complexity: linear in nodes, and in distinct typings times versions.
    """
    device = device_of(target)
    oldest = ""
    if not target_of(device).versioned:
        return None
    # The newest versions come first: the search ends at the first one that fails.
    _keys, examples = distinct_typings(graph, device)
    for version in reversed(known_versions(device)):
        older = f"{device}@{version}"
        reason = next(_unloadable(graph, model, older), "")
        for example in () if reason else examples.values():
            placement = place(older, example)
            if placement.severity == "error":
                reason = f"{example.node.key}: {placement.text.partition(':')[0]}"
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
            fault = f"ONNX Runtime {version_of(target)} does not load it: {text}"
            yield finding("", "error", "opset", fault, action)


def wrong_results(graph: Graph, target: str) -> Iterator[Finding]:
    """Yield the low-precision nodes whose kernels compute wrong results on the target, or in its version."""
    newer = ", or use a newer ONNX Runtime" if version_of(target) else ""
    for low in FORMATS.values():
        for node, why in wrong_kernels(graph, low.name, target):
            if any(graph.types[value] == low.tensor for value in node.inputs):
                action = f"Keep it in float32 (--keep-fp32 NAME){newer}."
                yield finding(node, "warning", "kernel", why, action)


def _unloadable(graph: Graph, model: ModelProto, target: str) -> Iterator[str]:
    """Yield clauses about versions in the file that the target's ONNX Runtime does not know."""
    newest = release(target)
    if model.ir_version > newest.ir_version:
        yield f"its IR version is {model.ir_version}, and {newest.ir_version} is the newest that it reads"
    opset = graph.book.opsets.get("", 0)
    if opset > newest.opset:
        yield f"its opset is {opset}, and {newest.opset} is the newest that it knows"
