"""What the builder of a target must read without a Cast in front (``_data/targets``): pins and implications.

A Cast counts through data movement, too, since builders move it.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from onnxamp._decide.ports import (
    HIGH,
    LOW,
    NONE,
    PortVariables,
    Read,
    data_movement,
    moved_from,
    own_casts,
    ports_of,
    straight_reads,
)
from onnxamp._graph.bodies import body_targets, carried
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.profiles import Profile


def split_scales(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node, Node]]:
    """(product, what dequantizes its first factor, and its second), where their scales have one type."""
    nodes = graph.nodes_of(profile.one_scale)
    behind = graph.ask(_dequantized) if nodes else {}
    for node in nodes:
        first, second = (behind.get(value) for value in node.inputs[:2])
        if first is not None and second is not None and first is not second:
            yield node, first, second


def integer_factors(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Products of something dequantized and a Cast of integers, which are float32."""
    nodes = graph.nodes_of(profile.one_scale)
    behind = graph.ask(_dequantized) if nodes else {}
    integers = op_facts().free_sources["Cast"]
    for node in nodes:
        pairs = node.inputs[:2], node.inputs[1::-1]
        casts = (graph.producer(other) for value, other in pairs if value in behind)
        if any(
            cast is not None
            and cast.key == "Cast"
            and graph.types[cast.input(0)] in integers
            for cast in casts
        ):
            yield node


def shared_factors(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node]]:
    """Two products of dequantized factors that share the first one."""
    nodes, first = graph.nodes_of(profile.shared_factors), dict[int, Node]()
    behind, origins = (
        (graph.ask(_dequantized), graph.ask(_origins)) if nodes else ({}, {})
    )
    for node in nodes:
        left, right = (behind.get(value) for value in node.inputs[:2])
        if left is not None and right is not None:
            other = first.setdefault(origins[left.index], node)
            if other is not node:
                yield other, node


def dequantized_values(graph: Graph) -> Mapping[int, int]:
    """Values that are dequantized -> what they are dequantized from."""
    origins = graph.ask(_origins)
    return {
        value: origins[node.index] for value, node in graph.ask(_dequantized).items()
    }


def _origins(graph: Graph) -> Mapping[int, int]:
    """What dequantizes -> the value that it dequantizes, or what that was before it was quantized once more."""
    facts, origins = op_facts(), dict[int, int]()
    for index in graph.order:
        node = graph.nodes[index]
        if node.key in facts.dequantize:
            made = graph.producer(node.input(0))
            is_quantized = made is not None and made.key in facts.quantize
            before = (
                graph.producer(made.input(0))
                if made is not None and is_quantized
                else None
            )
            origin = ABSENT if before is None else before.index
            origins[index] = origins.get(origin, node.input(0))
    return origins


def _dequantized(graph: Graph) -> Mapping[int, Node]:
    """Values -> what dequantizes them, also through ops that read one value that is computed.

    Complexity: linear in nodes.
    """
    behind: dict[int, Node] = {}
    for index in graph.order if graph.nodes_of(op_facts().dequantize) else ():
        node = graph.nodes[index]
        found = node if node.key in op_facts().dequantize else None
        if found is None:
            computed = [
                value
                for value in node.inputs
                if value != ABSENT and value not in graph.constants.tensors
            ]
            found = behind.get(computed[0]) if len(computed) == 1 else None
        if found is not None:
            behind |= dict.fromkeys(node.outputs, found)
    return behind


def computed_high(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Nodes that stay float32 because an input is computed."""
    for node in (
        graph.nodes_of(profile.computed_high) if graph.nodes_of(profile.beside) else ()
    ):
        if any(
            node.input(position) not in graph.constants.tensors
            for position in profile.computed_high[node.key]
        ):
            yield node


def high_nodes(graph: Graph, profile: Profile) -> Iterator[tuple[Node, str]]:
    """(node that stays float32, why) by what the builder does not take in low precision."""
    of_constants = (node for node, _ in casts_of_constants(graph, profile))
    for nodes, why in (
        (stacked_up(graph, profile), "it is stacked up in float32 alone"),
        (of_constants, "no constant is read there, only a Cast of it"),
        (
            integer_factors(graph, profile),
            "no integers stand beside dequantized numbers",
        ),
        (computed_high(graph, profile), "its numbers are constants, or float32"),
        (
            pooled_twice(graph, profile),
            "a value between loops is pooled once, or in float32",
        ),
    ):
        yield from ((node, why) for node in nodes)


def stacked_up(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Nodes whose result a loop stacks up as they make it, and may not in low precision."""
    for read in straight_reads(graph, profile):
        made = graph.producer(read.value)
        if (
            read.result is not None
            and made is not None
            and made.key in profile.stacked_high
        ):
            yield made


def pooled_twice(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Pools of what a loop makes, and another one takes, where there are several."""
    pools: dict[int, list[Node]] = {}
    for node in graph.nodes_of(profile.pooled_once):
        pools.setdefault(node.input(0), []).append(node)
    for value, found in pools.items():
        made = graph.producer(value) if len(found) > 1 else None
        if made is None or not carried(graph, made):
            continue
        if any(_is_state(graph, output) for output in made.outputs):
            yield from found


def _is_state(graph: Graph, value: int) -> bool:
    """Whether a loop takes a value as a state."""
    readers = graph.consumers(value) if value != ABSENT else ()
    return any(
        node.bodies and port in dict(carried(graph, node)) for node, port in readers
    )


def straight_pairs(
    graph: Graph, ports: PortVariables, profile: Profile
) -> Iterator[tuple[int, int]]:
    """(variable of a value, variable of what reads it, which may be HIGH): if the first is low, so must be the second.

    Constants are stored as they are read.
    """
    for read in straight_reads(graph, profile):
        if read.value in ports.free:
            continue
        made, reader = ports.produced[read.value], _reader(graph, ports, read)
        if made >= 0 and reader != LOW:
            yield made, reader
    yield from _undivided(graph, ports, profile)
    yield from _stored(graph, ports, profile)
    yield from _lonely(graph, ports, profile)
    for one, other in (
        *_unread(graph, ports, profile),
        *_signature(graph, ports, profile),
    ):
        yield from _alike(one, other)
    scales = ((first, second) for _, first, second in split_scales(graph, profile))
    for pair in (*scales, *shared_factors(graph, profile)):
        for one, other in product(
            *(ports.of_node.get(node.index, {}).values() for node in pair)
        ):
            yield from _alike(one, other)
    for returned, value in _chosen(graph, profile):
        made, reader = ports.returned.get(returned, NONE), ports.produced[value]
        if made >= 0 and reader not in (LOW, NONE):
            yield made, reader
    for state, moved in passed_states(graph, profile):
        made = ports.produced[state]
        for reader in _readers(graph, ports, moved):
            yield from _alike(made, reader)


def _reader(graph: Graph, ports: PortVariables, read: Read) -> int:
    """The variable of what reads a value; LOW where there is nothing to decide."""
    node = graph.nodes[read.node]
    if node.key == "Cast":  # of float32, which becomes one from low precision otherwise
        return ports.produced[node.outputs[0]]
    if read.result is None:
        return ports.consumed[read.node][read.port]
    return ports.returned.get(read.result, LOW)


def _chosen(graph: Graph, profile: Profile) -> Iterator[tuple[tuple[int, int], int]]:
    """(result of a body, dequantized value that it passes on) of nodes whose bodies all pass on the same numbers."""
    nodes = graph.nodes_of(profile.one_choice)
    origins = dequantized_values(graph) if nodes else {}
    for node in nodes:
        found: dict[int, list[tuple[tuple[int, int], int]]] = {}
        for _, body in node.bodies:
            for position, value in enumerate(graph.scopes[body].outputs):
                if (source := _source(graph, profile, node, value)) != ABSENT:
                    found.setdefault(position, []).append(((body, position), source))
        for passed in found.values():
            same = {origins.get(value, ABSENT) for _, value in passed}
            if len(same) == 1 and ABSENT not in same:
                yield from passed


def _source(graph: Graph, profile: Profile, owner: Node, value: int) -> int:
    """What data movement makes a value of that a body returns; ABSENT if there is none."""
    *_, last = (
        Read(owner, ABSENT, owner.index, ABSENT),
        *data_movement(graph, profile, Read(owner, value, owner.index, ABSENT)),
    )
    return last.value


def _stored(
    graph: Graph, ports: PortVariables, profile: Profile
) -> Iterator[tuple[int, int]]:
    """(variable of a weight that is to be low, variable of what reads it) where no Cast of it is read."""
    for node, position in ports_of(graph, profile.stored_inputs):
        value, reader = node.input(position), ports.consumed[node.index][position]
        is_open = reader not in (LOW, NONE) and value not in ports.free
        if is_open and value in graph.constants.tensors:
            yield ports.produced[value], reader


def _lonely(
    graph: Graph, ports: PortVariables, profile: Profile
) -> Iterator[tuple[int, int]]:
    """(variable of one more reader of a Cast that the model brings along, variable of what does not read it alone)."""
    for read, cast in own_casts(graph, profile):
        value, reader = cast.outputs[0], ports.consumed[read.node][read.port]
        keys = {(node.index, port): None for node, port in graph.consumers(value)}
        keys.pop((read.node, read.port), None)
        others = [ports.consumed[node][port] for node, port in keys]
        others += [ports.returned.get(result, HIGH) for result in graph.results[value]]
        able = [other for other in others if other >= 0]
        if able and HIGH not in others and reader not in (LOW, NONE):
            yield able[0], reader


def _alike(one: int, other: int) -> Iterator[tuple[int, int]]:
    """The pairs that give two ports one precision; one that is low already asks for nothing."""
    if not {LOW, NONE} & {one, other}:
        yield from (
            (made, reader)
            for made, reader in ((one, other), (other, one))
            if made != HIGH
        )


def _signature(
    graph: Graph, ports: PortVariables, profile: Profile
) -> Iterator[tuple[int, int]]:
    """(variable of an input or output of the model, variable of the node that reads or makes it)."""
    for node, value in _signature_values(graph, profile):
        if graph.producer(value) is node:
            yield from (
                (ports.produced[value], ports.returned.get(key, NONE))
                for key in graph.results[value]
            )
        else:
            yield from (
                (ports.produced[value], ports.consumed[node.index][at])
                for at, read in enumerate(node.inputs)
                if read == value
            )


def _signature_values(graph: Graph, profile: Profile) -> Iterator[tuple[Node, int]]:
    """(node, value) of what must be an input or an output of the model, without a Cast."""
    yield from (
        (node, node.input(at)) for node, at in ports_of(graph, profile.signature_inputs)
    )
    yield from (
        (node, node.outputs[at])
        for node, at in ports_of(graph, profile.signature_outputs)
    )


def _undivided(
    graph: Graph, ports: PortVariables, profile: Profile
) -> Iterator[tuple[int, int]]:
    """(variable of what reads a low input of the model, variable of what else reads it)."""
    nodes = (
        graph.nodes_of(profile.undivided_inputs)
        if graph.nodes_of(profile.beside)
        else ()
    )
    for node in nodes:
        read = node.input(0)
        source = ports.lowered.get(read, read)
        if graph.values[source].scope or graph.producer(source) is not None:
            continue
        if source == read and ports.produced[read] != LOW:
            continue
        casts = (
            cast.outputs[0] for cast, _ in graph.consumers(source) if cast.key == "Cast"
        )
        for value in {read, *(value for value in casts if value in ports.lowered)}:
            for other, port in graph.consumers(value):
                variable = ports.consumed[other.index][port]
                if other is not node and (variable >= 0 or variable == HIGH):
                    yield ports.consumed[node.index][0], variable


def _unread(
    graph: Graph, ports: PortVariables, profile: Profile
) -> Iterator[tuple[int, int]]:
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
                output = (
                    owner.outputs[target]
                    if 0 <= target < len(owner.outputs)
                    else ABSENT
                )
                if output == ABSENT or not (
                    graph.uses[output] or graph.results[output]
                ):
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


def casts_of_constants(graph: Graph, profile: Profile) -> Iterator[tuple[Node, Node]]:
    """(node, Cast) where the node reads a Cast of a constant, and cannot read the constant itself."""
    for node, position in ports_of(graph, profile.computed_inputs):
        cast = graph.producer(node.input(position))
        if (
            cast is not None
            and cast.key == "Cast"
            and cast.input(0) in graph.constants.tensors
        ):
            yield node, cast


def constant_reads(graph: Graph, profile: Profile) -> Iterator[tuple[Node, int]]:
    """(node, input position) where a constant is read that must not be one."""
    for node, position in ports_of(graph, profile.computed_inputs):
        if node.input(position) in graph.constants.tensors:
            yield node, position


def uncast_values(graph: Graph, profile: Profile) -> frozenset[int]:
    """Values of which the builder may refuse a Cast."""
    states = (value for _, moved in passed_states(graph, profile) for value in moved)
    own = (value for _, value in _signature_values(graph, profile))
    captured = (value for value, _, _ in unread_captures(graph, profile))
    return frozenset(
        [
            *states,
            *own,
            *captured,
            *(read.value for read in straight_reads(graph, profile)),
        ]
    )


def passed_states(graph: Graph, profile: Profile) -> Iterator[tuple[int, list[int]]]:
    """Last states that the body of a loop moves from elsewhere without computing them, with all that they become."""
    for node in graph.nodes_of(profile.uncast_states):
        for _, body in node.bodies:
            outputs = graph.scopes[body].outputs
            returned = dict(zip(body_targets(node, len(outputs)), outputs, strict=True))
            for _, output in carried(graph, node):
                state = node.outputs[output] if output < len(node.outputs) else ABSENT
                source = _source(graph, profile, node, returned.get(output, ABSENT))
                made = graph.producer(source)
                if state != ABSENT and (
                    made is None or made.key == "Constant" or made.scope != body
                ):
                    yield state, moved_from(graph, profile, state)


def _readers(
    graph: Graph, ports: PortVariables, values: Iterable[int]
) -> Iterator[int]:
    """The variables, or HIGH, of all that reads values."""
    for value in values:
        found = [ports.returned.get(result, LOW) for result in graph.results[value]]
        found += [
            ports.consumed[node.index][port] for node, port in graph.consumers(value)
        ]
        yield from (variable for variable in found if variable >= 0 or variable == HIGH)


def reads_no_input(
    graph: Graph, ports: PortVariables, profile: Profile, node: Node
) -> bool:
    """Whether a node that must read inputs of the model, without a Cast, would read a Cast if it were low."""
    values = [
        node.input(position) for position in profile.signature_inputs.get(node.key, ())
    ]
    return any(
        ports.produced[value] == HIGH or graph.producer(value) is not None
        for value in values
    )
