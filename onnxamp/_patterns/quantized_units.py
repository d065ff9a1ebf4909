"""Nodes between nodes that dequantize and quantize, which runtimes fuse into integer kernels."""

from collections.abc import Iterator

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node, Origin
from onnxamp._ops.facts import op_facts
from onnxamp._target import target_of


def between_integers(graph: Graph, node: Node) -> tuple[bool, bool]:
    """Return whether all floats that a node reads are dequantized, and whether a result is quantized."""
    ops = op_facts().dequantize
    fed = [graph.producer(value, *ops) for _, value in graph.float_inputs(node)]
    feeds = any(
        reader.key in op_facts().quantize and port == 0
        for value in node.outputs
        for reader, port in graph.consumers(value)
    )
    return bool(fed) and None not in fed, feeds


def _is_alone(graph: Graph, node: Node) -> bool:
    """Return whether the results of a node are quantized, and nothing else reads them."""
    results = node.writes
    readers = [reader for value in results for reader, _ in graph.consumers(value)]
    quantize = op_facts().quantize
    return bool(readers) and (
        all(reader.key in quantize for reader in readers)
        and not any(graph.results[value] for value in results)
    )


def bounded_nodes(graph: Graph, target: str) -> frozenset[int]:
    """Return nodes whose rounding integers on both sides outdo; none where the target fuses them in float32 alone.

    A scale that is rounded moves an input by at most a sixteenth of what rounding it to integers did, and a result by a
    sixteenth of what that will do. Complexity: linear in nodes.
    """
    if target_of(target).fuses_quantized:
        return frozenset()
    nodes = graph.nodes_of(op_facts().pointwise)
    return frozenset(
        node.index
        for node in nodes
        if _is_alone(graph, node) and _reads_integers(graph, node)
    )


def _reads_integers(graph: Graph, node: Node) -> bool:
    """Return whether a node reads dequantized numbers and stored parameters alone."""
    makers = [
        graph.producer(value, *op_facts().dequantize)
        for _, value in graph.float_inputs(node)
        if graph.values[value].origin is not Origin.DEFAULT
        and not graph.constants.is_constant(value)
    ]
    return bool(makers) and None not in makers


def fused_blindly(graph: Graph) -> Iterator[Node]:
    """Yield nodes that ONNX Runtime's CPU provider fuses regardless of the type of the scales around them."""
    for node in graph.nodes_of(op_facts().fused_blindly):
        reader = graph.only_reader(node.outputs[0])
        if (
            reader is not None
            and reader.key in op_facts().quantize
            and reader.input(0) == node.outputs[0]
            and between_integers(graph, node)[0]
        ):
            yield node
