"""Exact minimum s-t cut over yes/no questions; independent of ONNX.

A question is *low* on the source's side of the cut and *high* on the sink's. An arc (u, v, c) costs c if u is low and v
is high. Questions that their own arcs settle are taken out first, which leaves little of most networks. What is left
goes to ``scipy.sparse.csgraph.maximum_flow`` if it is large, and to Dinic's algorithm if that takes less time than
importing scipy. Of all optimal cuts, each step finds the one with the fewest low questions (those that the source still
reaches in the residual graph), so results are deterministic and ties go to high.
"""

import sys
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType

import numpy as np

from onnxamp._base.errors import InternalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Question = NewType("Question", int)
"""The number of a question, LOW or HIGH: a type of its own, so that no number of a node or value is taken for one."""

LOW: Final = Question(-2)
"""A question that is settled: low."""
HIGH: Final = Question(-1)
"""A question that is settled: high."""

INFINITE: Final = -1
"""Capacity of an arc that must not be cut."""

# Question q is vertex q + 2, so that settled questions are the two poles.
_SOURCE = LOW + 2
_SINK = HIGH + 2
_INT32_MAX = 2**31 - 1
_SMALL = 16_384
"""Arcs up to which solving in Python takes less time than importing scipy."""
_ROUNDS = 32
"""Rounds after which no more questions are taken out: a chain in which each settles the next needs one for each."""
_EXACT = 1 << 22
"""Arcs up to which 64-bit floats hold sums of capacities, which are less than 2**31, exactly."""
_PHASES = 32
"""Phases after which Dinic's algorithm gives up if scipy is installed; most problems need fewer than ten."""


class Network:
    """Questions, numbered from 0, and the arcs between them: tail, head and capacity of each."""

    def __init__(
        self, size: int = 0, arcs: Iterable[tuple[int, int, int]] = ()
    ) -> None:
        self.size = size
        self._arcs = list(arcs)

    def add(self, count: int = 1) -> Question:
        """Add questions, and return the first."""
        first = Question(self.size)
        self.size = self.size + count
        return first

    def copy(self) -> "Network":
        """Return an independent copy."""
        return Network(self.size, self._arcs)

    def arc(self, low: Question, high: Question, cost: int) -> None:
        """Charge ``cost`` (or INFINITE) if ``low`` is low and ``high`` is high; either may be LOW or HIGH.

        An arc between settled sides adds the same cost to every cut, so it is left out.
        """
        is_paid_never = low in (high, HIGH) or high == LOW
        is_paid_always = low == LOW and high == HIGH
        if cost and not is_paid_never and not is_paid_always:
            self._arcs.append((low + 2, high + 2, cost))

    def pin_low(self, question: Question) -> None:
        """Require that the question is low."""
        self.charge_high(question, INFINITE)

    def pin_high(self, question: Question) -> None:
        """Require that the question is high."""
        self.charge_low(question, INFINITE)

    def imply(self, low: Question, other: Question) -> None:
        """Require that ``other`` is low if ``low`` is, and thus that ``low`` is high if ``other`` is."""
        self.arc(low, other, INFINITE)

    def differ(self, one: Question, other: Question, cost: int) -> None:
        """Charge ``cost`` if one question is low and the other is high."""
        self.arc(one, other, cost)
        self.arc(other, one, cost)

    def charge_low(self, question: Question, cost: int) -> None:
        """Charge ``cost`` if the question is low; INFINITE pins it to high."""
        if cost:
            self._arcs.append((question + 2, _SINK, cost))

    def charge_high(self, question: Question, cost: int) -> None:
        """Charge ``cost`` if the question is high; INFINITE pins it to low."""
        if cost:
            self._arcs.append((_SOURCE, question + 2, cost))

    def solve(self, small: int = _SMALL) -> "Cut":
        """Find the cheapest cut.

        scipy's capacities are int32, and its sparse matrix would sum parallel arcs and overflow silently. Parallel arcs
        are therefore combined first (finite ones summed, infinite ones saturated). If the finite costs still do not
        fit, all are scaled down, each to at least 1.

        Args:
            small: number of arcs up to which Dinic's algorithm is tried first, as long as nothing has loaded scipy.

        Raises:
            InternalError: infinite arcs lead from a question pinned low to one pinned high.

        Complexity: O(arcs) memory; the flow of a 50,000-node graph takes about 0.2 s.
        """
        low = np.zeros(self.size, dtype=bool)
        if not any(tail == _SOURCE for tail, _, _ in self._arcs):
            return Cut(low, 0)
        tails, heads, costs, infinite = self._combined()
        costs = _scaled(costs)
        total = int(costs.sum())
        # More than all finite costs together is as good as infinite, and shows below that a cut had to pay it.
        capacities = np.where(infinite, total + 1, costs).astype(np.int32)
        rest = _reduced(self.size + 2, tails, heads, capacities, total + 1)
        flow, side = _solved(rest, total + 1, small)
        flow += rest.flow
        reached = np.concatenate((rest.low, rest.vertices[side]))
        if flow > total:
            raise InternalError(
                "The precision problem has no solution: one pin requires low precision, another float32."
            )
        low[reached[reached >= 2] - 2] = True
        return Cut(low, flow)

    def _combined(
        self,
    ) -> "tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]":
        """Return tails, heads, finite costs and which arcs are infinite, with parallel arcs combined."""
        tails, heads, costs = (
            np.fromiter(chain.from_iterable(self._arcs), np.int64).reshape(-1, 3).T
        )
        keys, inverse = _distinct(tails * (self.size + 2) + heads)
        summed = np.zeros(len(keys), np.int64)
        np.add.at(summed, inverse, np.maximum(costs, 0))
        infinite = np.zeros(len(keys), bool)
        infinite[inverse[costs == INFINITE]] = True
        return (
            keys // (self.size + 2),
            keys % (self.size + 2),
            np.where(infinite, 0, summed),
            infinite,
        )


def _scaled(costs: "NDArray[Any]") -> "NDArray[Any]":
    """Return costs whose sum is an int32: as they are, or scaled down, each to at least 1.

    Raises:
        InternalError: there are too many.
    """
    total = int(costs.sum())
    if total < _INT32_MAX:
        return costs
    # Half of the range, because rounding small costs up to 1 adds to the total.
    scale = (_INT32_MAX // 2) / total
    scaled = np.maximum(1, (costs * scale).astype(np.int64))
    scaled = np.where(costs > 0, scaled, 0)
    if int(scaled.sum()) >= _INT32_MAX:
        raise InternalError(
            f"A network of {len(costs)} arcs is too large for int32 capacities."
        )
    return scaled


class Cut(NamedTuple):
    """An optimal cut: whether each question is low, and the cost (scaled if the costs were)."""

    low: "NDArray[np.bool_]"
    cost: int


class _Rest(NamedTuple):
    """What is left of a network once vertices are merged with the source or the sink.

    Attributes:
        vertices: the vertices that are left, the source and the sink first; arcs have their positions here.
        tails, heads, capacities: the arcs that are left, without parallel ones.
        low: vertices that are merged with the source.
        flow: the capacity of what was between the source and the sink.
    """

    vertices: "NDArray[Any]"
    tails: "NDArray[Any]"
    heads: "NDArray[Any]"
    capacities: "NDArray[Any]"
    low: "NDArray[Any]"
    flow: int

    @property
    def size(self) -> int:
        """Number of vertices."""
        return len(self.vertices)


def _reduced(
    size: int,
    tails: "NDArray[Any]",
    heads: "NDArray[Any]",
    capacities: "NDArray[Any]",
    infinite: int,
) -> _Rest:
    """Merge vertices with the source or the sink that are on its side in the optimal cut with the fewest low questions.

    A vertex that gets more from the source alone than it can pass on is on the source's side of every optimal cut: to
    change sides costs less than what it saves. One that can pass on to the sink alone all that it gets is on the sink's
    side of the optimal cut with the fewest low questions: without it, another cut would cost no more.

    Complexity: linear in arcs, for each round.
    """
    sides = np.arange(size)
    costs = capacities.astype(np.int64)
    flow = 0
    for _ in range(_ROUNDS if len(tails) <= _EXACT else 0):
        direct = (tails == _SOURCE) & (heads == _SINK)
        flow += int(costs[direct].sum())
        is_open = ~direct & (tails != heads) & (tails != _SINK) & (heads != _SOURCE)
        tails, heads, costs = tails[is_open], heads[is_open], costs[is_open]
        given = np.bincount(heads, costs * (tails == _SOURCE), size)
        out_of = np.bincount(tails, costs * (heads == _SINK), size)
        into = np.bincount(heads, costs, size)
        onward = np.bincount(tails, costs, size)
        has_arcs = (into > 0) | (onward > 0)
        to_source = has_arcs & (given > onward)
        to_sink = has_arcs & ~to_source & (out_of >= into)
        to_source[[_SOURCE, _SINK]] = to_sink[[_SOURCE, _SINK]] = False
        if not (to_source.any() or to_sink.any()):
            break
        merged = np.arange(size)
        merged[to_source] = _SOURCE
        merged[to_sink] = _SINK
        sides, tails, heads = merged[sides], merged[tails], merged[heads]
    # Merging makes parallel arcs. Two infinite ones are no more than one, and must fit into an int32.
    keys, inverse = _distinct(tails * size + heads)
    summed = np.zeros(len(keys), np.int64)
    np.add.at(summed, inverse, costs)
    vertices, _ = _distinct(
        np.concatenate(([_SOURCE, _SINK], keys // size, keys % size))
    )
    return _Rest(
        vertices=vertices,
        tails=np.searchsorted(vertices, keys // size),
        heads=np.searchsorted(vertices, keys % size),
        capacities=np.minimum(summed, infinite).astype(np.int32),
        low=np.flatnonzero(sides == _SOURCE),
        flow=flow,
    )


def _distinct(numbers: "NDArray[Any]") -> "tuple[NDArray[Any], NDArray[Any]]":
    """Return the different numbers of an array in order, and the place of each number among them.

    ``numpy.unique`` would load masked arrays, which takes longer than all cuts of a small model.
    """
    order = np.argsort(numbers)
    ranked = numbers[order]
    is_first = np.ones(len(ranked), bool)
    is_first[1:] = ranked[1:] != ranked[:-1]
    places = np.empty(len(ranked), np.int64)
    places[order] = np.cumsum(is_first) - 1
    return ranked[is_first], places


def _solved(rest: _Rest, infinite: int, small: int) -> "tuple[int, NDArray[Any]]":
    """Return the value of the flow, and the vertices that the source reaches in the residual graph.

    Args:
        rest: the network.
        infinite: capacity of the arcs that must not be cut.
        small: number of arcs up to which Dinic's algorithm is tried first.
    """
    has_scipy = find_spec("scipy") is not None
    # Dinic's algorithm only saves the import of scipy: once that is done, scipy solves all sizes.
    is_small = len(rest.capacities) <= small and "scipy.sparse" not in sys.modules
    if is_small or not has_scipy:
        # Each phase makes the shortest path longer, so without scipy, one per vertex is enough to end.
        phases = _PHASES if has_scipy else rest.size
        arguments = rest.size, rest.tails, rest.heads, rest.capacities
        solution = _dinic(*arguments, infinite, phases)
        if solution is not None:
            return solution
    return _maximum_flow(rest.size, rest.tails, rest.heads, rest.capacities)


def _maximum_flow(
    size: int, tails: "NDArray[Any]", heads: "NDArray[Any]", capacities: "NDArray[Any]"
) -> "tuple[int, NDArray[Any]]":
    """Return the value of the flow, and the vertices that the source reaches in the residual graph."""
    from scipy.sparse import csr_array  # noqa: PLC0415 - importing scipy costs 0.3 s
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow  # noqa: PLC0415

    graph = csr_array(
        (capacities, (tails.astype(np.int32), heads.astype(np.int32))),
        shape=(size, size),
    )
    result = maximum_flow(graph, _SOURCE, _SINK)
    residual = csr_array(graph.astype(np.int64) - result.flow.astype(np.int64))
    residual.eliminate_zeros()
    reached = breadth_first_order(
        residual, _SOURCE, directed=True, return_predecessors=False
    )
    return int(result.flow_value), np.asarray(reached)


def _dinic(
    size: int,
    tails: "NDArray[Any]",
    heads: "NDArray[Any]",
    capacities: "NDArray[Any]",
    infinite: int,
    phases: int,
) -> "tuple[int, NDArray[Any]] | None":
    """Return the same as :func:`_maximum_flow`, by augmenting along shortest paths (E. A. Dinic, 1970).

    The result is None if that needs more phases.

    Vertices that arcs of ``infinite`` capacity join to the source or the sink are merged with it.
    """
    joins = capacities == infinite
    pinned = _pinned(zip(tails[joins].tolist(), heads[joins].tolist(), strict=True))
    merged = np.arange(size)
    merged[list(pinned)] = list(pinned.values())
    residual = _Residual(size, merged[tails], merged[heads], capacities)
    flow = 0
    for _ in range(phases):
        levels = residual.levels()
        if levels[_SINK] < 0:
            low = [vertex for vertex, side in pinned.items() if side == _SOURCE]
            low += [vertex for vertex in range(size) if levels[vertex] >= 0]
            return flow, np.asarray(low)
        flow += residual.push(levels)
    return None


class _Residual:
    """The capacities that a flow leaves.

    Attributes:
        arcs: vertex -> the arcs that begin there.
        ends: arc -> the vertex where it ends.
        left: arc -> its capacity that is left.
    """

    def __init__(
        self,
        size: int,
        tails: "NDArray[Any]",
        heads: "NDArray[Any]",
        capacities: "NDArray[Any]",
    ) -> None:
        self.arcs: list[list[int]] = [[] for _ in range(size)]
        self.ends = list[int]()
        self.left = list[int]()
        is_open = (tails != heads) & (tails != _SINK) & (heads != _SOURCE)
        columns = (column[is_open].tolist() for column in (tails, heads, capacities))
        # Arc 2k and its reverse 2k + 1 are neighbors, so that arc ^ 1 is the reverse of either.
        for tail, head, capacity in zip(*columns, strict=True):
            self.arcs[tail].append(len(self.ends))
            self.arcs[head].append(len(self.ends) + 1)
            self.ends += (head, tail)
            self.left += (capacity, 0)

    def levels(self) -> list[int]:
        """Return the distance of each vertex from the source, -1 if there is no path."""
        arcs, ends, left = self.arcs, self.ends, self.left
        levels = [-1] * len(arcs)
        levels[_SOURCE] = 0
        frontier = [_SOURCE]
        while frontier:
            further = []
            for vertex in frontier:
                for arc in arcs[vertex]:
                    if left[arc] and levels[ends[arc]] < 0:
                        levels[ends[arc]] = levels[vertex] + 1
                        further.append(ends[arc])
            frontier = further
        return levels

    def push(self, levels: list[int]) -> int:
        """Push flow along shortest paths until each of them has a full arc, and return how much. Levels are used up."""
        ends, left = self.ends, self.left
        untried = [iter(outgoing) for outgoing in self.arcs]
        flow = 0
        path: list[int] = []
        vertex = _SOURCE
        while True:
            if vertex == _SINK:
                pushed = min(left[arc] for arc in path)
                flow += pushed
                for arc in path:
                    left[arc] -= pushed
                    left[arc ^ 1] += pushed
                # The path goes on from the tail of its first arc that is now full.
                cut = next(number for number, arc in enumerate(path) if not left[arc])
                vertex = ends[path[cut] ^ 1]
                del path[cut:]
            deeper = levels[vertex] + 1
            for arc in untried[vertex]:
                if left[arc] and levels[ends[arc]] == deeper:
                    path.append(arc)
                    vertex = ends[arc]
                    break
            else:
                if not path:
                    return flow
                levels[vertex] = -2  # a dead end
                vertex = ends[path.pop() ^ 1]


def _pinned(joins: "Iterable[tuple[int, int]]") -> dict[int, int]:
    """Return vertex -> the source or the sink, if arcs of infinite capacity join them."""
    onward: dict[int, list[int]] = {}
    back: dict[int, list[int]] = {}
    for tail, head in joins:
        onward.setdefault(tail, []).append(head)
        back.setdefault(head, []).append(tail)
    pinned = {_SOURCE: _SOURCE, _SINK: _SINK}
    for side, joined in ((_SOURCE, onward), (_SINK, back)):
        stack = [side]
        while stack:
            for vertex in joined.get(stack.pop(), ()):
                if vertex not in pinned:
                    pinned[vertex] = side
                    stack.append(vertex)
    return pinned
