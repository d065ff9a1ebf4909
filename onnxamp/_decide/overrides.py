"""What the user says of single nodes, by name patterns and by a rule; and slips in what is named at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from onnxamp._decide.verdicts import Reason
from onnxamp._errors import ArgumentError, ContradictionError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._options.options import Options


@dataclass(frozen=True, slots=True)
class Override:
    """That a node be low, or float32."""

    low: bool
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Overrides:
    """Node index -> override, and a warning for each name that matches nothing."""

    of_node: Mapping[int, Override]
    warnings: Sequence[str]


def find_overrides(graph: Graph, options: Options) -> Overrides:
    """Match the patterns against node names and outputs, and ask the rule about every node.

    Raises:
        ContradictionError: a node is wished low and float32. ArgumentError: the rule returns something else.

    Complexity: nodes times patterns.
    """
    matched: set[str] = set()
    found: dict[int, Override] = {}
    if options.keep_patterns or options.low_patterns or options.rule is not None:
        for node in graph.nodes:
            said = [*_patterns(node, options, matched), *_opinion(node, options)]
            if len({override.low for override in said}) == 2:
                first, second = said[0], next(override for override in said if override.low != said[0].low)
                raise ContradictionError(f"Node {node.label!r}: {first.detail} against {second.detail}; drop one.")
            if said:
                found[node.index] = said[0]
    return Overrides(found, _slips(graph, options, matched))


def _patterns(node: Node, options: Options, matched: set[str]) -> list[Override]:
    names = {node.proto.name, *node.proto.output} - {""}
    said = []
    for low, option, patterns in (
        (False, "keep_high (--keep-fp32)", options.keep_patterns),
        (True, "force_low (--force-low)", options.low_patterns),
    ):
        for pattern in patterns:
            if any(pattern.fullmatch(name) for name in names):
                matched.add(pattern.pattern)
                said.append(Override(low, Reason.PATTERN, f"{option} {pattern.pattern!r}"))
    return said


def _opinion(node: Node, options: Options) -> list[Override]:
    if options.rule is None:
        return []
    copy = NodeProto()
    copy.CopyFrom(node.proto)
    opinion = options.rule(copy)
    if opinion not in ("low", "high", None):
        raise ArgumentError(f"rule returned {opinion!r} for node {node.label!r}: it may say 'low', 'high' or None.")
    return [] if opinion is None else [Override(opinion == "low", Reason.RULE, f"rule says {opinion!r}")]


def _slips(graph: Graph, options: Options, matched: set[str]) -> list[str]:
    """A pattern, op type or name that matches nothing is probably a slip."""
    patterns = [pattern.pattern for pattern in (*options.keep_patterns, *options.low_patterns)]
    slips = [f"The pattern {text!r} matches no node name." for text in patterns if text not in matched]
    present = {node.key for node in graph.nodes}
    missing = sorted(options.listed_by_user - present)
    slips += [f"The op type {op!r} of your lists does not occur in the model." for op in missing]
    if not isinstance(options.keep_io_types, bool):
        proto = graph.model.graph
        known = {entry.name for entry in (*proto.input, *proto.output)}
        unknown = sorted(options.keep_io_types - known)
        slips += [f"The model has no input or output {name!r} to keep." for name in unknown]
    return slips
