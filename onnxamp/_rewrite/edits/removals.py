"""The third step of planning edits: the original Casts that nothing reads once inputs and results have new names.

Complexity: linear in ports.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from onnxamp._decide.problem import Problem
from onnxamp._rewrite.edits.value_names import Names


def find_removals(
    problem: Problem,
    names: Names,
    inputs: Mapping[tuple[int, int], str],
    results: Mapping[tuple[int, int], str],
) -> AbstractSet[int]:
    """Return the original Casts that go.

    Args:
        problem: the problem.
        names: the names of values, and the Casts that these make needless.
        inputs: (node, input) -> the new name that it reads.
        results: (scope, output) -> the new name that it returns.
    """
    removed = set(names.needless)
    for value in _dead_raised(problem, removed, inputs, results):
        removed.add(problem.graph.values[value].producer)
    return removed


def _dead_raised(
    problem: Problem,
    removed: AbstractSet[int],
    inputs: Mapping[tuple[int, int], str],
    results: Mapping[tuple[int, int], str],
) -> Iterator[int]:
    """Yield values that an original Cast raises from low precision, if all readers of it read something else."""
    graph = problem.graph
    for value in problem.ports.raised_from:
        name = graph.values[value].name
        returned, uses = graph.results[value], graph.uses[value]
        if any(results.get(key, name) == name for key in returned):
            continue
        reads = [key for key in uses if key[0] not in removed]
        # A Cast that nothing read in the original stays as it is.
        is_used = bool(returned or uses)
        if is_used and all(inputs.get(key, name) != name for key in reads):
            yield value
