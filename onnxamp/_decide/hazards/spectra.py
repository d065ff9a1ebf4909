"""Spectra of inputs before a logarithm, as in front ends of speech and music: power, mel and constant-Q spectra.

A bin of a spectrum is a sum of large products that cancel. Next to a loud bin, low precision loses a quiet one in the
rounding of these products: 66 dB below it in float16, 42 dB in bfloat16. The square and the logarithm after it make an
absolute error of the relative one. Random inputs hardly show that, because noise has no quiet bins.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node


def spectra(graph: Graph) -> Iterator[Hazard]:
    """Yield the nodes from the inputs of a model to a logarithm of their spectrum, both ends included.

    A spectrum is a square of sums of products, which sums, products and moves of data make of inputs. Filters, means
    and bounds may follow it.

    Complexity: linear.
    """
    ends = list(graph.nodes_of(op_facts().logarithms))
    spectral = _spectral_values(graph) if ends else set()
    seen = set[int]()
    for end in ends:
        if end.input(0) not in spectral:
            continue
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


def _spectral_values(graph: Graph) -> set[int]:
    """Return the values that are spectra of inputs, and computed of nothing else."""
    facts = op_facts()
    arithmetic = facts.spectral_arithmetic | facts.transform_arithmetic
    signals = set[int]()
    transformed = set[int]()
    spectral = set[int]()
    for node in graph.computing:
        read = graph.computed_inputs(node)
        is_spectral = not spectral.isdisjoint(read)
        is_bound = is_spectral and node.key in facts.bounds
        if node.key not in arithmetic and not is_bound:
            continue
        if not all(
            value in signals or graph.producer(value) is None for value in read
        ):
            continue
        signals.update(node.writes)
        is_transformed = not transformed.isdisjoint(read)
        if is_transformed or node.key in facts.contractions:
            transformed.update(node.writes)
        if is_spectral or (is_transformed and _is_square(node)):
            spectral.update(node.writes)
    return spectral


def _is_square(node: Node) -> bool:
    """Return whether a node makes squares, or magnitudes, of its input."""
    is_product_with_itself = node.key == "Mul" and node.inputs[0] == node.inputs[1]
    return is_product_with_itself or node.key in op_facts().squares


class _Spectra(HazardKind):
    value = "spectrum"
    title = "low precision loses the quiet parts of a spectrum before its logarithm"
    looks_at = ("logarithms",)
    is_measurable = True
    fault = Fault(
        Effect.ROUNDS_AWAY,
        "computes a spectrum in LOW before its logarithm, which makes much of quiet parts that rounding loses",
    )

    def find(self, graph: Graph, _low: Format, /) -> Iterator[Hazard]:
        return spectra(graph)


KIND: Final = _Spectra()
