"""What ``onnxamp check`` predicts of a model beside what ONNX Runtime does with it."""

from collections.abc import Iterator

import onnx
from onnx import GraphProto, ModelProto

from onnxamp._audit import Audit
from onnxamp._audit.audit import audit_model
from onnxamp._base.errors import OnnxAmpError
from onnxamp._runtime.sessions.session import Provider, assigned_nodes, make_session


def disagreements(model: ModelProto, provider: Provider) -> list[str]:
    """Where prediction and assignment differ: whether the model loads, and which provider has each node.

    Nodes that are not there any more were replaced by their function bodies.
    """
    model = named(model)
    audit = audit_model(model, provider)
    try:
        session = make_session(model, provider, optimize=False, record=True)
    except OnnxAmpError as error:
        return [] if may_fail(audit) else [f"it should load, but: {error}"]
    if must_fail(audit):
        return [f"it should not load, but does: {[(n.op, n.node) for n in audit.nodes if n.provider == 'none']}"]
    found = {name: place for place, _, name in assigned_nodes(session) if name}
    return [
        f"{node.op} {node.node!r} ({node.precision}): predicted on {node.provider}, is on {found[node.node]}"
        for node in audit.nodes
        if node.provider and found.get(node.node, node.provider) != node.provider
    ]


def must_fail(audit: Audit) -> bool:
    return any(node.provider == "none" for node in audit.nodes)


def may_fail(audit: Audit) -> bool:
    """Errors say that it will not load; unknown ops, and function bodies that may lack kernels, that it might not."""
    doubts = ("kernel", "schema")
    return any(f.severity == "error" or (f.kind in doubts and f.op) for f in audit.findings)


def named(model: ModelProto) -> ModelProto:
    """The model with a name for every node; names that there are stay."""
    result = ModelProto()
    result.CopyFrom(model)
    for number, node in enumerate(node for graph in graphs(result.graph) for node in graph.node):
        node.name = node.name or f"unnamed/{number}"
    return result


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and all graphs in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            bodies = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
            for body in bodies:
                yield from graphs(body)
