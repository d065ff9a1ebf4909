"""What to say of the names in the user's lists: unknown ones, absent ones, and those on a preset's black list."""

from difflib import get_close_matches

import onnx.defs

from onnxamp._graph.graph import Graph
from onnxamp._options.lists import PRESETS, framework_names, ops_named, preset
from onnxamp._options.options import Level, Options
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
    for name in absent:
        near = [] if is_known[name] else get_close_matches(name, sorted(known | present | framework_names().keys()), 1)
        says[name] += f" Did you mean {near[0]!r}?" if near else ""
    unknown = [says[name] for name in absent if not is_known[name]]
    return unknown, [says[name] for name in absent if is_known[name]]


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
