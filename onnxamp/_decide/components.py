"""What belongs together: parts of a set that relations join."""

from collections.abc import Iterable, Sequence


def components(members: Iterable[int], joined: Iterable[Sequence[int]]) -> list[list[int]]:
    """The members in groups that rows of ``joined`` connect, both in the order of the members.

    Complexity: near linear in members and joined ones.
    """
    members = list(members)
    parents = {member: member for member in members}

    def root(member: int) -> int:
        while parents[member] != member:
            parents[member] = parents[parents[member]]
            member = parents[member]
        return member

    for first, *others in joined:
        for other in others:
            parents[root(other)] = root(first)
    found: dict[int, list[int]] = {}
    for member in members:
        found.setdefault(root(member), []).append(member)
    return list(found.values())
