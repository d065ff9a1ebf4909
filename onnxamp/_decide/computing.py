"""The nodes that compute a constant, which must not lose what a hazard needs of it."""

from collections.abc import Iterator

from onnxamp._decide.verdicts import Hazard, Kind
from onnxamp._graph.graph import Graph
from onnxamp._graph.known import known_numbers
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts


def computing(
    graph: Graph, value: int, reader: Node, kind: Kind, *, rare: bool = False
) -> Iterator[Hazard]:
    """Yield the nodes that compute a constant for a node that a hazard is about; none if a tensor stores it.

    What makes a constant in either precision at no cost follows its readers anyway.
    """
    known = graph.ask(known_numbers)
    if value not in known.numbers:
        return
    why = f"computes a number for {reader.label!r}"
    for origin in known.origins(value):
        maker = graph.producer(origin)
        if maker is not None and maker.key not in op_facts().representable:
            yield Hazard(
                maker.index, kind, why, rare, origin if maker.bodies else ABSENT
            )
