"""Integers carried in floats: indices, sizes, counters, positions. float16 holds them up to 2048, bfloat16 to 256."""

from collections.abc import Iterator

from onnxamp._decide.verdicts import Hazard, Reason
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._ops.facts import op_facts

_FLOATS = frozenset({FLOAT, *(low.tensor for low in LOW_TYPES.values())})
_INTEGERS = frozenset({"tensor(int32)", "tensor(int64)", "tensor(uint32)", "tensor(uint64)"})


def index_paths(graph: Graph) -> Iterator[Hazard]:
    """Index arithmetic upstream of Casts to integers, and of sizes and scales, stays float32.

    The walk stops at all other ops (Conv, MatMul, activations), so an image that is cast to integers at the end does
    not keep a whole network in float32. Complexity: linear; each node is visited once.
    """
    walk, sized = op_facts().index_arithmetic, op_facts().index_inputs
    seen: set[int] = set()
    stack: list[tuple[int, str]] = []
    for node in graph.nodes_of({"Cast", *sized}):
        is_cast = node.key == "Cast" and node.input(0) != ABSENT and graph.types[node.inputs[0]] == FLOAT
        if is_cast and graph.types[node.outputs[0]] in _INTEGERS:
            stack.append((node.inputs[0], f"becomes integers at {node.label!r}"))
        for port in sized.get(node.key, ()):
            value = node.input(port)
            if value != ABSENT and graph.types[value] == FLOAT and not _is_roi(node, port):
                stack.append((value, f"is a size or step of {node.label!r}"))
                if node.key == "Range" and node.index not in seen:
                    seen.add(node.index)
                    yield Hazard(node.index, Reason.INDEX, "counts in floats")
    while stack:
        value, why = stack.pop()
        producer = graph.producer(value)
        if producer is None or producer.index in seen or producer.key not in walk:
            continue
        seen.add(producer.index)
        yield Hazard(producer.index, Reason.INDEX, why)
        stack += [(source, why) for source in producer.inputs if source != ABSENT and graph.types[source] == FLOAT]


def _is_roi(node: Node, port: int) -> bool:
    """Whether the port is a region of interest: input 1 of Resize held scales up to opset 10."""
    return node.key == "Resize" and port == 1 and node.signature is not None and node.signature.since > 10


def position_paths(graph: Graph) -> Iterator[Hazard]:
    """Rotary and timestep tables: from counters, Casts from integers and graph inputs to Sin, Cos, Floor and Mod.

    A value is a *position* if position arithmetic computes it from these sources and constants alone. Downstream of
    Range and CumSum all position arithmetic stays float32; downstream of Casts and inputs only what reaches such a
    sink, or a comparison, which rounded positions would answer wrongly.
    """
    facts = op_facts()
    counting, position = set[int](), set[int]()
    for index in graph.scopes[0].inputs:
        if graph.types[index] in _FLOATS and graph.values[index].origin in (Origin.INPUT, Origin.DEFAULT):
            position.add(index)
    sinks: list[Node] = []
    for index in graph.order:
        node = graph.nodes[index]
        if node.key in facts.position_sources:
            counting.update(node.outputs)
            position.update(node.outputs)
            yield Hazard(index, Reason.INDEX, "counts in floats")
            continue
        if node.key == "Cast" and node.input(0) != ABSENT and graph.types[node.inputs[0]] in _INTEGERS:
            position.update(node.outputs)
            continue
        if position.isdisjoint(node.inputs):
            continue
        sources = [value for value in node.inputs if value != ABSENT and graph.types[value] in _FLOATS]
        if node.key in facts.position_sinks and sources and sources[0] in position:
            sinks.append(node)
            if node.key in facts.rounding:
                counting.update(node.outputs)
                position.update(node.outputs)
        elif (
            node.key in facts.position_arithmetic
            and sources
            and all(v in position or graph.constants.is_constant(v) for v in sources)
        ):
            if any(value in position for value in sources):
                position.update(node.outputs)
            if any(value in counting for value in sources):
                counting.update(node.outputs)
                yield Hazard(index, Reason.INDEX, "computes positions")
    yield from _leading_to(graph, sinks, position)


def _leading_to(graph: Graph, sinks: list[Node], position: set[int]) -> Iterator[Hazard]:
    ends = {node.index for node in sinks}
    seen, stack = set(ends), list(sinks)
    while stack:
        node = stack.pop()
        yield Hazard(
            node.index,
            Reason.INDEX,
            "works on positions" if node.index in ends else "leads to an op that needs exact positions",
        )
        for value in node.inputs:
            producer = graph.producer(value)
            if value in position and producer is not None and producer.index not in seen:
                seen.add(producer.index)
                stack.append(producer)
