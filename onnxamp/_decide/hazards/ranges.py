"""Constants out of the range of low precision."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxamp._decide.kinds import (
    ByExponents,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    computing,
    in_range,
    large_enough,
)
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import attribute, attribute_of, op_facts
from onnxamp._graph.exact_walks import (
    before_offsets,
    makers_through_exact,
    readers_through_exact,
)
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.channels import channel_factors
from onnxamp._graph.numbers.damaged import damaged
from onnxamp._graph.numbers.extremes import DIGITS, shrinking
from onnxamp._graph.numbers.known import floats_of, is_out_of_range, stats_of
from onnxamp._graph.view import Node
from onnxamp._model.weights import SENTINEL
from onnxamp._options.options import Options


def constant_ranges(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the consumers of constants out of range, sentinels apart, and the nodes that read their results.

    Factors that scale values of a few units out of range count as well.
    """
    seen: set[int] = set()
    # Times an eighth of the largest number, values above 8 leave the range.
    limit = low.max_finite / 8
    large = {
        value for value, stats in floats_of(graph) if abs(stats.largest_number) > limit
    }
    for node in _reading(graph, large):
        for value in node.inputs:
            beyond = _beyond(graph, low, node, value) if value in large else None
            if beyond is None or _carries(graph, node):
                continue
            name = graph.values[value].name
            verb = "holds" if abs(beyond) > low.max_finite else "scales by"
            why = f"{name!r} {verb} {beyond:.6g}; {low.name} ends at {low.max_finite:.6g}"
            claims = in_range(graph, node, low)
            yield Hazard(node.index, KIND, why, unless=claims)
            yield from computing(graph, value, node, KIND, unless=claims)
            why = f"reads what {node.label!r} computes from a constant out of range"
            for reader in readers_through_exact(graph, node, seen):
                claims = in_range(graph, reader, low)
                yield Hazard(reader.index, KIND, why, unless=claims)


def tiny_factors(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes that scale values of a few units by so small a constant that low precision loses the products.

    The nodes that read the products follow.
    """
    least = DIGITS * low.smallest_subnormal
    for node, start, number, value in shrinking(graph, low):
        verb = "scales" if node is start else f"reads what {start.label!r} scales"
        why = f"{verb} by {number:.6g}; the smallest {low.name} number is {low.smallest_subnormal:.6g}"
        claims = large_enough(graph, node, least, value)
        yield Hazard(node.index, KIND, why, value=value, unless=claims)


def tiny_channels(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the nodes that make channels of a result of very different scale, some of which low precision loses.

    Forecasts of temperatures beside mixing ratios are such results: each is scaled by its own deviation at the end.
    """
    least = DIGITS * low.smallest_subnormal
    for value in graph.scopes[0].outputs:
        nodes = before_offsets(graph, value, _MOST_ENDING)
        factors = channel_factors(graph, nodes[-1]) if nodes else None
        if factors is None:
            continue
        # Beside an ordinary offset, what a dead channel computes does not matter.
        used = factors[(factors > 0) & (_offsets(graph, nodes, factors.size) < least)]
        if not used.size or not used.min() < least <= factors.max():
            continue
        why = f"makes channels of a result, one of which is scaled by {used.min():.3g}"
        for node in nodes:
            yield Hazard(node.index, KIND, why)


def _offsets(graph: Graph, nodes: Sequence[Node], count: int) -> NDArray[np.float64]:
    """Return the magnitude of the constants that nodes at the end of a model add to each channel."""
    total = np.zeros(count)
    for node in nodes:
        is_sum = node.key in op_facts().additive
        added = node.reads if is_sum else node.reads[2:]
        for value in added:
            numbers = graph.constants.numbers(value, most=count)
            if numbers is not None and numbers.size in (1, count):
                total += numbers.reshape(-1)
    return np.abs(total)


_MOST_ENDING: Final = 5
"""Nodes at the end of a model: scales, a mean that is added, data movement."""


def large_moments(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield normalizations whose stored moments show that their input leaves the range, with the nodes that make it."""
    facts = op_facts()
    for node in graph.nodes_of(facts.moments):
        mean, variance = (
            graph.constants.numbers(node.input(port))
            for port in facts.moments[node.key]
        )
        if mean is None or variance is None or mean.shape != variance.shape:
            continue
        deviation = np.sqrt(np.maximum(variance.astype(np.float64), 0.0))
        reach = float((np.abs(mean) + _DEVIATIONS * deviation).max(initial=0.0))
        if not low.max_finite < reach < SENTINEL:
            continue
        why = f"makes numbers that reach {reach:.6g}, as the stored moments of {node.label!r} show"
        for maker in (*makers_through_exact(graph, node.input(0)), node):
            claims = in_range(graph, maker, low)
            yield Hazard(maker.index, KIND, why, rare=True, unless=claims)


_DEVIATIONS: Final = 4.0
"""Deviations from their mean within which nearly all numbers are."""


def damaged_constants(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes that compute a constant from numbers that low precision cannot hold, or cannot tell apart."""
    for node in damaged(graph, low):
        yield Hazard(
            node.index, KIND, f"computes a constant, and a wrong one in {low.name}"
        )
        yield from computing(graph, node.outputs[0], node, KIND)


def held_numbers(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield the readers of results and the makers of inputs that are large, as numbers in a node's attributes show.

    The nodes themselves know float32 alone. Complexity: linear in nodes and attributes.
    """
    facts = op_facts()
    seen: set[int] = set()
    for node in graph.nodes_of({*facts.input_numbers, *facts.result_numbers}):
        kept = _unfit(node, facts.input_numbers.get(node.key, ()), low)
        if kept is not None:
            why = f"makes numbers that {node.label!r} compares with {kept:.6g}, which {low.name} cannot hold"
            for maker in makers_through_exact(graph, node.input(0)):
                yield Hazard(maker.index, KIND, why)
        is_squashed = attribute_of(
            node.proto, "post_transform", "NONE"
        ) in facts.squashed_by.get(node.key, ())
        largest = (
            None
            if is_squashed
            else _unfit(node, facts.result_numbers.get(node.key, ()), low)
        )
        if largest is not None:
            why = f"reads results of {node.label!r}, which holds {largest:.6g}; {low.name} cannot hold that"
            # A product of many terms is as wrong as its operands, relative to them: a rounded integer does no more.
            is_rounded = abs(largest) < low.overflow
            harmless = facts.contractions if is_rounded else frozenset()
            for reader in readers_through_exact(graph, node, seen):
                if reader.key not in harmless:
                    yield Hazard(reader.index, KIND, why)


def _unfit(node: Node, names: Iterable[str], low: Format) -> float | None:
    """Return a number in attributes of a node that is out of range, or an integer that low precision would change."""
    for name in names:
        held = attribute(node.proto, name)
        if held is None or (
            isinstance(held, TensorProto) and held.data_type not in _REALS
        ):
            continue
        array = (
            numpy_helper.to_array(held)
            if isinstance(held, TensorProto)
            else np.asarray(held)
        )
        numbers = np.abs(array.astype(np.float64).reshape(-1))
        beyond = numbers[(numbers >= low.overflow) & (numbers < SENTINEL)]
        if beyond.size:
            return float(beyond.max())
        numbers = numbers[numbers < low.overflow]
        rounded = numbers.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(
            np.float64
        )
        is_changed = (
            (numbers > low.exact_integers)
            & (numbers == np.round(numbers))
            & (rounded != numbers)
        )
        if is_changed.any():
            return float(numbers[is_changed].max())
    return None


_REALS: Final = (TensorProto.FLOAT, TensorProto.DOUBLE)


def beyond_init_max(graph: Graph, options: Options) -> Iterator[Hazard]:
    """Yield nodes that read a constant with an element beyond ``options.init_max``, as the user asks."""
    limit = options.init_max or inf
    floats = graph.constants.floats().items()
    large = {
        value: stats
        for value, stats in floats
        if stats and (stats.largest > limit or stats.has_infinite)
    }
    for node in _reading(graph, large):
        value = next(value for value in node.inputs if value in large)
        why = f"{graph.values[value].name!r} holds {large[value].largest:.6g}; init_max (--init-max) is {limit:.6g}"
        yield Hazard(node.index, KIND, why)


def _reading(graph: Graph, values: Iterable[int]) -> list[Node]:
    """Return the nodes that read one of some values, in node order."""
    uses = chain.from_iterable(graph.uses[value] for value in values)
    return graph.at({node for node, _ in uses})


def _beyond(graph: Graph, low: Format, node: Node, value: int) -> float | None:
    """Return an element of the constant that is out of range, or a factor that scales values of a few units there."""
    for stats in stats_of(graph, value):
        factor = abs(stats.uniform or 0.0) if node.key == "Mul" else 0.0
        grows = low.max_finite / 8 < factor < SENTINEL
        beyond = stats.uniform if grows else stats.out_of_range(low)
        if beyond is not None:
            return beyond
    return None


def _carries(graph: Graph, node: Node) -> bool:
    """Return whether the node only moves the constant: then its consumers are judged instead."""
    return bool(node.outputs) and bool(stats_of(graph, node.outputs[0]))


class _Ranges(HazardKind):
    value = "constant range"
    title = "a constant exceeds the range of low precision"
    looks_at = ("input_numbers", "result_numbers")
    exponents = ByExponents.SETTLE
    fault = Fault(
        Effect.LEAVES_RANGE,
        "computes in LOW near the end of its range",
        ": it ends at {end:.6g}",
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        yield from constant_ranges(graph, low)
        yield from tiny_factors(graph, low)
        yield from tiny_channels(graph, low)
        yield from large_moments(graph, low)
        yield from held_numbers(graph, low)
        yield from damaged_constants(graph, low)

    def find_asked(self, graph: Graph, options: Options, /) -> Iterable[Hazard]:
        return () if options.init_max is None else beyond_init_max(graph, options)

    def is_shown_by(self, number: float, low: Format, /) -> bool:
        return abs(number) > low.max_finite / 8

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        return is_out_of_range(graph, weight, low)


KIND: Final = _Ranges()
