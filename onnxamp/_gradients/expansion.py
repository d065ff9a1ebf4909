"""Models whose nodes have gradient rules, and the values through which gradients pass."""

from collections.abc import Iterable, Mapping

from onnx import ModelProto, NodeProto

from onnxamp._base.errors import ModelError
from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import op_key
from onnxamp._gradients.quantized import QUANTIZE
from onnxamp._gradients.recurrent import UNROLLED
from onnxamp._gradients.walk import FLAT, RULES, Pass
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import as_floats
from onnxamp._graph.view import Node, inline_functions


def expanded(model: ModelProto) -> ModelProto:
    """Return a piece whose nodes have gradient rules, as far as possible.

    Recurrent nodes are unrolled, functions inlined, and ops on integers written with floats.
    """
    model, graph = _unrolled(as_floats(inline_functions(model, partly=True)))
    nodes = filter(_needs_inlining, graph.nodes)
    ops = {(node.proto.domain, node.proto.op_type) for node in nodes}
    try:
        return inline_functions(model, ops) if ops else model
    except ModelError:
        return model


def _unrolled(model: ModelProto) -> tuple[ModelProto, Graph]:
    """Return a model without its recurrent nodes, but for those that cannot be unrolled, and its graph."""
    graph = Graph.of(model)
    recurrent = graph.nodes_of(UNROLLED)
    if not recurrent:
        return model, graph
    unrolling = Pass(graph, [], (), ())
    model = unrolling.unrolled(filter(unrolling.can_unroll, recurrent))
    return model, Graph.of(model)


def _needs_inlining(node: Node) -> bool:
    """Return whether a node has no gradient, and its function may have one."""
    has_gradient = node.key in RULES or node.key in FLAT or bool(node.bodies)
    signature = node.signature
    return not has_gradient and signature is not None and signature.has_function


def moved_integers(
    nodes: Iterable[NodeProto], kinds: Mapping[str, str | None]
) -> set[str]:
    """Return the integers that floats were quantized to, and the integers computed from them.

    Args:
        nodes: those of a graph, in order.
        kinds: type by name of a value.
    """
    integers = set[str]()
    for node in nodes:
        if op_key(node) in QUANTIZE:
            integers.add(node.output[0])
        elif not integers.isdisjoint(node.input):
            integers.update(name for name in node.output if kinds.get(name) != FLOAT)
    return integers
