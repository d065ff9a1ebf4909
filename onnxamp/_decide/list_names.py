"""What to say of the names in the user's lists: unknown ones, absent ones, and those on a preset's black list."""

from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from typing import Final

import onnx.defs

from onnxamp._graph.graph import Graph
from onnxamp._options.levels import Level
from onnxamp._options.lists import PRESETS, framework_names, ops_named, preset
from onnxamp._options.options import Options
from onnxamp._target.kernels import PROVIDERS, kernel_table


def absent_names(graph: Graph, options: Options) -> tuple[list[str], list[str]]:
    """What to say of names in the user's lists that mean no op of the model: of unknown ones, and of known ones.

    Known are the ops of ONNX's standard, those that ONNX Runtime has kernels for, those of the presets, and the names
    of the presets' frameworks.
    """
    present = {node.key for node in graph.nodes}
    names = dict.fromkeys((*options.white_list, *options.black_list))
    absent = sorted(name for name in names if present.isdisjoint(ops_named(name)))
    known = _known_ops() if absent else frozenset[str]()
    says = {name: f"The op type {name!r} of your lists does not occur in the model." for name in absent}
    is_known = {name: known.issuperset(ops_named(name)) for name in absent}
    # Of names that differ in capitals alone, the last counts: frameworks' yield to ONNX's, and these to the model's.
    spelt = {name.lower(): name for names in (framework_names(), known, present) for name in sorted(names)}
    for name in absent:
        near = [] if is_known[name] else get_close_matches(name.lower(), sorted(spelt), 1)
        says[name] += f" Did you mean {spelt[near[0]]!r}?" if near else ""
    unknown = [says[name] for name in absent if not is_known[name]]
    return unknown, [says[name] for name in absent if is_known[name]]


_LIKELY: Final = 20
"""Names that are compared letter by letter."""


def nearest(names: Iterable[str], text: str) -> str | None:
    """The name that a text is likely meant to be; None if there is none. Linear in names."""
    wanted = _triples(text)
    likely = nlargest(_LIKELY, names, key=lambda name: len(wanted & _triples(name)))
    return next(iter(get_close_matches(text, likely, 1)), None)


def _triples(text: str) -> frozenset[str]:
    """All runs of three letters."""
    small = text.lower()
    return frozenset(small[at : at + 3] for at in range(len(small) - 2))


def _known_ops() -> frozenset[str]:
    schemas = {
        schema.name if schema.domain in ("", "ai.onnx") else f"{schema.domain}::{schema.name}"
        for schema in onnx.defs.get_all_schemas()
    }
    kernels = (kernel_table(provider).keys() for provider in PROVIDERS)
    lists = (preset(name) for name in PRESETS)
    return frozenset(schemas).union(*kernels, *((*known.white, *known.black) for known in lists))


def taken_off(options: Options) -> list[str]:
    """Which ops the user's white list takes off the preset's black list."""
    if options.level not in (Level.O1, Level.O2):
        return []
    ops = sorted(options.preset.black.keys() & options.user_white)
    return [f"Your white list takes {op} off the black list of {options.preset.name!r}." for op in ops]
