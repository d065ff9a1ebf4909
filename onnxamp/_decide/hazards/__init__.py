"""Hazards: nodes that are known to break in low precision before anything runs. A module here is one hazard.

It contains its rule and its ``KIND``: the title, what may overrule it, and its text in audits. No list names them.
"""

import pkgutil
from functools import cache
from importlib import import_module

from onnxamp._decide.verdicts import Hazard, Kind
from onnxamp._dtypes import Format
from onnxamp._graph.graph import Graph


@cache
def kinds() -> tuple[Kind, ...]:
    """Return the kinds of hazards, one for each module of this folder."""
    modules = (
        import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    return tuple(module.KIND for module in modules)


def find_hazards(graph: Graph, low: Format) -> list[Hazard]:
    """Return all hazards of a graph, in node order; a node may have several, one of each reason and value, rare ones
    first.
    """
    found = [
        hazard
        for kind in kinds()
        if kind.rule is not None
        for hazard in kind.rule(graph, low)
    ]
    ranked = sorted(found, key=lambda hazard: hazard.rare, reverse=True)
    unique = {
        (hazard.node, hazard.reason, hazard.value): hazard
        for hazard in reversed(ranked)
    }
    return sorted(
        unique.values(), key=lambda hazard: (hazard.node, hazard.reason.value)
    )


def hazards_on(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Return the hazards of a graph on a target, in node order, those of its arithmetic before those of its kernels."""
    rules = [kind.on_target for kind in kinds() if kind.on_target is not None]
    found = [hazard for rule in rules for hazard in rule(graph, low, target)]
    return sorted(found, key=lambda hazard: (hazard.reason.is_of_kernels, hazard.node))
