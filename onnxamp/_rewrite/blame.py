"""Which nodes of a model a fault in its result is about."""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._rewrite.edits import Edits


def nodes_around(
    original: Graph,
    edits: Edits,
    result: Graph,
    nodes: AbstractSet[int],
    values: Iterable[int],
    suspected: AbstractSet[str],
) -> tuple[str, ...]:
    """Return the outputs of the original's nodes that stand around a fault.

    These are the nodes at fault, all that make or read a value of theirs, and what makes or reads the values at fault.
    Where that is a node that the edits added, or one that was suspected before, its neighbours stand for it.

    Args:
        original: the model that was converted.
        edits: what was changed in it.
        result: what it became.
        nodes, values: what is wrong there, in the result.
        suspected: outputs of nodes that stay float32 because of earlier faults.

    Complexity: linear in nodes.
    """
    origins = _origins(original, edits)
    waiting = {index for value in values for index in _beside(result, value)} | nodes
    waiting |= {index for node in nodes for index in _neighbours(result, result.nodes[node])}
    found, stack, seen = set[int](), sorted(waiting), set(waiting)
    while stack:
        node = result.nodes[stack.pop()]
        known = {origins[key] for name in node.proto.output if (key := (node.scope, name)) in origins}
        new = {index for index in known if suspected.isdisjoint(original.nodes[index].proto.output)}
        found |= new
        for index in () if new else _neighbours(result, node):
            if index not in seen:
                seen.add(index)
                stack.append(index)
    return tuple(next(filter(None, original.nodes[index].proto.output), "") for index in sorted(found))


def _origins(graph: Graph, edits: Edits) -> dict[tuple[int, str], int]:
    """(scope, name of an output in the result) -> the node of the original that makes it."""
    return {
        (node.scope, edits.outputs.get((node.index, port), name)): node.index
        for node in graph.nodes
        for port, name in enumerate(node.proto.output)
        if name
    }


def _neighbours(graph: Graph, node: Node) -> Iterator[int]:
    """Nodes that make what a node reads or its bodies return, and that read what it makes."""
    returned = (value for _, body in node.bodies for value in graph.scopes[body].outputs)
    for value in (*node.inputs, *node.outputs, *returned):
        if value != ABSENT:
            yield from _beside(graph, value)


def _beside(graph: Graph, value: int) -> Iterator[int]:
    """Nodes that make or read a value, and those whose bodies return it."""
    producer = graph.producer(value)
    if producer is not None:
        yield producer.index
    yield from (node for node, _ in graph.uses[value])
    yield from (graph.scopes[scope].owner for scope, _ in graph.results[value] if scope)
