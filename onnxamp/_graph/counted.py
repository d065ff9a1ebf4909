"""Integers that count, and the coordinates and angles computed from them: where they spread, and how large they get.

Every value gets flags, which only ever grow, and a limit:

* *position*: position arithmetic computes it from counters, Casts from integers and graph inputs, and constants alone.
* *counting*: a position from Range, CumSum, or what a loop accumulates.
* *counted*: at least one of its terms or factors is an integer that grows with a size, whatever the others are.
* *inverse*: a constant divided by such an integer.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf, prod
from typing import Final, NamedTuple

import numpy as np

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT_TENSORS, Format
from onnxamp._facts.ops import Count, attribute, op_facts
from onnxamp._graph.accumulation import accumulated, passed_inputs
from onnxamp._graph.determined import constant_trips
from onnxamp._graph.fading import clip_bounds
from onnxamp._graph.graph import Graph
from onnxamp._graph.index_paths import INTEGERS
from onnxamp._graph.known import is_fixed
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node, Origin, passages, passed_from

POSITION: Final = 1
COUNTING: Final = 2
COUNTED: Final = 4
INVERSE: Final = 8
"""The flags of a value; see the module. Plain integers, because large models have many."""

_COUNTER: Final = POSITION | COUNTING | COUNTED
_FEW: Final = 16
"""Most different integers of a stored list that counts nothing. float16 holds their sums to 1/128."""

_MOST: Final = 1 << 22
"""Most numbers of such a list: one for each pixel of a large image."""


class Counted(NamedTuple):
    """The marks of values.

    Attributes:
        marks: value -> its flags.
        limits: counted value -> the largest magnitude of its integers.
        computing: nodes that compute positions from counters.
        normalizing: nodes that divide coordinates by a size, which ends them.
    """

    marks: dict[int, int]
    limits: dict[int, float]
    computing: set[int]
    normalizing: set[int]


def counted(graph: Graph, low: Format) -> Counted:
    """Return the marks of a graph.

    Complexity: near linear in the nodes downstream of sources, which are visited in their order, and again only where a
    loop brings marks back.
    """
    return _Spread(graph, low).run()


class _Spread:
    """Spreads marks from values to the values computed from them, also through control flow."""

    def __init__(self, graph: Graph, low: Format) -> None:
        self.graph = graph
        self.low = low
        self.found = Counted({}, {}, set(), set())
        self.passed_from = graph.ask(passed_from)
        self.leaving: dict[int, list[int]] = {}
        for _, source, result in passages(graph):
            self.leaving.setdefault(source, []).append(result)
        self.ranks = [0] * len(graph.nodes)
        """Node -> its place in the order in which nodes run."""
        for rank, node in enumerate(graph.order):
            self.ranks[node.index] = rank
        self.pending: list[tuple[int, int]] = []
        """Ranks of nodes that must be visited, with the nodes: a heap."""
        self.waiting = set[int]()

    def run(self) -> Counted:
        """Return the marks."""
        for value, mark, limit in self.sources():
            self.add(value, mark, limit)
        for node in self.graph.nodes_of(op_facts().position_sources):
            self.wait_for(node.index)
        # In the order in which nodes run, so that a node is visited again only where a loop brings marks back.
        while self.pending:
            _, index = heappop(self.pending)
            self.waiting.discard(index)
            self.visit(self.graph.nodes[index])
        return self.found

    def add(self, value: int, mark: int, limit: float = 0.0) -> None:
        """Add to the marks of a value. A limit that a loop raises has no end."""
        marks, limits = self.found.marks, self.found.limits
        stack = [(value, mark, limit)]
        while stack:
            value, mark, limit = stack.pop()
            old = marks.get(value, 0)
            known = limits.get(value, 0.0)
            if value == ABSENT or (old | mark == old and limit <= known):
                continue
            if limit > known:
                # The limit of a loop's state would rise with every visit, and the walk would never end.
                is_raised = known and self.graph.values[value].origin is Origin.INPUT
                limits[value] = inf if is_raised else limit
            marks[value] = old | mark
            for index, _ in self.graph.uses[value]:
                self.wait_for(index)
            stack += [self.passed_on(result) for result in self.leaving.get(value, ())]

    def wait_for(self, index: int) -> None:
        """Queue a node for a visit, after the nodes that run before it."""
        if index not in self.waiting:
            self.waiting.add(index)
            heappush(self.pending, (self.ranks[index], index))

    def mark(self, value: int) -> int:
        """Return the marks of a value so far."""
        return self.found.marks.get(value, 0)

    def sources(self) -> Iterator[tuple[int, int, float]]:
        """Yield (value, marks, limit) for the sources of integers and of possible positions."""
        graph, facts = self.graph, op_facts()
        for value in graph.scopes[0].inputs:
            is_given = graph.values[value].origin in (Origin.INPUT, Origin.DEFAULT)
            if is_given and graph.types[value] in FLOAT_TENSORS:
                yield value, POSITION, 0.0
        for value in self.stored():
            yield value, COUNTED, self.reach(value)
        for node in graph.nodes_of(facts.counts.keys() - facts.position_sources):
            for count in facts.counts[node.key]:
                value = node.output(count.output)
                yield value, COUNTED, self.limit_of(node, count)
        for node in graph.nodes_of({"Cast"}):
            if node.inputs and self.is_integer(node.input(0)):
                yield node.outputs[0], POSITION, 0.0
        for node in graph.nodes_of({"Loop"}):
            for _, body in node.bodies:
                trips = constant_trips(graph, node)
                turn = graph.scopes[body].inputs[:1]
                yield from (
                    (one, COUNTED, inf if trips is None else trips) for one in turn
                )
        states = graph.ask(accumulated, self.low)
        for value in states.values:
            is_float = graph.types[value] in ANY_FLOAT_TENSORS
            is_open = is_float and value in states.open_ended
            yield value, _COUNTER if is_open else COUNTED, inf

    def stored(self) -> Iterator[int]:
        """Yield constants that list many integers, such as the columns of a grid, where arithmetic reads them."""
        graph, facts = self.graph, op_facts()
        reading = (facts.adds.keys() | facts.multiplies.keys()) - facts.contractions
        for value, stats in graph.constants.floats().items():
            if stats is None or stats.uniform is not None or stats.largest < _FEW:
                continue
            is_read = any(
                graph.nodes[at].key in reading for at, _ in graph.uses[value]
            )
            if is_read and self.is_list(value):
                yield value

    def is_list(self, value: int) -> bool:
        """Return whether a constant holds many different integers, or halves, as grids of centers do, and no others."""
        numbers = self.graph.constants.numbers(value)
        if numbers is None or numbers.size > _MOST:
            return False
        # Masks hold the lowest number of the type. Its double is infinite, which is a whole number here as well.
        with np.errstate(over="ignore"):
            doubled = 2 * numbers.reshape(-1)
        # Nearly all constants end at the first numbers.
        for some in (doubled[: 2 * _FEW], doubled):
            if not np.array_equal(some, np.round(some)):
                return False
        return len(np.unique(doubled)) > _FEW

    def is_integer(self, value: int) -> bool:
        """Return whether a value holds integers of more than 8 bits, which low precision cannot hold."""
        return self.graph.types[value] in INTEGERS

    def limit_of(self, node: Node, count: Count) -> float:
        """Return the largest magnitude that the integers of an op that counts may reach."""
        graph = self.graph
        if count.up_to == "limits":
            return max((self.reach(value) for value in node.reads[:2]), default=inf)
        sizes = graph.shapes[node.input(0)]
        if not count.up_to or sizes is None:
            return inf
        if count.up_to == "axis":
            axis = attribute(node.proto, "axis")
            axis = count.default if axis is None else int(axis)
            sizes = sizes[axis : axis + 1 or None]
        numbers = [inf if size is None else float(size) for size in sizes]
        if count.up_to == "elements":
            return prod(numbers)
        return max(numbers, default=1.0)

    def reach(self, value: int) -> float:
        """Return the largest magnitude of integers, or of a constant."""
        constants = self.graph.constants
        if constants.is_constant(value):
            stats = constants.stats(value)
            if stats is not None:
                return abs(stats.largest_number)
            integers = constants.integers(value) if self.is_integer(value) else None
            if integers is None:
                return inf
            return float(max(map(abs, integers), default=0))
        return self.found.limits.get(value, inf)

    def passed_on(self, result: int) -> tuple[int, int, float]:
        """Return the marks and the limit that control flow passes on to a value: a position only if all sources are."""
        sources = [source for _, source in self.passed_from[result]]
        marks = [self.mark(source) for source in sources]
        mark = 0
        if all(one & POSITION for one in marks):
            mark |= POSITION
            if any(one & COUNTING for one in marks):
                mark |= COUNTING
        if any(one & COUNTED for one in marks):
            mark |= COUNTED
        limits = [self.found.limits.get(source, 0.0) for source in sources]
        return result, mark, max(limits)

    def visit(self, node: Node) -> None:
        """Mark the results of a node."""
        facts = op_facts()
        if node.key in facts.control_flow or not node.writes:
            return
        if node.key in facts.position_sources:
            self.count(node)
            return
        mark, limit = self.counted_by(node)
        mark |= self.position_by(node) | self.inverse_by(node)
        if mark & COUNTING and node.key not in facts.rounding:
            self.found.computing.add(node.index)
        # Divided by a size, a coordinate no longer grows with it.
        if node.index in self.found.normalizing:
            mark &= POSITION
            limit = 0.0
        for value in node.writes if mark else ():
            self.add(value, mark, limit)

    def count(self, node: Node) -> None:
        """Mark the results of a counter; its end may be a size."""
        for count in op_facts().counts[node.key]:
            value = node.output(count.output)
            is_float = self.graph.types[value] in ANY_FLOAT_TENSORS
            mark = _COUNTER if is_float else COUNTED
            self.add(value, mark, self.limit_of(node, count))

    def position_by(self, node: Node) -> int:
        """Return the marks of results that a node computes from positions and constants alone."""
        facts = op_facts()
        graph = self.graph
        given = [value for value in node.reads if graph.types[value] in FLOAT_TENSORS]
        if node.key == "Cast" and node.reads and self.is_integer(node.reads[0]):
            return POSITION
        if not given:
            return 0
        if node.key in facts.position_sinks and self.mark(given[0]) & POSITION:
            is_rounding = node.key in facts.rounding
            return POSITION | COUNTING if is_rounding else 0
        marks = [self.mark(value) for value in given]
        is_pure = node.key in facts.position_arithmetic and all(
            mark & POSITION or is_fixed(graph, value)
            for value, mark in zip(given, marks, strict=True)
        )
        if not is_pure:
            return 0
        mark = 0
        if any(one & POSITION for one in marks):
            mark |= POSITION
        if any(one & COUNTING for one in marks):
            mark |= COUNTING
        return mark

    def inverse_by(self, node: Node) -> int:
        """Return whether a node divides a constant by an integer that counts, or moves such a quotient."""
        facts = op_facts()
        if node.key in facts.carriers:
            return self.mark(node.input(0)) & INVERSE
        if node.key not in facts.divisors.keys() & facts.norm_arithmetic:
            return 0
        divisor = node.input(facts.divisors[node.key][0])
        others = [value for value in node.reads if value != divisor]
        is_fixed = all(self.graph.constants.is_constant(value) for value in others)
        is_float = self.graph.types[divisor] in ANY_FLOAT_TENSORS
        is_inverse = is_fixed and is_float and self.mark(divisor) & COUNTED
        return INVERSE if is_inverse else 0

    def counted_by(self, node: Node) -> tuple[int, float]:
        """Return whether a node makes coordinates of counted integers, and their limit."""
        facts = op_facts()
        keys = facts.coordinate_arithmetic, facts.moved_inputs
        if not any(node.key in some for some in keys):
            return 0, 0.0
        read = self.carried_by(node)
        sources = [value for value in read if self.mark(value) & COUNTED]
        if not sources:
            return 0, 0.0
        if node.key in facts.divisors:
            return self.divided(node)
        return COUNTED, self.limit_from(node, sources)

    def limit_from(self, node: Node, sources: Sequence[int]) -> float:
        """Return the largest magnitude of the results of coordinate arithmetic on these integers."""
        facts = op_facts()
        own = [self.found.limits.get(value, 0.0) for value in sources]
        others = [value for value in node.reads if value not in sources]
        if node.key in facts.moved_inputs:
            return self.picked(node, max(own))
        if node.key in facts.reduces_axes and node.index not in self.graph.exact:
            return inf
        if node.key in facts.rounding and len(node.reads) > 1:
            return min(max(own), self.reach(node.reads[1]))
        if node.key in facts.multiplies:
            if any(self.mark(value) & INVERSE for value in others):
                self.found.normalizing.add(node.index)
            return prod((*own, *(self.reach(value) or 1.0 for value in others)))
        if node.key in facts.adds:
            is_constant = self.graph.constants.is_constant
            return sum(
                (*own, *(self.reach(value) for value in others if is_constant(value)))
            )
        bounds = [
            bound for bound in clip_bounds(self.graph, node) if bound is not None
        ]
        return min(max(own), max(map(abs, bounds))) if len(bounds) > 1 else max(own)

    def divided(self, node: Node) -> tuple[int, float]:
        """Return the marks of a quotient; coordinates end where they are divided by a size."""
        largest = self.found.limits.get(node.input(0), 0.0)
        divisor = node.input(1)
        if not self.mark(node.input(0)) & COUNTED:
            return 0, 0.0
        if self.mark(divisor) & COUNTED:
            is_float = self.graph.types[divisor] in ANY_FLOAT_TENSORS
            if is_float:
                self.found.normalizing.add(node.index)
            return COUNTED, largest
        number = self.graph.constants.uniform(divisor)
        return COUNTED, largest / max(abs(number or 1.0), 1e-30)

    def carried_by(self, node: Node) -> Sequence[int]:
        """Return the inputs whose integers a node keeps."""
        facts = op_facts()
        passed = passed_inputs(self.graph, node)
        if passed:
            return passed
        kept = (
            *facts.adds.get(node.key, ())[: len(node.inputs)],
            *facts.multiplies.get(node.key, ()),
        )
        return [node.input(port) for port in kept if node.input(port) != ABSENT]

    def picked(self, node: Node, largest: float) -> float:
        """Return the limit of moved integers: the size itself if they are sizes of a known axis."""
        for port in op_facts().moved_inputs[node.key][:1]:
            maker = self.graph.producer(node.input(port), "Shape")
            sizes = None if maker is None else self.graph.shapes[maker.input(0)]
            chosen = None if sizes is None else self.chosen(node, sizes)
            if maker is not None and not maker.proto.attribute and chosen:
                return max(inf if size is None else float(size) for size in chosen)
        return largest

    def chosen(self, node: Node, sizes: Shape) -> list[int | None]:
        """Return the sizes that a look-up or a Slice takes from a shape; none if that is not known."""
        integers = self.graph.constants.integers
        lookup = op_facts().lookups.get(node.key, ())
        if lookup:
            indices = integers(node.input(lookup[0].indices)) or []
            return [
                sizes[index] for index in indices if -len(sizes) <= index < len(sizes)
            ]
        starts, ends = integers(node.input(1)), integers(node.input(2))
        if node.key != "Slice" or not (starts and ends) or node.input(4) != ABSENT:
            return []
        return list(sizes[starts[0] : ends[0]])
