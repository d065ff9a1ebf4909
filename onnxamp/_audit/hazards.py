"""Hazards of a model that is already in low precision.

Two kinds of rules look for them. The rules of :mod:`onnxamp._decide.hazards` expect float32 models, so they see this
model raised to float32 (:class:`onnxamp._graph.raised.RaisedGraph`), and apply where a node really computes in low
precision. The other rules look for constants that a conversion damaged: epsilons that became zero, masks that became
infinite.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf, sqrt
from typing import Final, TypeAlias

from onnxamp._audit import Finding, finding
from onnxamp._decide.kinds import (
    Fault,
    Harm,
    Hazard,
    HazardKind,
    find_hazards,
    hazards_on,
    kinds,
)
from onnxamp._decide.patterns.find import patterns_of
from onnxamp._decide.patterns.fusion_groups import absorbed_casts
from onnxamp._facts.dtypes import FLOAT, FLOAT16, Format, lows_among
from onnxamp._facts.ops import is_exact, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.paths import mask_path
from onnxamp._graph.numbers.powers import squared_value
from onnxamp._graph.raised import RaisedGraph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node

_KEEP: Final = "Convert the original again with hazards on (onnxamp convert), or keep it in float32 (--keep-fp32 NAME)."
_REACH: Final = 32
"""Nodes that the walk from an epsilon may visit: the op that it guards is near, and graphs are large."""

LowRule: TypeAlias = Callable[[RaisedGraph], Iterator[Finding]]


def low_hazards(
    graph: Graph, view_in: Callable[[Format], RaisedGraph], target: str
) -> list[Finding]:
    """Find low-precision nodes that are known to break.

    For a float32 model, return one note with the number of nodes that a conversion would keep in float32.

    Args:
        graph: the model.
        view_in: returns the graph with its values of a low type raised to float32, as :func:`raised` does.
        target: where the model runs.

    Complexity: near linear in nodes, like the rules; weights are read once per low-precision type.
    """
    lows = lows_among(graph.types)
    findings: dict[tuple[str, str], Finding] = {}
    for low in lows:
        view = view_in(low)
        for rule in _RULES:
            for one in rule(view):
                findings[one.node, one.text] = one
    if lows or FLOAT not in graph.types:
        return list(findings.values())
    view = view_in(FLOAT16)
    anywhere = find_hazards(view, FLOAT16)
    fused = {
        hazard.node
        for hazard in (*anywhere, *hazards_on(view, FLOAT16, target))
        if hazard.reason.harm is Harm.FUSION
    }
    kept = {hazard.node for hazard in anywhere} - fused
    whys = {
        "they would break in float16": kept,
        "they are quantized, or are between quantized nodes": fused,
    }
    text = "a conversion to float16 keeps up to {} of its nodes in float32: {}"
    action = "onnxamp inspect -v shows which, and why."
    return [
        finding("", "note", "hazard", text.format(len(them), why), action)
        for why, them in whys.items()
        if them
    ]


def _hazard(
    graph: RaisedGraph,
    node: Node,
    text: str,
    severity: str = "warning",
    action: str = _KEEP,
) -> Finding:
    """Return a hazard of a low-precision node; LOW in the text is replaced by the name of the type."""
    return finding(
        node, severity, "hazard", text.replace("LOW", graph.low.name), action
    )


def _of_kinds(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield the findings for hazard kinds with a fault, one per low-precision node and kind."""
    faulty = [(kind, kind.fault) for kind in kinds() if kind.fault is not None]
    explained = set[int]()
    for kind, fault in sorted(faulty, key=lambda pair: pair[1].effect):
        for hazard, shown in _faults(graph, kind, fault):
            if fault.is_enough:
                explained.add(hazard.node)
            elif hazard.node in explained:
                continue
            node = graph.nodes[hazard.node]
            yield _hazard(graph, node, _text(graph, fault, hazard, shown))


def _faults(
    graph: RaisedGraph, kind: HazardKind, fault: Fault
) -> Iterator[tuple[Hazard, list[float]]]:
    """Yield the hazards to report of a kind, each with the constants that show it.

    A rule yields a cause first, then its consequences, which name it: one finding covers them all.
    """
    cause = ABSENT
    for hazard in kind.find_in_low(graph, graph.low):
        value = hazard.value
        if value != ABSENT and graph.actual[value] != graph.low.tensor:
            continue
        node = graph.nodes[hazard.node]
        shown = _shown(graph, node, kind)
        is_consequence = not shown and _follows(graph, hazard, cause)
        # A constant shows the cause, if the fault needs one.
        if shown or not (fault.needs_constant or is_consequence):
            cause = hazard.node
        is_certain = bool(shown) or not fault.needs_constant
        if is_certain and not is_consequence and graph.is_low(node):
            yield hazard, shown


def _follows(graph: RaisedGraph, hazard: Hazard, cause: int) -> bool:
    """Return whether a hazard is a consequence of that of another node, which is low as well."""
    if cause == ABSENT:
        return False
    node = graph.nodes[cause]
    return repr(node.label) in hazard.detail and graph.is_low(node)


def _text(
    graph: RaisedGraph, fault: Fault, hazard: Hazard, shown: Sequence[float]
) -> str:
    """Return the sentence about a hazard, with the constants that show it."""
    text = fault.text.format(detail=hazard.detail)
    if shown:
        text += f" (constant {', '.join(f'{number:.4g}' for number in shown)})"
    limit = fault.limit.format(
        end=graph.low.max_finite, integers=graph.low.exact_integers
    )
    return f"{text}{limit}"


def _shown(graph: RaisedGraph, node: Node, kind: HazardKind) -> list[float]:
    """Return the constants of a node that show its hazard."""
    numbers = (graph.constants.number(value) for value in graph.float_inputs(node))
    return [
        number
        for number in numbers
        if number is not None and kind.is_shown_by(number, graph.low)
    ]


def _decomposed(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield one finding per decomposed normalization, softmax or magnitude, at the op that breaks first."""
    narrow = graph.low.is_narrow
    digits = f"its sums keep only {graph.low.mantissa + 1} bits"
    squares = f"squares beyond {sqrt(graph.low.max_finite):.3g} overflow, and the result silently becomes 0"
    texts = {
        "normalization": f"a normalization decomposed into basic ops in LOW: {squares if narrow else digits}",
        "softmax": "a softmax decomposed into basic ops in LOW: "
        + (
            "exponentials of numbers beyond 11 overflow, and so do their sums"
            if narrow
            else digits
        ),
        "magnitude": "a magnitude in LOW, whose squares need twice the range of the result",
    }
    for kind, text in texts.items():
        for match in patterns_of(graph, kind):
            first = _first_to_break(graph, match.nodes)
            if first is not None:
                yield _hazard(graph, first, text)


def _first_to_break(graph: RaisedGraph, nodes: Collection[int]) -> Node | None:
    """Return the first low-precision node of a pattern that squares, exponentiates or sums up."""
    growing = op_facts().growing
    for node in graph.at(nodes):
        grows = node.key in growing or squared_value(graph, node) != ABSENT
        if graph.is_low(node) and grows:
            return node
    return None


def _absorbed_casts(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield Casts to float32 before a decomposed normalization, which ONNX Runtime fuses into a node it cannot load."""
    for value in graph.ask(absorbed_casts, graph.low):
        cast = graph.producer(value, "Cast")
        if cast is not None and graph.actual[cast.inputs[0]] == graph.low.tensor:
            text = "ONNX Runtime fuses this Cast with the normalization that follows, and then cannot load the model"
            action = (
                "Convert the original again: onnxamp convert keeps such Casts apart."
            )
            yield _hazard(graph, cast, text, "error", action)


def _zero_epsilons(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield epsilons that a conversion flushed to zero, before the node that they guarded."""
    adds = op_facts().added_epsilons
    bounds = op_facts().bounding_epsilons
    for node in graph.nodes:
        # Clip and Max with 0 are common without any epsilon, and so is a Sqrt of their result.
        ports = adds.get(node.key) or bounds.get(node.key)
        if ports is None or not graph.is_low(node):
            continue
        zeros = [
            node.inputs[port]
            for port, number in graph.low_constants(node)
            if number == 0 and port in ports
        ]
        if not any(_is_single(graph, zero) for zero in zeros):
            continue
        if _guards(graph, node, through_roots=node.key in adds):
            text = "its epsilon is 0 in LOW, so the op that it guards divides by zero"
            yield _hazard(graph, node, text)


def _is_single(graph: RaisedGraph, value: int) -> bool:
    """Return whether the constant is a single stored number, like an epsilon; vectors of zeros are biases."""
    maker = graph.producer(graph.constants.source(value))
    return elements(graph.shapes[value]) == 1 and (
        maker is None or maker.key == "Constant"
    )


def _guards(graph: RaisedGraph, start: Node, *, through_roots: bool) -> bool:
    """Return whether exact ops, and roots if allowed, lead from the node to one that divides by its result."""
    stack = [start]
    seen = {start.index}
    while stack and len(seen) < _REACH:
        for reader, port in graph.readers(stack.pop()):
            if port in op_facts().divisors.get(reader.key, ()):
                return True
            passes = (
                is_exact(reader.proto)
                or reader.key == "Cast"
                or (through_roots and reader.key == "Sqrt")
            )
            if passes and reader.index not in seen and graph.is_float_output(reader):
                seen.add(reader.index)
                stack.append(reader)
    return False


def _infinite_constants(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield infinities that are multiplied (0 times infinity is NaN) or added as a mask, and constant divisors of 0."""
    for node in graph.nodes:
        if node.key == "Div" and (1, 0.0) in graph.low_constants(node):
            yield _hazard(
                graph, node, "divides by a constant that is 0 in LOW", "error"
            )
        if node.key not in op_facts().mask_arithmetic or not graph.is_low(node):
            continue
        if not any(stats.has_infinite for stats in graph.low_stats(node)):
            continue
        if node.key == "Mul":
            text = "multiplies by an infinite constant, which turns 0 into NaN"
            action = "Convert the original again: onnxamp convert saturates masks and keeps other large numbers in float32."
            yield _hazard(graph, node, text, "error", action)
        elif mask_path(graph, node):
            text = "masks with infinities in LOW: a fully masked row becomes NaN"
            action = "Harmless if the original does the same; otherwise convert it again (onnxamp convert saturates masks)."
            yield _hazard(graph, node, text, "note", action)


def _saturated_masks(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield masks at the very end of the range, which overflow when a score is added. Half of the range would do."""
    # The end of a wide range is far beyond the last digit of a score.
    if not graph.low.is_narrow:
        return
    for node in graph.nodes:
        if node.key not in ("Add", "Sub", "Where", "Mul"):
            continue
        end = graph.low.max_finite
        if all(stats.largest != end for stats in graph.low_stats(node)):
            continue
        path = graph.at(mask_path(graph, node))
        if any(step.key in ("Add", "Sub") and graph.is_low(step) for step in path):
            text = "masks with the largest number of LOW: adding a score makes it infinite, and a masked row NaN"
            action = "Convert the original again (onnxamp convert uses half of that number), or add the mask in float32."
            yield _hazard(graph, node, text, action=action)


def _cast_masks(graph: RaisedGraph) -> Iterator[Finding]:
    """Yield masks that are computed in float32, and become infinite in a Cast on their way to the Softmax."""
    walk = op_facts().mask_arithmetic
    low = graph.low
    for node in graph.nodes:
        if node.key not in walk or node.key == "Cast":
            continue
        largest = 0.0
        for value in graph.float_inputs(node):
            stats = graph.constants.stored(value)
            if graph.actual[value] == FLOAT and stats is not None:
                largest = max(largest, stats.largest)
        # An infinite mask is infinite in float32 as well: no Cast is to blame.
        if not low.overflow <= largest < inf:
            continue
        for step in graph.at(mask_path(graph, node)):
            falls = step.key == "Cast" and graph.actual[step.inputs[0]] == FLOAT
            if not falls or _is_bounded(graph, step):
                continue
            if graph.actual[step.outputs[0]] == low.tensor:
                text = f"casts a mask of {largest:.4g} to LOW, where it is infinite: a masked row becomes NaN"
                yield _hazard(graph, step, text)


def _is_bounded(graph: RaisedGraph, cast: Node) -> bool:
    """Return whether a Cast reads what a number in the range of low precision bounds, as conversions do."""
    maker = graph.producer(cast.inputs[0], *op_facts().bounds)
    if maker is None:
        return False
    bounds = (graph.constants.stored(value) for value in maker.inputs[1:])
    return any(
        stats is not None and stats.largest < graph.low.overflow for stats in bounds
    )


_RULES: Final[tuple[LowRule, ...]] = (
    _decomposed,
    _of_kinds,
    _zero_epsilons,
    _infinite_constants,
    _saturated_masks,
    _cast_masks,
    _absorbed_casts,
)
