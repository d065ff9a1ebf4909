"""Integers that count, and the coordinates and angles computed from them: where they spread, and how large they get.

:mod:`onnxamp._graph.loops.count_marks` explains the marks.
"""

from collections.abc import Sequence
from functools import reduce
from heapq import heappop, heappush
from math import inf
from operator import or_

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.loops.accumulation import passed_inputs
from onnxamp._graph.loops.count_limits import CountLimits
from onnxamp._graph.loops.count_marks import (
    COUNTED,
    COUNTER,
    COUNTING,
    INVERSE,
    POSITION,
    Counted,
    CountMark,
)
from onnxamp._graph.loops.count_sources import count_sources
from onnxamp._graph.numbers.known import is_fixed
from onnxamp._graph.view import ABSENT, Node, Origin, passed_from, passed_values


def counted(graph: Graph, low: Format) -> Counted:
    """Return the marks of a graph.

    Complexity: near linear in the nodes downstream of sources, which are visited in their order, and again only where a
    loop brings marks back.
    """
    return _Spread(graph, low).run()


class _Spread:
    """Spreads marks from values to the values computed from them, also through control flow.

    Attributes:
        leaving: value -> the values that control flow makes of it.
        ranks: node -> its place in the order in which nodes run.
        pending: ranks of nodes that must be visited, with the nodes: a heap.
        waiting: the nodes in ``pending``.
    """

    def __init__(self, graph: Graph, low: Format) -> None:
        self.graph = graph
        self.low = low
        self.found = Counted({}, {}, set(), set())
        self.limits = CountLimits(graph, self.found.limits)
        self.passed_from = graph.ask(passed_from)
        self.leaving = graph.ask(passed_values)
        self.ranks = [0] * len(graph.nodes)
        for rank, node in enumerate(graph.order):
            self.ranks[node.index] = rank
        self.pending = list[tuple[int, int]]()
        self.waiting = set[int]()

    def run(self) -> Counted:
        """Return the marks."""
        for source in count_sources(self.graph, self.low, self.limits):
            self.add(source)
        for node in self.graph.nodes_of(op_facts().position_sources):
            self.wait_for(node.index)
        # In the order in which nodes run, so that a node is visited again only where a loop brings marks back.
        while self.pending:
            _, index = heappop(self.pending)
            self.waiting.discard(index)
            self.visit(self.graph.nodes[index])
        return self.found

    def add(self, source: CountMark) -> None:
        """Add to the marks of a value. A limit that a loop raises has no end."""
        marks, limits = self.found.marks, self.found.limits
        stack = [source]
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

    def passed_on(self, result: int) -> CountMark:
        """Return the marks and the limit that control flow passes on to a value: a position only if all sources are."""
        sources = self.passed_from[result]
        marks = [self.mark(source) for source in sources]
        mark = _joined(marks, COUNTED)
        if all(one & POSITION for one in marks):
            mark |= _joined(marks, POSITION | COUNTING)
        limits = [self.found.limits.get(source, 0.0) for source in sources]
        return CountMark(result, mark, max(limits))

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
            self.add(CountMark(value, mark, limit))

    def count(self, node: Node) -> None:
        """Mark the results of a counter; its end may be a size."""
        for count in op_facts().counts[node.key]:
            value = node.output(count.output)
            is_float = self.graph.types[value] in ANY_FLOAT_TENSORS
            mark = COUNTER if is_float else COUNTED
            self.add(CountMark(value, mark, self.limits.of_count(node, count)))

    def position_by(self, node: Node) -> int:
        """Return the marks of results that a node computes from positions and constants alone."""
        facts = op_facts()
        graph = self.graph
        given = [value for value in node.reads if graph.types[value] in FLOAT_TENSORS]
        if not given:
            return 0
        if node.key in facts.position_sinks and self.mark(given[0]) & POSITION:
            is_rounding = node.key in facts.rounding
            return POSITION | COUNTING if is_rounding else 0
        marks = [self.mark(value) for value in given]
        if node.key not in facts.position_arithmetic:
            return 0
        for value, mark in zip(given, marks, strict=True):
            if not (mark & POSITION or is_fixed(graph, value)):
                return 0
        return _joined(marks, POSITION | COUNTING)

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
        is_arithmetic = node.key in facts.coordinate_arithmetic
        if not is_arithmetic and node.key not in facts.moved_inputs:
            return 0, 0.0
        read = self.carried_by(node)
        sources = [value for value in read if self.mark(value) & COUNTED]
        if not sources:
            return 0, 0.0
        if node.key in facts.divisors:
            return self.divided(node)
        if node.key in facts.multiplies:
            others = [value for value in node.reads if value not in sources]
            if any(self.mark(value) & INVERSE for value in others):
                self.found.normalizing.add(node.index)
        return COUNTED, self.limits.of_result(node, sources)

    def divided(self, node: Node) -> tuple[int, float]:
        """Return the marks of a quotient; coordinates end where they are divided by a size."""
        numerator, divisor = node.input(0), node.input(1)
        if not self.mark(numerator) & COUNTED:
            return 0, 0.0
        if not self.mark(divisor) & COUNTED:
            return COUNTED, self.limits.of_quotient(node)
        if self.graph.types[divisor] in ANY_FLOAT_TENSORS:
            self.found.normalizing.add(node.index)
        return COUNTED, self.found.limits.get(numerator, 0.0)

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


def _joined(marks: Sequence[int], flags: int) -> int:
    """Return those of some flags that any mark has."""
    return reduce(or_, marks, 0) & flags
