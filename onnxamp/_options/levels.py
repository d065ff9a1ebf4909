"""Levels: how much of a model to lower."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Self

from onnxamp._errors import ArgumentError, ArgumentTypeError

LevelName = Literal["O0", "O1", "O2", "O3", "auto"]
"""Levels by name."""

DiffMetric = Literal["auto", "detections", "elements"]
"""The comparison of outputs; see :func:`onnxamp.diff_models`."""


class Level(StrEnum):
    """How much of a model to lower, by the names of mindspore.amp."""

    O0 = "O0"
    """Nothing."""
    O1 = "O1"
    """White-listed ops, and exact ops if that saves Casts."""
    O2 = "O2"
    """All but black-listed ops, unless an op's Casts cost more than it gains."""
    O3 = "O3"
    """Every op that has a kernel and is not a hazard."""
    AUTO = "auto"
    """As much as measured errors and estimated times allow; see :mod:`onnxamp._tuning`."""


def check_level(level: object) -> Level:
    """Return the level called ``level``, regardless of case.

    Raises:
        ArgumentError: there is no such level.
        ArgumentTypeError: ``level`` is not a string.
    """
    if not isinstance(level, str):
        raise ArgumentTypeError(
            f"level must be a string such as 'O2', not {type(level).__name__}."
        )
    found = next((known for known in Level if known.lower() == level.lower()), None)
    if found is None:
        raise ArgumentError(
            f"Unknown level {level!r}: choose one of {', '.join(Level)}."
        )
    return found


TOLERANCE: Final = 1e-2
"""The largest error that level auto accepts by default."""


def is_auto(
    level: str,
    tolerance: float | None,
    samples: object,
    metric: object,
    *,
    measures: bool = False,
    validates: bool = False,
) -> bool:
    """Return whether the level is "auto".

    Raises:
        ArgumentError: it is not, but an argument is given that only "auto" takes; with ``measures``, samples are
            accepted as well, and with ``validates``, a tolerance.
    """
    unasked = samples is not None and not measures
    is_unheld = tolerance not in (None, TOLERANCE) and not validates
    given = {"tolerance": is_unheld, "samples": unasked, "metric": metric != "auto"}
    unused = [name for name, is_given in given.items() if is_given]
    if check_level(level) != Level.AUTO and unused:
        also = ", rescale, data_max or rounding" if unused[0] == "samples" else ""
        raise ArgumentError(
            f"{unused[0]} is only for level 'auto'{also}, not for {level!r}: leave it out, or change level."
        )
    return level == Level.AUTO


class Scaled(NamedTuple):
    """A value that is stored as ``value * 2**-exponent``.

    ``value`` is its name, after the names of the nodes whose bodies contain it. ``largest`` is its largest magnitude
    before scaling, None if unmeasured.
    """

    value: str
    exponent: int
    largest: float | None


class Unfit(NamedTuple):
    """A value that leaves the low type's range for every exponent; ``why`` names the nodes that prevent one."""

    value: str
    largest: float
    why: str


class Rescaling(NamedTuple):
    """Exponents of values, the values that stay out of range, and whether they were measured on random inputs.

    ``sums`` are values whose sums or means a target keeps in float16, and that were measured and fit. ``gap`` is the
    largest number of further constants that other exponents could leave unchanged; 0 if that is proven, None if not.

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
        """Return JSON values for :meth:`from_json`."""
        rows = {
            name: [list(row) for row in getattr(self, name)]
            for name in ("scaled", "unfit")
        }
        return rows | {
            "made_up": self.made_up,
            "sums": list(self.sums),
            "gap": self.gap,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the rescaling that :meth:`as_json` wrote.

        Raises:
            KeyError, TypeError: the data is not from :meth:`as_json`.
        """
        return cls(
            scaled=tuple(Scaled(*row) for row in data["scaled"]),
            unfit=tuple(Unfit(*row) for row in data["unfit"]),
            made_up=bool(data["made_up"]),
            sums=tuple(data.get("sums", ())),
            gap=data.get("gap"),
        )
