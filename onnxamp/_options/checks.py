"""Checks of the values given for options."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Final, Literal, SupportsFloat, get_args

import numpy as np
import onnx
from onnx.defs import onnx_opset_version

from onnxamp._errors import ArgumentError, ArgumentTypeError


def check_magnitude(what: str, number: object) -> float:
    """Return a limit of magnitudes.

    Raises:
        ArgumentTypeError: it is not a number. ArgumentError: it is not positive.
    """
    if isinstance(number, bool) or not isinstance(number, SupportsFloat):
        raise ArgumentTypeError(
            f"{what} must be a number, not {type(number).__name__}."
        )
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


NUMBERS: Final = (int, float, np.integer, np.floating)
WHOLE: Final = (int, np.integer)
"""Types of numbers, and of whole numbers. Bools do not count."""


def checked_number(
    name: str,
    value: Any,
    what: str,
    holds: Callable[[Any], bool],
    kinds: tuple[type, ...] = NUMBERS,
) -> Any:
    """Return a number that has one of the types and meets the condition.

    Raises:
        ArgumentTypeError: it has another type. ArgumentError: it does not meet the condition.
    """
    said = f"{name} must be {what}, not {value!r}."
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ArgumentTypeError(said)
    if not holds(value):
        raise ArgumentError(said)
    return value


def checked_flag(name: str, value: bool) -> bool:
    """Return a bool.

    Raises:
        ArgumentTypeError: it is not a bool.
    """
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a bool, not {type(value).__name__}.")
    return value


def flags(options: Any) -> dict[str, bool | None]:
    """Return the fields of a dataclass that are bools, including those that may be None.

    Raises:
        ArgumentTypeError: one has another type, such as "no", which counts as true in Python.
    """
    found: dict[str, bool | None] = {}
    for item in fields(options):
        if item.type in (bool, bool | None):
            value, may_be_none = getattr(options, item.name), item.type is not bool
            if not (
                isinstance(value, bool | np.bool_) or (value is None and may_be_none)
            ):
                raise ArgumentTypeError(
                    f"{item.name} must be a bool{' or None' * may_be_none}, not {value!r}."
                )
            found[item.name] = None if value is None else bool(value)
    return found


def checked_names(what: str, names: Iterable[str] | None) -> tuple[str, ...]:
    """Return a list of names without duplicates.

    Raises:
        ArgumentTypeError: the argument is not a list of names.
    """
    return (
        ()
        if names is None
        else tuple(dict.fromkeys(_listed(what, names, "names", "strings")))
    )


def checked_texts(what: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the regular expressions, given one or several.

    Raises:
        ArgumentTypeError: the argument is neither.
    """
    kind = "regular expressions"
    return (
        (patterns,)
        if isinstance(patterns, str)
        else _listed(what, patterns, kind, kind)
    )


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
    found = []
    for text in patterns:
        try:
            found.append(re.compile(text))
        except re.error as error:
            raise ArgumentError(
                f"{what}: {text!r} is not a regular expression: {error}."
            ) from None
    return tuple(found)


def meant(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the nearest name, or all names."""
    from difflib import get_close_matches  # noqa: PLC0415 - few runs need it

    near = get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}."


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
        raise ArgumentError(f"opset must be 'auto', 'keep' or a number, not {opset!r}.")
    newest = onnx_opset_version()
    if isinstance(opset, int) and opset < 1:
        raise ArgumentError(f"There is no opset {opset}: opsets start at 1.")
    if isinstance(opset, int) and opset > newest:
        raise ArgumentError(
            f"The installed onnx {onnx.__version__} knows opsets up to {newest}: {opset} is too new."
        )
    return opset  # type: ignore[return-value] # a string is one of the words
