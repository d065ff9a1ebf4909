"""onnx's checker on a result, beside the verification of types.

The checker knows what :mod:`onnxamp._rewrite.checks.verify` does not ask: that names are assigned once and before
they are read, that attributes fit their schemas, that domains are imported, that tensors hold their data in the field
of their type. It knows no types of values; its full form infers them, which takes far longer and finds less than the
verification.

The checker stops at its first complaint. So a complaint about the given model, whatever it is, silences it: it may not
know a domain or an opset, and such models are converted as well.
"""

import re
from collections.abc import Container
from itertools import chain
from typing import Final

from google.protobuf.message import EncodeError
from onnx import ModelProto, NodeProto, TensorProto, checker

from onnxamp._base.errors import InternalError
from onnxamp._facts.signature import SignatureBook
from onnxamp._graph.graph import Graph
from onnxamp._model.protos import (
    all_nodes,
    copied,
    copy_fields,
    copy_without,
    default_domain,
    has_external_data,
    opset_imports,
    stored_bytes,
    tensors_of,
)
from onnxamp._options.options import Options
from onnxamp._rewrite.checks.verify import neighbors

_LARGE: Final = 1 << 10
"""Bytes of a weight above which the checker gets it without its data. For smaller ones, copying is cheaper.

A model of many layers is mostly weights of a few KB, and the checker copies what it gets twice.
"""

_NODE: Final = re.compile(
    r"(?:node\. Name: |of node: \nname: )(?P<name>.*) OpType: (?P<op>\S+)"
)
"""Finds the node that a complaint names."""

_UNKNOWN: Final = re.compile(r"No Op registered for (\S+) with domain_version")
"""Finds the op in a complaint about one that onnx does not know."""

_UNCHECKED: Final = "unchecked"
"""A domain without ops that the checker knows, so that it checks nothing."""


def check_result(
    given: ModelProto, original: Graph, result: ModelProto, options: Options
) -> None:
    """Check a converted model with onnx's checker.

    Args:
        given: the model before anything was done to it.
        original: the prepared model that was converted.
        result: the converted model; the data of its weights may be elsewhere.
        options: the options of the conversion.

    Raises:
        InternalError: the checker has a complaint, and none about ``given``. The error names the nodes of the original
            around the fault.

    Complexity: linear in nodes and in the bytes of small weights.
    """
    complaint = complaint_about(result)
    if complaint and not complaint_about(given):
        text = complaint.strip().splitlines()[0].removesuffix(".")
        raise InternalError(
            f"onnx's checker refuses the converted model: {text}. This is a bug: please report the model.",
            _nodes_named(complaint, original, frozenset(options.unsound)),
        )


def _nodes_named(
    complaint: str, original: Graph, suspected: frozenset[str]
) -> tuple[str, ...]:
    """Return the outputs of the original's nodes that a complaint names; or of their neighbors, if it is not these.

    Args:
        complaint: of the checker.
        original: the model that was converted.
        suspected: outputs of nodes that stay in float32 because of earlier faults.
    """
    named = {(match["name"], match["op"]) for match in _NODE.finditer(complaint)}
    nodes = [
        node
        for node in original.nodes
        if (node.proto.name, node.proto.op_type) in named
    ]
    if not suspected.isdisjoint(node.first_output for node in nodes):
        # These nodes are in float32 already, which did not help.
        around = set[int]().union(*(neighbors(original, node) for node in nodes))
        nodes = [original.nodes[index] for index in sorted(around)]
    return tuple(node.first_output for node in nodes)


def complaint_about(model: ModelProto) -> str:
    """Return the first complaint of onnx's checker about a model; "" if there is none.

    The checker looks for data files, which do not exist yet, so it gets no weight whose data are elsewhere. It refuses
    ops that ONNX Runtime adds to the domain of onnx; these are not checked.
    """
    complaint = _complaint(_without_large_weights(model))
    if not complaint:
        return ""
    light = _without_large_weights(model)
    # Weights in bodies and attributes are rarely elsewhere, and a walk over all attributes takes as long as the check.
    if has_external_data(light):
        light = copied(light)
        for tensor in tensors_of(light):
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.CopyFrom(_without_data(tensor))
        complaint = _complaint(light)
    known = SignatureBook(opset_imports(model))
    skipped = set[str]()
    # The checker stops at the first op that it does not know, so they are set aside one by one.
    while (unknown := _UNKNOWN.search(complaint)) and unknown[1] not in skipped:
        if known.get("", unknown[1]) is None:
            break
        skipped.add(unknown[1])
        light = _in_other_domain(light, skipped)
        complaint = _complaint(light)
    return complaint


def _in_other_domain(model: ModelProto, ops: Container[str]) -> ModelProto:
    """Return a copy of a model in which ops of onnx's domain are in one that the checker does not know."""
    result = copied(model)
    result.opset_import.add(domain=_UNCHECKED, version=1)
    functions = (function.node for function in result.functions)
    for node in all_nodes(chain(result.graph.node, *functions)):
        if not default_domain(node.domain) and node.op_type in ops:
            node.domain = _UNCHECKED
    return result


def _complaint(model: ModelProto) -> str:
    try:
        written = model.SerializeToString()
        # Of a large model, the conversion takes the most memory here, and nothing else may need this copy.
        del model
        checker.check_model(written)
    except checker.ValidationError as error:
        return str(error)
    except (EncodeError, ValueError):
        # Bodies have more than 2 GiB, which no message can hold.
        return ""
    return ""


def _without_large_weights(model: ModelProto) -> ModelProto:
    """Return the model if it contains all its weights and they are small, otherwise a copy with the others emptied.

    Weights are initializers and Constant nodes of the main graph.
    """
    graph = model.graph
    constants = {
        at
        for at, node in enumerate(graph.node[:])
        if node.op_type == "Constant" and _is_large_constant(node)
    }
    weights = graph.initializer[:]
    are_large = [*map(_is_large, weights)]
    if not constants and not any(are_large):
        return model
    # All nodes are copied at once, which is fast, unless some have large values, which are not to be copied.
    light = copy_without(model, "initializer", *(("node",) if constants else ()))
    light.graph.initializer.extend(
        _without_data(weight) if is_large else weight
        for weight, is_large in zip(weights, are_large, strict=True)
    )
    if constants:
        light.graph.node.extend(
            _without_value(node) if at in constants else node
            for at, node in enumerate(graph.node[:])
        )
    return light


def _is_large(weight: TensorProto) -> bool:
    return (
        weight.data_location == TensorProto.EXTERNAL or stored_bytes(weight) > _LARGE
    )


def _is_large_constant(node: NodeProto) -> bool:
    return any(_is_large(item.t) for item in node.attribute if item.HasField("t"))


def _without_data(weight: TensorProto) -> TensorProto:
    """Return an empty tensor with the name and the type of a weight; the checker ignores shapes."""
    return TensorProto(name=weight.name, data_type=weight.data_type, dims=[0])


def _without_value(node: NodeProto) -> NodeProto:
    """Return a Constant node with an empty tensor."""
    result = NodeProto()
    copy_fields(node, result, {"attribute"})
    for item in node.attribute:
        emptied = result.attribute.add()
        copy_fields(item, emptied, {"t"})
        if item.HasField("t"):
            emptied.t.CopyFrom(_without_data(item.t))
    return result
