"""What measuring a model found out about exponents: part of the options, so that plans repeat it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self


class Scaled(NamedTuple):
    """A value that is stored as ``value * 2**-exponent``; ``largest`` is its largest magnitude before, None unmeasured.

    ``value`` is its name, behind those of the nodes whose bodies it is in.
    """

    value: str
    exponent: int
    largest: float | None


class Unfit(NamedTuple):
    """A value that leaves the low type's range whatever exponents do; ``why`` names the nodes that forbid one."""

    value: str
    largest: float
    why: str


class Rescaling(NamedTuple):
    """Exponents of values, what stays out of range, and whether the inputs that say so were made up.

    ``sums`` are values whose sums or means a target keeps in float16, were measured, and fit. ``gap`` is the number
    of constants that could at most stay as they are with other exponents; 0 where that is proven, None where not.

    Example:
        >>> Rescaling((Scaled("stream", 7, 1e6),)).as_json()
        {'scaled': [['stream', 7, 1000000.0]], 'unfit': [], 'made_up': False, 'sums': [], 'gap': None}
    """

    scaled: tuple[Scaled, ...] = ()
    unfit: tuple[Unfit, ...] = ()
    made_up: bool = False
    sums: tuple[str, ...] = ()
    gap: int | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON values, for :meth:`from_json`."""
        rows = {name: [list(row) for row in getattr(self, name)] for name in ("scaled", "unfit")}
        return rows | {"made_up": self.made_up, "sums": list(self.sums), "gap": self.gap}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What :meth:`as_json` wrote.

        Raises:
            KeyError, TypeError: it was not.
        """
        scaled, unfit = (
            (Scaled(*row) for row in data["scaled"]),
            (Unfit(*row) for row in data["unfit"]),
        )
        return cls(
            tuple(scaled),
            tuple(unfit),
            bool(data["made_up"]),
            tuple(data.get("sums", ())),
            data.get("gap"),
        )
