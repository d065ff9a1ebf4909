"""What the builder of a target must read without a Cast in front (``_data/targets``): pins and implications.

A Cast counts through data movement, too, since builders move it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

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
    """A read, and what data movement before it reads: also that of a loop, whose last state its body returns."""
    found: Read | None = read
    while found is not None and found.value != ABSENT:
        yield found
        found = _read_before(graph, found)


def _read_before(graph: Graph, read: Read) -> Read | None:
    """What the node reads, or the body returns, that makes a value, if it only moves data."""
    made = graph.producer(read.value)
    if made is None:
        return None
    if made.key in _movers() and graph.types[made.input(0)] == graph.types[read.value]:
        return Read(read.owner, made.input(0), made.index, 0)
    states = {made.outputs[output]: output for _, output in carried(graph, made) if output < len(made.outputs)}
    for _, body in made.bodies if read.value in states else ():
        outputs = graph.scopes[body].outputs
        position = body_targets(made, len(outputs)).index(states[read.value])
        return Read(read.owner, outputs[position], made.index, ABSENT, (body, position))
    return None


def _movers() -> frozenset[str]:
    """Ops through which the builder sees, an idle Dropout included."""
    return op_facts().carriers | op_facts().eliminated


def computed_high(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Nodes that stay float32 because an input is computed."""
    for node in graph.nodes_of(profile.computed_high) if graph.nodes_of(profile.beside) else ():
        if any(node.input(position) not in graph.constants.tensors for position in profile.computed_high[node.key]):
            yield node


def high_nodes(graph: Graph, profile: Profile) -> Iterator[tuple[Node, str]]:
    """(node that stays float32, why) by what the builder does not take in low precision."""
    yield from ((node, "it is stacked up in float32 alone") for node in stacked_up(graph, profile))
    yield from (
        (node, "no constant is read there, only a Cast of it") for node, _ in casts_of_constants(graph, profile)
    )
    yield from ((node, "no integers stand beside dequantized numbers") for node in integer_factors(graph, profile))
    yield from ((node, "its numbers are constants, or float32") for node in computed_high(graph, profile))


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
    yield from _undivided(graph, ports, profile)
    for one, other in (*_unread(graph, ports, profile), *_signature(graph, ports, profile)):
        yield from _alike(one, other)
    for _, first, second in split_scales(graph, profile):
        scales = (ports.of_node.get(node.index, {}).values() for node in (first, second))
        for one, other in product(*scales):
            yield from _alike(one, other)
    for state, moved in passed_states(graph, profile):
        made = ports.produced[state]
        for reader in _readers(graph, ports, moved):
            yield from _alike(made, reader)


def _alike(one: int, other: int) -> Iterator[tuple[int, int]]:
    """The pairs that give two ports one precision; one that is low already asks for nothing."""
    if not {LOW, NONE} & {one, other}:
        yield from ((made, reader) for made, reader in ((one, other), (other, one)) if made != HIGH)


def _signature(graph: Graph, ports: PortVariables, profile: Profile) -> Iterator[tuple[int, int]]:
    """(variable of an input or output of the model, variable of the node that reads or makes it)."""
    for node, value in _signature_values(graph, profile):
        if graph.producer(value) is node:
            yield from ((ports.produced[value], ports.returned.get(key, NONE)) for key in graph.results[value])
        else:
            yield from ((ports.produced[value], ports.consumed[node.index][at]) for at, read in enumerate(node.inputs)
                        if read == value)  # fmt: skip


def _signature_values(graph: Graph, profile: Profile) -> Iterator[tuple[Node, int]]:
    """(node, value) of what must be an input or an output of the model, without a Cast."""
    for node in graph.nodes_of(profile.signature_inputs):
        yield from ((node, node.input(position)) for position in profile.signature_inputs[node.key])
    for node in graph.nodes_of(profile.signature_outputs):
        yield from ((node, node.outputs[position]) for position in profile.signature_outputs[node.key])


def _undivided(graph: Graph, ports: PortVariables, profile: Profile) -> Iterator[tuple[int, int]]:
    """(variable of what reads a low input of the model, variable of what else reads it)."""
    nodes = graph.nodes_of(profile.undivided_inputs) if graph.nodes_of(profile.beside) else ()
    for node in nodes:
        read = node.input(0)
        source = ports.lowered.get(read, read)
        if graph.values[source].scope or graph.producer(source) is not None:
            continue
        if source == read and ports.produced[read] != LOW:
            continue
        casts = (cast.outputs[0] for cast, _ in graph.consumers(source) if cast.key == "Cast")
        for value in {read, *(value for value in casts if value in ports.lowered)}:
            for other, port in graph.consumers(value):
                variable = ports.consumed[other.index][port]
                if other is not node and (variable >= 0 or variable == HIGH):
                    yield ports.consumed[node.index][0], variable


def _unread(graph: Graph, ports: PortVariables, profile: Profile) -> Iterator[tuple[int, int]]:
    """(variable of a value from outside, variable of its reader in a body) where it becomes what nobody reads."""
    for value, node, port in unread_captures(graph, profile):
        made, reader = ports.produced[value], ports.consumed[node.index][port]
        if value not in ports.free and NONE not in (made, reader):
            yield made, reader


def unread_captures(graph: Graph, profile: Profile) -> Iterator[tuple[int, Node, int]]:
    """(value from outside of a body, node in the body that reads it, input position) for outputs that nobody reads."""
    for owner in graph.nodes_of(profile.unread_outputs):
        if not owner.scope:
            continue
        for _, body in owner.bodies:
            outputs = graph.scopes[body].outputs
            for position, target in enumerate(body_targets(owner, len(outputs))):
                output = owner.outputs[target] if 0 <= target < len(owner.outputs) else ABSENT
                if output == ABSENT or not (graph.uses[output] or graph.results[output]):
                    yield from _captures(graph, body, outputs[position])


def _captures(graph: Graph, body: int, value: int) -> Iterator[tuple[int, Node, int]]:
    """What nodes of a body that make one of its values read from outside."""
    waiting, seen = [value], set[int]()
    while waiting:
        made = graph.producer(waiting.pop())
        if made is None or made.scope != body or made.index in seen:
            continue
        seen.add(made.index)
        for port, source in enumerate(made.inputs):
            if source != ABSENT and graph.values[source].scope == body:
                waiting.append(source)
            elif source != ABSENT:
                yield source, made, port


def split_scales(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node, Node]]:
    """(product, what dequantizes its first factor, and its second), where their scales have one type."""
    behind = _dequantized(graph, profile)
    for node in graph.nodes_of(profile.one_scale):
        first, second = (behind.get(value) for value in node.inputs[:2])
        if first is not None and second is not None and first is not second:
            yield node, first, second


def integer_factors(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Products of something dequantized and a Cast of integers, which are float32."""
    behind = _dequantized(graph, profile)
    for node in graph.nodes_of(profile.one_scale):
        casts = (graph.producer(other) for value, other in (node.inputs[:2], node.inputs[1::-1]) if value in behind)
        if any(cast is not None and cast.key == "Cast" and _reads_integers(graph, cast) for cast in casts):
            yield node


def _reads_integers(graph: Graph, node: Node) -> bool:
    return graph.types[node.input(0)] in op_facts().free_sources["Cast"]


def _dequantized(graph: Graph, profile: Profile) -> Mapping[int, Node]:
    """Values -> what dequantizes them, also through ops that read one value that is computed.

    Complexity: linear in nodes.
    """
    behind: dict[int, Node] = {}
    for index in graph.order if graph.nodes_of(profile.one_scale) else ():
        node = graph.nodes[index]
        found = node if node.key in op_facts().dequantize else None
        if found is None:
            computed = [value for value in node.inputs if value != ABSENT and value not in graph.constants.tensors]
            found = behind.get(computed[0]) if len(computed) == 1 else None
        if found is not None:
            behind |= dict.fromkeys(node.outputs, found)
    return behind


def casts_of_constants(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node]]:
    """(node, Cast) where the node reads a Cast of a constant, and cannot read the constant itself."""
    for node, position in _computed_inputs(graph, profile):
        cast = graph.producer(node.input(position))
        if cast is not None and cast.key == "Cast" and cast.input(0) in graph.constants.tensors:
            yield node, cast


def constant_reads(graph: Graph, profile: Profile) -> Iterator[tuple[Node, int]]:
    """(node, input position) where a constant is read that must not be one."""
    for node, position in _computed_inputs(graph, profile):
        if node.input(position) in graph.constants.tensors:
            yield node, position


def _computed_inputs(graph: Graph, profile: Profile) -> Iterator[tuple[Node, int]]:
    for node in graph.nodes_of(profile.computed_inputs):
        yield from ((node, position) for position in profile.computed_inputs[node.key])


def uncast_values(graph: Graph, profile: Profile) -> frozenset[int]:
    """Values of which the builder may refuse a Cast."""
    states = (value for _, moved in passed_states(graph, profile) for value in moved)
    own = (value for _, value in _signature_values(graph, profile))
    captured = (value for value, _, _ in unread_captures(graph, profile))
    return frozenset([*states, *own, *captured, *(read.value for read in straight_reads(graph, profile))])


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
            if node.key in _movers() and port == 0:
                values += [result for result in node.outputs if graph.types[result] == graph.types[value]]
    return values


def _readers(graph: Graph, ports: PortVariables, values: Iterable[int]) -> Iterator[int]:
    """The variables, or HIGH, of all that reads values."""
    for value in values:
        found = [ports.returned.get(result, LOW) for result in graph.results[value]]
        found += [ports.consumed[node.index][port] for node, port in graph.consumers(value)]
        yield from (variable for variable in found if variable >= 0 or variable == HIGH)


def reads_no_input(graph: Graph, ports: PortVariables, profile: Profile, node: Node) -> bool:
    """Whether a node that must read inputs of the model, without a Cast, would read a Cast if it were low."""
    values = [node.input(position) for position in profile.signature_inputs.get(node.key, ())]
    return any(ports.produced[value] == HIGH or graph.producer(value) is not None for value in values)
