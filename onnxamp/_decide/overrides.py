"""What the user says of single nodes, by name patterns and by a rule; and slips in what is named at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from onnxamp._decide.policy import Policy
from onnxamp._decide.verdicts import Reason
from onnxamp._errors import ArgumentError, ContradictionError
from onnxamp._graph.view import Node, View


@dataclass(frozen=True, slots=True)
class Wish:
    """That a node be low, or float32."""

    low: bool
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Wishes:
    """Node index -> wish, and a warning for each name that matches nothing."""

    of_node: Mapping[int, Wish]
    warnings: Sequence[str]


def find_wishes(view: View, policy: Policy) -> Wishes:
    """Match the patterns against node names and outputs, and ask the rule about every node.

    Raises:
        ContradictionError: a node is wished low and float32. ArgumentError: the rule returns something else.

    Complexity: nodes times patterns.
    """
    matched: set[str] = set()
    found: dict[int, Wish] = {}
    if policy.keep_high or policy.force_low or policy.rule is not None:
        for node in view.nodes:
            said = [*_patterns(node, policy, matched), *_opinion(node, policy)]
            if len({wish.low for wish in said}) == 2:
                first, second = said[0], next(wish for wish in said if wish.low != said[0].low)
                raise ContradictionError(f"Node {node.label!r}: {first.detail} against {second.detail}; drop one.")
            if said:
                found[node.index] = said[0]
    return Wishes(found, _slips(view, policy, matched))


def _patterns(node: Node, policy: Policy, matched: set[str]) -> list[Wish]:
    names = {node.proto.name, *node.proto.output} - {""}
    said = []
    for low, option, patterns in (
        (False, "keep_high (--keep-fp32)", policy.keep_high),
        (True, "force_low (--force-low)", policy.force_low),
    ):
        for pattern in patterns:
            if any(pattern.fullmatch(name) for name in names):
                matched.add(pattern.pattern)
                said.append(Wish(low, Reason.PATTERN, f"{option} {pattern.pattern!r}"))
    return said


def _opinion(node: Node, policy: Policy) -> list[Wish]:
    if policy.rule is None:
        return []
    copy = NodeProto()
    copy.CopyFrom(node.proto)
    opinion = policy.rule(copy)
    if opinion not in ("low", "high", None):
        raise ArgumentError(f"rule returned {opinion!r} for node {node.label!r}: it may say 'low', 'high' or None.")
    return [] if opinion is None else [Wish(opinion == "low", Reason.RULE, f"rule says {opinion!r}")]


def _slips(view: View, policy: Policy, matched: set[str]) -> list[str]:
    """A pattern, op type or name that matches nothing is probably a slip."""
    patterns = [pattern.pattern for pattern in (*policy.keep_high, *policy.force_low)]
    slips = [f"The pattern {text!r} matches no node name." for text in patterns if text not in matched]
    present = {node.key for node in view.nodes}
    missing = sorted(policy.listed_by_user - present)
    slips += [f"The op type {op!r} of your lists does not occur in the model." for op in missing]
    if not isinstance(policy.keep_io, bool):
        graph = view.model.graph
        known = {entry.name for entry in (*graph.input, *graph.output)}
        slips += [f"The model has no input or output {name!r} to keep." for name in sorted(policy.keep_io - known)]
    return slips
