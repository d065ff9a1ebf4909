"""How often each body of a model runs."""

from typing import Final

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node

DEFAULT_TRIPS: Final = 10
"""Assumed iterations of a loop whose trip count is not constant."""


def loop_trips(graph: Graph) -> list[int]:
    """How often each scope runs per run of the model; capped, because nested guesses multiply."""
    trips = [1] * len(graph.scopes)
    for scope in graph.scopes[1:]:
        owner = graph.nodes[scope.owner]
        own = 1
        if owner.key in ("Loop", "Scan", "SequenceMap"):
            own = _constant_trips(graph, owner) or DEFAULT_TRIPS
        trips[scope.index] = min(trips[scope.parent] * max(own, 1), 1000)
    return trips


def guessed_scopes(graph: Graph) -> frozenset[int]:
    """Scopes that run as often as is assumed, or are within such ones."""
    guessed = set[int]()
    for scope in graph.scopes[1:]:
        owner = graph.nodes[scope.owner]
        is_guess = (
            owner.key in ("Loop", "Scan", "SequenceMap") and _constant_trips(graph, owner) is None
        )
        if is_guess or scope.parent in guessed:
            guessed.add(scope.index)
    return frozenset(guessed)


def _constant_trips(graph: Graph, node: Node) -> int | None:
    trips = (
        graph.constants.integers(node.input(0))
        if node.key == "Loop" and node.input(0) != ABSENT
        else None
    )
    return trips[0] if trips else None
