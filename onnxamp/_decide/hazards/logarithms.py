"""Probabilities on their way to a logarithm, or to odds, which are infinite where the probability rounds to 0 or 1.

Sigmoid and Softmax approach 0 and 1 exponentially. float32 tells a probability of 1e-20 from 0, and one of 0.99999 from
1. float16 ends at 6e-8, and at 0.9995 below 1; bfloat16 at 0.996. The logarithm, or the division by 1 - p, is then
infinite, although it is an ordinary number in float32.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from onnxamp._decide.kinds import Claim, Effect, Fault, Hazard, HazardKind, in_range
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import attribute_of, op_facts
from onnxamp._graph.exact_walks import readers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.channels import MOST_WEIGHTS
from onnxamp._graph.numbers.unmixed import Unmixed
from onnxamp._graph.view import ABSENT, Node, passed_from

_DIGITS: Final = 64.0
"""Steps below 1 that keep a difference such as 1 - p away from zero: it is off by a percent then, and not infinite."""


def logarithms(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the nodes from a probability to the logarithm or division that it reaches, both ends included.

    Inputs of the model count as probabilities where they reach a logarithm, because they may be.

    Complexity: linear.
    """
    facts = op_facts()
    near = Unmixed(graph, set(graph.given_floats), facts.additive)
    # A product with anything else divides well, as those of activations do that multiply by a Sigmoid.
    odds = Unmixed(graph, set(), facts.additive | facts.commutative)
    # Products with inputs are no mixtures: they are of any sign. Neither are those with what probabilities multiply.
    mixtures = Unmixed(graph, set(), facts.additive | facts.commutative)
    ends = list[tuple[Node, int, Unmixed]]()
    passed = graph.ask(passed_from)
    for node in graph.computing:
        for port in facts.divisors.get(node.key, ()):
            reached = near if node.key in facts.logarithms else odds
            if node.input(port) in reached.values:
                ends.append((node, port, reached))
        if node.key in facts.saturating and _reaches_bound(node):
            near.values.update(node.writes)
            mixtures.values.update(node.writes)
            # What is divided by an exponential is as large in float32.
            if node.key not in facts.growing:
                odds.values.update(node.writes)
            continue
        if node.key == "If":
            for value in node.writes:
                for kind in (near, odds, mixtures):
                    kind.choose(value, passed.get(value, ()))
            continue
        # Most nodes read none. All odds, and all values made of probabilities, are in `near` as well.
        if near.values.isdisjoint(node.inputs):
            continue
        if node.key in facts.odds_arithmetic:
            for kind in (near, odds, mixtures):
                kind.pass_through(node)
        elif node.key in facts.contractions and _is_mixture(
            graph, node, mixtures.values
        ):
            near.values.update(node.writes)
            mixtures.values.update(node.writes)
    yield from _paths(graph, ends, low)


def _reaches_bound(node: Node) -> bool:
    """Return whether a node's numbers come as close to 0 or 1 as they can, unless they are drawn between others."""
    if node.key not in op_facts().random:
        return True
    low = attribute_of(node.proto, "low", 0.0)
    high = attribute_of(node.proto, "high", 1.0)
    return bool(low == 0 or high == 1)


def _is_mixture(graph: Graph, node: Node, probabilities: AbstractSet[int]) -> bool:
    """Return whether a product sums up probabilities, each multiplied by another one, or by a constant of no sign.

    Such are mixtures of topics, and the steps of a hidden Markov model.
    """
    if probabilities.isdisjoint(node.inputs):
        return False
    constants = graph.constants
    others = [value for value in node.reads if value not in probabilities]
    if not all(map(constants.is_constant, others)):
        return False
    weights = (constants.numbers(value, most=MOST_WEIGHTS) for value in others)
    return all(numbers is not None and (numbers >= 0).all() for numbers in weights)


def _paths(
    graph: Graph, ends: list[tuple[Node, int, Unmixed]], low: Format
) -> Iterator[Hazard]:
    """Yield the nodes between probabilities and the ends that they reach.

    None is a hazard if what all ends divide by, or take the logarithm of, keeps away from zero.
    """
    saturating = op_facts().saturating
    claims = list[Claim]()
    for end, port, _ in ends:
        claims += in_range(graph, end, low)
        claims.append(Claim(end.input(port), least=_DIGITS * low.epsilon))
    unless = tuple(claims)
    passed = graph.ask(passed_from)
    # A node may lie on the way to a logarithm and on one to odds: each is walked once.
    seen = set[tuple[int, int]]()
    read = set[int]()
    for end, port, reached in ends:
        if end.key not in op_facts().logarithms:
            # Odds are large where 1 - p is small.
            why = f"reads the odds {end.label!r}"
            for reader in readers_through_exact(graph, end, read):
                yield Hazard(reader.index, KIND, why, unless=unless)
        why = "divides by, or takes the logarithm of, a probability"
        yield Hazard(end.index, KIND, why, unless=unless)
        stack = [end.input(port)]
        while stack:
            value = stack.pop()
            node = graph.producer(value)
            if (
                value == ABSENT
                or value not in reached.values
                or node is None
                or (node.index, id(reached)) in seen
            ):
                continue
            seen.add((node.index, id(reached)))
            why = f"leads to {end.label!r} from a probability"
            yield Hazard(node.index, KIND, why, unless=unless)
            if node.key == "If":
                stack += passed.get(value, ())
            elif node.key not in saturating:
                stack += node.inputs


class _Logarithms(HazardKind):
    value = "logarithm"
    title = "low precision rounds a probability to 0 or 1 before its logarithm or odds"
    looks_at = ("logarithms", "divisors", "saturating")
    is_measurable = True
    fault = Fault(
        Effect.ROUNDS_AWAY,
        "rounds a probability in LOW before its logarithm or odds, which become infinite where it rounds to 0 or 1",
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return logarithms(graph, low)


KIND: Final = _Logarithms()
