"""Names and patterns in options that match nothing in a model, and so are probably misspelt."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

import onnx.defs

from onnxamp._dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.nearest import suggestion
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


_FEW: Final = 8
"""Names that a message lists in full."""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A name or pattern that matches nothing.

    Attributes:
        option: the field of :class:`onnxamp.Options` that holds it, or another argument.
        name: the name or pattern.
        text: what to say of it, in sentences.
    """

    option: str
    name: str
    text: str


def unmatched_names(graph: Graph, options: Options) -> tuple[Unmatched, ...]:
    """Return the names and patterns of the options that match nothing in the graph.

    Complexity: linear in nodes for each pattern, and slower only where one matches nothing.
    """
    return (
        *_patterns(graph, "keep_high", options.keep_patterns),
        *_patterns(graph, "force_low", options.low_patterns),
        *_weights(graph, options.weight_patterns),
        *_nodes(graph, options.keep_nodes),
        *_ends(graph, options.keep_io_types),
        *_op_types(graph, options),
    )


def _patterns(
    graph: Graph, option: str, patterns: Sequence[re.Pattern[str]]
) -> Iterator[Unmatched]:
    names = node_names(graph) if patterns else []
    for pattern in patterns:
        if not any(map(pattern.fullmatch, names)):
            yield Unmatched(option, pattern.pattern, _no_match(names, pattern))


def _weights(graph: Graph, patterns: Sequence[re.Pattern[str]]) -> Iterator[Unmatched]:
    names = sorted(weight_names(graph)) if patterns else []
    for pattern in patterns:
        if not any(map(pattern.fullmatch, names)):
            text = f"The pattern {pattern.pattern!r} matches no float32 weight, and no node that reads one."
            yield Unmatched("low_weights", pattern.pattern, text + _suggested(names, pattern))


def weight_names(graph: Graph) -> set[str]:
    """Return the names of float32 constants, and of the nodes that read them."""
    names = set[str]()
    for value in graph.constants.tensors:
        if graph.types[value] == FLOAT:
            names.add(graph.values[value].name)
            names.update(node.proto.name for node, _ in graph.consumers(value))
    return names - {""}


def _nodes(graph: Graph, given: Iterable[str]) -> Iterator[Unmatched]:
    names = node_names(graph) if given else []
    for name in sorted(set(given).difference(names)):
        text = f"No node is called {name!r}, nor is its output."
        yield Unmatched("keep_nodes", name, text + suggestion(names, name))


def _ends(graph: Graph, given: bool | frozenset[str]) -> Iterator[Unmatched]:
    if isinstance(given, bool):
        return
    proto = graph.model.graph
    known = [entry.name for entry in (*proto.input, *proto.output)]
    for name in sorted(given.difference(known)):
        listed = f" It has {', '.join(map(repr, known))}." if len(known) <= _FEW else ""
        text = f"keep_io_types (--io-types): the model has no input or output {name!r}."
        yield Unmatched("keep_io_types", name, text + (suggestion(known, name) or listed))


def _op_types(graph: Graph, options: Options) -> Iterator[Unmatched]:
    for name, text in absent_names(graph, options).unknown.items():
        yield Unmatched("white_list" if name in options.white_list else "black_list", name, text)


def node_names(graph: Graph) -> list[str]:
    """Return the names of nodes and of their outputs, sorted."""
    return sorted(
        {name for node in graph.nodes for name in (node.proto.name, *node.proto.output) if name}
    )


def _no_match(names: Sequence[str], pattern: re.Pattern[str]) -> str:
    """What to say of a pattern that matches no node, with the names that may be meant."""
    return f"The pattern {pattern.pattern!r} matches no node name." + _suggested(names, pattern)


def _suggested(names: Sequence[str], pattern: re.Pattern[str]) -> str:
    if parts := [name for name in names if pattern.search(name)]:
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        return f" It matches a part of {parts[0]!r}{more}: write {f'.*{pattern.pattern}.*'!r}."
    return suggestion(names, pattern.pattern)
