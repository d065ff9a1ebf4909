"""Names of values and nodes: unused ones, and those of one value in both precisions."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class NewNames:
    """A source of names that no scope uses; O(1) each on average."""

    taken: set[str]
    _next: dict[str, int] = field(default_factory=dict)

    def fresh(self, base: str) -> str:
        """``base``, or ``base`` with a number if that name is taken. The result is taken from then on."""
        name, number = base, self._next.get(base, 1)
        while name in self.taken:
            name, number = f"{base}_{number}", number + 1
        self._next[base] = number
        self.taken.add(name)
        return name


@dataclass(slots=True)
class Versions:
    """Names of one float32 value in both precisions; None for a precision that has no readers."""

    high: str | None = None
    low: str | None = None


class Source(NamedTuple):
    """The source of a low-precision value: its name, its scope, and the name of its float32 version if there is one."""

    name: str
    scope: int
    raised: str | None
