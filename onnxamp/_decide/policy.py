"""What the user wants: level, lists, pins, target. Validated once, frozen, read by everything else."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources

from onnx import NodeProto

from onnxamp._dtypes import LowType, low_type
from onnxamp._errors import ArgumentError, ArgumentTypeError, ContradictionError
from onnxamp._target.kernels import check_target


class Level(StrEnum):
    """How much becomes low, in the words of mindspore.amp; the README's table says it in full."""

    O0 = "O0"
    """Nothing."""
    O1 = "O1"
    """White-listed ops, and exact ops where that saves Casts."""
    O2 = "O2"
    """All but black-listed ops, unless an op's Casts cost more than it gains."""
    O3 = "O3"
    """Everything that has a kernel and is no hazard."""
    AUTO = "auto"
    """Decided by data: measured errors and estimated times; see :mod:`onnxamp._tuning`."""


PRESETS = ("default", "fast", "mindspore", "paddle")
"""Names of the list presets in ``_data/oplists``."""

Rule = Callable[[NodeProto], str | None]
"""A user's callback: "low", "high", or None for no opinion."""


@dataclass(frozen=True, slots=True)
class Preset:
    """White and black op types, each with the source of its entry."""

    name: str
    summary: str
    white: Mapping[str, str]
    black: Mapping[str, str]
    folds_batch_norm: bool
    """Whether an inference BatchNormalization behind a Conv takes the Conv's precision, to be folded into it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's wishes, as :func:`make_policy` validated them."""

    level: Level
    low: LowType
    white: frozenset[str]
    black: frozenset[str]
    listed_by_user: frozenset[str]
    folds_batch_norm: bool
    keep_io: bool | frozenset[str]
    keep_high: tuple[re.Pattern[str], ...]
    force_low: tuple[re.Pattern[str], ...]
    rule: Rule | None
    target: str
    strict: bool
    hazards: bool
    freeze_defaults: bool
    keep_functions: bool
    fold: bool

    def keeps_io(self, name: str) -> bool:
        """Whether the graph input or output of that name keeps its type."""
        return self.keep_io if isinstance(self.keep_io, bool) else name in self.keep_io


def preset(lists: str) -> Preset:
    """A list preset.

    Raises:
        ArgumentError: no preset has that name. ArgumentTypeError: the name is no string.
    """
    if not isinstance(lists, str):
        raise ArgumentTypeError(f"lists must be a string such as 'default', not {type(lists).__name__}.")
    if lists not in PRESETS:
        raise ArgumentError(f"Unknown lists {lists!r}: choose one of {', '.join(PRESETS)}.")
    return _read_preset(lists)


@cache
def _read_preset(lists: str) -> Preset:
    text = resources.files("onnxamp").joinpath(f"_data/oplists/{lists}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    folds = bool(data.get("folds_batch_norm", False))
    return Preset(lists, data["summary"], data["white"], data["black"], folds)


def get_white_list(lists: str = "default") -> list[str]:
    """Op types that the preset wants low, as a fresh list; "domain::OpType" outside ai.onnx."""
    return list(preset(lists).white)


def get_black_list(lists: str = "default") -> list[str]:
    """Op types that the preset keeps in float32, as a fresh list; "domain::OpType" outside ai.onnx."""
    return list(preset(lists).black)


def make_policy(
    level: str = "O2",
    *,
    dtype: str = "float16",
    keep_io_types: bool | Iterable[str] = True,
    white_list: Iterable[str] | None = None,
    black_list: Iterable[str] | None = None,
    lists: str = "default",
    base: Preset | None = None,
    keep_high: Iterable[str] = (),
    force_low: Iterable[str] = (),
    rule: Rule | None = None,
    target: str = "cuda",
    strict: bool = False,
    hazards: bool = True,
    freeze_defaults: bool = False,
    keep_functions: bool = False,
    fold: bool = False,
) -> Policy:
    """Validate the user's wishes; see :func:`onnxamp.convert_model` for what each means.

    Args:
        base: the lists to which white_list and black_list add, in place of the preset called ``lists``.

    Raises:
        ArgumentError: a value is not known. ContradictionError: an op is in both lists.
        ArgumentTypeError: a value has the wrong type.
    """
    white, black = _names("white_list", white_list), _names("black_list", black_list)
    if both := sorted(white & black):
        raise ContradictionError(
            f"{', '.join(both)}: in white_list (--white) and in black_list (--black); take it out of one of them."
        )
    base = base or preset(lists)
    if rule is not None and not callable(rule):
        raise ArgumentTypeError(f"rule must be a function of a NodeProto, not {type(rule).__name__}.")
    if keep_io_types is None:
        raise ArgumentTypeError("keep_io_types must be a bool or a list of names, not None.")
    keep_io = keep_io_types if isinstance(keep_io_types, bool) else _names("keep_io_types", keep_io_types)
    return Policy(
        level=check_level(level),
        low=low_type(dtype),
        white=(frozenset(base.white) - black) | white,
        black=(frozenset(base.black) - white) | black,
        listed_by_user=white | black,
        folds_batch_norm=base.folds_batch_norm and not black & {"BatchNormalization"},
        keep_io=keep_io,
        keep_high=_patterns("keep_high (--keep-fp32)", keep_high),
        force_low=_patterns("force_low (--force-low)", force_low),
        rule=rule,
        target=check_target(target),
        strict=strict,
        hazards=hazards,
        freeze_defaults=freeze_defaults,
        keep_functions=keep_functions,
        fold=fold,
    )


def check_level(level: object) -> Level:
    """The level called ``level``.

    Raises:
        ArgumentError: no such level. ArgumentTypeError: not a string.
    """
    if not isinstance(level, str):
        raise ArgumentTypeError(f"level must be a string such as 'O2', not {type(level).__name__}.")
    if level not in list(Level):
        raise ArgumentError(f"Unknown level {level!r}: choose one of {', '.join(Level)}.")
    return Level(level)


def _names(what: str, names: Iterable[str] | None) -> frozenset[str]:
    if names is None:
        return frozenset()
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentTypeError(f"{what} must be a list of names, not {type(names).__name__}.")
    found = list(names)
    if bad := [name for name in found if not isinstance(name, str)]:
        raise ArgumentTypeError(f"{what} must hold strings, not {type(bad[0]).__name__}.")
    return frozenset(found)


def _patterns(what: str, patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    compiled = []
    if isinstance(patterns, str):
        patterns = (patterns,)
    if not isinstance(patterns, Iterable):
        raise ArgumentTypeError(f"{what} must be a list of regular expressions, not {type(patterns).__name__}.")
    for text in patterns:
        if not isinstance(text, str):
            raise ArgumentTypeError(f"{what} must hold regular expressions, not {type(text).__name__}.")
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise ArgumentError(f"{what}: {text!r} is not a regular expression: {error}.") from None
    return tuple(compiled)
