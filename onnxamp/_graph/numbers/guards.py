"""Walks from epsilons to the ops that they guard against zero."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from onnxamp._base.groups import Groups
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.known import is_known
from onnxamp._graph.passed import passed_on
from onnxamp._graph.view import ABSENT, Node

_JOINS: Final = 1
"""Values that may be added between an epsilon and the op that it guards: ``x + eps + y`` is guarded as ``x + y + eps``
is, but a sum over many layers is not."""


class Guarded(NamedTuple):
    """An op whose result explodes if the guarded value is flushed to zero, or a node between it and the epsilon.

    Attributes:
        node: the node.
        value: what it passes on into a body or out of one, or ABSENT.
        is_end: whether it is the guarded op.
    """

    node: int
    value: int = ABSENT
    is_end: bool = False


class GuardWalks:
    """The walks of several epsilons, numbered from 0. A walk ends where an earlier one has been.

    Attributes:
        seen: nodes from which a walk went on.
        leading: nodes that lead to a guarded op.
        guards: nodes with an epsilon that does.
        ends: for each epsilon, the values that guarded ops read downstream of it.
    """

    def __init__(self, graph: Graph, epsilons: int) -> None:
        self.graph = graph
        self.seen = set[int]()
        self.leading = set[int]()
        self.guards = set[int]()
        self.ends = [list[int]() for _ in range(epsilons)]
        self._met = dict[int, int]()
        self._groups = Groups()

    def group(self, number: int) -> int:
        """Return the epsilon that stands for all whose walks met that of this one."""
        return self._groups.first(number)

    def follow(self, node: Node, number: int) -> Iterator[Guarded]:
        """Yield the ops that an epsilon guards, each followed by the nodes between them, back to the epsilon.

        Complexity: linear over all epsilons of a graph.

        Args:
            node: the node with the epsilon.
            number: that of the epsilon.
        """
        guarded = op_facts().guarded
        before: dict[int, int] = {}
        crossed: dict[int, Sequence[tuple[int, int]]] = {}
        added = {node.index: 0}
        way = set[int]()
        stack = [node]
        while stack:
            last = stack.pop()
            passed = passed_on(self.graph, last)
            crossed[last.index] = passed.owners
            for reader, port in passed.readers(self.graph):
                if reader.index in before or reader.index == node.index:
                    continue
                before[reader.index] = last.index
                self._meet(number, reader.index)
                is_end = port in guarded.get(reader.key, ())
                if is_end:
                    way.add(reader.index)
                    self.ends[number].append(reader.inputs[port])
                    yield Guarded(reader.index, is_end=True)
                if is_end or reader.index in self.leading:
                    self.guards.add(node.index)
                    yield from _way_back(last.index, node.index, before, crossed, way)
                count = added[last.index] + _joins(self.graph, reader, passed.values)
                if count <= _JOINS and reader.index not in self.seen:
                    self.seen.add(reader.index)
                    added[reader.index] = count
                    stack.append(reader)
        self.leading |= way

    def _meet(self, number: int, node: int) -> None:
        """Join the walk of an epsilon with the one that came to a node before."""
        if node in self._met:
            self._groups.join((number, self._met[node]))
        self._met[node] = number


def _way_back(
    last: int,
    first: int,
    before: Mapping[int, int],
    crossed: Mapping[int, Sequence[tuple[int, int]]],
    way: set[int],
) -> Iterator[Guarded]:
    """Yield the nodes from one back to the first of a walk, since nothing on the way may be flushed.

    Args:
        last: the node to begin at.
        first: that with the epsilon, which is not among the results.
        before: node -> the one before it on the walk.
        crossed: node -> the nodes of control flow that pass its result on, with the values.
        way: nodes that earlier calls yielded; more are added.
    """
    while last not in way:
        for owner, value in crossed[last]:
            yield Guarded(owner, value)
        if last == first:
            return
        way.add(last)
        yield Guarded(last)
        last = before[last]


def _joins(graph: Graph, reader: Node, guarded: Collection[int]) -> int:
    """Return how many values a reader adds to a guarded one.

    There are none if it scales, roots, moves or chooses the value, and more than are allowed if it computes something
    else, whose result is not guarded.
    """
    facts = op_facts()
    too_many = _JOINS + 1
    is_choice = (
        bool(reader.outputs) and graph.types[reader.outputs[0]] == "tensor(bool)"
    )
    if not (graph.is_float_output(reader) or is_choice):
        return too_many
    is_scaling = reader.key in facts.reductions or reader.key == "Sqrt"
    if reader.index in graph.exact or is_scaling or is_choice:
        return 0
    is_sum = reader.key in facts.added_epsilons
    if not is_sum and reader.key not in facts.norm_arithmetic:
        return too_many
    others = [value for value in graph.float_inputs(reader) if value not in guarded]
    unknown = [value for value in others if not is_known(graph, value)]
    return len(unknown) if is_sum else len(unknown) * too_many
