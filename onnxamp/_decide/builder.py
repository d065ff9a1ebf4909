"""Casts that the builder of a target rejects, by the rules in its ``builder.toml``: where in a graph they apply.

:mod:`onnxamp._decide.pins.builder` says what follows for the precision of variables.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from onnxamp._decide.movement import Movement, Read
from onnxamp._facts.dtypes import LOW_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import target_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Scope,
    carried,
    carried_states,
    entering_values,
    leaving_values,
)


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

    def uncast_values(self) -> frozenset[int]:
        """Return the values whose Cast the builder may reject."""
        uncast = {read.value for read in self.reads}
        for _, moved in self.states:
            uncast.update(moved)
        uncast.update(value for _, value in self.signature_values())
        uncast.update(value for value, _, _ in self.captures)
        return frozenset(uncast)

    @cached_property
    def movement(self) -> Movement:
        """Return the data movement of the graph, with the ops that the builder removes."""
        return Movement(self.graph, self.rules.get("passing", {}).keys())

    # -- reads that allow no Cast -------------------------------------------------------------------------------

    @cached_property
    def reads(self) -> list[Read]:
        """Return all reads that allow no Cast from low precision. Complexity: linear in nodes, and in moved data."""
        reads = list[Read]()
        for node, position in self.ports("uncast_inputs"):
            read = Read(node, node.input(position), node.index, position)
            reads += self.movement.upstream(read)
        for loop in self.nodes("uncast_scans"):
            for _, body in loop.bodies:
                reads += self._stacked_reads(loop, self.graph.scopes[body])
        return reads

    def _stacked_reads(self, loop: Node, body: Scope) -> Iterator[Read]:
        """Yield the reads of what a body returns to be stacked up, and of inputs of which it returns slices."""
        states = len(carried(self.graph, loop))
        is_scan = loop.key == "Scan"
        entering = entering_values(loop, body) if is_scan else {}
        sliced = {inner: port for port, inner in entering.items()}
        leaving = leaving_values(loop, body).items()
        for position, (target, value) in enumerate(leaving):
            leaves = (body.index, position)
            moved = self.movement.upstream(
                Read(loop, value, loop.index, ABSENT, leaves)
            )
            # States have a rule of their own (uncast_states); the results after them are stacked.
            if target >= states:
                yield from moved
            port = sliced.get(moved[-1].value, ABSENT)
            if port != ABSENT:
                # The body returns a slice of an input, so the input is read without a Cast as well.
                read = Read(loop, loop.input(port), loop.index, port)
                yield from self.movement.upstream(read)

    def stacked_up(self) -> Iterator[Node]:
        """Yield the nodes whose results a loop stacks up unchanged, and may not in low precision."""
        ops = self.rules.get("stacked_high", {})
        for read in self.reads:
            producer = self.graph.producer(read.value)
            is_returned = read.result is not None
            if is_returned and producer is not None and producer.key in ops:
                yield producer

    @cached_property
    def states(self) -> list[tuple[int, list[int]]]:
        """Return the last states that a loop's body moves from elsewhere, uncomputed, each with its moved copies."""
        states = list[tuple[int, list[int]]]()
        for loop in self.nodes("uncast_states"):
            for state in self._moved_states(loop):
                states.append((state, self.movement.downstream(state)))
        return states

    def _moved_states(self, loop: Node) -> Iterator[int]:
        """Yield the last states of a loop that its body does not compute."""
        for state in carried_states(self.graph, loop):
            inner = self.graph.values[state.before].scope
            source = self.movement.source(loop, state.after)
            maker = self.graph.producer(source)
            is_stored = maker is None or maker.key == "Constant"
            is_outer = maker is not None and maker.scope != inner
            if state.end != ABSENT and (is_stored or is_outer):
                yield state.end

    @cached_property
    def captures(self) -> list[tuple[int, Node, int]]:
        """Return (value from outside a body, node in the body that reads it, position) where no output is read."""
        graph = self.graph
        captures = list[tuple[int, Node, int]]()
        for owner in self.nodes("unread_outputs"):
            for _, body in owner.bodies if owner.scope else ():
                leaving = leaving_values(owner, graph.scopes[body])
                for target, value in leaving.items():
                    output = owner.output(target)
                    if not (graph.uses[output] or graph.results[output]):
                        captures += _captured(graph, body, value)
        return captures

    # -- the signature, Casts and constants ---------------------------------------------------------------------

    def signature_values(self) -> Iterator[tuple[Node, int]]:
        """Yield (node, value) where the value must be an input or output of the model itself."""
        for node, at in self.ports("signature_inputs"):
            yield node, node.input(at)
        for node, at in self.ports("signature_outputs"):
            yield node, node.outputs[at]

    def own_casts(self) -> Iterator[tuple[Read, Node]]:
        """Yield (read, Cast) where an input reads an up-cast of the original model.

        The builder accepts such a Cast if it has another reader.
        """
        inputs = self.rules.get("uncast_inputs", {})
        for read in self.reads:
            cast = self.graph.producer(read.value, "Cast")
            is_input = read.result is None and read.owner.key in inputs
            if cast is None or not is_input:
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
                quantizer = graph.producer(origin, *facts.quantize)
                before = (
                    None if quantizer is None else graph.producer(quantizer.input(0))
                )
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

    def products(self, rule: str) -> Iterator[tuple[Node, Dequantized, Dequantized]]:
        """Yield (product, first factor, second factor) where both factors are dequantized."""
        for node in self.nodes(rule):
            first, second = map(self.dequantized.get, node.inputs[:2])
            if first is not None and second is not None:
                yield node, first, second

    def split_scales(self) -> Iterator[tuple[Node, Node, Node]]:
        """Yield (product, dequantizers of its two factors) where the scales need one type."""
        for node, first, second in self.products("one_scale"):
            if first.node is not second.node:
                yield node, first.node, second.node

    def shared_factors(self) -> Iterator[tuple[Node, Node]]:
        """Yield two products of dequantized factors that share the first one."""
        owners = dict[int, Node]()
        for node, first, _ in self.products("shared_factors"):
            other = owners.setdefault(first.origin, node)
            if other is not node:
                yield other, node


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
