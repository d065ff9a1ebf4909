"""State that loops accumulate: cycles of values, from one iteration to the next, along which rounding errors add up.

A state of a Loop or Scan is *kept* by an op whose result has at least the error of its input: data movement, a sum, a
product. If only such ops lie between a state and its next value, and one of them adds or multiplies, then the state
accumulates, and every rounding stays in it. An op that computes something new or bounds its result ends the cycle, such
as Tanh, a normalization, or a product with weights. So does a factor that fades the state: the forget gate of an LSTM.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple

from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.determined import constant_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.loops.cycles import cycles
from onnxamp._graph.loops.fading import Fading, Fate, loop_scopes
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    carried_states,
    passages,
    passed_from,
    passing_port,
    transfers,
)

_SYSTEMATIC: Final = 8
"""Iterations up to which the same term or factor may be rounded: 8 half steps, 0.4 % in float16, are half the limit."""
_RANDOM: Final = 64
"""Iterations up to which varying terms or factors may be rounded: such errors grow with the root of their number, and
those of 64 are no more than those of :data:`_SYSTEMATIC` equal ones.
"""


class Accumulated(NamedTuple):
    """The state that the loops of a graph accumulate.

    Attributes:
        ports: (node, value) of the nodes that carry such state -> the reason. ABSENT stands for all values of a node.
        values: the values of such state, inside of loops and after them -> the reason.
        open_ended: those of them whose terms and factors do not depend on the state itself, such as counters and
            phases. Others are corrected by a network, as in a solver, which needs no exact numbers.
    """

    ports: dict[tuple[int, int], str]
    values: dict[int, str]
    open_ended: set[int]


class _Propagation(NamedTuple):
    """A node that propagates the error of one input to its result."""

    node: int
    source: int
    result: int
    others: tuple[int, ...] = ()
    """The other operands, which the node adds to the source or multiplies it by."""
    fate: Fate = Fate.PASSES
    is_product: bool = False

    @property
    def accumulates(self) -> bool:
        """Whether the node adds to the value or multiplies it."""
        return self.fate == Fate.ACCUMULATES

    @property
    def decays(self) -> bool:
        """Whether the node multiplies the value by a factor below 1."""
        return self.fate == Fate.DECAYS


def accumulated_states(graph: Graph, low: Format) -> Accumulated:
    """Return the state that loops accumulate. Complexity: linear in the nodes of loops."""
    accumulated = Accumulated(ports={}, values={}, open_ended=set())
    if graph.nodes_of(op_facts().repeats):
        steps = list(_propagations(graph))
        # Where something is added to it, a state that decays forgets its errors.
        lasting = [step for step in steps if not step.decays]
        factors = _add_cycles(graph, low, lasting, accumulated)
        # Without a sum, nothing takes the place of what decays: it ends among the smallest numbers.
        products = [step for step in steps if step.is_product or not step.accumulates]
        factors |= _add_cycles(graph, low, products, accumulated)
        if accumulated.values:
            _add_factors(graph, factors, accumulated)
            _add_control_flow(graph, accumulated)
    return accumulated


def _add_cycles(
    graph: Graph, low: Format, steps: Sequence[_Propagation], accumulated: Accumulated
) -> set[int]:
    """Add the cycles of these steps in which a sum or a product accumulates. Return the factors of the products."""
    labels = cycles((step.source, step.result) for step in steps)
    growing: dict[int, list[_Propagation]] = {}
    for step in steps:
        grows = step.accumulates or step.decays
        if grows and labels[step.source] == labels[step.result]:
            growing.setdefault(labels[step.source], []).append(step)
    factors = set[int]()
    if not growing:
        return factors
    # Flows are far more than the steps, and tell only which of the growing states are corrected.
    reached = cycles(_all_flows(graph))
    members = _members(labels, growing)
    why = dict[int, str]()
    for cycle, grown in growing.items():
        state = _LoopState(members[cycle], grown, _owners(graph, members[cycle]))
        if _is_short(graph, state, low):
            continue
        products = [step for step in grown if step.is_product]
        loop = graph.nodes[state.owners[-1]].label if state.owners else ""
        verb = "multiplies" if products else "adds to"
        why[cycle] = f"{loop!r} {verb} it in every iteration"
        accumulated.values.update(dict.fromkeys(state.values, why[cycle]))
        for step in products:
            factors.update(step.others)
        if not _is_corrected(state, reached):
            accumulated.open_ended.update(state.values)
    for step in steps:
        cycle = labels[step.source]
        is_own = graph.nodes[step.node].key not in op_facts().control_flow
        if is_own and cycle in why and cycle == labels[step.result]:
            accumulated.ports[step.node, ABSENT] = why[cycle]
    return factors


class _LoopState(NamedTuple):
    """The values of a cycle, the steps that grow it, and the loops that run it, inner ones last."""

    values: frozenset[int]
    growing: Sequence[_Propagation]
    owners: Sequence[int]

    @property
    def operands(self) -> set[int]:
        """The values that the steps add to the state or multiply it by."""
        return set[int]().union(*(step.others for step in self.growing))


def _propagations(graph: Graph) -> Iterator[_Propagation]:
    """Yield the nodes inside loops that propagate errors, and the passages of control flow."""
    scopes = loop_scopes(graph)
    fading = Fading(graph, _SYSTEMATIC)
    control_flow = op_facts().control_flow
    for owner, source, result in passages(graph):
        yield _Propagation(owner, source, result)
    for node in graph.nodes:
        if node.scope in scopes and node.key not in control_flow and node.writes:
            yield from _kept(graph, node, fading)


def _kept(graph: Graph, node: Node, fading: Fading) -> Iterator[_Propagation]:
    """Yield each input whose error the results of a node have."""
    facts = op_facts()
    passed = passed_inputs(graph, node)
    for value in passed:
        for result in node.writes:
            yield _Propagation(node.index, value, result)
    sums = facts.adds.get(node.key, ())
    products = facts.multiplies.get(node.key, ())
    for port, value in enumerate(() if passed else node.inputs):
        is_product = port in products
        if value == ABSENT or not (is_product or port in sums):
            continue
        fate = fading.product(node, port) if is_product else fading.sum(node, port)
        if fate == Fate.FADES:
            continue
        others = tuple(
            other
            for at, other in enumerate(node.inputs)
            if at != port and other != ABSENT
        )
        yield _Propagation(
            node.index, value, node.outputs[0], others, fate, is_product
        )


def passed_inputs(graph: Graph, node: Node) -> list[int]:
    """Return the values of which a node moves elements, selects some, or changes the type."""
    facts = op_facts()
    if node.key in facts.moved_inputs:
        return node.inputs_at(facts.moved_inputs[node.key])
    if node.index in graph.exact and node.key not in facts.views:
        kind = graph.types[node.outputs[0]]
        return [value for value in node.reads if graph.types[value] == kind]
    return node.inputs_at(facts.carries.get(node.key, ()))


def _all_flows(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield (input, output) of everything that nodes compute inside of loops."""
    scopes = loop_scopes(graph)
    control_flow = op_facts().control_flow
    for node in graph.nodes:
        if node.key in control_flow:
            pairs: Iterable[tuple[int, int]] = transfers(graph, node)
        elif node.scope in scopes:
            pairs = product(node.inputs, node.outputs)
        else:
            continue
        yield from (pair for pair in pairs if ABSENT not in pair)


def _members(
    labels: Mapping[int, int], wanted: Mapping[int, object]
) -> dict[int, frozenset[int]]:
    members: dict[int, set[int]] = {cycle: set() for cycle in wanted}
    for value, cycle in labels.items():
        if cycle in members:
            members[cycle].add(value)
    return {cycle: frozenset(values) for cycle, values in members.items()}


def _owners(graph: Graph, values: Iterable[int]) -> list[int]:
    """Return the loops that pass these values on to their next iteration, outer ones first."""
    # The main graph has no owner: no loop passes its inputs on.
    inputs = (value for value in values if graph.values[value].origin is Origin.INPUT)
    scopes = {graph.values[value].scope for value in inputs} - {0}
    owners = {graph.scopes[scope].owner for scope in scopes}
    return sorted(owner for owner in owners if graph.nodes[owner].bodies)


def _is_short(graph: Graph, state: _LoopState, low: Format) -> bool:
    """Return whether the loops end before errors matter, as in a network of that depth, or before low precision rounds
    a counter.
    """
    trips = [constant_trips(graph, graph.nodes[owner]) for owner in state.owners]
    known = [count for count in trips if count is not None]
    if len(known) < len(trips):
        return False
    count = prod(known)
    bodies = set[int]()
    for owner in state.owners:
        bodies.update(body for _, body in graph.nodes[owner].bodies)
    # Terms from outside the loop are the same in every iteration, so that their roundings are too.
    is_varying = all(_is_in(graph, other, bodies) for other in state.operands)
    if count <= (_RANDOM if is_varying else _SYSTEMATIC):
        return True
    return _last_count(graph, state, count) <= low.exact_integers


def _is_in(graph: Graph, value: int, bodies: set[int]) -> bool:
    """Return whether one of these bodies, or one inside it, computes the value or receives it."""
    if graph.constants.is_constant(value):
        return False
    scope = graph.values[value].scope
    while scope != ABSENT and scope not in bodies:
        scope = graph.scopes[scope].parent
    return scope != ABSENT


def _last_count(graph: Graph, state: _LoopState, trips: int) -> float:
    """Return the largest number that a counter of integers reaches; infinity if the state is no such counter."""
    infinite = float("inf")
    total = 0.0
    for step in state.growing:
        numbers = [graph.constants.uniform(other) for other in step.others]
        if step.is_product or len(numbers) != 1 or not _is_integer(numbers[0]):
            return infinite
        total += trips * abs(numbers[0] or 0.0)
    first = 0.0
    for owner in state.owners:
        for source, result in transfers(graph, graph.nodes[owner]):
            if result in state.values and source not in state.values:
                number = graph.constants.uniform(source)
                if not _is_integer(number):
                    return infinite
                first = max(first, abs(number or 0.0))
    return first + total


def _is_integer(number: float | None) -> bool:
    return number is not None and float(number).is_integer()


def _is_corrected(state: _LoopState, reached: Mapping[int, int]) -> bool:
    """Return whether the state's terms or factors are computed from the state, by more than the steps that keep it."""
    own = {reached[value] for value in state.values}
    return any(reached.get(other) in own for other in state.operands - state.values)


def _add_factors(graph: Graph, factors: set[int], accumulated: Accumulated) -> None:
    """Add the nodes that compute factors. In such products they are near 1, where low precision has few numbers."""
    passed = graph.ask(passed_from)
    stack = sorted(factors - accumulated.values.keys())
    seen = set(stack)
    while stack:
        value = stack.pop()
        sources = [*passed.get(value, ())]
        for source in sources:
            accumulated.ports.setdefault(passing_port(graph, source, value), _FACTOR)
        maker = graph.producer(value)
        if (
            maker is not None
            and not sources
            and maker.key not in op_facts().contractions
        ):
            accumulated.ports.setdefault((maker.index, ABSENT), _FACTOR)
            sources += passed_inputs(graph, maker)
        fresh = [source for source in sources if source not in seen]
        seen.update(fresh)
        stack += fresh


def _add_control_flow(graph: Graph, accumulated: Accumulated) -> None:
    """Add the ports of control flow through which state enters, stays or leaves, and the values that leave."""
    ports, values = accumulated.ports, accumulated.values
    # Inner loops first, because what leaves them may leave outer ones as well.
    for node in graph.order:
        if not node.bodies or node.key not in op_facts().control_flow:
            continue
        for source, result in transfers(graph, node):
            kept = source if source in values else result
            if kept not in values:
                continue
            for value in {source, result} - {ABSENT}:
                if value in node.inputs or value in node.outputs:
                    ports[node.index, value] = values[kept]
            if result in node.outputs and source in values:
                values[result] = values[source]
                if source in accumulated.open_ended:
                    accumulated.open_ended.add(result)
        for state in carried_states(graph, node):
            if state.end in values and state.start != ABSENT:
                ports[node.index, state.start] = values[state.end]


_FACTOR: Final = "computes a factor by which a loop multiplies in every iteration"
