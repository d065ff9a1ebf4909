"""Static hazards: what is known to break in low precision before anything runs.

Each rule is a function that yields the hazards of a graph for a low-precision type; :func:`find_hazards` runs them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf, prod

from onnxamp._decide.masks import masks
from onnxamp._decide.positions import index_paths, position_paths
from onnxamp._decide.verdicts import Hazard, Reason
from onnxamp._dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.statistics import SENTINEL
from onnxamp._ops.facts import op_facts
from onnxamp._options.options import Options
from onnxamp._patterns.fusion_groups import absorbed_casts
from onnxamp._patterns.patterns import patterns_of

Rule = Callable[[Graph, Format], Iterator[Hazard]]


def find_hazards(graph: Graph, low: Format) -> list[Hazard]:
    """All hazards of a graph, in node order; a node may have several, one of each reason and value, rare ones first."""
    found = [hazard for rule in RULES for hazard in rule(graph, low)]
    ranked = sorted(found, key=lambda hazard: hazard.rare, reverse=True)
    unique = {(hazard.node, hazard.reason, hazard.value): hazard for hazard in reversed(ranked)}
    return sorted(unique.values(), key=lambda hazard: (hazard.node, hazard.reason.value))


def constant_ranges(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Constants out of range, sentinels apart, keep their consumers in float32, and the consumers of their results.

    So do factors that scale values of a few units out of it.
    """
    seen: set[int] = set()
    limit, floats = low.max_finite / 8, graph.constants.floats()
    large = {value for value, stats in floats.items() if stats is not None and abs(stats.largest_number) > limit}
    for node in (graph.nodes[index] for index in sorted({node for value in large for node, _ in graph.uses[value]})):
        for value in node.inputs:
            beyond = _beyond(graph, low, node, value) if value in large else None
            if beyond is None or _carries(graph, node):
                continue
            name = graph.values[value].name
            verb = "holds" if abs(beyond) > low.max_finite else "scales by"
            why = f"{name!r} {verb} {beyond:.6g}; {low.name} ends at {low.max_finite:.6g}"
            yield Hazard(node.index, Reason.RANGE, why)
            for reader in _readers(graph, node, seen):
                yield Hazard(
                    reader.index, Reason.RANGE, f"reads what {node.label!r} computes from a constant out of range"
                )


def beyond_init_max(graph: Graph, options: Options) -> Iterator[Hazard]:
    """Nodes that read a constant with an element beyond ``options.init_max``, as the user asks."""
    limit = options.init_max or inf
    floats = graph.constants.floats().items()
    large = {value: stats for value, stats in floats if stats and (stats.largest > limit or stats.has_infinite)}
    for node in (graph.nodes[index] for index in sorted({node for value in large for node, _ in graph.uses[value]})):
        value = next(value for value in node.inputs if value in large)
        why = f"{graph.values[value].name!r} holds {large[value].largest:.6g}; init_max (--init-max) is {limit:.6g}"
        yield Hazard(node.index, Reason.RANGE, why)


def _beyond(graph: Graph, low: Format, node: Node, value: int) -> float | None:
    """An element of the constant that is out of range, or a factor that scales values of a few units out of it."""
    stats = graph.constants.stats(value)
    if stats is None:
        return None
    grows = node.key == "Mul" and stats.uniform is not None and low.max_finite / 8 < abs(stats.uniform) < SENTINEL
    return stats.uniform if grows else stats.out_of_range(low)


def epsilons(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Tiny uniform constants keep their consumers in float32, and the ops that they guard against zero.

    One that becomes zero breaks what it guards where its input is zero, which samples may lack.
    """
    floats = graph.constants.floats().items()
    numbers = {value: stats.uniform for value, stats in floats if stats is not None and stats.uniform is not None}
    tiny = {value: number for value, number in numbers.items() if 0 < abs(number) < low.smallest_normal}
    zeros = {value for value, number in tiny.items() if abs(number) <= low.smallest_subnormal / 2}
    read = ((node, position) for node in graph.nodes_of(op_facts().epsilons) for position in range(len(node.inputs)))
    lost = [(node, port) for node, port in read if _is_lost(tiny.get(node.inputs[port], 0.0), low, node.key)]
    walks = _Walks()
    lost.sort(key=lambda use: use[0].inputs[use[1]] not in zeros)  # as walks end where earlier ones have been
    for node, port in lost:
        value = node.inputs[port]
        why = f"{graph.values[value].name!r} is {tiny[value]:.6g}, which {low.name} cannot hold"
        may_guard = (node.key, port) != ("Div", 1) and node.key != "Mul"
        behind = list(_guarded(graph, node, walks, rare=value in zeros)) if may_guard else []
        yield Hazard(node.index, Reason.EPSILON, why, value in zeros and node.index in walks.guards)
        yield from behind


@dataclass(slots=True)
class _Walks:
    """Nodes downstream of an epsilon that were visited, those among them that lead to a guarded op, and the nodes with
    an epsilon that does.
    """

    seen: set[int] = field(default_factory=set)
    leading: set[int] = field(default_factory=set)
    guards: set[int] = field(default_factory=set)


def _guarded(graph: Graph, node: Node, walks: _Walks, *, rare: bool) -> Iterator[Hazard]:
    """Ops downstream of an epsilon whose results explode if the guarded value is flushed to zero.

    Complexity: linear over all epsilons of a graph, because a walk ends where an earlier one has been.
    """
    guarded, why = op_facts().guarded, f"{node.label!r} guards its input with an epsilon"
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
                yield Hazard(reader.index, Reason.EPSILON, why, rare)
            if is_end or reader.index in walks.leading:
                walks.guards.add(node.index)
                between = last.index
                while between != node.index and between not in kept:  # what carries the value must not flush it
                    kept.add(between)
                    yield Hazard(between, Reason.EPSILON, why, rare)
                    between = previous[between]
            if is_end and reader.key == "Log":
                yield from _small_numbers(graph, node)
            carries = (reader.index in graph.exact or reader.key == "Sqrt") and graph.is_float_output(reader)
            if carries and reader.index not in walks.seen:
                walks.seen.add(reader.index)
                stack.append(reader)
    walks.leading |= kept


def _small_numbers(graph: Graph, node: Node) -> Iterator[Hazard]:
    """Ops that compute the argument of a guarded logarithm: a tiny epsilon says that tiny values occur there."""
    walk, stack, seen = op_facts().spectral_arithmetic, [node], {node.index}
    while stack and len(seen) < _SPECTRAL_REACH:
        for _, value in graph.float_inputs(stack.pop()):
            producer = graph.producer(value)
            if producer is not None and producer.index not in seen and producer.key in walk:
                seen.add(producer.index)
                stack.append(producer)
                yield Hazard(producer.index, Reason.EPSILON, f"computes small numbers for the guarded {node.label!r}")


_SPECTRAL_REACH = 16
"""Limit on the nodes visited upstream of a guarded logarithm."""


def _is_lost(number: float, low: Format, key: str) -> bool:
    """Whether rounding flushes a tiny constant or makes it subnormal (for Mul: inexact); 0 stays what it is."""
    if key != "Mul":
        return number != 0
    rounded = round(abs(number) / low.smallest_subnormal) * low.smallest_subnormal
    return abs(rounded - abs(number)) > 4 * low.epsilon * abs(number)


def large_reductions(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Sums over so many elements that terms of magnitude 1 reach an eighth of the largest finite number."""
    limit = low.max_finite / 8
    for node in graph.nodes_of(op_facts().growing_reductions):
        if ABSENT in (node.input(0), node.outputs[0]):
            continue
        before, after = graph.shapes[node.inputs[0]], graph.shapes[node.outputs[0]]
        if before is None or after is None or None in before or None in after or prod(after) == 0:  # type: ignore[arg-type]
            continue
        count = prod(before) // max(prod(after), 1)  # type: ignore[arg-type]
        if count > limit:
            yield Hazard(node.index, Reason.REDUCTION, f"sums {count} elements at a time")


def quantized_units(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Quantize and dequantize nodes and the nodes between them, which ONNX Runtime fuses into integer kernels."""
    facts = op_facts()
    for node in graph.nodes if graph.nodes_of(facts.quantize | facts.dequantize) else ():
        if node.key in facts.quantize | facts.dequantize:
            yield Hazard(node.index, Reason.QDQ, "quantizes or dequantizes")
            continue
        producers = [graph.producer(value) for _, value in graph.float_inputs(node)]
        fed = [p is not None and p.key in facts.dequantize for p in producers]
        feeds = any(
            reader.key in facts.quantize and port == 0
            for value in node.outputs
            for reader, port in graph.consumers(value)
        )
        if (fed and all(fed)) or (feeds and node.key not in facts.kernel_free):
            yield Hazard(node.index, Reason.QDQ, "stands between dequantize and quantize nodes")


def integer_products(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Ops that scale the sums of an integer product: the sums are out of range, and ONNX Runtime fuses both."""
    seen: set[int] = set()
    for node in graph.nodes_of(op_facts().integer_products):
        stack = [node]
        while stack:
            for reader, _ in graph.readers(stack.pop()):
                scales = reader.key == "Mul" or (reader.key == "Add" and _adds_constant(graph, reader))
                if reader.index in seen or not (scales or reader.key == "Cast"):
                    continue
                seen.add(reader.index)
                stack.append(reader)
                yield Hazard(reader.index, Reason.QDQ, f"scales what {node.label!r} sums up in integers")
                makers = [graph.producer(value) for _, value in graph.float_inputs(reader)]
                for maker in makers if reader.key == "Mul" else ():
                    if maker is not None and maker.key == "Mul":
                        yield Hazard(maker.index, Reason.QDQ, f"makes the scale of {node.label!r}")


def _adds_constant(graph: Graph, node: Node) -> bool:
    return any(graph.constants.is_constant(value) for _, value in graph.float_inputs(node))


def index_hazards(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Integers, positions and sizes carried in floats; see :mod:`onnxamp._decide.positions`."""
    yield from graph.ask(index_paths).hazards
    yield from position_paths(graph)


def decomposed_patterns(graph: Graph, _low: Format) -> Iterator[Hazard]:
    """Decomposed ops whose inner values, such as squares, leave the range that inputs and results have."""
    for kind in ("normalisation", "softmax", "magnitude"):
        for match in patterns_of(graph, kind):
            why = f"part of the {kind} around {graph.nodes[match.core].label!r}"
            yield from (Hazard(index, Reason.DECOMPOSED, why) for index in sorted(match.nodes))


def cast_absorbed(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Producers whose Cast to float32 a fusion would absorb: computed in float32, they need no Cast there."""
    for value, mean in graph.ask(absorbed_casts, low).items():
        producer = graph.producer(value)
        if producer is not None:
            why = f"ONNX Runtime would fuse a Cast in front of {mean!r} into the normalisation, and not load the model"
            yield Hazard(producer.index, Reason.FUSION, why)


RULES: tuple[Rule, ...] = (
    constant_ranges,
    epsilons,
    masks,
    large_reductions,
    quantized_units,
    integer_products,
    index_hazards,
    decomposed_patterns,
    cast_absorbed,
)


def _carries(graph: Graph, node: Node) -> bool:
    """Whether the node only moves the constant: then its consumers are judged instead."""
    return bool(node.outputs) and graph.constants.stats(node.outputs[0]) is not None


def _readers(graph: Graph, node: Node, seen: set[int]) -> Iterator[Node]:
    """Nodes not ``seen`` yet that read the node's outputs, directly or through exact ops, which are included.

    They are added to ``seen``, which keeps all walks of a graph linear together.
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
