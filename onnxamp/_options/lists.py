"""Presets of white and black lists, read from ``_data/oplists``."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import field, replace
from functools import cache
from typing import Any, Final, Literal, get_args

import onnx.defs

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, nearest, suggestion
from onnxamp._base.records import record
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.tables import read_table
from onnxamp._facts.targets import with_kernels
from onnxamp._options.doors import door

PresetName = Literal["default", "conservative", "fast", "mindspore", "paddle"]
PRESETS: Final[tuple[PresetName, ...]] = get_args(PresetName)


@record
class Preset:
    """White and black op types, each with the source of its entry."""

    name: str
    summary: str
    white: Mapping[str, str]
    black: Mapping[str, str]
    folds_batch_norm: bool = False
    """Whether an inference BatchNormalization after a Conv takes the Conv's precision, so that it can be folded."""
    trusts_kernels: bool = False
    """Whether black ops may be low on targets whose kernels accumulate them in float32."""
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The framework's own name of an operator or layer -> the ONNX op types that it becomes."""
    forms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Such a name -> the kinds of ordinary ops that exporters write for it."""
    white_names: Mapping[str, str] = field(default_factory=dict)
    black_names: Mapping[str, str] = field(default_factory=dict)
    """Entries of the framework's lists that no op type expresses, each with its source."""
    black_at: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Level -> op types that are black at this level only, each with the source of its entry."""
    is_literal: bool = False
    """Whether these count, and white-listed ops that must stay in float32 are reported, as in :mod:`onnxamp.amp`."""
    follows: bool = False
    """Whether, at O1, an op on no list is low if all its inputs are."""

    def black_of(self, level: str) -> Mapping[str, str]:
        """Return the black op types at a level."""
        return {**self.black, **self.black_at.get(level, {})}

    def without_black(self, ops: AbstractSet[str]) -> "Preset":
        """Return the preset with these op types off all of its black lists."""
        lists = {
            level: _without(entries, ops) for level, entries in self.black_at.items()
        }
        return replace(self, black=_without(self.black, ops), black_at=lists)


def _without(entries: Mapping[str, str], ops: AbstractSet[str]) -> Mapping[str, str]:
    return {op: why for op, why in entries.items() if op not in ops}


def preset(lists: str) -> Preset:
    """Return a list preset.

    Raises:
        ArgumentError: no preset has that name.
        ArgumentTypeError: the name is not a string.
    """
    if not isinstance(lists, str):
        raise ArgumentTypeError(
            f"lists must be a string such as 'default', not {type(lists).__name__}."
        )
    if lists not in PRESETS:
        raise ArgumentError(
            f"Unknown lists {lists!r}: choose one of {', '.join(PRESETS)}.{suggestion(PRESETS, lists)}"
        )
    return _read_preset(lists)


def literal_preset(lists: str) -> Preset:
    """Return a preset as :mod:`onnxamp.amp` reads it, including the entries that no op type expresses.

    Raises:
        ArgumentError, ArgumentTypeError: as :func:`preset`.
    """
    return replace(preset(lists), is_literal=True)


def autocast_preset() -> Preset:
    """Return the lists of ``torch.amp.autocast``, as :mod:`onnxamp.amp` reads them."""
    return replace(_read_preset("pytorch"), is_literal=True)


@cache
def _read_preset(lists: str) -> Preset:
    data = _preset_data(lists)
    # A preset that extends another one can add entries; only this key takes inherited ones away.
    removed = data.pop("not_black", {})
    data["black"] = _without(data["black"], removed.keys())
    return Preset(lists, **data)


def _preset_data(lists: str) -> dict[str, Any]:
    """Return the fields of a preset's file, together with those of the preset that it extends."""
    data = read_table(f"oplists/{lists}")
    base = data.pop("extends", None)
    return data if base is None else _preset_data(base) | data


def stated_in(lists: str, field: str) -> str:
    """Return the preset whose file states a field of a preset: its own, or that of one which it extends."""
    data = read_table(f"oplists/{lists}")
    while field not in data and "extends" in data:
        lists = data["extends"]
        data = read_table(f"oplists/{lists}")
    return lists


@cache
def framework_names() -> Mapping[str, Sequence[str]]:
    """Return names of operators and layers in MindSpore and Paddle -> the ONNX op types that exporters write."""
    names = dict[str, Sequence[str]]()
    for lists in PRESETS:
        names |= _read_preset(lists).names
    return names


@cache
def _framework_forms() -> Mapping[str, Sequence[str]]:
    """Return names of layers in MindSpore and Paddle -> the kinds of ordinary ops that exporters write for them."""
    forms = dict[str, Sequence[str]]()
    for lists in PRESETS:
        forms |= _read_preset(lists).forms
    return forms


def ops_named(name: str) -> Sequence[str]:
    """Return the ONNX op types that a name in a list stands for: those of a framework's name, or else the name itself.

    Module prefixes are ignored: "nn.Conv2d" is "Conv2d".
    """
    own = _without_modules(name)
    return framework_names().get(own, (own,))


def forms_named(name: str) -> Sequence[str]:
    """Return the kinds of ordinary ops that exporters write for a name in a list, besides its op types."""
    return _framework_forms().get(_without_modules(name), ())


def _without_modules(name: str) -> str:
    return name if "::" in name else name.rpartition(".")[2]


@cache
def _known_ops() -> frozenset[str]:
    """Return the op types of the ONNX standard, of ONNX Runtime's kernels, and of the presets."""
    known = set[str]()
    for schema in onnx.defs.get_all_schemas():
        is_standard = schema.domain in ("", "ai.onnx")
        known.add(schema.name if is_standard else f"{schema.domain}::{schema.name}")
    for provider in with_kernels():
        known.update(kernel_table(provider))
    for name in PRESETS:
        listed = _read_preset(name)
        known.update(listed.white, listed.black)
    return frozenset(known)


def is_known_op(name: str, declared: AbstractSet[str] = frozenset()) -> bool:
    """Return whether a name in a list means an op of ONNX, ONNX Runtime, MindSpore or Paddle, or a declared op."""
    return (_known_ops() | declared).issuperset(ops_named(name))


def nearest_name(name: str, more: AbstractSet[str] = frozenset()) -> str | None:
    """Return the known name that a misspelled name in a list is nearest to; None if there is none.

    Among names that differ only in case, those in ``more`` have priority over ONNX's, and ONNX's over frameworks'.
    """
    spelled = dict[str, str]()
    for names in (framework_names(), _known_ops(), more):
        for known in sorted(names):
            spelled[known.lower()] = known
    bare = name.lower().removeprefix("nn.").removeprefix("ops.")
    near = nearest(sorted(spelled), bare)
    return None if near is None else spelled[near]


@door
def get_white_list(lists: str = "mindspore") -> list[str]:
    """Return the op types that a preset lowers. The counterpart of ``mindspore.amp.get_white_list``.

    Args:
        lists: "mindspore", which :func:`auto_mixed_precision` uses, "paddle", "default", "conservative" or "fast".

    Returns:
        A new list of op types ("domain::OpType" outside ai.onnx) and the framework's names that stand for no single op.

    Raises:
        ArgumentError: there is no such preset.
        ArgumentTypeError: ``lists`` is not a string.

    Example:
        >>> from onnxamp.amp import get_white_list
        >>> white_list = get_white_list()
        >>> white_list.append("Flatten")
        >>> "MatMul" in white_list, "Flatten" in get_white_list()
        (True, False)
    """
    known = preset(lists)
    return [*known.white, *known.white_names]


@door
def get_black_list(lists: str = "mindspore") -> list[str]:
    """Return the op types that a preset keeps in float32. The counterpart of ``mindspore.amp.get_black_list``.

    The list of "default" contains every op that it keeps in float32 on any target. If the kernels of a target
    accumulate an op in float32, the conversion lowers it there (``onnxamp lists default`` shows where). The list of
    "paddle" is that of all levels; at O2, BatchNormalization is black as well.

    Args:
        lists: "mindspore", which :func:`auto_mixed_precision` uses, "paddle", "default", "conservative" or "fast".

    Returns:
        A new list of op types ("domain::OpType" outside ai.onnx) and the framework's names that stand for no single op.

    Raises:
        ArgumentError: there is no such preset.
        ArgumentTypeError: ``lists`` is not a string.

    Example:
        >>> from onnxamp.amp import get_black_list
        >>> get_black_list(), "Softmax" in get_black_list("paddle")
        (['BatchNormalization', 'LayerNormalization'], True)
    """
    known = preset(lists)
    return [*known.black, *known.black_names]
