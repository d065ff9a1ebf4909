"""Casts that the builder of a target rejects, by the rules in its ``builder.toml``: pins and implications.

Builders move Casts, so a rule holds through data movement.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from onnxamp._decide.ports import HIGH, LOW, NONE, PortVariables
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import target_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, body_sources, body_targets, carried


class Read(NamedTuple):
    """A value that is read as it is produced: by an input of a node, or (``port`` is ABSENT) by an output of its body.

    ``owner`` is the node that cannot read a Cast: ``node`` itself, or one downstream of data movement.
    """

    owner: Node
    value: int
    node: int
    port: int
    result: tuple[int, int] | None = None
    """Scope and output position where the value leaves a body."""


class Dequantized(NamedTuple):
    """The node that dequantizes a value, and its input before it was quantized again."""

    node: Node
    origin: int


def builder_of(graph: Graph, target: str) -> "Builder":
    """Return the rules of the target's builder for a graph; a target without a builder has no rules."""
    return Builder(graph, _rules(target))


@cache
def _rules(target: str) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """Return rule -> op type -> the positions of inputs or outputs that the rule is about, if any."""
    rules = target_table(target, "builder").get("casts", {})
    return {rule: _positions(ops) for rule, ops in rules.items()}


def _positions(ops: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """Return op type -> the positions that a rule lists; none if the rule is about whole nodes."""
    return {op: tuple(at) if isinstance(at, list) else () for op, at in ops.items()}


@dataclass(frozen=True)
class Builder:
    """The rules of a builder, and the places in a graph where they apply."""

    graph: Graph
    rules: Mapping[str, Mapping[str, tuple[int, ...]]]

    def nodes(self, rule: str) -> list[Node]:
        """Return the nodes that a rule is about."""
        return self.graph.nodes_of(self.rules.get(rule, ()))

    def ports(self, rule: str) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that a rule is about, with the positions that it names."""
        for node in self.nodes(rule):
            yield from ((node, position) for position in self.rules[rule][node.key])

    # -- reads that allow no Cast -------------------------------------------------------------------------------

    @cached_property
    def reads(self) -> list[Read]:
        """Return all reads that allow no Cast from low precision. Complexity: linear in nodes, and in moved data."""
        graph = self.graph
        reads = list[Read]()
        for node, position in self.ports("uncast_inputs"):
            reads += self._upstream(
                Read(node, node.input(position), node.index, position)
            )
        for node in self.nodes("uncast_scans"):
            states = len(carried(graph, node))
            for _, body in node.bodies:
                inputs = graph.scopes[body].inputs
                outputs = graph.scopes[body].outputs
                sources = body_sources(node, len(inputs)) if node.key == "Scan" else ()
                sliced = dict(zip(inputs, sources, strict=False))
                for position, target in enumerate(body_targets(node, len(outputs))):
                    value = outputs[position]
                    leaves = (body, position)
                    read = Read(node, value, node.index, ABSENT, leaves)
                    moved = self._upstream(read)
                    # States have a rule of their own (uncast_states); the results after them are stacked.
                    if target >= states:
                        reads += moved
                    port = sliced.get(moved[-1].value, ABSENT)
                    if port != ABSENT:
                        # The body returns a slice of an input, so the input is read without a Cast as well.
                        read = Read(node, node.input(port), node.index, port)
                        reads += self._upstream(read)
        return reads

    def _upstream(self, first: Read) -> list[Read]:
        """Return a read and those of the data movement upstream, which includes last states that bodies return."""
        reads = list[Read]()
        read = first
        while read.value != ABSENT:
            reads.append(read)
            producer = self.graph.producer(read.value)
            before = None if producer is None else self._before(read, producer)
            if before is None:
                break
            read = before
        return reads

    def _before(self, read: Read, producer: Node) -> Read | None:
        """Return the read of the node or body that produces a value; None if it computes the value."""
        if (port := self._passes_on(producer)) != ABSENT:
            return Read(read.owner, producer.input(port), producer.index, port)
        types = self.graph.types
        if producer.key == "Cast" and types[read.value] in LOW_TENSORS:
            # An earlier conversion adds such a Cast where it lowers the reader alone.
            source = producer.input(0)
            is_lowered = types[source] == FLOAT
            return Read(read.owner, source, producer.index, 0) if is_lowered else None
        states = {
            producer.outputs[output]: output
            for _, output in carried(self.graph, producer)
            if output < len(producer.outputs)
        }
        for _, body in producer.bodies if read.value in states else ():
            outputs = self.graph.scopes[body].outputs
            at = body_targets(producer, len(outputs)).index(states[read.value])
            return Read(read.owner, outputs[at], producer.index, ABSENT, (body, at))
        return None

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
        passes = node.key in self.rules.get("passing", ()) and len(alike) == 1
        return node.inputs.index(*alike) if passes else ABSENT

    def _downstream(self, value: int) -> list[int]:
        """Return a value and all values that data movement makes from it."""
        values = [value]
        types = self.graph.types
        for moved in values:
            for node, port in self.graph.consumers(moved):
                if self._passes_on(node) == port:
                    values += [
                        one for one in node.outputs if types[one] == types[value]
                    ]
        return values

    def _source(self, owner: Node, value: int) -> int:
        """Return the value that data movement turns into one that a body returns; ABSENT if there is none."""
        moved = self._upstream(Read(owner, value, owner.index, ABSENT))
        return moved[-1].value if moved else ABSENT

    @cached_property
    def states(self) -> list[tuple[int, list[int]]]:
        """Return the last states that a loop's body moves from elsewhere, uncomputed, each with its moved copies."""
        graph = self.graph
        states = list[tuple[int, list[int]]]()
        for node in self.nodes("uncast_states"):
            for _, body in node.bodies:
                outputs = graph.scopes[body].outputs
                targets = body_targets(node, len(outputs))
                returned = dict(zip(targets, outputs, strict=True))
                for _, at in carried(graph, node):
                    state = node.output(at)
                    source = self._source(node, returned.get(at, ABSENT))
                    maker = graph.producer(source)
                    if state != ABSENT and (
                        maker is None or maker.key == "Constant" or maker.scope != body
                    ):
                        states.append((state, self._downstream(state)))
        return states

    @cached_property
    def captures(self) -> list[tuple[int, Node, int]]:
        """Return (value from outside a body, node in the body that reads it, position) where no output is read."""
        graph = self.graph
        captures = list[tuple[int, Node, int]]()
        for owner in self.nodes("unread_outputs"):
            for _, body in owner.bodies if owner.scope else ():
                outputs = graph.scopes[body].outputs
                for position, target in enumerate(body_targets(owner, len(outputs))):
                    output = owner.output(target)
                    if not (graph.uses[output] or graph.results[output]):
                        captures += _captured(graph, body, outputs[position])
        return captures

    def uncast_values(self) -> frozenset[int]:
        """Return the values whose Cast the builder may reject."""
        uncast = {read.value for read in self.reads}
        for _, moved in self.states:
            uncast.update(moved)
        uncast.update(value for _, value in self._signature_values())
        uncast.update(value for value, _, _ in self.captures)
        return frozenset(uncast)

    def _signature_values(self) -> Iterator[tuple[Node, int]]:
        """Yield (node, value) where the value must be an input or output of the model itself."""
        yield from (
            (node, node.input(at)) for node, at in self.ports("signature_inputs")
        )
        for node, at in self.ports("signature_outputs"):
            yield node, node.outputs[at]

    def own_casts(self) -> Iterator[tuple[Read, Node]]:
        """Yield (read, Cast) where an input reads an up-cast of the original model.

        The builder accepts such a Cast if it has another reader.
        """
        for read in self.reads:
            cast = self.graph.producer(read.value, "Cast")
            is_input = read.result is None and read.owner.key in self.rules.get(
                "uncast_inputs", ()
            )
            if not is_input or cast is None:
                continue
            if self.graph.types[cast.input(0)] in LOW_TENSORS:
                yield read, cast

    def constant_reads(self) -> Iterator[tuple[Node, int]]:
        """Yield (node, input position) where a constant is read and must not be."""
        tensors = self.graph.constants.tensors
        for node, position in self.ports("computed_inputs"):
            if node.input(position) in tensors:
                yield node, position

    def casts_of_constants(self) -> Iterator[tuple[Node, Node]]:
        """Yield (node, Cast) where a node reads a Cast of a constant, and cannot read the constant itself."""
        for node, position in self.ports("computed_inputs"):
            cast = self.graph.producer(node.input(position), "Cast")
            if cast is not None and cast.input(0) in self.graph.constants.tensors:
                yield node, cast

    # -- nodes that stay in float32 -------------------------------------------------------------------------------

    def high_nodes(self) -> Iterator[tuple[Node, str]]:
        """Yield (node, reason) where the builder rejects low precision."""
        for node in self.stacked_up():
            yield node, "a loop can only stack its results in float32"
        for node, _ in self.casts_of_constants():
            yield node, "it accepts a Cast of a constant, but not the constant itself"
        for node in self._integer_factors():
            yield (
                node,
                "low precision cannot multiply dequantized numbers by cast integers",
            )
        for node, port in self.ports("computed_high") if self.nodes("beside") else ():
            if node.input(port) not in self.graph.constants.tensors:
                yield node, "its parameters must be constants to be low precision"
        for node in self._pooled_twice():
            yield (
                node,
                "several pools of a value that one loop passes to another stay in float32",
            )

    def stacked_up(self) -> Iterator[Node]:
        """Yield the nodes whose results a loop stacks up unchanged, and may not in low precision."""
        ops = self.rules.get("stacked_high", ())
        for read in self.reads:
            producer = self.graph.producer(read.value)
            if read.result is not None and producer is not None:
                yield from (producer,) if producer.key in ops else ()

    def _integer_factors(self) -> Iterator[Node]:
        """Yield the products of something dequantized and a Cast of integers."""
        integers = op_facts().free_sources["Cast"]
        for node in self.nodes("one_scale"):
            for value, other in (node.inputs[:2], node.inputs[1::-1]):
                cast = self.graph.producer(other, "Cast")
                source = ABSENT if cast is None else cast.input(0)
                if value in self.dequantized and self.graph.types[source] in integers:
                    yield node

    def _pooled_twice(self) -> Iterator[Node]:
        """Yield the pools that share a value which one loop computes and another one reads."""
        pools: dict[int, list[Node]] = {}
        for node in self.nodes("pooled_once"):
            pools.setdefault(node.input(0), []).append(node)
        for value, sharing in pools.items():
            loop = self.graph.producer(value) if len(sharing) > 1 else None
            if loop is None or not carried(self.graph, loop):
                continue
            readers = self.graph.readers(loop)
            if any(port in dict(carried(self.graph, node)) for node, port in readers):
                yield from sharing

    # -- dequantized values ------------------------------------------------------------------------------------

    @cached_property
    def dequantized(self) -> Mapping[int, Dequantized]:
        """Return value -> the node that dequantizes it, also through ops that read one computed value.

        Complexity: linear in nodes.
        """
        graph = self.graph
        facts = op_facts()
        origins = dict[int, int]()
        known: dict[int, Dequantized] = {}
        for node in graph.order if graph.nodes_of(facts.dequantize) else ():
            if node.key in facts.dequantize:
                origin = node.input(0)
                made = graph.producer(origin, *facts.quantize)
                before = None if made is None else graph.producer(made.input(0))
                # Numbers that are quantized again are still those of the first dequantizer.
                if before is not None:
                    origin = origins.get(before.index, origin)
                origins[node.index] = origin
                known |= dict.fromkeys(node.outputs, Dequantized(node, origin))
                continue
            computed = [
                value for value in node.reads if value not in graph.constants.tensors
            ]
            if len(computed) == 1 and computed[0] in known:
                known |= dict.fromkeys(node.outputs, known[computed[0]])
        return known

    def _products(self, rule: str) -> Iterator[tuple[Node, Dequantized, Dequantized]]:
        """Yield (product, first factor, second factor) where both factors are dequantized."""
        for node in self.nodes(rule):
            first, second = map(self.dequantized.get, node.inputs[:2])
            if first is not None and second is not None:
                yield node, first, second

    def split_scales(self) -> Iterator[tuple[Node, Node, Node]]:
        """Yield (product, dequantizers of its two factors) where the scales need one type."""
        for node, first, second in self._products("one_scale"):
            if first.node is not second.node:
                yield node, first.node, second.node

    def shared_factors(self) -> Iterator[tuple[Node, Node]]:
        """Yield two products of dequantized factors that share the first one."""
        owners = dict[int, Node]()
        for node, first, _ in self._products("shared_factors"):
            other = owners.setdefault(first.origin, node)
            if other is not node:
                yield other, node

    # -- implications ------------------------------------------------------------------------------------------

    def implications(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (p, q): variable ``p`` may be low only if ``q`` is low, and never if ``q`` is HIGH."""
        one_way = (self._straight, self._undivided, self._stored, self._lonely)
        equal = (self._unread, self._signature, self._same_scales, self._moved_states)
        pairs = list[tuple[int, int]]()
        for rule in (*one_way, self._chosen):
            pairs += rule(ports)
        for rule in equal:
            for one, other in rule(ports):
                # Equality is an implication in each direction.
                pairs += [(one, other), (other, one)]
        for p, q in pairs:
            # A port without a variable asks for nothing; one that is LOW, or holds no float32, agrees in any case.
            if p >= 0 and q not in (LOW, NONE):
                yield p, q

    def _straight(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (value, its reader without a Cast). Constants are stored as they are read."""
        for read in self.reads:
            if read.value in ports.free:
                continue
            node = self.graph.nodes[read.node]
            if node.key == "Cast":  # of float32: it becomes one from low precision
                reader = ports.produced[node.outputs[0]]
            elif read.result is None:
                reader = ports.consumed[read.node][read.port]
            else:
                reader = ports.returned.get(read.result, LOW)
            yield ports.produced[read.value], reader

    def _undivided(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (reader of a low input of the model, another reader of it)."""
        graph = self.graph
        for node in self.nodes("undivided_inputs") if self.nodes("beside") else ():
            read = node.input(0)
            source = ports.lowered.get(read, read)
            if graph.values[source].scope or graph.producer(source) is not None:
                continue
            if source == read and ports.produced[read] != LOW:
                continue
            casts = (
                cast.outputs[0]
                for cast, _ in graph.consumers(source)
                if cast.key == "Cast"
            )
            for value in {read, *(value for value in casts if value in ports.lowered)}:
                for other, port in graph.consumers(value):
                    if other is not node:
                        own = ports.consumed[node.index][0]
                        yield own, ports.consumed[other.index][port]

    def _stored(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (weight to lower, its reader) where the builder reads no Cast of a weight."""
        for node, position in self.ports("stored_inputs"):
            value = node.input(position)
            if value in self.graph.constants.tensors and value not in ports.free:
                yield ports.produced[value], ports.consumed[node.index][position]

    def _lonely(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (another reader of an original up-cast, the reader that must not be the only one)."""
        for read, cast in self.own_casts():
            value = cast.outputs[0]
            keys = {(node.index, at): None for node, at in self.graph.consumers(value)}
            keys.pop((read.node, read.port), None)
            others = [ports.consumed[node][port] for node, port in keys]
            others += [
                ports.returned.get(result, HIGH)
                for result in self.graph.results[value]
            ]
            able = [other for other in others if other >= 0]
            if able and HIGH not in others:
                yield able[0], ports.consumed[read.node][read.port]

    def _unread(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (value from outside a body, its reader in the body) where no output of the body is read."""
        for value, node, port in self.captures:
            if value not in ports.free:
                yield ports.produced[value], ports.consumed[node.index][port]

    def _signature(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (input or output of the model, the node's port that reads or writes it)."""
        for node, value in self._signature_values():
            own = ports.produced[value]
            if self.graph.producer(value) is node:
                for key in self.graph.results[value]:
                    yield own, ports.returned.get(key, NONE)
            else:
                for at, read in enumerate(node.inputs):
                    if read == value:
                        yield own, ports.consumed[node.index][at]

    def _same_scales(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield the variables of nodes around products of dequantized factors that need one precision."""
        scales = ((first, second) for _, first, second in self.split_scales())
        for pair in (*scales, *self.shared_factors()):
            yield from product(*(ports.of(node.index) for node in pair))

    def _chosen(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (result of a body, dequantized value) where all bodies of a node pass on the same numbers."""
        for node in self.nodes("one_choice"):
            passed: dict[int, list[tuple[tuple[int, int], int]]] = {}
            for _, body in node.bodies:
                for at, value in enumerate(self.graph.scopes[body].outputs):
                    if (source := self._source(node, value)) != ABSENT:
                        passed.setdefault(at, []).append(((body, at), source))
            for results in passed.values():
                known = [self.dequantized.get(value) for _, value in results]
                origins = {None if one is None else one.origin for one in known}
                if len(origins) == 1 and None not in origins:
                    for result, value in results:
                        yield ports.returned.get(result, NONE), ports.produced[value]

    def _moved_states(self, ports: PortVariables) -> Iterator[tuple[int, int]]:
        """Yield (state of a loop, reader of it or of a moved copy)."""
        for state, moved in self.states:
            for value in moved:
                for result in self.graph.results[value]:
                    yield ports.produced[state], ports.returned.get(result, LOW)
                for node, port in self.graph.consumers(value):
                    yield ports.produced[state], ports.consumed[node.index][port]

    @property
    def binds_inputs(self) -> bool:
        """Whether there are nodes that must read inputs of the model itself."""
        return bool(self.rules.get("signature_inputs"))

    def reads_no_input(self, ports: PortVariables, node: Node) -> bool:
        """Return whether a node that must read inputs of the model itself would read a Cast if it were low."""
        positions = self.rules.get("signature_inputs", {}).get(node.key, ())
        values = map(node.input, positions)
        return any(
            ports.produced[value] == HIGH or self.graph.producer(value) is not None
            for value in values
        )


def _captured(graph: Graph, body: int, value: int) -> Iterator[tuple[int, Node, int]]:
    """Yield (value from outside, node, position) of the nodes in a body that a value of the body depends on."""
    waiting = [value]
    seen = set[int]()
    while waiting:
        node = graph.producer(waiting.pop())
        if node is None or node.scope != body or node.index in seen:
            continue
        seen.add(node.index)
        for port, source in enumerate(node.inputs):
            if source != ABSENT and graph.values[source].scope == body:
                waiting.append(source)
            elif source != ABSENT:
                yield source, node, port
