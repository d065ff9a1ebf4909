"""Presets of white and black lists, read from ``_data/oplists``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal, get_args

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._ops.targets import read_table

PresetName = Literal["default", "conservative", "fast", "mindspore", "paddle"]
PRESETS: Final[tuple[PresetName, ...]] = get_args(PresetName)


@dataclass(frozen=True, slots=True)
class Preset:
    """White and black op types, each with the source of its entry."""

    name: str
    summary: str
    white: Mapping[str, str]
    black: Mapping[str, str]
    folds_batch_norm: bool
    """Whether an inference BatchNormalization behind a Conv takes the Conv's precision, to be folded into it."""
    trusts_kernels: bool = False
    """Whether black ops may be low on targets whose kernels accumulate them in float32."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The framework's own name of an operator or layer -> the ONNX op types that it becomes."""


def preset(lists: str) -> Preset:
    """A list preset.

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
            f"Unknown lists {lists!r}: choose one of {', '.join(PRESETS)}."
        )
    return _read_preset(lists)


@cache
def _read_preset(lists: str) -> Preset:
    data = _preset_data(lists)
    removed = data.get("not_black", {})
    return Preset(
        name=lists,
        summary=data["summary"],
        white=data["white"],
        black={op: source for op, source in data["black"].items() if op not in removed},
        folds_batch_norm=data.get("folds_batch_norm", False),
        trusts_kernels=data.get("trusts_kernels", False),
        names={name: tuple(ops) for name, ops in data.get("names", {}).items()},
    )


def _preset_data(lists: str) -> dict[str, Any]:
    """Return the fields of a preset's file, together with those of the preset that it extends."""
    data = read_table(f"oplists/{lists}")
    base = data.get("extends")
    return data if base is None else _preset_data(base) | data


@cache
def framework_names() -> Mapping[str, tuple[str, ...]]:
    """Names of operators and layers in MindSpore and Paddle -> the ONNX op types that exporters make of them."""
    return {
        name: ops
        for lists in PRESETS
        for name, ops in _read_preset(lists).names.items()
    }


def ops_named(name: str) -> tuple[str, ...]:
    """The ONNX op types that a name in a list stands for: those of a framework's name, or else the name itself.

    Modules in front of a name do not count: "nn.Conv2d" is "Conv2d".
    """
    own = name if "::" in name else name.rpartition(".")[2]
    return framework_names().get(own, (own,))


def get_white_list(lists: str = "mindspore") -> list[str]:
    """Op types that a preset lowers. The counterpart of ``mindspore.amp.get_white_list``.

    Args:
        lists: "mindspore", which :func:`auto_mixed_precision` uses, "paddle", "default", "conservative" or "fast".

    Returns:
        A new list of op types; "domain::OpType" outside ai.onnx.

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
    return list(preset(lists).white)


def get_black_list(lists: str = "mindspore") -> list[str]:
    """Op types that a preset keeps in float32. The counterpart of ``mindspore.amp.get_black_list``.

    The list of "default" names all that it keeps in float32 on some target: where the kernels of a target accumulate an
    op in float32, the conversion lowers it (``onnxamp lists default`` says where).

    Args:
        lists: "mindspore", which :func:`auto_mixed_precision` uses, "paddle", "default", "conservative" or "fast".

    Returns:
        A new list of op types; "domain::OpType" outside ai.onnx.

    Raises:
        ArgumentError: there is no such preset.
        ArgumentTypeError: ``lists`` is not a string.

    Example:
        >>> from onnxamp.amp import get_black_list
        >>> get_black_list(), "Softmax" in get_black_list("paddle")
        (['BatchNormalization', 'LayerNormalization'], True)
    """
    return list(preset(lists).black)
