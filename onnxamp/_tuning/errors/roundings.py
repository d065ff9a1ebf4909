"""The roundings of a choice: which rows of the table of costs apply if certain nodes are in low precision.

A value is rounded once: where its node is in low precision, or else where it is cast for a node that is.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, entering_values
from onnxamp._tuning.errors.cost_table import CAST, MADE, REST, Rows
from onnxamp._tuning.errors.lowered import LowNode, Settled, computes


@dataclass(frozen=True, kw_only=True)
class Roundings:
    """The rows of nodes.

    Attributes:
        graph: of the float32 model.
        computing: the nodes that compute, in execution order.
        exact: those that only move numbers.
        settled: what is rounded whatever the choice.
        rows: the rows of the table.
    """

    graph: Graph
    computing: Sequence[LowNode]
    exact: Sequence[LowNode]
    settled: Settled
    rows: Rows

    @cached_property
    def made(self) -> Mapping[str, tuple[int, ...]]:
        """By key of a node that computes: the rows of its results. Nodes in a loop round the results of the loop."""
        return {unit.key: self._rows_of_results(unit) for unit in self.computing}

    @cached_property
    def read(self) -> Mapping[str, tuple[tuple[str, int], ...]]:
        """By key of a node: the rows of values that are cast for it, each with the key of the node that makes it."""
        read = dict[str, tuple[tuple[str, int], ...]]()
        for unit in self._units.values():
            node = self.graph.nodes[unit.node]
            inputs = dict.fromkeys(node.inputs[port] for port in unit.ports.inputs)
            rows = list[tuple[str, int]]()
            for value in inputs:
                if value not in self.settled.stored:
                    maker = self._maker(value)
                    rows += [(maker, row) for row in self._at(value, unit.key)]
            read[unit.key] = tuple(rows)
        return read

    @cached_property
    def everything(self) -> list[int]:
        """The rows of all that is rounded if every node is in low precision."""
        return self.of_all({unit.key for unit in self._units.values()})

    def of_node(self, key: str, low: AbstractSet[str]) -> list[int]:
        """Return the rows of all values that a node rounds: its results, and the values that are cast for it.

        ``low`` are the nodes in low precision, whose results need no Cast.
        """
        cast = [row for maker, row in self.read[key] if maker not in low]
        return [*self.made.get(key, ()), *cast]

    def of_nodes(self, low: AbstractSet[str]) -> set[int]:
        """Return the rows of all values that these nodes round if they are in low precision."""
        rows = set[int]()
        for key in low:
            rows.update(self.of_node(key, low))
        return rows

    def of_all(self, low: AbstractSet[str]) -> list[int]:
        """Return the rows of all values that are rounded if these nodes are in low precision."""
        rows = self.of_nodes(low)
        rows.update(self.given(low))
        return [*rows]

    def given(self, low: AbstractSet[str]) -> dict[int, str]:
        """Return the rows that every choice rounds and these nodes do not, each with the name of its value."""
        return {row: name for row, name, makers in self._settled if not makers & low}

    def sources(self, unit: LowNode) -> list[int]:
        """Return the rows of weights and other float32 values that a node reads, directly or through exact nodes."""
        rows = list[int]()
        waiting = [unit]
        seen = {ABSENT, *self.settled.stored}
        while waiting:
            one = waiting.pop()
            node = self.graph.nodes[one.node]
            for value in (node.inputs[port] for port in one.ports.inputs):
                if value in seen:
                    continue
                seen.add(value)
                producer = self._units.get(self.graph.values[value].producer)
                if producer is None:
                    rows += self._at(value, one.key)
                elif not computes(self.graph.nodes[producer.node]):
                    waiting.append(producer)
        return rows

    @cached_property
    def _units(self) -> Mapping[int, LowNode]:
        """By index: the nodes that can be in low precision."""
        return {unit.node: unit for unit in (*self.computing, *self.exact)}

    @cached_property
    def _settled(self) -> list[tuple[int, str, set[str]]]:
        """The rows that every choice rounds, each with the name of its value and the nodes that may round it first."""
        rows = list[tuple[int, str, set[str]]]()
        values = self.graph.values
        units = self._units.values()
        for value in sorted(self.settled.stored):
            name = values[value].name
            rows += [(row, name, set()) for row in self._at(value)]
        for value in sorted(self.settled.returned):
            name = values[value].name
            node = values[value].producer
            makers = {u.key for u in units if node == u.node or name in u.names}
            rows += [(row, name, makers) for row in self._at(value, REST)]
        return rows

    def _at(self, value: int, way: str = CAST) -> tuple[int, ...]:
        """Return the row of a value that is rounded in a way, or in the next more general one; none if unmeasured."""
        if value == ABSENT:
            return ()
        name = self.graph.values[value].name
        ways = (CAST,) if way == CAST else (way, REST, CAST)
        for one in ways:
            if (name, one) in self.rows:
                return (self.rows[name, one],)
        return ()

    def _rows_of_results(self, unit: LowNode) -> tuple[int, ...]:
        """Return the rows of the values that a node computes."""
        node = self.graph.nodes[unit.node]
        rows = self._rows_made(node.outputs[port] for port in unit.ports.outputs)
        keys = ((name, MADE) for name in unit.names)
        rows += [self.rows[key] for key in keys if key in self.rows]
        scope = node.scope
        while not rows and scope:
            owner = self.graph.nodes[self.graph.scopes[scope].owner]
            rows = self._rows_made(owner.outputs)
            scope = owner.scope
        return tuple(dict.fromkeys(rows))

    def _rows_made(self, values: Iterable[int]) -> list[int]:
        """Return the rows of values as their nodes compute them in low precision."""
        return [*chain.from_iterable(self._at(value, MADE) for value in values)]

    def _maker(self, value: int) -> str:
        """Return the key of the node that computes a value, before its loops; "" if it is always float32."""
        while (outer := self._before_loops.get(value, ABSENT)) != ABSENT:
            value = outer
        unit = self._units.get(self.graph.values[value].producer)
        return unit.key if unit is not None else ""

    @cached_property
    def _before_loops(self) -> Mapping[int, int]:
        """By value that the body of a Loop or Scan takes: the value that it is in the first turn."""
        before = dict[int, int]()
        for node in self.graph.nodes_of(op_facts().loops):
            for _, scope in node.bodies:
                entering = entering_values(node, self.graph.scopes[scope])
                for source, value in entering.items():
                    if source != ABSENT:
                        before[value] = node.input(source)
        return before
