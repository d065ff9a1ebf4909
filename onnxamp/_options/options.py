"""The one definition of every option of a conversion.

JSON, plan files and the reference derive from the fields of :class:`Options`. :class:`OptionKeywords` has the types of
keyword arguments, and :mod:`onnxamp._options.command_line` the command-line spellings of fields. Tests verify that they
agree.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Final, Literal, Self, TypedDict, get_args

from onnx import NodeProto

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContradictionError,
)
from onnxamp._facts.dtypes import FLOAT16, DtypeLike, Format, Range, low_type
from onnxamp._facts.kernels import float32_accumulators
from onnxamp._facts.providers import computes_low
from onnxamp._facts.signature import CustomOp, CustomOpsLike, as_json, custom_ops_of
from onnxamp._facts.targets import check_target
from onnxamp._options.command_line import spelled_fields
from onnxamp._options.lists import PRESETS, Preset, PresetName, ops_named, preset
from onnxamp._options.values import (
    Level,
    OpsetWord,
    Rescaling,
    check_level,
    check_magnitude,
    check_opset,
    checked_names,
    checked_ranges,
    checked_texts,
    checked_word,
    compiled,
    flags,
    meant,
)

Rounding = Literal["auto", "nearest", "compensated"]
Rule = Callable[[NodeProto], str | None]
"""A callback that returns "low", "high", or None for no opinion. Training also returns :data:`LOSS_SCALED` and
:data:`DECIDED_LOW`."""

LOSS_SCALED: Final = "scaled"
"""The answer of a rule for nodes whose values a loss scale keeps in range, regardless of the sizes of inputs."""

DECIDED_LOW: Final = "decided"
"""The answer of a rule for nodes that are low by a decision about another model, which has issued all warnings."""

_NAMES: Final = ("white_list", "black_list", "keep_nodes", "folded", "unsound")
_TEXTS: Final = ("keep_high", "force_low", "low_weights")
"""Fields that hold names and regular expressions."""


@dataclass(frozen=True)
class Options:
    """The options of a conversion, validated on construction; :func:`onnxamp.convert_model` describes each field.

    Raises:
        ArgumentError: a value is unknown or impossible.
        ArgumentTypeError: a value has the wrong type.
        ContradictionError: an op type is in both lists, or the target has no such type.

    Example:
        >>> import onnxamp
        >>> options = onnxamp.Options("O1", white_list=["Softmax"])
        >>> "Softmax" in options.white, "Softmax" in options.black
        (True, False)
    """

    level: Level = Level.O2
    dtype: str = "float16"
    lists: str | Preset = "default"
    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    keep_high: tuple[str, ...] = ()
    force_low: tuple[str, ...] = ()
    keep_nodes: tuple[str, ...] = ()
    low_weights: tuple[str, ...] = ()
    weights_only: bool = False
    init_max: float | None = None
    data_max: float | None = None
    input_ranges: tuple[tuple[str, Range], ...] = ()
    keep_io_types: bool | frozenset[str] = True
    target: str = "cuda"
    strict: bool = False
    hazards: bool = True
    freeze_defaults: bool | None = None
    from_dtype: str | None = None
    custom_ops: tuple[CustomOp, ...] = ()
    keep_functions: bool = False
    opset: int | OpsetWord = "auto"
    fold: bool | None = None
    folded: tuple[str, ...] = ()
    rescale: bool | None = None
    rescaling: Rescaling | None = None
    split_k: bool = True
    rounding: str = "auto"
    unsound: tuple[str, ...] = ()
    rule: Rule | None = None
    strict_options: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        # The dataclass is frozen, and callers may pass lists, paths and short names.
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        self._refuse_contradictions()
        # Computing these validates them, so that an error names the option before any model is read.
        _ = self.preset, self.keep_patterns, self.low_patterns, self.weight_patterns

    def _checked(self) -> dict[str, Any]:
        """Return the fields that must be of one form, checked and in that form."""
        values: dict[str, Any] = {
            **flags(self),
            "level": check_level(self.level),
            "dtype": low_type(self.dtype).name,
            **{name: checked_names(name, getattr(self, name)) for name in _NAMES},
            **{name: checked_texts(name, getattr(self, name)) for name in _TEXTS},
            "custom_ops": custom_ops_of(self.custom_ops),
            "input_ranges": checked_ranges(self.input_ranges),
            "target": check_target(self.target),
            "opset": check_opset(self.opset),
            "rounding": checked_word("rounding", self.rounding, get_args(Rounding)),
        }
        if self.from_dtype not in (None, "auto"):
            values["from_dtype"] = low_type(self.from_dtype).name
        if self.keep_io_types is None:
            raise ArgumentTypeError(
                "keep_io_types must be a bool or a list of names, not None."
            )
        if not isinstance(self.keep_io_types, bool):
            values["keep_io_types"] = frozenset(
                checked_names("keep_io_types", self.keep_io_types)
            )
        for name in ("init_max", "data_max"):
            if (limit := getattr(self, name)) is not None:
                values[name] = check_magnitude(
                    f"{name} ({spelled_fields()[name].flags})", limit
                )
        if self.rule is not None and not callable(self.rule):
            raise ArgumentTypeError(
                f"rule must be a function of a NodeProto, not {type(self.rule).__name__}."
            )
        if isinstance(self.rescaling, Mapping):
            try:
                values["rescaling"] = Rescaling.from_json(self.rescaling)
            except (KeyError, TypeError):
                raise ArgumentError(
                    "rescaling must be taken from a plan: this dict is none of its."
                ) from None
        elif not isinstance(self.rescaling, Rescaling | None):
            raise ArgumentTypeError(
                f"rescaling must be taken from a plan, not {type(self.rescaling).__name__}."
            )
        return values

    def _refuse_contradictions(self) -> None:
        """Raise a ContradictionError if two options exclude each other."""
        if both := sorted(self.user_white & self.user_black):
            raise ContradictionError(
                f"{', '.join(both)}: in white_list (--white) and in black_list (--black); take it out of one of them."
            )
        if self.weights_only and self.level in (Level.O0, Level.AUTO):
            raise ContradictionError(
                f"weights_only (--weights-only) computes everything in float32, which contradicts level {self.level}:"
                " drop one of the two."
            )
        if self.low is not FLOAT16 and computes_low(self.target):
            raise ContradictionError(
                f"{self.target} computes only in float16, but dtype (--dtype) is {self.dtype}: choose"
                " float16, or another target."
            )

    @classmethod
    def of(cls, level: str = "O2", keywords: Mapping[str, Any] | None = None) -> Self:
        """Return the options of a call.

        Raises:
            ArgumentTypeError: a keyword is unknown; the message names the nearest one. Other errors: see the class.
        """
        names = [item.name for item in fields(cls)]
        for name in keywords or ():
            if name not in names:
                raise ArgumentTypeError(
                    f"Unknown option {name!r}: {meant(name, names)}"
                )
        return cls(level, **(keywords or {}))  # type: ignore[arg-type] # __post_init__ checks and normalizes them

    @cached_property
    def low(self) -> Format:
        """The low-precision type."""
        return low_type(self.dtype)

    @cached_property
    def preset(self) -> Preset:
        """The preset that white_list and black_list extend."""
        return self.lists if isinstance(self.lists, Preset) else preset(self.lists)

    @cached_property
    def user_white(self) -> frozenset[str]:
        """Op types of white_list, with the names of other frameworks translated."""
        return frozenset(chain.from_iterable(map(ops_named, self.white_list)))

    @cached_property
    def user_black(self) -> frozenset[str]:
        """Op types of black_list, with the names of other frameworks translated."""
        return frozenset(chain.from_iterable(map(ops_named, self.black_list)))

    @cached_property
    def white(self) -> frozenset[str]:
        """Op types to lower; the user's lists override the preset."""
        return (frozenset(self.preset.white) - self.user_black) | self.user_white

    @cached_property
    def black(self) -> frozenset[str]:
        """Op types to keep in float32; the user's lists override the preset, which level O3 leaves out."""
        if self.level == Level.O3:
            return self.user_black
        preset = frozenset(self.preset.black_of(self.level))
        return (preset - self.trusted - self.user_white) | self.user_black

    @cached_property
    def trusted(self) -> frozenset[str]:
        """Op types that the preset lowers because the target's low-precision kernels accumulate them in float32."""
        if not self.preset.trusts_kernels:
            return frozenset()
        return float32_accumulators(self.target, self.dtype)

    @cached_property
    def folds_batch_norm(self) -> bool:
        """Whether an inference BatchNormalization takes the precision of the Conv that the runtime folds it into."""
        return (
            self.preset.folds_batch_norm
            and "BatchNormalization" not in self.user_black
        )

    @property
    def has_names(self) -> bool:
        """Whether the options contain names or patterns that a model may lack."""
        listed = "white_list", "black_list", "keep_nodes", *_TEXTS
        is_listed = any(getattr(self, name) for name in listed)
        return is_listed or not isinstance(self.keep_io_types, bool)

    @property
    def folds(self) -> bool:
        """Whether all patterns are folded. Normalizations contain squares, which no exponent brings into range."""
        return bool(self.fold or self.rescale)

    @property
    def may_fold(self) -> bool:
        """Whether patterns are folded if that makes the result faster."""
        return self.fold is None and not self.folds and self.level != Level.O0

    @property
    def may_upgrade(self) -> bool:
        """Whether the model is upgraded to a newer opset if more of it can be low precision there."""
        return self.opset == "auto" and self.level != Level.O0

    @property
    def lacks_ranges(self) -> bool:
        """Whether the options request exponents or nodes that still have to be measured."""
        asked = self.data_max is not None or (
            bool(self.rescale) and self.rescaling is None
        )
        return asked and self.level != Level.O0

    @property
    def measures(self) -> bool:
        """Whether the options leave anything to measurements on samples."""
        return self.level == Level.AUTO or self.lacks_ranges or self.compensates

    @property
    def takes_samples(self) -> bool:
        """Whether any option uses samples."""
        return bool(self.rescale) or self.data_max is not None or self.compensates

    @property
    def compensates(self) -> bool:
        """Whether weights are rounded with compensation."""
        return self.rounding == "compensated"

    @property
    def may_compensate(self) -> bool:
        """Whether weights may be rounded with compensation, by request or because measurements decide."""
        return self.compensates or (
            self.rounding == "auto" and self.level == Level.AUTO
        )

    def highest_opset(self, current: int) -> int | None:
        """Return the opset beyond which a model of opset ``current`` must not be upgraded; None if there is none."""
        if self.opset == "auto":
            return None
        return current if self.opset == "keep" else int(self.opset)

    @cached_property
    def keep_patterns(self) -> tuple[re.Pattern[str], ...]:
        """``keep_high``, compiled."""
        return compiled("keep_high (--keep-fp32)", self.keep_high)

    @cached_property
    def low_patterns(self) -> tuple[re.Pattern[str], ...]:
        """``force_low``, compiled."""
        return compiled("force_low (--force-low)", self.force_low)

    @cached_property
    def weight_patterns(self) -> tuple[re.Pattern[str], ...]:
        """``low_weights``, compiled."""
        return compiled("low_weights (--low-weight)", self.low_weights)

    def keeps_io(self, name: str) -> bool:
        """Return whether a graph input or output keeps its type."""
        kept = self.keep_io_types
        return kept if isinstance(kept, bool) else name in kept

    def keywords(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as keyword arguments, without the level."""
        keywords = dict[str, Any]()
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "level" and value != item.default:
                keywords[item.name] = value
        return keywords

    def written(self) -> tuple[str, ...]:
        """Return the options that the command line can express, as arguments.

        It cannot express ``rule``, declarations of ``custom_ops`` without a file, and names with commas.
        """
        spelled = spelled_fields()
        written = list[str]()
        for name, value in self.keywords().items():
            if name in spelled and name != "custom_ops":
                written += spelled[name].arguments(value)
        return tuple(written)

    def as_json(self) -> dict[str, Any]:
        """Return the options that affect decisions, except ``rule``, as JSON values for :meth:`from_json`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        # JSON cannot express a function, and how names are checked changes no decision.
        del values["rule"], values["strict_options"]
        if not isinstance(self.keep_io_types, bool):
            values["keep_io_types"] = sorted(self.keep_io_types)
        return values | {
            "rescaling": None if self.rescaling is None else self.rescaling.as_json(),
            "level": str(self.level),
            "custom_ops": as_json(self.custom_ops),
            "input_ranges": {name: [*ends] for name, ends in self.input_ranges},
            "lists": self.preset.name if self.preset.name in PRESETS else "default",
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the options that :meth:`as_json` wrote.

        Raises:
            KeyError: the level is missing.
            ArgumentError, ArgumentTypeError: as for the class.
        """
        keywords = dict(data)
        return cls.of(keywords.pop("level"), keywords)


class OptionKeywords(TypedDict, total=False):
    """Keyword arguments of :func:`onnxamp.convert_model` and of all functions that convert."""

    dtype: DtypeLike
    lists: PresetName
    white_list: Iterable[str] | None
    black_list: Iterable[str] | None
    keep_high: Iterable[str]
    force_low: Iterable[str]
    keep_nodes: Iterable[str]
    low_weights: str | Iterable[str]
    weights_only: bool
    init_max: float | None
    data_max: float | None
    input_ranges: Mapping[str, Range]
    keep_io_types: bool | Iterable[str]
    target: str
    strict: bool
    hazards: bool
    freeze_defaults: bool | None
    from_dtype: DtypeLike | Literal["auto"] | None
    custom_ops: CustomOpsLike | None
    keep_functions: bool
    opset: int | OpsetWord
    fold: bool | None
    folded: Iterable[str]
    rescale: bool | None
    rescaling: Rescaling | None
    split_k: bool
    rounding: Rounding
    unsound: Iterable[str]
    rule: Rule | None
    strict_options: bool
