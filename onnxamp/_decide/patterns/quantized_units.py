"""Nodes between nodes that dequantize and quantize, which runtimes fuse into integer kernels."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import chain

from onnxamp._facts.ops import op_facts
from onnxamp._facts.targets import target_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node, Origin


def between_integers(graph: Graph, node: Node) -> tuple[bool, bool]:
    """Return whether all floats that a node reads are dequantized, and whether a result is quantized."""
    ops = op_facts().dequantize
    fed = [graph.producer(value, *ops) for value in graph.float_inputs(node)]
    quantize = op_facts().quantize
    uses = chain.from_iterable(map(graph.consumers, node.outputs))
    feeds = any(reader.key in quantize and port == 0 for reader, port in uses)
    return bool(fed) and None not in fed, feeds


def quantized_values(graph: Graph) -> frozenset[int]:
    """Return the values that are only quantized, directly or after exact ops.

    Numbers beyond the ends of their grid saturate. Complexity: linear in nodes.
    """
    quantize = op_facts().quantize
    values = set[int]()
    # Readers come first, so it is known whether what an exact op writes is quantized.
    for node in reversed(graph.order) if graph.nodes_of(quantize) else ():
        for value in node.writes:
            readers = list(graph.consumers(value))
            if graph.results[value] or not readers:
                continue
            if all(
                port == 0
                if reader.key in quantize
                else reader.index in graph.exact and values.issuperset(reader.writes)
                for reader, port in readers
            ):
                values.add(value)
    return frozenset(values)


def dequantized_values(graph: Graph) -> frozenset[int]:
    """Return the values that are dequantized, or that exact ops make of such values and of stored parameters.

    Complexity: linear in nodes.
    """
    dequantize = op_facts().dequantize
    values = set[int]()
    for node in graph.order if graph.nodes_of(dequantize) else ():
        is_moved = node.index in graph.exact and _reads_integers(graph, node, values)
        if is_moved or node.key in dequantize:
            values.update(node.writes)
    return frozenset(values)


def bounded_nodes(graph: Graph, target: str) -> frozenset[int]:
    """Return nodes between integers on both sides, which round more than low precision does.

    There are none where the target fuses such nodes in float32 alone. Rounding a scale moves an input by at most a
    sixteenth of what rounding it to integers did, and a result by a sixteenth of what that will do. Exact ops between
    the node and the integers add nothing. Complexity: linear in nodes.
    """
    nodes = graph.nodes_of(op_facts().pointwise)
    if not nodes or target_of(target).fuses_quantized:
        return frozenset()
    before = graph.ask(dequantized_values)
    after = graph.ask(quantized_values)
    return frozenset(
        node.index
        for node in nodes
        if after.issuperset(node.writes) and _reads_integers(graph, node, before)
    )


def _reads_integers(graph: Graph, node: Node, dequantized: AbstractSet[int]) -> bool:
    """Return whether a node reads dequantized numbers and stored parameters alone."""
    computed = [
        value
        for value in graph.float_inputs(node)
        if graph.values[value].origin is not Origin.DEFAULT
        and not graph.constants.is_constant(value)
    ]
    return bool(computed) and dequantized >= {*computed}


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
