"""Epsilons that low precision loses, and the ops that they guard against zero."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from onnxamp._decide.kinds import (
    Claim,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    computing,
    in_range,
)
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.extremes import exploding
from onnxamp._graph.numbers.guards import GuardWalks
from onnxamp._graph.numbers.known import floats_of, stats_of
from onnxamp._graph.passed import passed_on
from onnxamp._graph.view import ABSENT, Node


def epsilons(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the consumers of tiny uniform constants, and the ops that these guard against zero.

    A constant that becomes zero breaks the guarded op at an input of zero, which samples may lack. A constant that is
    added, guards nothing and does not become zero is a learned bias: it changes by less than half of the smallest
    number.
    """
    # Zeros come first, because walks end where earlier ones have been.
    uses = sorted(_uses(graph, low), key=_Use.is_held)
    walks = GuardWalks(graph, len(uses))
    walked = list[tuple[int, bool, Hazard]]()
    for number, use in enumerate(uses):
        for hazard in _hazards_of(graph, low, use, number, walks):
            is_own = hazard.node == use.node.index
            is_own = is_own and use.is_lost and not _only_guards(graph, use, walks)
            walked.append((number, is_own, hazard))
    claims = _group_claims(uses, walks, low)
    # An epsilon that becomes zero is lost to its own node, even if the values that it guards are large.
    of_own = {
        group: tuple([claim._replace(instead=()) for claim in unless])
        for group, unless in claims.items()
    }
    for number, is_own, hazard in walked:
        if not uses[number].may_guard:
            yield hazard
            continue
        unless = (of_own if is_own else claims)[walks.group(number)]
        yield replace(hazard, unless=unless)


def _hazards_of(
    graph: Graph, low: Format, use: "_Use", number: int, walks: GuardWalks
) -> Iterator[Hazard]:
    """Yield the hazards of one tiny constant, without claims."""
    facts = op_facts()
    node, is_zero = use.node, use.is_zero
    fate = "rounds to zero" if is_zero else "holds with fewer digits"
    why = f"{use.name!r} is {use.number:.6g}, which {low.name} {fate}"
    downstream = list[Hazard]()
    if use.may_guard:
        downstream += _guarded(graph, node, number, walks, rare=is_zero)
    is_guard = node.index in walks.guards
    joins = facts.added_epsilons.keys() | facts.thresholds
    if not is_guard and not use.is_lost and node.key in joins:
        return
    rare = is_zero and is_guard
    yield Hazard(node.index, KIND, why, rare)
    if use.port != ABSENT:
        yield from computing(graph, node.inputs[use.port], node, KIND, rare=rare)
    yield from downstream


def _guarded(
    graph: Graph, node: Node, number: int, walks: GuardWalks, *, rare: bool
) -> Iterator[Hazard]:
    """Yield the hazards of the ops that an epsilon guards, and of what lies on the way to them."""
    why = f"{node.label!r} guards its input with an epsilon"
    for guarded in walks.follow(node, number):
        yield Hazard(guarded.node, KIND, why, rare, guarded.value)
        if guarded.is_end and graph.nodes[guarded.node].key == "Log":
            yield from _small_numbers(graph, node)


def _only_guards(graph: Graph, use: "_Use", walks: GuardWalks) -> bool:
    """Return whether all that reads the result of a node with an epsilon leads to ops that it guards."""
    passed = passed_on(graph, use.node)
    readers = {reader.index for reader, _ in passed.readers(graph)}
    is_output = any(value in passed.values for value in graph.scopes[0].outputs)
    return readers <= walks.leading and not is_output


def _group_claims(
    uses: "Sequence[_Use]", walks: GuardWalks, low: Format
) -> dict[int, tuple[Claim, ...]]:
    """Return the claims under which no constant of a group of walks matters, by group.

    Either each is far smaller than what it is added to, or all that the group divides by is far from zero.
    """
    numbers = dict[int, list[int]]()
    for number, use in enumerate(uses):
        if use.may_guard:
            numbers.setdefault(walks.group(number), []).append(number)
    claims_of = dict[int, tuple[Claim, ...]]()
    for group, members in numbers.items():
        largest = max(abs(uses[number].number) for number in members)
        # A divisor may be a root of a root of what the epsilon is added to.
        least = max((largest / low.epsilon) ** 0.25, low.smallest_normal)
        ends = dict.fromkeys(end for number in members for end in walks.ends[number])
        instead = tuple(Claim(end, least=least) for end in ends)
        claims = [
            uses[number].claim(low)._replace(instead=instead) for number in members
        ]
        claims_of[group] = tuple(claims)
    return claims_of


class _Use(NamedTuple):
    """A node with a tiny constant, at one of its inputs, or at ABSENT in an attribute; whether that rounds to zero."""

    node: Node
    port: int
    number: float
    name: str
    is_zero: bool

    def is_held(self) -> bool:
        """Return whether low precision holds some digits of the constant."""
        return not self.is_zero

    @property
    def is_lost(self) -> bool:
        """Whether low precision loses the constant and the node does more with it than compare."""
        return self.is_zero and self.node.key not in op_facts().thresholds

    @property
    def may_guard(self) -> bool:
        """Whether the constant may keep the result of the node away from zero."""
        divisors = op_facts().divisors.get(self.node.key, ())
        return self.port not in divisors and self.node.key != "Mul"

    def claim(self, low: Format) -> Claim:
        """Return the claim that the result is so much larger than the constant that this makes no difference."""
        least = max(abs(self.number) / low.epsilon, low.smallest_normal)
        return Claim(self.node.output(0), least=least)


def _uses(graph: Graph, low: Format) -> Iterator[_Use]:
    """Yield the nodes with tiny constants that low precision changes."""
    facts = op_facts()
    tiny = dict[int, float]()
    varied = set[int]()
    for value, stats in floats_of(graph):
        number = stats.largest_number if stats.uniform is None else stats.uniform
        if _is_tiny(number, low):
            tiny[value] = min(number, tiny.get(value, number), key=abs)
            if stats.uniform is None:
                varied.add(value)
    joining = facts.added_epsilons.keys() | facts.bounding_epsilons.keys()
    for node in graph.nodes_of(facts.epsilons):
        # An epsilon may differ among channels. Factors that do are weights.
        is_joined = node.key in joining
        apart = frozenset[int]() if is_joined else varied
        for port, value in enumerate(node.inputs):
            if value not in tiny or value in apart:
                continue
            number = tiny[value]
            if _is_lost(number, low, node.key):
                name = graph.values[value].name
                yield _Use(node, port, number, name, _vanishes(number, low))
    for op, name in facts.bounding_attribute.items():
        for node in graph.nodes_of({op}):
            number = attribute(node.proto, name)
            if number is not None and _is_tiny(number, low):
                yield _Use(node, ABSENT, number, name, _vanishes(number, low))


def _vanishes(number: float, low: Format) -> bool:
    """Return whether low precision rounds a number to zero."""
    # Half of the smallest number is a tie, which goes to the even neighbor: to zero.
    return abs(number) <= low.smallest_subnormal / 2


def inverses(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes that compute or read the inverse of a guard, which is large where the guarded value is zero."""
    for node, guard, number, value in exploding(graph, low):
        why = (
            f"reaches {number:.6g} where the value that {guard.label!r} guards is zero;"
            f" {low.name} ends at {low.max_finite:.6g}"
        )
        yield Hazard(
            node.index,
            KIND,
            why,
            rare=True,
            value=value,
            unless=in_range(graph, node, low),
        )


def _small_numbers(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Yield ops that compute the argument of a guarded logarithm, where a tiny epsilon implies tiny values."""
    walk = op_facts().spectral_arithmetic
    stack = [node]
    seen = {node.index}
    while stack and len(seen) < _SPECTRAL_REACH:
        for value in graph.float_inputs(stack.pop()):
            producer = graph.producer(value, *walk)
            if producer is not None and producer.index not in seen:
                seen.add(producer.index)
                stack.append(producer)
                why = f"computes small numbers for the guarded {node.label!r}"
                yield Hazard(producer.index, KIND, why)


_SPECTRAL_REACH = 16
"""Limit on the nodes visited upstream of a guarded logarithm."""


def _is_lost(number: float, low: Format, key: str) -> bool:
    """Return whether rounding flushes a tiny constant or makes it subnormal (for Mul: inexact); 0 does not change."""
    if key != "Mul":
        return number != 0
    rounded = round(abs(number) / low.smallest_subnormal) * low.smallest_subnormal
    # Normal numbers are off by half of epsilon at most, so a factor may lose up to three of its bits.
    return abs(rounded - abs(number)) > 4 * low.epsilon * abs(number)


def _is_tiny(number: float, low: Format) -> bool:
    """Return whether a number is too small for low precision to hold all of its digits, but not 0."""
    return 0 < abs(number) < low.smallest_normal


class _Epsilons(HazardKind):
    value = "epsilon"
    title = "low precision loses an epsilon, or the small values that it guards"
    looks_at = ("epsilons", "guarded")
    is_measurable = True
    ends_by_folding = True
    fault = Fault(
        Effect.LOSES_EPSILON,
        "LOW loses an epsilon here, or the small values that it guards",
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from epsilons(graph, low)
        yield from inverses(graph, low)

    def is_shown_by(self, number: float, low: Format, /) -> bool:
        return _is_tiny(number, low)

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        numbers = (stats.uniform for stats in stats_of(graph, weight))
        return any(number is not None and _is_tiny(number, low) for number in numbers)


KIND: Final = _Epsilons()
