"""Epsilons that low precision loses, and the ops that they guard against zero."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.verdicts import Audit, Hazard, Kind
from onnxamp._dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._ops.facts import op_facts


def epsilons(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Tiny uniform constants keep their consumers in float32, and the ops that they guard against zero.

    One that becomes zero breaks the guarded op at an input of zero, which samples may lack. One that is added, guards
    nothing and does not become zero is a learned bias: it changes by less than half of the smallest low number.
    """
    facts = op_facts()
    tiny = dict[int, float]()
    zeros = set[int]()
    for value, stats in graph.constants.floats().items():
        number = None if stats is None else stats.uniform
        if number is not None and _is_telling(number, low):
            tiny[value] = number
            if abs(number) <= low.smallest_subnormal / 2:
                zeros.add(value)
    lost = [
        (node, port, value)
        for node in graph.nodes_of(facts.epsilons)
        for port, value in enumerate(node.inputs)
        if value in tiny and _is_lost(tiny[value], low, node.key)
    ]
    walks = _Walks()
    # Zeros come first, because walks end where earlier ones have been.
    for node, port, value in sorted(lost, key=lambda use: use[2] not in zeros):
        fate = "rounds to zero" if value in zeros else "holds with fewer digits"
        why = f"{graph.values[value].name!r} is {tiny[value]:.6g}, which {low.name} {fate}"
        may_guard = (node.key, port) != ("Div", 1) and node.key != "Mul"
        behind = (
            list(_guarded(graph, node, walks, rare=value in zeros))
            if may_guard
            else []
        )
        is_guard = node.index in walks.guards
        if not is_guard and value not in zeros and node.key in facts.added_epsilons:
            continue
        yield Hazard(node.index, KIND, why, value in zeros and is_guard)
        yield from behind


class _Walks:
    """Nodes downstream of an epsilon that were visited, those among them that lead to a guarded op, and the nodes with
    an epsilon that does.
    """

    def __init__(self) -> None:
        self.seen, self.leading, self.guards = set[int](), set[int](), set[int]()


def _guarded(
    graph: Graph, node: Node, walks: _Walks, *, rare: bool
) -> Iterator[Hazard]:
    """Ops downstream of an epsilon whose results explode if the guarded value is flushed to zero.

    Complexity: linear over all epsilons of a graph, because a walk ends where an earlier one has been.
    """
    guarded = op_facts().guarded
    why = f"{node.label!r} guards its input with an epsilon"
    previous: dict[int, int] = {}
    kept: set[int] = set()
    stack = [node]
    while stack:
        last = stack.pop()
        for reader, port in graph.readers(last):
            if reader.index in previous or reader.index == node.index:
                continue
            previous[reader.index] = last.index
            is_end = port in guarded.get(reader.key, ())
            if is_end:
                kept.add(reader.index)
                yield Hazard(reader.index, KIND, why, rare)
            if is_end or reader.index in walks.leading:
                walks.guards.add(node.index)
                between = last.index
                while (
                    between != node.index and between not in kept
                ):  # it must not be flushed
                    kept.add(between)
                    yield Hazard(between, KIND, why, rare)
                    between = previous[between]
            if is_end and reader.key == "Log":
                yield from _small_numbers(graph, node)
            carries = reader.index in graph.exact or reader.key == "Sqrt"
            if (
                carries
                and graph.is_float_output(reader)
                and reader.index not in walks.seen
            ):
                walks.seen.add(reader.index)
                stack.append(reader)
    walks.leading |= kept


def _small_numbers(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Yield ops that compute the argument of a guarded logarithm: a tiny epsilon implies that tiny values
    occur there.
    """
    walk = op_facts().spectral_arithmetic
    stack = [node]
    seen = {node.index}
    while stack and len(seen) < _SPECTRAL_REACH:
        for _, value in graph.float_inputs(stack.pop()):
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
    return abs(rounded - abs(number)) > 4 * low.epsilon * abs(number)


def _is_telling(number: float, low: Format) -> bool:
    return 0 < abs(number) < low.smallest_normal


def _loses(graph: Graph, value: int, low: Format) -> bool:
    number = graph.constants.uniform(value)
    return number is not None and _is_telling(number, low)


KIND: Final = Kind(
    "epsilon",
    title="low precision loses an epsilon, or the small values that it guards",
    rule=epsilons,
    is_measurable=True,
    audit=Audit(
        3,
        "LOW loses an epsilon here, or the small values that it guards",
        "",
        _is_telling,
    ),
    loses=_loses,
)
