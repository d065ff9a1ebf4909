"""What to say of the names in the user's lists: unknown ones, absent ones, and those on a preset's black list."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import onnx.defs

from onnxamp._graph.graph import Graph
from onnxamp._options.levels import Level
from onnxamp._options.lists import PRESETS, framework_names, ops_named, preset
from onnxamp._options.options import Options
from onnxamp._target.kernels import kernel_table
from onnxamp._target.targets import with_kernels


@dataclass(frozen=True, slots=True)
class AbsentNames:
    """Names in the user's lists that mean no op of the model -> what to say of them.

    Attributes:
        unknown: those that are probably misspelt.
        known: those of ops that exist, or may exist in a domain of which nothing is known.
    """

    unknown: Mapping[str, str]
    known: Mapping[str, str]


def absent_names(graph: Graph, options: Options) -> AbsentNames:
    """Return the names in the user's lists that mean no op of the model.

    Known are the ops of ONNX's standard, those that ONNX Runtime has kernels for, those of the presets, the names of
    the presets' frameworks, and custom ops that are declared.
    """
    present = {node.key for node in graph.nodes}
    names = dict.fromkeys((*options.white_list, *options.black_list))
    absent = sorted(name for name in names if present.isdisjoint(ops_named(name)))
    declared = {f"{op.domain}::{op.type}" for op in options.custom_ops}
    known = _known_ops() | declared if absent else frozenset[str]()
    # Of names that differ in capitals alone, the last counts: frameworks' yield to ONNX's, and these to the model's.
    spelt = {
        name.lower(): name
        for names in (framework_names(), known, present)
        for name in sorted(names)
    }
    found: tuple[dict[str, str], dict[str, str]] = {}, {}
    for name in absent:
        is_known = known.issuperset(ops_named(name))
        near = [] if is_known else get_close_matches(name.lower(), sorted(spelt), 1)
        text = f"The op type {name!r} of your lists does not occur in the model."
        text += f" Did you mean {spelt[near[0]]!r}?" if near else ""
        found[is_known or (not near and "::" in name)][name] = text
    return AbsentNames(*found)


def _known_ops() -> frozenset[str]:
    schemas = {
        schema.name if schema.domain in ("", "ai.onnx") else f"{schema.domain}::{schema.name}"
        for schema in onnx.defs.get_all_schemas()
    }
    kernels = (kernel_table(provider).keys() for provider in with_kernels())
    lists = (preset(name) for name in PRESETS)
    return frozenset(schemas).union(*kernels, *((*known.white, *known.black) for known in lists))


def taken_off(options: Options) -> list[str]:
    """Which ops the user's white list takes off the preset's black list."""
    if options.level not in (Level.O1, Level.O2):
        return []
    ops = sorted(options.preset.black.keys() & options.user_white)
    return [
        f"Your white list takes {op} off the black list of {options.preset.name!r}." for op in ops
    ]
