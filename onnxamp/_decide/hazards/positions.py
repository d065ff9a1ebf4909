"""Positions and the angles that they turn into, as in rotary embeddings: low precision turns large ones by degrees.

The angle of position 1,000 at rate 1 is rounded by up to 1/4 in float16, which is 14 degrees, and by 2 in bfloat16: no
sine or cosine of it is right then. Sines and cosines themselves are as precise in low precision as any number.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.hazards.indices import INTEGERS, loses
from onnxamp._decide.verdicts import Audit, Hazard, Kind
from onnxamp._dtypes import FLOAT_TENSORS, Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.known import is_known
from onnxamp._graph.view import Node, Origin
from onnxamp._ops.facts import op_facts


def position_hazards(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Rotary and timestep tables: from counters, Casts from integers and graph inputs to Sin, Cos, Floor and Mod.

    A value is a *position* if position arithmetic computes it from these sources and constants alone. Downstream of
    Range and CumSum, all position arithmetic stays float32. Downstream of Casts and inputs, only nodes that lead to
    such a sink or to a comparison do, whose results rounded positions would change.
    """
    facts = op_facts()
    counting = set[int]()
    position = set[int]()
    for index in graph.scopes[0].inputs:
        is_given = graph.values[index].origin in (Origin.INPUT, Origin.DEFAULT)
        if is_given and graph.types[index] in FLOAT_TENSORS:
            position.add(index)
    sinks: list[Node] = []
    for node in graph.order:
        if node.key in facts.position_sources:
            counting.update(node.outputs)
            position.update(node.outputs)
            continue
        given = node.reads
        if node.key == "Cast" and given and graph.types[given[0]] in INTEGERS:
            position.update(node.outputs)
            continue
        if position.isdisjoint(given):
            continue
        sources = [value for value in given if graph.types[value] in FLOAT_TENSORS]
        if node.key in facts.position_sinks and sources and sources[0] in position:
            sinks.append(node)
            if node.key in facts.rounding:
                counting.update(node.outputs)
                position.update(node.outputs)
        elif (
            node.key in facts.position_arithmetic
            and sources
            and all(v in position or is_known(graph, v) for v in sources)
        ):
            if any(value in position for value in sources):
                position.update(node.outputs)
            if any(value in counting for value in sources):
                counting.update(node.outputs)
                yield Hazard(node.index, KIND, "computes positions")
    yield from _leading_to(graph, sinks, position)


def _leading_to(
    graph: Graph, sinks: list[Node], position: set[int]
) -> Iterator[Hazard]:
    ends = {node.index for node in sinks}
    seen = set(ends)
    stack = list(sinks)
    while stack:
        node = stack.pop()
        is_end = node.index in ends
        why = (
            "works on positions"
            if is_end
            else "leads to an op that needs exact positions"
        )
        yield Hazard(node.index, KIND, why)
        for value in node.inputs:
            producer = graph.producer(value)
            if (
                value in position
                and producer is not None
                and producer.index not in seen
            ):
                seen.add(producer.index)
                stack.append(producer)


KIND: Final = Kind(
    "position",
    title="positions, or angles that grow with them",
    rule=position_hazards,
    audit=Audit(
        4,
        "computes positions, or angles that grow with them, in LOW",
        ", which counts exactly up to {integers} only",
    ),
    loses=loses,
)
