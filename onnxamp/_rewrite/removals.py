"""The third step of planning edits: original nodes that nothing reads once inputs and results have their new names.

Complexity: linear in ports.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnxamp._decide.problem import Problem
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._rewrite.new_casts import NewCasts
from onnxamp._rewrite.value_names import Names


class Removals(NamedTuple):
    """Nodes that go.

    Attributes:
        casts: original Casts.
        unread: nodes that compute constants of which only the stored copies are read.
    """

    casts: AbstractSet[int]
    unread: AbstractSet[int]


def find_removals(
    problem: Problem,
    names: Names,
    casts: NewCasts,
    inputs: Mapping[tuple[int, int], str],
    results: Mapping[tuple[int, int], str],
) -> Removals:
    """Return the nodes that go.

    Args:
        problem: the problem.
        names: the names of values, and the Casts that these make needless.
        casts: the new Casts and copies.
        inputs: (node, input) -> the new name that it reads.
        results: (scope, output) -> the new name that it returns.
    """
    removed = set(names.needless)
    for value in _dead_raised(problem, removed, inputs, results):
        removed.add(problem.graph.values[value].producer)
    unread = _unread(problem, names, casts, removed, inputs, results)
    return Removals(removed, unread)


def _dead_raised(
    problem: Problem,
    removed: AbstractSet[int],
    inputs: Mapping[tuple[int, int], str],
    results: Mapping[tuple[int, int], str],
) -> Iterator[int]:
    """Yield values that an original Cast raises from low precision, if all readers of it read something else."""
    graph = problem.graph
    for value in problem.ports.lowered:
        name = graph.values[value].name
        returned, uses = graph.results[value], graph.uses[value]
        if any(results.get(key, name) == name for key in returned):
            continue
        reads = [key for key in uses if key[0] not in removed]
        # A Cast that nothing read in the original is none of our business.
        is_used = bool(returned or uses)
        if is_used and all(inputs.get(key, name) != name for key in reads):
            yield value


def _unread(
    problem: Problem,
    names: Names,
    casts: NewCasts,
    removed: AbstractSet[int],
    inputs: Mapping[tuple[int, int], str],
    results: Mapping[tuple[int, int], str],
) -> AbstractSet[int]:
    """Return the nodes that compute constants of which only the stored copies are read.

    Complexity: linear in ports, if there are such copies at all.
    """
    graph = problem.graph
    computed = (copy.value for copy in casts.copies if copy.numbers is not None)
    pending = [graph.values[value].producer for value in computed]
    if not pending:
        return frozenset()
    unread = set[int]()
    reads = _names_read(problem, casts, removed, inputs, results)
    while pending:
        node = graph.nodes[pending.pop()]
        made = (
            names.outputs.get((node.index, port), graph.values[value].name)
            for port, value in enumerate(node.outputs)
            if value != ABSENT
        )
        if node.index in unread or any(reads[name] > 0 for name in made):
            continue
        unread.add(node.index)
        reads.subtract(_names_read_by(graph, node, inputs))
        makers = map(graph.producer, node.reads)
        pending += [maker.index for maker in makers if maker and not maker.bodies]
    return unread


def _names_read(
    problem: Problem,
    casts: NewCasts,
    removed: AbstractSet[int],
    inputs: Mapping[tuple[int, int], str],
    results: Mapping[tuple[int, int], str],
) -> Counter[str]:
    """Count how often nodes and results will read each name."""
    graph = problem.graph
    reads = Counter(cast.source for cast in casts.casts)
    reads.update(second.scale for second in casts.dequantized)
    for node in graph.nodes:
        if node.index not in removed:
            reads.update(_names_read_by(graph, node, inputs))
    for scope in graph.scopes:
        for position, entry in enumerate(scope.proto.output):
            reads[results.get((scope.index, position), entry.name)] += 1
    return reads


def _names_read_by(
    graph: Graph, node: Node, inputs: Mapping[tuple[int, int], str]
) -> list[str]:
    """Return the names that a node will read."""
    return [
        inputs.get((node.index, port), graph.values[value].name)
        for port, value in enumerate(node.inputs)
        if value != ABSENT
    ]
