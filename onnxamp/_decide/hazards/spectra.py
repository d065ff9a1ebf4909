"""Spectra of inputs before a logarithm, as in front ends of speech and music: power, mel and constant-Q spectra.

A bin of a spectrum is a sum of large products that cancel. Next to a loud bin, low precision loses a quiet one in the
rounding of these products: 66 dB below it in float16, 42 dB in bfloat16. The square and the logarithm after it turn
that relative error into an absolute one. So does a division of each bin by its own mean, or its normalization. Random
inputs hardly show that, because noise has no quiet bins, so level auto does not measure it.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.powers import squared_value
from onnxamp._graph.view import ABSENT, Node


def spectra(graph: Graph) -> Iterator[Hazard]:
    """Yield the nodes from the inputs of a model to the logarithm of their spectrum, or to a division by it,
    inclusive.

    Complexity: linear.
    """
    seen = set[int]()
    for end in _ends(graph, _spectral(graph)):
        why = f"computes the spectrum for {end.label!r}"
        stack = [end]
        while stack:
            node = stack.pop()
            if node.index in seen:
                continue
            seen.add(node.index)
            yield Hazard(node.index, KIND, why)
            makers = map(graph.producer, graph.computed_inputs(node))
            stack += [maker for maker in makers if maker is not None]


def _spectral(graph: Graph) -> set[int]:
    """Return the spectra: squares of sums of products, and what filters, means and bounds make of them.

    They are signals: what sums, products and moves of data make of the inputs of a model, and of nothing else.
    """
    facts = op_facts()
    arithmetic = facts.spectral_arithmetic | facts.transform_arithmetic
    transforms = facts.contractions | facts.transforms
    waiting = [*graph.scopes[0].inputs]
    signals = set(waiting)
    missing = dict[int, set[int]]()
    """Node -> the values that it reads and that are not known to be signals yet."""
    transformed = set[int]()
    spectral = set[int]()
    while waiting:
        value = waiting.pop()
        for node, _ in graph.consumers(value):
            if node.index not in missing:
                missing[node.index] = set(graph.computed_inputs(node))
            missing[node.index].discard(value)
            if missing[node.index] or not signals.isdisjoint(node.writes):
                continue
            read = graph.computed_inputs(node)
            is_spectral = not spectral.isdisjoint(read)
            is_bound = is_spectral and node.key in facts.bounds
            if node.key not in arithmetic and not is_bound:
                continue
            is_transformed = not transformed.isdisjoint(read)
            if is_transformed or node.key in transforms:
                transformed.update(node.writes)
            if is_spectral or (is_transformed and _is_magnitude(graph, node)):
                spectral.update(node.writes)
            signals.update(node.writes)
            waiting += node.writes
    return spectral


def _ends(graph: Graph, spectral: set[int]) -> list[Node]:
    """Return the nodes that amplify quiet parts of spectra."""
    facts = op_facts()
    ends = dict[int, Node]()
    for value in spectral:
        for node, port in graph.consumers(value):
            divides = port in facts.divisors.get(node.key, ())
            read = graph.computed_inputs(node)
            # A norm divides what it is computed of, not its square.
            is_quotient = divides and len(read) > 1 and spectral.issuperset(read)
            is_normalized = node.key in facts.centering_channels and port == 0
            if is_quotient or is_normalized or node.key in facts.logarithms:
                ends[node.index] = node
    return [ends[index] for index in sorted(ends)]


def _is_magnitude(graph: Graph, node: Node) -> bool:
    """Return whether a node makes squares, other powers or magnitudes of its input."""
    return node.key in op_facts().magnitudes or squared_value(graph, node) != ABSENT


class _Spectra(HazardKind):
    value = "spectrum"
    title = "low precision loses the quiet parts of a spectrum"
    looks_at = ("logarithms", "divisors", "centering_channels")
    fault = Fault(
        Effect.ROUNDS_AWAY,
        "computes a spectrum in LOW, whose quiet parts rounding loses, before a logarithm or a division that amplifies"
        " them",
    )

    def find(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        return spectra(graph)


KIND: Final = _Spectra()
