"""Values of options: levels, exponents, and checks of what is given."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from math import inf
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    Self,
    SupportsFloat,
    get_args,
)

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.defs import onnx_opset_version

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, nearest, suggestion
from onnxamp._base.numbers import checked_number
from onnxamp._facts.dtypes import Range

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
    match = next((known for known in Level if known.lower() == level.lower()), None)
    if match is None:
        raise ArgumentError(
            f"Unknown level {level!r}: choose one of {', '.join(Level)}.{suggestion(Level, level)}"
        )
    return match


TOLERANCE: Final = 1e-2
"""The largest error that level auto accepts by default."""


def check_tolerance(tolerance: float | None) -> None:
    """Check that a tolerance is a number or None. What uses it knows how large it may be.

    Raises:
        ArgumentTypeError: it is of another type.
    """
    if tolerance is not None:
        checked_number("tolerance", tolerance, "a number", lambda _: True)


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
            accepted as well, and with ``validates``, a tolerance and a way to compare outputs.
        ArgumentTypeError: the tolerance is no number.
    """
    check_tolerance(tolerance)
    compares = validates and metric in get_args(DiffMetric)
    given = {
        "tolerance": tolerance is not None and not validates,
        "samples": samples is not None and not measures,
        "metric": metric != "auto" and not compares,
    }
    unused = [name for name, is_given in given.items() if is_given]
    if check_level(level) != Level.AUTO and unused:
        if unused[0] == "metric" and validates:
            raise ArgumentError(
                f"metric {metric!r} is only for level 'auto': to compare outputs at {str(level)!r}, choose one of"
                f" {', '.join(get_args(DiffMetric))}."
            )
        also = ", rescale, data_max or rounding" if unused[0] == "samples" else ""
        judged = "" if unused[0] == "samples" else " without validation"
        raise ArgumentError(
            f"{unused[0]} is only for level 'auto'{also}, not for {str(level)!r}{judged}: leave it out, or change level."
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

    @property
    def exponents(self) -> dict[str, int]:
        """The exponents by name of a value."""
        return {row.value: row.exponent for row in self.scaled}

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for :meth:`from_json`."""
        return {
            "scaled": [list(row) for row in self.scaled],
            "unfit": [list(row) for row in self.unfit],
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


def check_magnitude(what: str, number: object) -> float:
    """Return a limit of magnitudes.

    Raises:
        ArgumentTypeError: it is not a number. ArgumentError: it is not positive.
    """
    if isinstance(number, bool) or not isinstance(number, SupportsFloat):
        raise ArgumentTypeError(
            f"{what} must be a number, not {type(number).__name__}."
        )
    # "not >" rather than "<=", so that NaN is refused as well.
    if not float(number) > 0:
        raise ArgumentError(f"{what} must be a positive number, not {number}.")
    return float(number)


def checked_word(what: str, given: object, words: Sequence[str]) -> str:
    """Return ``given``, which must be one of some words.

    Raises:
        ArgumentError: it is another string. ArgumentTypeError: it is not a string.
    """
    if not isinstance(given, str):
        raise ArgumentTypeError(
            f"{what} must be {' or '.join(map(repr, words))}, not {type(given).__name__}."
        )
    if given not in words:
        raise ArgumentError(f"Unknown {what} {given!r}: {meant(given, words)}")
    return given


def checked_array(name: str, given: Any) -> NDArray[Any]:
    """Return what NumPy makes of an array, a number or lists.

    Raises:
        ArgumentTypeError: it makes no array of them, such as of rows of different lengths.
    """
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name} must be an array, or lists of the same length: {str(error).removesuffix('.')}."
        ) from error


def checked_flag(name: str, value: bool) -> bool:
    """Return a bool.

    Raises:
        ArgumentTypeError: it is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(f"{name} must be a bool, not {type(value).__name__}.")
    return bool(value)


def flags(options: Any) -> dict[str, bool | None]:
    """Return the fields of a dataclass that are bools, including those that may be None.

    Raises:
        ArgumentTypeError: one has another type, such as "no", which counts as true in Python.
    """
    checked: dict[str, bool | None] = {}
    for item in fields(options):
        if item.type not in (bool, bool | None):
            continue
        value = getattr(options, item.name)
        may_be_none = item.type is not bool
        is_fine = isinstance(value, bool | np.bool_) or (value is None and may_be_none)
        if not is_fine:
            kinds = "a bool or None" if may_be_none else "a bool"
            raise ArgumentTypeError(f"{item.name} must be {kinds}, not {value!r}.")
        checked[item.name] = None if value is None else bool(value)
    return checked


def checked_names(what: str, names: Iterable[str] | None) -> tuple[str, ...]:
    """Return a list of names without duplicates.

    Raises:
        ArgumentTypeError: the argument is not a list of names.
    """
    if names is None:
        return ()
    return tuple(dict.fromkeys(_listed(what, names, "names", "strings")))


def checked_texts(what: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the regular expressions, given one or several.

    Raises:
        ArgumentTypeError: the argument is neither.
    """
    if isinstance(patterns, str):
        return (patterns,)
    return _listed(what, patterns, "regular expressions", "regular expressions")


def _listed(what: str, given: Iterable[str], kind: str, held: str) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentTypeError(
            f"{what} must be a list of {kind}, not {type(given).__name__}."
        )
    listed = tuple(given)
    if bad := [item for item in listed if not isinstance(item, str)]:
        raise ArgumentTypeError(
            f"{what} must hold {held}, not {type(bad[0]).__name__}."
        )
    return listed


def compiled(what: str, patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Return the regular expressions of an option, compiled.

    Raises:
        ArgumentError: a text is not a regular expression.
    """
    expressions = []
    for text in patterns:
        try:
            expressions.append(re.compile(text))
        except re.error as error:
            raise ArgumentError(
                f"{what}: {text!r} is not a regular expression: {error}."
            ) from None
    return tuple(expressions)


def meant(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the nearest name, or all names."""
    near = nearest(known, name)
    return f"did you mean {near!r}?" if near else f"choose from {', '.join(known)}."


OpsetWord = Literal["auto", "keep"]


def check_opset(opset: object) -> int | OpsetWord:
    """Return ``opset`` if it is one of the two words or a possible opset number.

    Raises:
        ArgumentError: it is another word, or there is no such opset.
        ArgumentTypeError: it is neither a string nor an integer.
    """
    if isinstance(opset, bool) or not isinstance(opset, (int, str)):
        raise ArgumentTypeError(
            f"opset must be 'auto', 'keep' or an integer, not {type(opset).__name__}."
        )
    if isinstance(opset, str) and opset not in get_args(OpsetWord):
        raise ArgumentError(
            f"opset must be 'auto', 'keep' or a number, not {opset!r}."
        )
    # Schemas of newer opsets are unknown, and no op can be upgraded to them.
    newest = onnx_opset_version()
    if isinstance(opset, int) and opset < 1:
        raise ArgumentError(f"There is no opset {opset}: opsets start at 1.")
    if isinstance(opset, int) and opset > newest:
        raise ArgumentError(
            f"The installed onnx {onnx.__version__} knows opsets up to {newest}: {opset} is too new."
        )
    return opset  # type: ignore[return-value] # a string is one of the words


def checked_ranges(given: object) -> tuple[tuple[str, Range], ...]:
    """Return the ranges of inputs, sorted by name.

    Args:
        given: a mapping from names to pairs, or such pairs with their names.

    Raises:
        ArgumentTypeError: it is of another type. ArgumentError: a range is empty or infinite.
    """
    try:
        pairs = dict(given)  # type: ignore[call-overload]
        ranges = {
            str(name): (float(low), float(high)) for name, (low, high) in pairs.items()
        }
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            "input_ranges must map names of inputs to pairs of numbers, as in {'image': (0, 255)}."
        ) from None
    for name, (low, high) in ranges.items():
        if not -inf < low <= high < inf:
            raise ArgumentError(
                f"input_ranges (--input-range): the range of {name!r} is {low:g} to {high:g}: give two finite numbers, the"
                " smaller one first."
            )
    return tuple(sorted(ranges.items()))
