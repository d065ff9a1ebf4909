"""The one editor of models."""

from dataclasses import dataclass, field


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
