"""Walks through decomposed Softmaxes, from their exponential."""

from onnxamp._decide.patterns.steps import REACH, back_to_reduction, carries_on, scales
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import maker_of, readers_of
from onnxamp._graph.view import ABSENT, Node


def softmax(graph: Graph, exp: Node) -> set[int]:
    """Return Exp -> sum -> divide (or Log), with the subtraction of the maximum before it."""
    if not graph.is_float_output(exp):
        return set()
    sums = [
        node for node in readers_of(graph, exp.outputs[0]) if node.key == "ReduceSum"
    ]
    ends = set().union(*(_softmax_end(graph, exp, total) for total in sums))
    if not ends:
        return set()
    shift = maker_of(graph, exp.inputs[0], "Sub")
    if shift is not None:
        ends |= {shift.index} | back_to_reduction(graph, shift.input(1), {"ReduceMax"})
    return {exp.index, *ends}


def _softmax_end(graph: Graph, exp: Node, total: Node) -> set[int]:
    """Return nodes from the sum of exponentials to the softmax's last division or logarithm; empty if there is none."""
    path = {total.index}
    value = total.outputs[0]
    for _ in range(REACH):
        readers = [node for node, _ in graph.consumers(value)]
        ends = {
            node.index
            for node in readers
            if node.key == "Log" or scales(graph, node, exp.outputs[0])
        }
        if ends:
            return path | ends
        onward = next(filter(carries_on, readers), None)
        if onward is None or onward.outputs[0] == ABSENT:
            return set()
        path.add(onward.index)
        value = onward.outputs[0]
    return set()
