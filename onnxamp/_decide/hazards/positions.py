"""Positions and their angles, as in rotary embeddings: low precision turns large angles by many degrees.

The angle of position 1,000 at rate 1 is rounded by up to 1/4 in float16, which is 14 degrees, and by 2 in bfloat16: no
sine or cosine of it is right then. Sines and cosines themselves are as precise in low precision as any number.

Coordinates are positions with a computed part, such as the center of a box: the column of a pixel plus an offset. From
2,048 columns on, float16 loses the offset, and then the column itself.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from onnxamp._decide.kinds import (
    Effect,
    Fault,
    Hazard,
    HazardKind,
    computing,
    counts_exactly,
    exact_reads,
)
from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.loops.accumulation import accumulated_states
from onnxamp._graph.loops.count_marks import COUNTED, INVERSE, POSITION, Counted
from onnxamp._graph.loops.counted import counted
from onnxamp._graph.numbers.known import is_rounded
from onnxamp._graph.view import ABSENT, Node, passed_from, passing_port

_EXACT = "leads to an op that needs exact positions"
_RESULT = "leads to a result that holds coordinates"
_SIZE = "leads to a division by a size"
_DISTANCE = "leads to a distance between coordinates"
_TERM = "leads to a running sum that is an angle"


def position_hazards(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the arithmetic of positions and coordinates, from counters, Casts from integers and inputs to its ends.

    Downstream of Range, CumSum and what loops accumulate, all position arithmetic stays in float32. Downstream of Casts
    and inputs, only nodes that lead to a Sin, Cos, Floor or Mod do, or to a comparison, whose results rounded positions
    would change. Where counted integers meet computed values, the sums and products that lead to one of these stay
    float32, and if the integers may be too large, those that lead to a result of the model, or to a division by a size.
    """
    known = graph.ask(accumulated_states, low).ports
    seen = set[int]()
    for hazard in _hazards(graph, low):
        if (hazard.node, hazard.value) not in known:
            yield hazard
        if hazard.value == ABSENT and hazard.node not in seen:
            seen.add(hazard.node)
            yield from _factors(graph, graph.nodes[hazard.node])


def _factors(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Yield the nodes that compute constants of position arithmetic: a rounded rate turns large angles as well."""
    if node.key in op_facts().position_arithmetic:
        for value in graph.float_inputs(node):
            claims = counts_exactly(graph, node)
            yield from computing(graph, value, node, KIND, unless=claims)


def _hazards(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the arithmetic of positions and coordinates, some nodes several times."""
    counts = graph.ask(counted, low)
    states = graph.ask(accumulated_states, low).values
    for index in sorted(counts.computing):
        is_positional = states.keys().isdisjoint(graph.nodes[index].inputs)
        why = "computes positions" if is_positional else "works on accumulated state"
        yield _unless_exact(graph, index, why)
    positions = {value for value, mark in counts.marks.items() if mark & POSITION}
    coordinates = {
        value
        for value, mark in counts.marks.items()
        if mark & COUNTED and graph.types[value] in ANY_FLOAT_TENSORS
    }
    exact = [node for node in _sinks(graph) if _first(graph, node) in positions]
    yield from _leading_to(graph, exact, positions, _EXACT)
    turning = [node for node in exact if node.key in op_facts().periodic]
    yield from _terms(graph, turning, positions)
    ends = [node for node in _sinks(graph) if _needs(graph, counts, node, low)]
    yield from _leading_to(graph, ends, coordinates, _EXACT)
    large = {
        value
        for value in coordinates
        if counts.limits.get(value, 0.0) > low.exact_integers
    }
    sizes = [
        node
        for node in graph.at(counts.normalizing)
        if not large.isdisjoint(node.reads)
    ]
    distances = [
        node for node in graph.nodes_of({"Sub"}) if large.issuperset(node.inputs)
    ]
    yield from _leading_to(graph, distances, coordinates, _DISTANCE)
    inverses = {value for value, mark in counts.marks.items() if mark & INVERSE}
    yield from _leading_to(graph, sizes, coordinates | inverses, _SIZE)
    results = [value for value in graph.scopes[0].outputs if value in large]
    yield from _upstream(graph, results, coordinates, _RESULT)


def _terms(graph: Graph, ends: list[Node], positions: set[int]) -> Iterator[Hazard]:
    """Yield what computes the terms of running sums that are angles, back to the product that they come from.

    What rounds each term, such as a frequency of 200 by 0.06, turns the sum.

    Complexity: linear; each node is visited once.
    """
    facts = op_facts()
    steps = facts.position_arithmetic | facts.rounding | facts.elementwise
    sources = steps | facts.contractions
    read_by_ends = chain.from_iterable(end.inputs for end in ends)
    stack = [(graph.producer(value), False) for value in read_by_ends]
    seen = set[int]()
    while stack:
        node, is_term = stack.pop()
        if node is None or node.index in seen:
            continue
        if is_term and node.key not in sources:  # what it hands on is no term
            continue
        seen.add(node.index)
        if is_term:
            yield _unless_exact(graph, node.index, _TERM)
            if node.key in facts.contractions:
                continue
        adds = is_term or node.key in facts.running_sums
        read = graph.computed_inputs(node)
        values = read if adds else [value for value in read if value in positions]
        stack += [(graph.producer(value), adds) for value in values]


def _unless_exact(graph: Graph, index: int, why: str, value: int = ABSENT) -> Hazard:
    """Return the hazard of a node that is none if low precision holds all positions there, or the one of a port."""
    claims = counts_exactly(graph, graph.nodes[index], value)
    return Hazard(index, KIND, why, value=value, unless=claims)


def _sinks(graph: Graph) -> list[Node]:
    """Return the nodes whose results rounded positions would change."""
    return graph.nodes_of(op_facts().position_sinks)


def _first(graph: Graph, node: Node) -> int:
    """Return the first float that a node reads; ABSENT if there is none."""
    floats = (value for value in node.reads if graph.types[value] in FLOAT_TENSORS)
    return next(floats, ABSENT)


def _needs(graph: Graph, counts: Counted, node: Node, low: Format) -> bool:
    """Return whether a sink reads coordinates that low precision may not hold; angles need more digits than others."""
    facts = op_facts()
    read = (
        node.reads
        if graph.types[node.outputs[0]] == "tensor(bool)"
        else [_first(graph, node)]
    )
    limits = [
        counts.limits.get(value, 0.0)
        for value in read
        if counts.marks.get(value, 0) & COUNTED
    ]
    is_float = _first(graph, node) != ABSENT
    is_large = (
        node.key in facts.periodic or max(limits, default=0) > low.exact_integers
    )
    return is_float and bool(limits) and is_large


def _leading_to(
    graph: Graph, ends: list[Node], among: set[int], why: str
) -> Iterator[Hazard]:
    """Yield nodes that need exact numbers, and those that compute them."""
    for node in ends:
        # Sines and quotients are as precise as any number where what they are computed from is exact.
        claims = exact_reads(graph, node)
        yield Hazard(node.index, KIND, "works on positions", unless=claims)
    read = chain.from_iterable(node.inputs for node in ends)
    values = [value for value in read if value in among]
    yield from _upstream(graph, values, among, why)


def _upstream(
    graph: Graph, values: Iterable[int], among: set[int], why: str
) -> Iterator[Hazard]:
    """Yield the nodes that compute some values from positions, also in bodies.

    Complexity: linear; each value is visited once.
    """
    passed = graph.ask(passed_from)
    stack = list(values)
    seen = set(stack)
    visited = set[int]()
    while stack:
        value = stack.pop()
        sources = [*passed.get(value, ())]
        for source in sources:
            owner, port = passing_port(graph, source, value)
            yield _unless_exact(graph, owner, why, port)
        producer = graph.producer(value)
        if producer is not None and producer.index not in visited and not sources:
            visited.add(producer.index)
            yield _unless_exact(graph, producer.index, why)
            sources += producer.inputs
        fresh = {
            source for source in sources if source in among and source not in seen
        }
        seen |= fresh
        stack += sorted(fresh)


class _Positions(HazardKind):
    value = "position"
    title = "positions, or angles that grow with them"
    looks_at = ("position_sources", "position_sinks")
    fault = Fault(
        Effect.MISCOUNTS,
        "computes positions, or angles that grow with them, in LOW",
        ", which counts exactly up to {integers} only",
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return position_hazards(graph, low)

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        return is_rounded(graph, weight, low)


KIND: Final = _Positions()
