"""Facts about op types as they run, read once from ``_data/executed.toml``; the comments there say what each means."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Executed:
    """The tables of ``_data/executed.toml``."""

    channels: Mapping[str, int]
    convolutions: frozenset[str]
    conv_activations: frozenset[str]
    attentions: frozenset[str]
    copies: frozenset[str]
    glue: frozenset[str]


@cache
def executed() -> Executed:
    """The facts, parsed at the first call."""
    text = resources.files("onnxamp").joinpath("_data/executed.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return Executed(data["channels"], **{name: frozenset(ops) for name, ops in data["ops"].items()})
