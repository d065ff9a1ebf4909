"""Names and patterns of the options that match nothing in a model, each with a message for the user."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from onnxamp._base.errors import first_of, suggestion
from onnxamp._base.records import record
from onnxamp._decide.listed import absent_names
from onnxamp._facts.dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options

_FEW: Final = 8
"""Names that a message lists in full."""

_WEIGHT: Final = "float32 weight, and no node that reads one"


@record
class Unmatched:
    """A name or pattern that matches nothing.

    Attributes:
        option: its field of :class:`onnxamp.Options`, or another argument.
        name: the name or pattern.
        text: the message, in sentences.
        is_unaided: whether the message says nothing about the names that exist.
    """

    option: str
    name: str
    text: str
    is_unaided: bool = False


def unmatched_names(graph: Graph, options: Options) -> tuple[Unmatched, ...]:
    """Return the names and patterns of the options that match nothing in the graph.

    Complexity: linear in nodes for each pattern, and slower only if a pattern matches nothing.
    """
    is_asked = options.keep_nodes or options.keep_patterns or options.low_patterns
    nodes = node_names(graph) if is_asked else []
    weights = set[str]()
    if options.weight_patterns:
        weights.update(*(names for _, names in named_weights(graph)))
    return (
        *_patterns("keep_high", options.keep_patterns, nodes, "node name"),
        *_patterns("force_low", options.low_patterns, nodes, "node name"),
        *_patterns("low_weights", options.weight_patterns, sorted(weights), _WEIGHT),
        *_nodes(nodes, options.keep_nodes),
        *_ends(graph, options.keep_io_types),
        *_op_types(graph, options),
    )


def _patterns(
    option: str, patterns: Sequence[re.Pattern[str]], names: Sequence[str], what: str
) -> Iterator[Unmatched]:
    """Yield the patterns of an option that match none of the names."""
    for pattern in patterns:
        if not any(map(pattern.fullmatch, names)):
            text = f"The pattern {pattern.pattern!r} matches no {what}."
            hint = _suggested(names, pattern)
            yield Unmatched(option, pattern.pattern, text + hint, is_unaided=not hint)


def named_weights(graph: Graph) -> Iterator[tuple[int, set[str]]]:
    """Yield the float32 constants, each with its name and those of the nodes that read it."""
    for value in graph.constants.tensors:
        if graph.types[value] == FLOAT:
            readers = (node.proto.name for node, _ in graph.consumers(value))
            yield value, {graph.values[value].name, *readers} - {""}


def _nodes(names: Sequence[str], given: Iterable[str]) -> Iterator[Unmatched]:
    """Yield the given names that no node and no output of a node has."""
    for name in sorted(set(given).difference(names)):
        text = f"No node and no output of a node is called {name!r}."
        hint = suggestion(names, name)
        yield Unmatched("keep_nodes", name, text + hint, is_unaided=not hint)


def _ends(graph: Graph, given: bool | frozenset[str]) -> Iterator[Unmatched]:
    """Yield the given names that no input or output of the model has."""
    if isinstance(given, bool):
        return
    proto = graph.model.graph
    known = [entry.name for entry in (*proto.input, *proto.output)]
    for name in sorted(given.difference(known)):
        listed = (
            f" It has {', '.join(map(repr, known))}." if len(known) <= _FEW else ""
        )
        text = (
            f"keep_io_types (--io-types): the model has no input or output {name!r}."
        )
        yield Unmatched(
            "keep_io_types", name, text + (suggestion(known, name) or listed)
        )


def _op_types(graph: Graph, options: Options) -> Iterator[Unmatched]:
    """Yield the names in lists that are probably misspelled."""
    for name, text in absent_names(graph, options).unknown.items():
        yield Unmatched(
            "white_list" if name in options.white_list else "black_list", name, text
        )


def node_names(graph: Graph) -> list[str]:
    """Return the names of nodes and of their outputs, sorted."""
    names = set[str]()
    for node in graph.nodes:
        names.update((node.proto.name, *node.proto.output))
    return sorted(names - {""})


def _suggested(names: Sequence[str], pattern: re.Pattern[str]) -> str:
    """Return a sentence that suggests another pattern; "" if no name is similar."""
    # A pattern must match the full name.
    if parts := [name for name in names if pattern.search(name)]:
        whole = f".*{pattern.pattern}.*"
        return f" It matches only part of {first_of(parts)}: write {whole!r}."
    return suggestion(names, pattern.pattern)
