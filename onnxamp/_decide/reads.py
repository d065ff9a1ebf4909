"""What the builder of a target reads as it was made (``_data/targets``), also through data movement."""

from collections.abc import Iterator
from dataclasses import dataclass

from onnxamp._dtypes import FORMATS
from onnxamp._graph.bodies import body_sources, body_targets, carried
from onnxamp._graph.graph import Graph
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
            yield from data_movement(
                graph, profile, Read(node, node.input(position), node.index, position)
            )
    for node in graph.nodes_of(profile.uncast_scans):
        states = len(carried(graph, node))
        for _, body in node.bodies:
            inputs, outputs = graph.scopes[body].inputs, graph.scopes[body].outputs
            sliced = (
                dict(zip(inputs, body_sources(node, len(inputs)), strict=True))
                if node.key == "Scan"
                else {}
            )
            for position, target in enumerate(body_targets(node, len(outputs))):
                result = Read(node, outputs[position], node.index, ABSENT, (body, position))
                reads = list(data_movement(graph, profile, result))
                if target >= states:
                    yield from reads
                if (
                    port := sliced.get(reads[-1].value, ABSENT)
                ) != ABSENT:  # what is read slice by slice, and moved
                    yield from data_movement(
                        graph, profile, Read(node, node.input(port), node.index, port)
                    )


def data_movement(graph: Graph, profile: Profile, read: Read) -> Iterator[Read]:
    """A read, and what data movement before it reads: also that of a loop, whose last state its body returns."""
    found: Read | None = read
    while found is not None and found.value != ABSENT:
        yield found
        found = _read_before(graph, profile, found)


def _read_before(graph: Graph, profile: Profile, read: Read) -> Read | None:
    """What the node reads, or the body returns, that makes a value, if it only moves data."""
    made = graph.producer(read.value)
    if made is None:
        return None
    if (port := _passes_on(graph, profile, made)) != ABSENT:
        return Read(read.owner, made.input(port), made.index, port)
    states = {
        made.outputs[output]: output
        for _, output in carried(graph, made)
        if output < len(made.outputs)
    }
    for _, body in made.bodies if read.value in states else ():
        outputs = graph.scopes[body].outputs
        position = body_targets(made, len(outputs)).index(states[read.value])
        return Read(read.owner, outputs[position], made.index, ABSENT, (body, position))
    return None


def _passes_on(graph: Graph, profile: Profile, node: Node) -> int:
    """The input that a node passes on as the builder sees it, without computing anything; ABSENT if it computes."""
    if not node.outputs:
        return ABSENT
    kind = graph.types[node.outputs[0]]
    ports = [
        port
        for port, value in enumerate(node.inputs)
        if value != ABSENT and graph.types[value] == kind
    ]
    facts = op_facts()
    if node.key in facts.carriers | facts.eliminated:
        return 0 if 0 in ports else ABSENT
    return (
        ports[0]
        if node.key in profile.passing and len({node.inputs[port] for port in ports}) == 1
        else ABSENT
    )


def own_casts(graph: Graph, profile: Profile) -> Iterator[tuple[Read, Node]]:
    """(read, Cast) where an input reads a Cast of low precision that the model brings along.

    The builder takes such a Cast if others read it, too.
    """
    types = {low.tensor for low in FORMATS.values()}
    for read in straight_reads(graph, profile):
        made = (
            graph.producer(read.value)
            if read.result is None and read.owner.key in profile.uncast_inputs
            else None
        )
        if (
            made is not None
            and made.key == "Cast"
            and made.input(0) != ABSENT
            and graph.types[made.input(0)] in types
        ):
            yield read, made


def moved_from(graph: Graph, profile: Profile, value: int) -> list[int]:
    """A value, and all that data movement makes of it."""
    values = [value]
    for moved in values:
        for node, port in graph.consumers(moved):
            if _passes_on(graph, profile, node) == port:
                values += [
                    result for result in node.outputs if graph.types[result] == graph.types[value]
                ]
    return values
