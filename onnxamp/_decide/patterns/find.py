"""The patterns of a graph, ``graph.ask(find_patterns)``: decomposed ops, regardless of other nodes among theirs.

:mod:`onnxamp._decide.patterns.forms` matches forms of them exactly.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final

from onnxamp._decide.patterns.activations import gelu, silu
from onnxamp._decide.patterns.norms import magnitude, normalization
from onnxamp._decide.patterns.softmaxes import softmax
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Match
from onnxamp._graph.view import Node

WALKS: Final[Mapping[str, Callable[[Graph, Node], set[int]]]] = {
    "normalization": normalization,
    "softmax": softmax,
    "magnitude": magnitude,
    "gelu": gelu,
    "silu": silu,
}
"""Kind of match -> the walk from its core that returns the nodes; an empty set if there is no match."""


def find_patterns(graph: Graph) -> tuple[Match, ...]:
    """Return the decomposed ops that the walks recognize, in the order of their cores. Complexity: linear."""
    cores = op_facts().core_of
    matches = list[Match]()
    for node in graph.nodes_of(cores):
        for kind in cores[node.key]:
            if nodes := WALKS[kind](graph, node):
                between = _between(graph, nodes) if graph.passing else set()
                matches.append(Match(kind, node.index, frozenset(nodes | between)))
    return tuple(matches)


def _between(graph: Graph, nodes: set[int]) -> set[int]:
    """Return the nodes that pass on values from one of the nodes to another."""
    between = set[int]()
    for value in chain.from_iterable(graph.nodes[index].inputs for index in nodes):
        path = set[int]()
        node = graph.producer(value)
        while node is not None and node.index not in nodes:
            if node.index not in graph.passing:
                break
            path.add(node.index)
            node = graph.producer(node.inputs[0])
        if path and node is not None and node.index in nodes:
            between |= path
    return between


GROWING: Final = ("normalization", "softmax", "magnitude")
"""Kinds of decomposed ops with inner values, such as squares, that leave the range of inputs and results."""


TIED: Final = ("gelu", "silu", "normalization")
"""Kinds of decomposed ops whose nodes need one precision, unless options split them."""


def patterns_of(graph: Graph, *kinds: str) -> Iterator[Match]:
    """Return the patterns of some kinds."""
    return (match for match in graph.ask(find_patterns) if match.kind in kinds)


def pattern_nodes(graph: Graph, *kinds: str) -> frozenset[int]:
    """Return the nodes of the patterns of some kinds."""
    return frozenset().union(*(match.nodes for match in patterns_of(graph, *kinds)))
