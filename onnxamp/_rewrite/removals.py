"""The third step of planning edits: original nodes that nothing reads once inputs and results have their new names.

Complexity: linear in ports.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from onnxamp._decide.problem import Problem
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
    return Removals(removed, _unread(problem, casts, removed, inputs))


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
    casts: NewCasts,
    removed: AbstractSet[int],
    inputs: Mapping[tuple[int, int], str],
) -> AbstractSet[int]:
    """Return the nodes that compute constants of which only the stored copies are read."""
    graph = problem.graph
    unread = set[int]()

    def is_read(value: int) -> bool:
        """Return whether something reads or returns a value under its original name."""
        name = graph.values[value].name
        return bool(graph.results[value]) or any(
            key[0] not in removed
            and key[0] not in unread
            and inputs.get(key, name) == name
            for key in graph.uses[value]
        )

    computed = (copy.value for copy in casts.copies if copy.numbers is not None)
    pending = [graph.values[value].producer for value in computed]
    while pending:
        node = graph.nodes[pending.pop()]
        if node.index in unread or any(map(is_read, node.writes)):
            continue
        unread.add(node.index)
        makers = map(graph.producer, node.reads)
        pending += [maker.index for maker in makers if maker and not maker.bodies]
    return unread
