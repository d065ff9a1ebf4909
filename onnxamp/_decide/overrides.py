"""Overrides of single nodes, by name patterns and by a rule, with warnings about names that match nothing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from onnxamp._decide.unmatched import absent_names, taken_off, unmatched_names
from onnxamp._decide.verdicts import Hazard, Reason
from onnxamp._dtypes import FLOAT, LOW_TENSORS, Format
from onnxamp._errors import ArgumentError, ContradictionError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.options import Options


@dataclass(frozen=True, slots=True)
class Override:
    """The precision that the user demands for a node."""

    low: bool
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Overrides:
    """Overrides by node index, warnings about names that match nothing, and notes about op types that do not occur.

    ``low_weights`` are the constants that the user wants in low precision, by value, with what says so.
    """

    of_node: Mapping[int, Override]
    low_weights: Mapping[int, str]
    warnings: Sequence[str]
    notes: Sequence[str]


def find_overrides(graph: Graph, options: Options) -> Overrides:
    """Match patterns with names and outputs of nodes, and call the rule for every node.

    Raises:
        ContradictionError: one override lowers a node, and another keeps it in float32.
        ArgumentError: the rule returns something other than "low", "high" or None.

    Complexity: nodes times patterns.
    """
    overrides: dict[int, Override] = {}
    if (
        options.keep_nodes
        or options.keep_patterns
        or options.low_patterns
        or options.rule is not None
    ):
        for node in graph.nodes:
            matching = [*_from_patterns(graph, node, options), *_from_rule(node, options)]
            if not matching:
                continue
            first = overrides[node.index] = matching[0]
            second = next((override for override in matching if override.low != first.low), None)
            if second is not None:
                raise ContradictionError(
                    f"Node {node.label!r}: {first.detail} contradicts {second.detail}; drop one."
                )
    weights = _weights(graph, options) if options.weight_patterns else dict[int, str]()
    warnings = [*(one.text for one in unmatched_names(graph, options)), *taken_off(options)]
    return Overrides(overrides, weights, warnings, [*absent_names(graph, options).known.values()])


def forced_hazards(graph: Graph, overrides: Overrides, hazards: Iterable[Hazard]) -> Iterator[str]:
    """Sentences about nodes that the user forces low against hazards: one per override and kind of hazard."""
    found: dict[tuple[str, Reason], dict[str, Hazard]] = {}
    for hazard in hazards:
        override = overrides.of_node.get(hazard.node)
        if (
            override is not None and override.low and not hazard.reason.is_shielded
        ):  # whose Casts are shielded
            rows = found.setdefault((override.detail, hazard.reason), {})
            rows.setdefault(graph.nodes[hazard.node].label, hazard)
    return _told(found, "lowers {}")


def lost_weights(
    graph: Graph, overrides: Overrides, hazards: Iterable[Hazard], low: Format
) -> Iterator[str]:
    """Sentences about weights that the user stores low against hazards of their numbers: one per pattern and kind."""
    found: dict[tuple[str, Reason], dict[str, Hazard]] = {}
    weights = overrides.low_weights
    for hazard in hazards if weights else ():
        for value in graph.nodes[hazard.node].inputs if hazard.value == ABSENT else (hazard.value,):
            source = graph.constants.source(value) if value != ABSENT else value
            if (
                source in weights
                and hazard.reason.loses
                and hazard.reason.loses(graph, source, low)
            ):
                found.setdefault((weights[source], hazard.reason), {}).setdefault(
                    graph.values[source].name, hazard
                )
    return _told(found, "stores {} in low precision")


def _told(found: Mapping[tuple[str, Reason], Mapping[str, Hazard]], does: str) -> Iterator[str]:
    """A sentence per option and kind of hazard; rows are hazards by what the option names."""
    for (detail, reason), rows in found.items():
        label, first = next(iter(rows.items()))
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        what = does.format(f"{label!r}{more}")
        yield f"{detail} {what} although that is known to break: {reason.value}: {first.detail}."


def _cast_names(graph: Graph, node: Node) -> Iterator[str]:
    """Public names of the node's outputs that a conversion gave to Casts between the node and the model's outputs."""
    for value in node.outputs:
        for reader, _ in graph.uses[value] if value != ABSENT else ():
            cast = graph.nodes[reader]
            if (
                cast.key != "Cast"
                or cast.outputs[0] == ABSENT
                or not graph.results[cast.outputs[0]]
            ):
                continue
            kinds = {graph.types[value], graph.types[cast.outputs[0]]}
            if FLOAT in kinds and kinds & LOW_TENSORS:
                yield cast.proto.output[0]


def _from_patterns(graph: Graph, node: Node, options: Options) -> list[Override]:
    names = {node.proto.name, *node.proto.output, *_cast_names(graph, node)} - {""}
    literal = names.intersection(options.keep_nodes)
    overrides = [
        Override(False, Reason.PATTERN, f"keep_nodes (--keep-node) {name!r}")
        for name in sorted(literal)
    ]
    for low, option, patterns in (
        (False, "keep_high (--keep-fp32)", options.keep_patterns),
        (True, "force_low (--force-low)", options.low_patterns),
    ):
        matching = (pattern.pattern for pattern in patterns if any(map(pattern.fullmatch, names)))
        overrides += [Override(low, Reason.PATTERN, f"{option} {text!r}") for text in matching]
    return overrides


def _weights(graph: Graph, options: Options) -> dict[int, str]:
    """Float32 constants whose name matches a pattern, or that of a node that reads them. Nodes times patterns."""
    found: dict[int, str] = {}
    for value in graph.constants.tensors:
        readers = (node.proto.name for node, _ in graph.consumers(value))
        names = {graph.values[value].name, *readers} - {""}
        matching = (
            one.pattern for one in options.weight_patterns if any(map(one.fullmatch, names))
        )
        if graph.types[value] == FLOAT and (text := next(matching, None)) is not None:
            found[value] = f"low_weights (--low-weight) {text!r}"
    return found


def _from_rule(node: Node, options: Options) -> list[Override]:
    if options.rule is None:
        return []
    copy = NodeProto()
    copy.CopyFrom(node.proto)
    opinion = options.rule(copy)
    if opinion not in ("low", "high", None):
        raise ArgumentError(
            f"rule returned {opinion!r} for node {node.label!r}: return 'low', 'high' or None."
        )
    return (
        []
        if opinion is None
        else [Override(opinion == "low", Reason.RULE, f"rule says {opinion!r}")]
    )
