"""Names of values and nodes: new ones, and those of one value in both precisions."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class NewNames:
    """Names that no scope has yet; O(1) each on average."""

    taken: set[str]
    _next: dict[str, int] = field(default_factory=dict)

    def fresh(self, base: str) -> str:
        """``base`` if nothing has that name, else ``base`` with a number. It is taken from then on."""
        name, number = base, self._next.get(base, 1)
        while name in self.taken:
            name, number = f"{base}_{number}", number + 1
        self._next[base] = number
        self.taken.add(name)
        return name


@dataclass(slots=True)
class Versions:
    """Names of one float32 value in both precisions; None where nobody needs it."""

    high: str | None = None
    low: str | None = None


class Source(NamedTuple):
    """Where a low value comes from: its name, its scope, and the name of its float32 version, where it has one."""

    name: str
    scope: int
    raised: str | None
