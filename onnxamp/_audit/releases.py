"""Which versions of ONNX Runtime load a model: by its kernels, its opset and its IR version."""

from collections.abc import Iterator

from onnx import ModelProto

from onnxamp._audit.device_placement import distinct_typings, place
from onnxamp._audit.findings import Finding, LoadsFrom
from onnxamp._decide.wrong_kernels import wrong_kernels
from onnxamp._dtypes import LOW_TYPES
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._target.versions import VERSIONED, device_of, known_versions, release, version_of


def loads_from(graph: Graph, model: ModelProto, target: str) -> LoadsFrom | None:
    """The oldest version of ONNX Runtime from which on all load the model, and why the one before it does not.

    None where the newest one does not load it either, or the target has no versions.

    Complexity: linear in nodes, and in distinct typings times versions.
    """
    device, oldest = device_of(target), ""
    if device not in VERSIONED:
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
    for low in LOW_TYPES.values():
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
