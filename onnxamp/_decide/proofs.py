"""Hazards that the bounds of values disprove: what no input brings out of range does not overflow.

Bounds cost a pass over all weights. They are computed only if a hazard depends on them, and without ranges of inputs
only for small models, since little is bounded then that static rules do not know.
"""

from collections.abc import Iterable
from typing import Final

from onnxamp._decide.kinds import Claim, Hazard
from onnxamp._graph.bounds.bounds import Bounds
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import Graph
from onnxamp._model.model import weight_bytes
from onnxamp._options.options import Options

_SMALL: Final = 64 << 20
"""Bytes of weights up to which bounds are computed although no range is stated: a fraction of a second."""


def undisproved(
    graph: Graph, options: Options, hazards: Iterable[Hazard]
) -> list[Hazard]:
    """Return the hazards that may show on some input in the ranges that the user states.

    Samples do not count as ranges, because a hazard is about inputs that they lack.
    """
    candidates = list(hazards)
    if not any(hazard.unless for hazard in candidates):
        return candidates
    if not (options.input_ranges or weight_bytes(graph.model) <= _SMALL):
        return candidates
    ranges = options.input_ranges
    bounds = graph.ask(find_bounds, options.low, ranges, True, options.target)
    left = list[Hazard]()
    known = dict[int, bool]()
    """Whether all claims of a hazard hold, by their identity: hazards of one cause share them."""
    for hazard in candidates:
        unless = hazard.unless
        if unless and id(unless) not in known:
            known[id(unless)] = all(_holds(bounds, claim) for claim in unless)
        if not (unless and known[id(unless)]):
            left.append(hazard)
    return left


def _holds(bounds: Bounds, claim: Claim) -> bool:
    """Return whether a claim, or all of those that do as well, are true of every input."""
    others = claim.instead
    is_made_up = bool(others) and all(_is_true(bounds, other) for other in others)
    return is_made_up or _is_true(bounds, claim)


def _is_true(bounds: Bounds, claim: Claim) -> bool:
    """Return whether a claim itself is true of every input."""
    if claim.is_exact and not bounds.is_exact(claim.value):
        return False
    bound = bounds[claim.value]
    least = max(bound.low, -bound.high, 0.0)
    return claim.least <= least and bound.magnitude <= claim.most
