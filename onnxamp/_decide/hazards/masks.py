"""Attention masks: large constants on their way to a Softmax, which low precision would spoil."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind, computing
from onnxamp._facts.dtypes import LOW_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.added import may_be_bounded
from onnxamp._graph.masks.made import bounded_masks
from onnxamp._graph.masks.paths import (
    holds_sentinel,
    mask_arithmetic,
    mask_path,
    saturated,
)
from onnxamp._graph.numbers.known import is_out_of_range, known_numbers, stats_of
from onnxamp._graph.view import Node
from onnxamp._model.constant_stats import ConstantStats
from onnxamp._model.weights import SENTINEL


def masks(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the paths from large constants, sentinels apart, to a Softmax, which stay in float32 as a whole.

    A constant is large if adjacent low-precision numbers differ by more than 1 there, so that score + mask loses the
    score. A fully masked row would then lose the differences that float32 keeps.

    Complexity: linear; a path is walked once, however many of its nodes read large constants.
    """
    leading = mask_arithmetic(graph, graph.nodes_of(op_facts().mask_sinks))
    divisors = op_facts().divisors
    walked: set[int] = set()
    kept: set[int] = set()
    for node in graph.at(leading):
        # If a node is kept, so is its whole path.
        if node.index in kept:
            continue
        scales = {node.input(port) for port in divisors.get(node.key, ())}
        for value in graph.float_inputs(node):
            # A divisor scales the scores, so it is no mask.
            if value in scales:
                continue
            each = stats_of(graph, value)
            largest = next(
                (large for stats in each if (large := _large(low, stats)) is not None),
                None,
            )
            largest = (
                _computed_sentinel(graph, low, value, leading)
                if largest is None
                else largest
            )
            path = list[int]()
            if largest is None and holds_sentinel(graph, low, value):
                if node.index not in walked:
                    path = mask_path(graph, node)
                    walked.update(path)
                makers = _makers(graph, value, path)
                # A sentinel that is made in float32 does not saturate: its Cast would be infinite.
                if any(_stays_high(low, maker) for maker in makers):
                    largest = each[0].largest
            if largest is not None:
                path = path or mask_path(graph, node)
                kept.update(path)
                why = f"carries the mask value {largest:.6g} to its Softmax"
                yield from (Hazard(index, KIND, why) for index in path)
                yield from computing(graph, value, node, KIND) if path else ()


def given_masks(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the nodes that compute a mask from inputs, which is bounded before its Cast.

    In a model that was converted before, it is bounded already, and only a Cast may read the bounded mask. Where no
    node can bound the mask, or its rows are unknown, its whole path stays in float32.
    """
    given = bounded_masks(graph, low)
    unbounded = given.unaligned
    if not may_be_bounded(graph):
        unbounded |= given.sums
    for node in graph.at(unbounded):
        why = "adds a mask among the inputs, which low precision would spoil"
        yield from (Hazard(index, KIND, why) for index in mask_path(graph, node))
    for index in sorted(given.arithmetic):
        yield Hazard(
            index,
            KIND,
            "computes a mask, which is bounded before it becomes low precision",
        )
    for node in graph.nodes_of(op_facts().bounds):
        bounds = [graph.constants.uniform(value) for value in node.inputs]
        if any(
            bound is not None and abs(bound) >= 1 / low.epsilon for bound in bounds
        ) and _is_cast(graph, node):
            yield Hazard(
                node.index, KIND, "bounds a mask before it becomes low precision"
            )


def _is_cast(graph: Graph, node: Node) -> bool:
    """Return whether nothing but Casts to low precision read a node."""
    readers = [reader for reader, _ in graph.readers(node)]
    casts = [
        reader
        for reader in readers
        if reader.key == "Cast" and graph.types[reader.outputs[0]] in LOW_TENSORS
    ]
    return bool(casts) and len(casts) == len(readers)


def _computed_sentinel(
    graph: Graph, low: Format, value: int, leading: AbstractSet[int]
) -> float | None:
    """Return a sentinel that the model computes, or lets callers override, so that no stored number can saturate.

    The result is None if mask arithmetic computes it from a stored sentinel, which saturates.
    """
    known = graph.ask(known_numbers)
    largest = max(
        (stats.largest for stats in known.stats(value) if stats.has_sentinel(low)),
        default=None,
    )
    if largest is None:
        return None
    makers = (graph.producer(origin) for origin in known.origins(value))
    arithmetic = [
        maker for maker in makers if maker is not None and maker.index in leading
    ]
    sources = chain.from_iterable(maker.reads for maker in arithmetic)
    is_stored = any(holds_sentinel(graph, low, source) for source in sources)
    return None if is_stored else largest


def _large(low: Format, stats: ConstantStats) -> float | None:
    """Return a large element of the constant that is no sentinel."""
    is_large = 1 / low.epsilon <= abs(stats.uniform or 0.0) < SENTINEL
    return stats.uniform if is_large else stats.out_of_range(low)


def _makers(graph: Graph, value: int, path: list[int]) -> Iterator[Node]:
    """Yield the node that creates a constant, and the path from there to the Softmax, which is excluded."""
    maker = graph.producer(graph.constants.source(value))
    if maker is not None:
        yield maker
    yield from (
        node for node in graph.at(path) if node.key not in op_facts().mask_sinks
    )


def _stays_high(low: Format, maker: Node) -> bool:
    """Return whether the node's schema does not allow the low-precision type as output."""
    port = maker.signature.output(0) if maker.signature is not None else None
    if port is None or maker.signature is None:
        return False
    return low.tensor not in maker.signature.params.get(port.type, frozenset())


class _Masks(HazardKind):
    value = "mask"
    title = "low precision would change an attention mask"
    looks_at = ("mask_sinks", "bounding_epsilons")
    fault = Fault(
        Effect.SPOILS_MASK,
        "adds a mask in LOW that is so large that a fully masked row loses its scores",
        needs_constant=True,
        is_enough=True,  # a mask times 0 or 1 stays in range
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from masks(graph, low)
        yield from given_masks(graph, low)

    def is_shown_by(self, number: float, low: Format, /) -> bool:
        return abs(number) * low.epsilon >= 1 and abs(number) not in saturated(low)

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        return is_out_of_range(graph, weight, low)


KIND: Final = _Masks()
