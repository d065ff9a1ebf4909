"""What the builder of a target must read without a Cast in front (``_data/targets``): pins and implications.

A Cast counts through data movement, too, since builders move it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onnxamp._decide.ports import HIGH, LOW, NONE, PortVariables
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import body_sources, body_targets, carried
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.profiles import Profile


@dataclass(frozen=True, slots=True)
class Read:
    """A value that is read as it was made: by an input of a node, or (``port`` is ABSENT) by an output of its body.

    ``owner`` is the node that cannot read a Cast; ``node`` itself, or one behind data movement.
    """

    owner: Node
    value: int
    node: int
    port: int
    result: tuple[int, int] | None = None
    """Scope and output position where it leaves a body."""


def straight_reads(graph: Graph, profile: Profile) -> Iterator[Read]:
    """All reads of a model that take no Cast from low precision. Complexity: linear in nodes, and in moved data."""
    for node in graph.nodes_of(profile.uncast_inputs):
        for position in profile.uncast_inputs[node.key]:
            yield from _moved(graph, Read(node, node.input(position), node.index, position))
    for node in graph.nodes_of(profile.uncast_scans):
        states = len(carried(graph, node))
        for _, body in node.bodies:
            inputs, outputs = graph.scopes[body].inputs, graph.scopes[body].outputs
            sliced = dict(zip(inputs, body_sources(node, len(inputs)), strict=True)) if node.key == "Scan" else {}
            for position, target in enumerate(body_targets(node, len(outputs))):
                reads = list(_moved(graph, Read(node, outputs[position], node.index, ABSENT, (body, position))))
                if target >= states:
                    yield from reads
                if (port := sliced.get(reads[-1].value, ABSENT)) != ABSENT:  # what is read slice by slice, and moved
                    yield from _moved(graph, Read(node, node.input(port), node.index, port))


def _moved(graph: Graph, read: Read) -> Iterator[Read]:
    """A read, and what data movement before it reads."""
    while read.value != ABSENT:
        yield read
        made = graph.producer(read.value)
        if made is None or made.key not in op_facts().carriers or graph.types[made.input(0)] != graph.types[read.value]:
            return
        read = Read(read.owner, made.input(0), made.index, 0)


def stacked_up(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Nodes whose result a loop stacks up as they make it, and may not in low precision."""
    for read in straight_reads(graph, profile):
        made = graph.producer(read.value)
        if read.result is not None and made is not None and made.key in profile.stacked_high:
            yield made


def straight_pairs(graph: Graph, ports: PortVariables, profile: Profile) -> Iterator[tuple[int, int]]:
    """(variable of a value, variable of what reads it, which may be HIGH): if the first is low, so must be the second.

    Constants are stored as they are read.
    """
    for read in straight_reads(graph, profile):
        if read.value in ports.free:
            continue
        made = ports.produced[read.value]
        reader = ports.consumed[read.node][read.port] if read.result is None else ports.returned.get(read.result)
        if made >= 0 and reader is not None and reader != LOW:
            yield made, reader
    for state, moved in passed_states(graph, profile):
        made = ports.produced[state]
        for reader in _readers(graph, ports, moved) if made not in (LOW, NONE) else ():
            yield from ((one, other) for one, other in ((made, reader), (reader, made)) if one != HIGH)


def uncast_values(graph: Graph, profile: Profile) -> frozenset[int]:
    """Values of which the builder may refuse a Cast."""
    states = (value for _, moved in passed_states(graph, profile) for value in moved)
    return frozenset([*states, *(read.value for read in straight_reads(graph, profile))])


def passed_states(graph: Graph, profile: Profile) -> Iterator[tuple[int, list[int]]]:
    """Last states that the body of a loop moves from elsewhere without computing them, with all that they become."""
    for node in graph.nodes_of(profile.uncast_states):
        for _, body in node.bodies:
            outputs = graph.scopes[body].outputs
            returned = dict(zip(body_targets(node, len(outputs)), outputs, strict=True))
            for _, output in carried(graph, node):
                state = node.outputs[output] if output < len(node.outputs) else ABSENT
                reads = list(_moved(graph, Read(node, returned.get(output, ABSENT), node.index, ABSENT)))
                made = graph.producer(reads[-1].value) if reads else None
                if state != ABSENT and (made is None or made.key == "Constant" or made.scope != body):
                    yield state, _moved_to(graph, state)


def _moved_to(graph: Graph, value: int) -> list[int]:
    """A value, and all that data movement makes of it."""
    values = [value]
    for moved in values:
        for node, port in graph.consumers(moved):
            if node.key in op_facts().carriers and port == 0:
                values += [result for result in node.outputs if graph.types[result] == graph.types[value]]
    return values


def _readers(graph: Graph, ports: PortVariables, values: Iterable[int]) -> Iterator[int]:
    """The variables, or HIGH, of all that reads values."""
    for value in values:
        found = [ports.returned.get(result, LOW) for result in graph.results[value]]
        found += [ports.consumed[node.index][port] for node, port in graph.consumers(value)]
        yield from (variable for variable in found if variable >= 0 or variable == HIGH)


def reads_no_input(ports: PortVariables, profile: Profile, node: Node) -> bool:
    """Whether a node that must read inputs of the model, without a Cast, would read a Cast if it were low."""
    return any(ports.produced[node.input(position)] != LOW for position in profile.signature_inputs.get(node.key, ()))
