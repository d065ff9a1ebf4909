"""The patterns of a graph: ``graph.ask(find_patterns)`` recognises them, ``graph.ask(find_forms)`` matches exactly."""

from collections.abc import Iterator

from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._ops.facts import op_facts
from onnxamp._patterns.decomposed import WALKS
from onnxamp._patterns.forms import Anchors, Form, form_table
from onnxamp._patterns.match import Match, matches


def find_patterns(graph: Graph) -> tuple[Match, ...]:
    """What the walks recognise as decomposed ops, in the order of their cores. Complexity: linear."""
    cores = op_facts().core_of
    found = []
    for node in graph.nodes:
        for kind in cores.get(node.key, ()):
            nodes = WALKS[kind](graph, node)
            if nodes:
                found.append(Match(kind, node.index, frozenset(nodes)))
    return tuple(found)


def patterns_of(graph: Graph, *kinds: str) -> Iterator[Match]:
    """The patterns of some kinds."""
    return (match for match in graph.ask(find_patterns) if match.kind in kinds)


def find_forms(graph: Graph) -> tuple[Match, ...]:
    """All matches of the table's forms whose results nobody reads but for that of the core, producers first.

    Matches may overlap, and one core may have several, the largest forms first.

    Complexity: near linear. A form is tried only where the few steps from one of its anchors to its last node end.
    """
    forms_at = _candidates(graph)
    return tuple(
        match
        for index in graph.order
        if index in forms_at and not graph.scopes[graph.nodes[index].scope].opaque
        for form in forms_at[index]
        for match in matches(graph, form, graph.nodes[index])
        if is_closed(graph, match)
    )


def is_closed(graph: Graph, match: Match) -> bool:
    """Whether nobody outside reads what the nodes make, but for the output of the core."""
    made = (value for index in match.nodes - {match.core} for value in graph.nodes[index].outputs if value != ABSENT)
    return not any(
        graph.results[value] or any(reader not in match.nodes for reader, _ in graph.uses[value]) for value in made
    )


def _candidates(graph: Graph) -> dict[int, list[Form]]:
    """Nodes that may be the last one of forms, with these forms in the table's order."""
    forms = form_table().forms
    anchors = frozenset[str]().union(*(form.anchors.keys for form in forms))
    of_type: dict[str, list[int]] = {}
    for node in graph.nodes:
        if node.key in anchors:
            of_type.setdefault(node.key, []).append(node.index)
    ends = {form.anchors: _ends(graph, form.anchors, of_type) for form in forms}
    candidates: dict[int, list[Form]] = {}
    for form in forms:
        for index in ends[form.anchors]:
            if graph.nodes[index].key in form.roots:
                candidates.setdefault(index, []).append(form)
    return candidates


def _ends(graph: Graph, anchors: Anchors, of_type: dict[str, list[int]]) -> set[int]:
    """Nodes at most the height above an anchor, through the spine and what passes its input on."""
    edge = {index for key in anchors.keys for index in of_type.get(key, ())}
    ends = set(edge)
    for _ in range(anchors.height):
        stack, edge = list(edge), set[int]()
        while stack:
            for reader, _ in graph.readers(graph.nodes[stack.pop()]):
                if reader.key in anchors.spine:
                    edge.add(reader.index)
                elif graph.passes_on(reader):
                    stack.append(reader.index)
        ends |= edge
    return ends
