"""Counters: states of loops to which every turn adds something.

The bound of a counter grows with every turn, so that no fixed point bounds it. The number of turns does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.bounds.bound import Bound, between, contains, hull, times
from onnxamp._graph.determined import constant_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node

_NOTHING: Final = between(0.0, 0.0)

_CASTS: Final = frozenset({"Cast", "CastLike"})

_REACH: Final = 64
"""Values upstream of a state that are visited. A counter has a handful; a residual stream has hundreds."""


class Increment(NamedTuple):
    """What one turn adds to each element of a state.

    Attributes:
        total: the bound of the sum of all that is added.
        reach: the bound of any part of that sum, as intermediate results hold it.
        steps: how many values are computed on the way, each of which may be rounded.
    """

    total: Bound
    reach: Bound
    steps: int

    def is_within(self, other: "Increment") -> bool:
        """Return whether another increment allows for this one."""
        return contains(other.total, self.total) and contains(other.reach, self.reach)


class Counter(NamedTuple):
    """A state to which each turn of a loop adds something.

    Attributes:
        added: what a turn adds.
        during: the bound before any turn.
        end: the bound after the last turn.
    """

    added: Increment
    during: Bound
    end: Bound


def most_turns(graph: Graph, loop: Node, count: Bound) -> float:
    """Return how many turns a Loop or Scan takes at most; infinity if that is unknown.

    Args:
        graph: the graph.
        loop: the node.
        count: the bound of its first input, which limits the turns of a Loop.
    """
    known = constant_trips(graph, loop)
    if known is not None:
        return float(max(known, 0))
    is_limited = loop.key == "Loop" and loop.input(0) != ABSENT
    return max(count.high, 0.0) if is_limited else inf


def increment(
    graph: Graph, state: int, following: int, bounds: Callable[[int], Bound]
) -> Increment | None:
    """Return what a turn adds to a state; None if it does more than add.

    Args:
        graph: the graph.
        state: the state before a turn.
        following: the state after it.
        bounds: returns the bound of a value.
    """
    added = {state: _NOTHING}
    parts = [_NOTHING]
    for value in _upstream(graph, state, following):
        part = _added(graph, value, added, bounds)
        if part is not None:
            added[value] = part
            parts.append(part)
    total = added.get(following)
    return (
        None if total is None else Increment(total, hull(parts).bare, len(parts) - 1)
    )


def _upstream(graph: Graph, state: int, following: int) -> list[int]:
    """Return values from which a state follows by sums and moves, each after those that it is computed from.

    There are none if they are too many for a counter.
    """
    values = list[int]()
    seen = {state}
    stack = [(following, False)]
    while stack:
        value, is_done = stack.pop()
        if is_done:
            values.append(value)
            continue
        if value in seen or value == ABSENT:
            continue
        seen.add(value)
        if len(seen) > _REACH:
            return []
        stack.append((value, True))
        stack += [(source, False) for source in _sources(graph, value)]
    return values


def _sources(graph: Graph, value: int) -> Sequence[int]:
    """Return the values of which a value is the sum, or from which its elements are moved."""
    maker = graph.producer(value)
    if maker is None:
        return ()
    if maker.key == "If":
        port = maker.outputs.index(value)
        scopes = [graph.scopes[body] for _, body in maker.bodies]
        return [scope.outputs[port] for scope in scopes]
    facts = op_facts()
    if maker.key in facts.adds and maker.key in facts.elementwise:
        return maker.reads
    if maker.key not in facts.moves_data | _CASTS:
        return ()
    return maker.inputs_at(facts.moved_inputs.get(maker.key, (0,)))


def _added(
    graph: Graph, value: int, added: dict[int, Bound], bounds: Callable[[int], Bound]
) -> Bound | None:
    """Return what a value is more than the state; None if it is not the state with something added."""
    maker = graph.producer(value)
    sources = _sources(graph, value)
    held = [source for source in sources if source in added]
    if maker is None or not held:
        return None
    if maker.key in op_facts().adds:
        is_difference = maker.key == "Sub"
        if len(held) > 1 or (is_difference and maker.inputs[0] not in added):
            return None
        terms = [bounds(source).bare for source in sources if source not in added]
        total = added[held[0]]
        for term in terms:
            total += -term if is_difference else term
        return total.bare
    # A Cast to integers cuts off digits.
    kinds = {graph.types[one] for one in (*sources, value)}
    is_kept = len(held) == len(sources)
    is_kept = is_kept and (len(kinds) == 1 or kinds <= ANY_FLOAT_TENSORS)
    return hull([added[source] for source in sources]).bare if is_kept else None


def after_turns(start: Bound, added: Bound, turns: float) -> Bound:
    """Return the bound of a state after at most this many turns, each of which adds something."""
    return Bound(
        low=start.low + times(turns, min(added.low, 0.0)),
        high=start.high + times(turns, max(added.high, 0.0)),
        step=min(start.step, added.step),
    )


def widened(added: Bound, by: float) -> Bound:
    """Return the bound of what is added if it may be off by so much."""
    return replace(added.unstepped, low=added.low - by, high=added.high + by)
