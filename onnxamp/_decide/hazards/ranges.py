"""Constants out of the range of low precision."""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Final

from onnxamp._decide.computing import computing
from onnxamp._decide.extremes import shrinking
from onnxamp._decide.verdicts import Audit, Hazard, Kind
from onnxamp._dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.known import floats_of, stats_of
from onnxamp._graph.view import Node
from onnxamp._model.weights import SENTINEL
from onnxamp._options.options import Options


def constant_ranges(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Constants out of range, sentinels apart, keep their consumers in float32, and the consumers of their results.

    So do factors that scale values of a few units out of it.
    """
    seen: set[int] = set()
    limit = low.max_finite / 8
    large = {value for value, stats in floats_of(graph) if abs(stats.largest_number) > limit}
    for node in _reading(graph, large):
        for value in node.inputs:
            beyond = _beyond(graph, low, node, value) if value in large else None
            if beyond is None or _carries(graph, node):
                continue
            name = graph.values[value].name
            verb = "holds" if abs(beyond) > low.max_finite else "scales by"
            why = f"{name!r} {verb} {beyond:.6g}; {low.name} ends at {low.max_finite:.6g}"
            yield Hazard(node.index, KIND, why)
            yield from computing(graph, value, node, KIND)
            why = f"reads what {node.label!r} computes from a constant out of range"
            for reader in readers_through_exact(graph, node, seen):
                yield Hazard(reader.index, KIND, why)


def tiny_factors(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes that scale values of a few units by a constant so small that low precision loses the products, and
    those that read the products.
    """
    for node, start, number in shrinking(graph, low):
        verb = "scales" if node is start else f"reads what {start.label!r} scales"
        why = f"{verb} by {number:.6g}; the smallest {low.name} number is {low.smallest_subnormal:.6g}"
        yield Hazard(node.index, KIND, why)


def _rule(graph: Graph, low: Format) -> Iterator[Hazard]:
    yield from constant_ranges(graph, low)
    yield from tiny_factors(graph, low)


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
    readers = {node for value in values for node, _ in graph.uses[value]}
    return graph.at(readers)


def _beyond(graph: Graph, low: Format, node: Node, value: int) -> float | None:
    """Return an element of the constant that is out of range, or a factor that scales values of a few units out of
    it.
    """
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


def readers_through_exact(graph: Graph, node: Node, seen: set[int]) -> Iterator[Node]:
    """Yield nodes that are not yet in ``seen`` and read the node's outputs, directly or through exact ops, which are
    included.

    Nodes are added to ``seen``, so that all walks of a graph together take linear time.
    """
    stack = [node]
    while stack:
        for reader, _ in graph.readers(stack.pop()):
            if reader.index in seen:
                continue
            seen.add(reader.index)
            yield reader
            if reader.index in graph.exact and graph.is_float_output(reader):
                stack.append(reader)


def _is_telling(number: float, low: Format) -> bool:
    return abs(number) > low.max_finite / 8


def is_out_of_range(graph: Graph, value: int, low: Format) -> bool:
    """Return whether a constant has an element that low precision cannot hold."""
    return any(stats.out_of_range(low) is not None for stats in stats_of(graph, value))


KIND: Final = Kind(
    "constant range",
    title="a constant exceeds the range of low precision",
    rule=_rule,
    is_cured_by_exponents=True,
    audit=Audit(
        2,
        "computes in LOW near the end of its range",
        ": it ends at {end:.6g}",
        _is_telling,
    ),
    loses=is_out_of_range,
)
