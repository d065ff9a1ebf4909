"""Strongly connected components: the values that arcs lead from to each other and back."""

from collections.abc import Iterable, Iterator


def cycles(arcs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the number of the strongly connected component of each value that has an arc.

    Values have one number if and only if arcs lead from each of them to the other. This is Tarjan's algorithm
    ("Depth-first search and linear graph algorithms", 1972) with a stack of its own instead of recursion.

    Args:
        arcs: (source, target).

    Complexity: linear in arcs.
    """
    targets: dict[int, list[int]] = {}
    for source, target in arcs:
        targets.setdefault(source, []).append(target)
        targets.setdefault(target, [])
    component_of: dict[int, int] = {}
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    """Visited values whose component is not complete, in their order."""
    for root, first in targets.items():
        if root in order:
            continue
        order[root] = lowest[root] = len(order)
        path.append(root)
        walk: list[tuple[int, Iterator[int]]] = [(root, iter(first))]
        while walk:
            value, left = walk[-1]
            for target in left:
                if target not in order:
                    order[target] = lowest[target] = len(order)
                    path.append(target)
                    walk.append((target, iter(targets[target])))
                    break
                # A target without a component yet is on the path, so the arc closes a cycle.
                if target not in component_of:
                    lowest[value] = min(lowest[value], order[target])
            else:
                walk.pop()
                if walk:
                    parent = walk[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[value])
                # It reaches nothing before it, so all that follows it on the path is its component.
                if lowest[value] == order[value]:
                    member = path.pop()
                    while member != value:
                        component_of[member] = value
                        member = path.pop()
                    component_of[value] = value
    return component_of
