"""Where integers that count come from, and positions that may be computed from them."""

from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final

import numpy as np

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.determined import constant_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.loops.accumulation import accumulated_states
from onnxamp._graph.loops.count_limits import CountLimits
from onnxamp._graph.loops.count_marks import COUNTED, COUNTER, POSITION, CountMark
from onnxamp._graph.numbers.index_paths import INTEGERS

_FEW: Final = 16
"""Most different integers of a stored list that counts nothing. float16 holds their sums to 1/128."""

_MOST: Final = 1 << 22
"""Most numbers of such a list: one for each pixel of a large image."""


def count_sources(
    graph: Graph, low: Format, limits: CountLimits
) -> Iterator[CountMark]:
    """Yield the sources of integers and of possible positions, apart from ops that count positions themselves."""
    return chain(
        (CountMark(value, POSITION) for value in graph.given_floats),
        (CountMark(one, COUNTED, limits.reach(one)) for one in _listed(graph)),
        _counters(graph, limits),
        _cast_integers(graph),
        _turns(graph),
        _states(graph, low),
    )


def _listed(graph: Graph) -> Iterator[int]:
    """Yield constants that list many integers, such as the columns of a grid, where arithmetic reads them."""
    facts = op_facts()
    reading = (facts.adds.keys() | facts.multiplies.keys()) - facts.contractions
    for value, stats in graph.constants.floats().items():
        if stats is None or stats.uniform is not None or stats.largest < _FEW:
            continue
        is_read = any(graph.nodes[at].key in reading for at, _ in graph.uses[value])
        if is_read and _is_list(graph, value):
            yield value


def _is_list(graph: Graph, value: int) -> bool:
    """Return whether a constant holds many different integers, or halves, as grids of centers do, and no others."""
    numbers = graph.constants.numbers(value, most=_MOST)
    if numbers is None:
        return False
    # Masks hold the lowest number of the type. Its double is infinite, which is a whole number here as well.
    with np.errstate(over="ignore"):
        doubled = 2 * numbers.reshape(-1)
    # Nearly all constants end at the first numbers.
    for some in (doubled[: 2 * _FEW], doubled):
        if not np.array_equal(some, np.round(some)):
            return False
    return len(set(doubled.tolist())) > _FEW


def _counters(graph: Graph, limits: CountLimits) -> Iterator[CountMark]:
    """Yield the results of ops that count."""
    facts = op_facts()
    for node in graph.nodes_of(facts.counts.keys() - facts.position_sources):
        for count in facts.counts[node.key]:
            value = node.output(count.output)
            yield CountMark(value, COUNTED, limits.of_count(node, count))


def _cast_integers(graph: Graph) -> Iterator[CountMark]:
    """Yield the results of Casts from integers of more than 8 bits, which low precision cannot hold."""
    for node in graph.nodes_of({"Cast"}):
        if node.inputs and graph.types[node.input(0)] in INTEGERS:
            yield CountMark(node.outputs[0], POSITION)


def _turns(graph: Graph) -> Iterator[CountMark]:
    """Yield the numbers of turns that Loops pass to their bodies."""
    for node in graph.nodes_of({"Loop"}):
        for _, body in node.bodies:
            trips = constant_trips(graph, node)
            limit = inf if trips is None else trips
            for turn in graph.scopes[body].inputs[:1]:
                yield CountMark(turn, COUNTED, limit)


def _states(graph: Graph, low: Format) -> Iterator[CountMark]:
    """Yield what loops accumulate."""
    states = graph.ask(accumulated_states, low)
    for value in states.values:
        is_float = graph.types[value] in ANY_FLOAT_TENSORS
        is_open = is_float and value in states.open_ended
        yield CountMark(value, COUNTER if is_open else COUNTED, inf)
