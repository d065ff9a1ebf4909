"""Presets of white and black lists, read from ``_data/oplists``."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final, Literal, get_args

from onnxamp._errors import ArgumentError, ArgumentTypeError

PresetName = Literal["default", "fast", "mindspore", "paddle"]
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


def preset(lists: str) -> Preset:
    """A list preset.

    Raises:
        ArgumentError: no preset has that name.
        ArgumentTypeError: the name is not a string.
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
    """Op types that a preset lowers.

    Args:
        lists: "default", "fast", "mindspore" or "paddle".

    Returns:
        A new list of op types; "domain::OpType" outside ai.onnx.

    Raises:
        ArgumentError: there is no such preset.
        ArgumentTypeError: ``lists`` is not a string.

    Example:
        >>> from onnxamp.amp import get_white_list
        >>> "MatMul" in get_white_list("mindspore")
        True
    """
    return list(preset(lists).white)


def get_black_list(lists: str = "default") -> list[str]:
    """Op types that a preset keeps in float32.

    Args:
        lists: "default", "fast", "mindspore" or "paddle".

    Returns:
        A new list of op types; "domain::OpType" outside ai.onnx.

    Raises:
        ArgumentError: there is no such preset.
        ArgumentTypeError: ``lists`` is not a string.

    Example:
        >>> from onnxamp.amp import get_black_list
        >>> "Softmax" in get_black_list("paddle")
        True
    """
    return list(preset(lists).black)
