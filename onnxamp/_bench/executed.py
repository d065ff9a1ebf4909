"""Facts about op types as they run, read once from ``_data/executed.toml``; the comments there say what each means."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnxamp._ops.tables import read_table


@dataclass(frozen=True, slots=True)
class Executed:
    """The tables of ``_data/executed.toml``."""

    channels: Mapping[str, int]
    convolutions: frozenset[str]
    conv_activations: frozenset[str]
    attentions: frozenset[str]
    copies: frozenset[str]
    glue: frozenset[str]
    standard: Mapping[str, str]
    kernels: Mapping[str, Mapping[str, Any]]


@cache
def executed() -> Executed:
    """The facts, parsed at the first call."""
    data = read_table("executed")
    ops = {name: frozenset(ops) for name, ops in data["ops"].items()}
    return Executed(data["channels"], **ops, standard=data["standard"], kernels=data["kernels"])
