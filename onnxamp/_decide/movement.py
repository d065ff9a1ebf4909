"""Values that are read as they were computed, since only data movement lies between: builders move Casts through it."""

from collections.abc import Collection
from typing import NamedTuple

from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, carried, leaving_values


class Read(NamedTuple):
    """A value that is read as it is produced: by an input of a node, or (``port`` is ABSENT) by an output of its body.

    Attributes:
        owner: the node that the walk began at: ``node`` itself, or one downstream of data movement.
        value: the value.
        node: the node that reads it, or whose body returns it.
        port: the input.
        result: scope and output position where the value leaves a body.
    """

    owner: Node
    value: int
    node: int
    port: int
    result: tuple[int, int] | None = None


class Movement:
    """Follows data movement in a graph, upstream and downstream.

    Args:
        graph: the graph.
        passing: ops that the builder removes if they read only one value of their result's type.
    """

    def __init__(self, graph: Graph, passing: Collection[str]) -> None:
        self.graph = graph
        self.passing = passing

    def upstream(self, first: Read) -> list[Read]:
        """Return a read and those of the data movement upstream, which includes last states that bodies return."""
        reads = list[Read]()
        read: Read | None = first
        while read is not None and read.value != ABSENT:
            reads.append(read)
            producer = self.graph.producer(read.value)
            read = None if producer is None else self._before(read, producer)
        return reads

    def source(self, owner: Node, value: int) -> int:
        """Return the value that data movement turns into one that a body returns; ABSENT if there is none."""
        reads = self.upstream(Read(owner, value, owner.index, ABSENT))
        return reads[-1].value if reads else ABSENT

    def downstream(self, value: int) -> list[int]:
        """Return a value and all values that data movement makes from it."""
        types = self.graph.types
        values = [value]
        for moved in values:
            for node, port in self.graph.consumers(moved):
                if self._passes_on(node) != port:
                    continue
                values += [one for one in node.outputs if types[one] == types[value]]
        return values

    def _before(self, read: Read, producer: Node) -> Read | None:
        """Return the read of the node or body that produces a value; None if it computes the value."""
        owner = read.owner
        port = self._passes_on(producer)
        if port != ABSENT:
            return Read(owner, producer.input(port), producer.index, port)
        types = self.graph.types
        if producer.key == "Cast" and types[read.value] in LOW_TENSORS:
            # An earlier conversion adds such a Cast where it lowers the reader alone.
            source = producer.input(0)
            is_lowered = types[source] == FLOAT
            return Read(owner, source, producer.index, 0) if is_lowered else None
        output = self._last_state(producer, read.value)
        if output == ABSENT:
            return None
        _, body = producer.bodies[0]
        leaving = leaving_values(producer, self.graph.scopes[body])
        at = [*leaving].index(output)
        return Read(owner, leaving[output], producer.index, ABSENT, (body, at))

    def _last_state(self, loop: Node, value: int) -> int:
        """Return the output of a loop that is a value, if it is a last state; ABSENT otherwise."""
        for _, output in carried(self.graph, loop):
            if output < len(loop.outputs) and loop.outputs[output] == value:
                return output
        return ABSENT

    def _passes_on(self, node: Node) -> int:
        """Return the input that a node passes on without computing anything; ABSENT if it computes."""
        if not node.outputs:
            return ABSENT
        types = self.graph.types
        facts = op_facts()
        kind = types[node.outputs[0]]
        alike = {value for value in node.reads if types[value] == kind}
        if node.key in facts.carriers | facts.eliminated:
            return 0 if node.input(0) in alike else ABSENT
        passes = node.key in self.passing and len(alike) == 1
        return node.inputs.index(*alike) if passes else ABSENT
