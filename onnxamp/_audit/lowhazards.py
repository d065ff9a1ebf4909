"""Hazards of a model that is low already: the rules of :mod:`onnxamp._decide.hazards`, asked about its low nodes.

The rules know float32 models. So they see this one as if every low value were float32 (the graph stays as it is, only
types and constants are raised), and what they find counts where the node is low in truth. What a conversion did to the
constants before (an epsilon that is zero now, a mask that is infinite) is found by :mod:`onnxamp._audit.spoiled`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log2, sqrt
from typing import Final

from onnxamp._audit.findings import Finding
from onnxamp._audit.raised import LowRule, LowScene, low_hazard, make_low_scene, saturated
from onnxamp._audit.spoiled import SPOILED
from onnxamp._decide.hazards import (
    constant_ranges,
    epsilons,
    find_hazards,
    index_hazards,
    integer_products,
    large_reductions,
)
from onnxamp._decide.masks import masks
from onnxamp._decide.verdicts import Hazard, Reason
from onnxamp._dtypes import FLOAT, FLOAT16, LOW_TYPES, LowType
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._patterns.islands import absorbed_casts, decomposed_norms, magnitudes, softmax_islands


def low_hazards(graph: Graph) -> list[Finding]:
    """What is known to break among the low nodes of a model, or of a float32 model how much a conversion would keep.

    Complexity: as the rules, near linear in nodes; weights are read once per low type.
    """
    present = {name for name in graph.types if name is not None}
    lows = [low for low in LOW_TYPES.values() if any(low.tensor in name for name in present)]
    found = [finding for low in lows for finding in _findings(make_low_scene(graph, low))]
    if not lows and FLOAT in present:
        found += _of_a_conversion(graph)
    return found


def _findings(scene: LowScene) -> list[Finding]:
    unique = {(finding.node, finding.text): finding for rule in _RULES for finding in rule(scene)}
    return list(unique.values())


def _of_a_conversion(graph: Graph) -> Iterator[Finding]:
    """One note for a float32 model: which nodes, and why, is what ``inspect`` shows."""
    kept = {hazard.node for hazard in graph.ask(find_hazards, FLOAT16)}
    if kept:
        text = f"a conversion to float16 keeps up to {len(kept)} of its nodes float32: they would break in float16"
        yield Finding("note", "hazard", "", "", text, "onnxamp inspect -v shows which, and why.")


_WHY: Final[Mapping[Reason, str]] = {
    Reason.RANGE: "works in LOW at the end of its range",
    Reason.EPSILON: "LOW loses an epsilon here, or what the epsilon guards",
    Reason.INDEX: "computes integers, positions or sizes in LOW",
    Reason.MASK: "masks in LOW with a number so large that a row that is masked as a whole forgets its scores",
    Reason.QDQ: "scales integer sums in LOW, whose range they leave",
}


def _known_hazards(scene: LowScene) -> Iterator[Finding]:
    """Masks, ranges, epsilons, indices and integer products; one finding per low node and reason."""
    view, masking = scene.graph, set[int]()
    for rule in (masks, constant_ranges, epsilons, index_hazards, integer_products):
        owner = ABSENT
        for hazard in rule(scene.graph, scene.low):
            node, shows = view.nodes[hazard.node], _TELLING.get(hazard.reason)
            numbers = [] if shows is None else [x for x in _numbers(scene, node) if shows(x, scene.low)]
            if numbers:
                owner = hazard.node
            # A rule names the node with the constant first, then what follows from it: one finding says it all.
            cause = view.nodes[owner] if owner not in (hazard.node, ABSENT) else None
            follows = cause is not None and scene.is_low(cause) and repr(cause.label) in hazard.detail
            if not scene.is_low(node) or follows or (hazard.reason is Reason.MASK and not numbers):
                continue
            if hazard.reason is Reason.MASK:
                masking.add(hazard.node)
            elif hazard.node in masking:  # what multiplies a mask by 0 or 1 does not leave the range
                continue
            constants = f" (constant {', '.join(f'{number:.4g}' for number in numbers)})" if numbers else ""
            yield low_hazard(scene, node, _WHY[hazard.reason] + constants + _limits(scene.low, hazard.reason))


def _numbers(scene: LowScene, node: Node) -> list[float]:
    """The float constants of one number that the node reads, as they are stored."""
    found = [scene.constants.number(value) for _, value in scene.graph.float_inputs(node)]
    return [number for number in found if number is not None]


_TELLING: Final[Mapping[Reason, Callable[[float, LowType], bool]]] = {
    Reason.EPSILON: lambda number, low: 0 < abs(number) < low.smallest_normal,
    Reason.MASK: lambda number, low: abs(number) * low.epsilon >= 1 and abs(number) not in saturated(low),
    Reason.RANGE: lambda number, low: abs(number) > low.max_finite / 8,
}
"""Which constants of a node show what is meant."""


def _limits(low: LowType, reason: Reason) -> str:
    if reason is Reason.INDEX:
        return f", which counts exactly up to {low.exact_integers} alone"
    if reason in (Reason.RANGE, Reason.QDQ):
        return f": it ends at {low.max_finite:.6g}"
    return ""


def _large_sums(scene: LowScene) -> Iterator[Finding]:
    """Sums over very many elements."""
    for hazard in large_reductions(scene.graph, scene.low):
        node = scene.graph.nodes[hazard.node]
        if scene.is_low(node):
            text = f"{hazard.detail} in LOW, which ends at {scene.low.max_finite:.6g}"
            yield low_hazard(scene, node, text)


def _islands(scene: LowScene) -> Iterator[Finding]:
    """One finding per normalisation, softmax or magnitude written out as single ops, at the op that breaks first."""
    limit = f"squares beyond {sqrt(scene.low.max_finite):.3g} overflow, and the result becomes 0 without a word"
    if scene.low is not FLOAT16:
        limit = f"its sums keep {1 - int(log2(scene.low.epsilon))} bits alone"
    for _, nodes in scene.graph.ask(decomposed_norms):
        yield from _first_low(scene, nodes, f"a normalisation written out as single ops in LOW: {limit}")
    limit = "exponentials beyond 11 overflow, and their sums" if scene.low is FLOAT16 else limit
    yield from _grouped(scene, softmax_islands(scene.graph), f"a softmax written out as single ops in LOW: {limit}")
    limit = "its squares need twice the range of the result"
    yield from _grouped(scene, magnitudes(scene.graph), f"a magnitude in LOW: {limit}")


def _grouped(scene: LowScene, hazards: Iterator[Hazard], text: str) -> Iterator[Finding]:
    groups: dict[str, list[int]] = {}
    for hazard in hazards:
        groups.setdefault(hazard.detail, []).append(hazard.node)
    for nodes in groups.values():
        yield from _first_low(scene, nodes, text)


def _first_low(scene: LowScene, nodes: Sequence[int], text: str) -> Iterator[Finding]:
    """The finding for the first low node that squares, exponentiates or sums up; the others of a group are harmless."""
    members = [scene.graph.nodes[index] for index in sorted(nodes)]
    risky = [node for node in members if scene.is_low(node) and _grows(node)]
    for node in risky[:1]:
        yield low_hazard(scene, node, text)


def _grows(node: Node) -> bool:
    squares = node.key == "Mul" and node.input(0) == node.input(1)
    return squares or node.key in op_facts().hazard["growing"]


def _swallowed_casts(scene: LowScene) -> Iterator[Finding]:
    """Casts up to float32 in front of a written-out norm, which ONNX Runtime fuses into what does not load."""
    raised, view = scene.graph, scene.graph
    swallowing = raised.ask(absorbed_casts, scene.low)
    for value in swallowing:
        cast = view.producer(value)
        if cast is not None and cast.key == "Cast" and scene.types[cast.inputs[0]] == scene.low.tensor:
            text = "ONNX Runtime takes this Cast into the normalisation behind it, and then cannot load the model"
            action = "Convert the original again: onnxamp convert keeps such Casts apart."
            yield low_hazard(scene, cast, text, "error", action)


_RULES: Final[tuple[LowRule, ...]] = (
    _islands,
    _known_hazards,
    _large_sums,
    *SPOILED,
    _swallowed_casts,
)
