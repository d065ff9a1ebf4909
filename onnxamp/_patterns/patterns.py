"""The patterns of a graph: ``graph.ask(find_patterns)`` recognises them, ``graph.ask(find_forms)`` matches exactly."""

from collections.abc import Iterator

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._ops.facts import op_facts
from onnxamp._patterns.decomposed import WALKS
from onnxamp._patterns.forms import form_table
from onnxamp._patterns.match import Match, matches, readers_of


def find_patterns(graph: Graph) -> tuple[Match, ...]:
    """What the walks recognise as decomposed ops, in the order of their cores. Complexity: linear."""
    cores = op_facts().core_of
    found = []
    for node in [node for node in graph.nodes if node.key in cores]:
        for kind in cores[node.key]:
            nodes = WALKS[kind](graph, node)
            if nodes and graph.passing:
                nodes |= _between(graph, nodes)
            if nodes:
                found.append(Match(kind, node.index, frozenset(nodes)))
    return tuple(found)


def _between(graph: Graph, nodes: set[int]) -> set[int]:
    """What passes values on from one of the nodes to another."""
    between = set[int]()
    for value in (value for index in nodes for value in graph.nodes[index].inputs):
        path, node = set[int](), graph.producer(value)
        while node is not None and node.index not in nodes and node.index in graph.passing:
            path.add(node.index)
            node = graph.producer(node.inputs[0])
        if path and node is not None and node.index in nodes:
            between |= path
    return between


def patterns_of(graph: Graph, *kinds: str) -> Iterator[Match]:
    """The patterns of some kinds."""
    return (match for match in graph.ask(find_patterns) if match.kind in kinds)


def find_forms(graph: Graph) -> tuple[Match, ...]:
    """All matches of the table's forms whose results nobody reads but for that of the core, producers first.

    Matches may overlap, and one core may have several, the largest forms first.

    Complexity: near linear. A form is tried only at the nodes of patterns, and at those right behind.
    """
    cores_at = _last_nodes(graph)
    return tuple(
        match
        for node in (graph.nodes[index] for index in graph.order if index in cores_at)
        if not graph.scopes[node.scope].opaque
        for form in form_table().forms
        if node.key in form.roots and not form.cores.isdisjoint(cores_at[node.index])
        for match in matches(graph, form, node)
        if is_closed(graph, match)
    )


def _last_nodes(graph: Graph) -> dict[int, set[str]]:
    """Nodes that may be the last one of a form -> types of the cores of patterns that have them, or end before them."""
    cores: dict[int, set[str]] = {}
    for match in graph.ask(find_patterns):
        made = (value for index in match.nodes for value in graph.nodes[index].outputs)
        readers = {reader.index for value in made for reader in readers_of(graph, value)}
        for index in match.nodes | readers:
            cores.setdefault(index, set()).add(graph.nodes[match.core].key)
    return cores


def is_closed(graph: Graph, match: Match) -> bool:
    """Whether nobody outside reads what the nodes make, but for the output of the core."""
    made = (value for index in match.nodes - {match.core} for value in graph.nodes[index].outputs if value != ABSENT)
    return not any(
        graph.results[value] or any(reader not in match.nodes for reader, _ in graph.uses[value]) for value in made
    )
