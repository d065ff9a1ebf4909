"""Pins and implications of the Casts that the builder of a target rejects, see :mod:`onnxamp._decide.builder`.

An implication (p, q) says that variable ``p`` may be low only if ``q`` is low, and never if ``q`` is HIGH.
"""

from collections.abc import Iterator
from itertools import product
from typing import TypeAlias

from onnxamp._decide.builder import Builder
from onnxamp._decide.mincut import Question
from onnxamp._decide.variables.ports import HIGH, LOW, NONE, PortVariables
from onnxamp._facts.ops import op_facts
from onnxamp._graph.view import ABSENT, Node, carried

_Pairs: TypeAlias = Iterator[tuple[Question, Question]]


# -- nodes that stay in float32 --------------------------------------------------------------------------------


def high_nodes(builder: Builder) -> Iterator[tuple[Node, str]]:
    """Yield (node, reason) where the builder rejects low precision."""
    for node in builder.stacked_up():
        yield node, "a loop can only stack its results in float32"
    for node, _ in builder.casts_of_constants():
        yield node, "it accepts a Cast of a constant, but not the constant itself"
    for node in _integer_factors(builder):
        yield (
            node,
            "low precision cannot multiply dequantized numbers by cast integers",
        )
    for node in _computed_beside(builder):
        yield node, "its parameters must be constants to be low precision"
    for node in _pooled_twice(builder):
        why = (
            "several pools of a value that one loop passes to another stay in float32"
        )
        yield node, why


def away_from_inputs(builder: Builder, ports: PortVariables) -> frozenset[int]:
    """Return the nodes that must read inputs of the model itself and would read a Cast if they were low."""
    graph = builder.graph
    away = set[int]()
    for node, position in builder.ports("signature_inputs"):
        value = node.input(position)
        if ports.produced[value] == HIGH or graph.producer(value) is not None:
            away.add(node.index)
    return frozenset(away)


def _integer_factors(builder: Builder) -> Iterator[Node]:
    """Yield the products of something dequantized and a Cast of integers (rule ``one_scale``)."""
    graph = builder.graph
    integers = op_facts().free_sources["Cast"]
    for node in builder.nodes("one_scale"):
        for value, other in (node.inputs[:2], node.inputs[1::-1]):
            cast = graph.producer(other, "Cast")
            source = ABSENT if cast is None else cast.input(0)
            if value in builder.dequantized and graph.types[source] in integers:
                yield node


def _computed_beside(builder: Builder) -> Iterator[Node]:
    """Yield the nodes with computed parameters beside an op that forbids them (rules ``computed_high``, ``beside``)."""
    if not builder.nodes("beside"):
        return
    constants = builder.graph.constants.tensors
    for node, port in builder.ports("computed_high"):
        if node.input(port) not in constants:
            yield node


def _pooled_twice(builder: Builder) -> Iterator[Node]:
    """Yield the pools that share a value which one loop computes and another one reads (rule ``pooled_once``)."""
    graph = builder.graph
    pools: dict[int, list[Node]] = {}
    for node in builder.nodes("pooled_once"):
        pools.setdefault(node.input(0), []).append(node)
    for value, sharing in pools.items():
        loop = graph.producer(value) if len(sharing) > 1 else None
        if loop is None or not carried(graph, loop):
            continue
        readers = graph.readers(loop)
        if any(port in dict(carried(graph, node)) for node, port in readers):
            yield from sharing


# -- implications ----------------------------------------------------------------------------------------------


def implications(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield the implications of all rules."""
    pairs = list[tuple[Question, Question]]()
    for rule in (_uncast_reads, _undivided_inputs, _stored, _lone_readers, _chosen):
        pairs += rule(builder, ports)
    for rule in (_unread_outputs, _signature, _same_scales, _moved_states):
        for one, other in rule(builder, ports):
            # Equality is an implication in each direction.
            pairs += [(one, other), (other, one)]
    for p, q in pairs:
        # A port without a variable asks for nothing; one that is LOW, or holds no float32, agrees in any case.
        if p >= 0 and q not in (LOW, NONE):
            yield p, q


def _uncast_reads(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (value, its reader without a Cast). Constants are stored as they are read."""
    for read in builder.reads:
        if read.value in ports.free:
            continue
        node = builder.graph.nodes[read.node]
        if node.key == "Cast":  # of float32: it becomes one from low precision
            reader = ports.produced[node.outputs[0]]
        elif read.result is None:
            reader = ports.consumed[read.node][read.port]
        else:
            reader = ports.returned.get(read.result, LOW)
        yield ports.produced[read.value], reader


def _undivided_inputs(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (reader of a low input of the model, another reader of it)."""
    graph = builder.graph
    for node in builder.nodes("undivided_inputs") if builder.nodes("beside") else ():
        read = node.input(0)
        source = ports.raised_from.get(read, read)
        is_input = not graph.values[source].scope and graph.producer(source) is None
        is_low = source != read or ports.produced[read] == LOW
        if not (is_input and is_low):
            continue
        casts = [one for one, _ in graph.consumers(source) if one.key == "Cast"]
        raised = {cast.outputs[0] for cast in casts} & ports.raised_from.keys()
        for value in {read} | raised:
            for other, port in graph.consumers(value):
                if other is not node:
                    own = ports.consumed[node.index][0]
                    yield own, ports.consumed[other.index][port]


def _stored(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (weight to lower, its reader) where the builder reads no Cast of a weight (rule ``stored_inputs``)."""
    constants = builder.graph.constants.tensors
    for node, position in builder.ports("stored_inputs"):
        value = node.input(position)
        if value in constants and value not in ports.free:
            yield ports.produced[value], ports.consumed[node.index][position]


def _lone_readers(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (another reader of an original up-cast, the reader that must not be the only one)."""
    graph = builder.graph
    for read, cast in builder.own_casts():
        value = cast.outputs[0]
        keys = {(node.index, at): None for node, at in graph.consumers(value)}
        keys.pop((read.node, read.port), None)
        others = [ports.consumed[node][port] for node, port in keys]
        others += [ports.returned.get(key, HIGH) for key in graph.results[value]]
        able = [other for other in others if other >= 0]
        if able and HIGH not in others:
            yield able[0], ports.consumed[read.node][read.port]


def _chosen(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (result of a body, dequantized value) where all bodies of a node pass on the same numbers."""
    for node in builder.nodes("one_choice"):
        for results in _moved_results(builder, node):
            known = [builder.dequantized.get(value) for _, value in results]
            origins = {None if one is None else one.origin for one in known}
            if len(origins) == 1 and None not in origins:
                for result, value in results:
                    yield ports.returned.get(result, NONE), ports.produced[value]


def _moved_results(
    builder: Builder, node: Node
) -> list[list[tuple[tuple[int, int], int]]]:
    """Return, for each output of a node, the results of its bodies with the values that data movement makes them of."""
    moved: dict[int, list[tuple[tuple[int, int], int]]] = {}
    for _, body in node.bodies:
        for at, value in enumerate(builder.graph.scopes[body].outputs):
            source = builder.movement.source(node, value)
            if source != ABSENT:
                moved.setdefault(at, []).append(((body, at), source))
    return list(moved.values())


def _unread_outputs(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (value from outside a body, its reader in the body) where no output of the body is read."""
    for value, node, port in builder.captures:
        if value not in ports.free:
            yield ports.produced[value], ports.consumed[node.index][port]


def _signature(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (input or output of the model, the node's port that reads or writes it)."""
    graph = builder.graph
    for node, value in builder.signature_values():
        own = ports.produced[value]
        if graph.producer(value) is node:
            for key in graph.results[value]:
                yield own, ports.returned.get(key, NONE)
        else:
            for at, read in enumerate(node.inputs):
                if read == value:
                    yield own, ports.consumed[node.index][at]


def _same_scales(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield the variables of nodes around products of dequantized factors that need one precision."""
    scales = ((first, second) for _, first, second in builder.split_scales())
    for one, other in (*scales, *builder.shared_factors()):
        yield from product(ports.of(one.index), ports.of(other.index))


def _moved_states(builder: Builder, ports: PortVariables) -> _Pairs:
    """Yield (state of a loop, reader of it or of a moved copy)."""
    graph = builder.graph
    for state, copies in builder.states:
        own = ports.produced[state]
        for value in copies:
            for result in graph.results[value]:
                yield own, ports.returned.get(result, LOW)
            for node, port in graph.consumers(value):
                yield own, ports.consumed[node.index][port]
