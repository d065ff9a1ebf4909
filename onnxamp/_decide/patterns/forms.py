"""The forms of decomposed ops that folds match exactly, around the patterns of a graph."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from onnxamp._decide.patterns.find import find_patterns
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import Form, FormSearch, Match, form_table, readers_of
from onnxamp._graph.view import Node


def find_forms(
    graph: Graph, patterns: Iterable[Match] | None = None
) -> Iterator[tuple[Node, Iterator[Match]]]:
    """Yield the nodes at which forms may end, producers first, each with the matches of the table's forms there.

    In each match, only the core's result is read from outside. Matches may overlap. A core may have several matches,
    the largest forms first. The search is lazy: a caller that takes the first match of a node pays for no other.

    Args:
        graph: the graph.
        patterns: those to search; by default, all.

    Complexity: near linear. A form is tried only at the nodes of patterns, and at those directly after them.
    """
    cores_at = _last_nodes(
        graph, graph.ask(find_patterns) if patterns is None else patterns
    )
    ending_in = form_table().ending_in
    search = FormSearch(graph)
    known = dict[tuple[object, ...], list[Form]]()
    """The forms that nodes after the same op types may end: large models repeat few."""
    for node in graph.order if cores_at else ():
        forms = ending_in.get(node.key)
        cores = cores_at.get(node.index) if forms else None
        if not forms or not cores or graph.scopes[node.scope].opaque:
            continue
        look = node.key, frozenset(cores), search.look_of(node)
        able = known.get(look)
        if able is None:
            able = known[look] = [
                form
                for form, ends in forms
                if not form.cores.isdisjoint(cores) and search.may_be_any(ends, node)
            ]
        if able:
            yield node, _closed_matches(search, able, node)


def _closed_matches(
    search: FormSearch, forms: Iterable[Form], core: Node
) -> Iterator[Match]:
    """Yield the matches of forms that end at a node, and of which only its result is read from outside."""
    for form in forms:
        for match in search.matches(form, core):
            if is_closed(search.graph, match):
                yield match


def _last_nodes(graph: Graph, patterns: Iterable[Match]) -> dict[int, set[str]]:
    """Return possible last nodes of forms -> core types of the patterns that contain them or end before them."""
    cores = defaultdict[int, set[str]](set)
    for match in patterns:
        reached = set(match.nodes)
        for index in match.nodes:
            for value in graph.nodes[index].writes:
                if graph.passing:
                    reached.update(node.index for node in readers_of(graph, value))
                    continue
                for reader, _ in graph.uses[value]:
                    reached.add(reader)
        core = graph.nodes[match.core].key
        for index in reached:
            cores[index].add(core)
    return cores


def is_closed(graph: Graph, match: Match) -> bool:
    """Return whether only the output of the core is read outside the match."""
    inner = graph.at(match.nodes - {match.core})
    for value in chain.from_iterable(node.writes for node in inner):
        readers = {reader for reader, _ in graph.uses[value]}
        if graph.results[value] or not readers <= match.nodes:
            return False
    return True
