"""Groups of numbers that are merged (union-find)."""

from collections.abc import Iterable


class Groups:
    """Groups of numbers, each of its own at first. The smallest number of a group stands for it."""

    def __init__(self) -> None:
        self.above = dict[int, int]()
        """Number -> a smaller one of its group; those in groups of their own may be left out."""

    def first(self, number: int) -> int:
        """Return the number that stands for the group of one, and shorten the path to it for later calls."""
        above = self.above
        while (other := above.get(number, number)) != number:
            above[number] = number = above.get(other, other)
        return number

    def join(self, numbers: Iterable[int]) -> None:
        """Merge the groups of some numbers."""
        firsts = [*map(self.first, numbers)]
        self.above |= dict.fromkeys(firsts, min(firsts, default=0))
