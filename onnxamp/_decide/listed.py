"""What lists and the level say of ops, and which ops must stay float32 although the user's white list has them."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from onnxamp._decide.ports import HIGH
from onnxamp._decide.problem import Problem
from onnxamp._decide.variables import unknown_floats
from onnxamp._decide.verdicts import Reason, Verdict
from onnxamp._decide.words import told
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._options.levels import Level


def listed(
    problem: Problem,
    node: Node,
    *,
    exact: bool,
    follows: bool,
    freed: AbstractSet[Reason],
) -> tuple[bool, Reason, str] | None:
    """Whether lists or level lower the node, and why; None if they leave it to the cut.

    Args:
        problem: the problem.
        node: the node.
        exact: whether low precision costs it no accuracy.
        follows: whether it has no preference of its own.
        freed: reasons to ignore.
    """
    options = problem.options
    if options.level == Level.AUTO and node.key not in options.listed_by_user:
        return None
    if options.level == Level.O0:
        return False, Reason.LEVEL, "O0 lowers nothing"
    if node.key in options.black and Reason.BLACK not in freed:
        return None if node.index in problem.folded else (False, Reason.BLACK, node.key)
    if node.key in options.white and not exact and not follows:
        return True, Reason.WHITE, node.key
    if not follows and (
        options.level == Level.O3 or (options.strict and options.level == Level.O2)
    ):
        return True, Reason.LEVEL, f"{options.level} lowers every op it can"
    is_high = options.level == Level.O1 and not exact and not follows
    return (False, Reason.LEVEL, "O1 lowers only white-listed ops") if is_high else None


def unmet_lists(problem: Problem, pins: Mapping[int, Verdict]) -> list[str]:
    """Why ops of the user's white list stay float32: one sentence per op type and reason. Linear in nodes.

    Args:
        problem: the problem.
        pins: deciding variable -> its pin.
    """
    options, found = problem.options, dict[tuple[str, str], list[tuple[Node, str]]]()
    for node in (
        problem.graph.nodes_of(options.user_white) if options.level != Level.O0 else ()
    ):
        if (refusal := _refusal(problem, pins, node)) is not None:
            found.setdefault((node.key, refusal[0]), []).append((node, refusal[1]))
    return [_sentence(op, reason, nodes) for (op, reason), nodes in found.items()]


_SCHEMA: Final = "schema"
_OF_USER: Final = frozenset({Reason.PATTERN, Reason.RULE})
"""What the user wants of single nodes is no news."""


def _refusal(
    problem: Problem, pins: Mapping[int, Verdict], node: Node
) -> tuple[str, str] | None:
    """Why a listed node stays float32: the reason, and all that can be said of it; None if it does not."""
    ports = problem.ports
    variables = ports.of_node.get(node.index, {}).values()
    for variable in variables:
        pin = pins.get(ports.root(variable))
        if pin is not None and not pin.low and pin.reason not in _OF_USER:
            own = ports.variables[pin.variable].node in (node.index, ABSENT)
            return pin.reason.value, pin.detail + " (shares its precision)" * (not own)
    produced = (ports.produced[value] for value in node.outputs if value != ABSENT)
    if variables or HIGH not in (*ports.consumed[node.index], *produced):
        return None
    if node.signature is None or problem.graph.scopes[node.scope].opaque:
        return _SCHEMA, "its schema is unknown, or that of an op around it"
    if unknown := unknown_floats(problem.graph, node):
        name = problem.graph.values[unknown[0]].name
        return _SCHEMA, f"nothing tells the type of {name!r} beside it"
    if node.key in op_facts().pinned_parameters:
        return _SCHEMA, "what it reads must not be rounded"
    return (
        _SCHEMA,
        f"that of opset {node.signature.since} allows no {problem.options.low.name}",
    )


_WAYS_OUT: Final = {
    Reason.NO_KERNEL.value: "Another target (--target) or opset (--opset) may have one.",
    _SCHEMA: "",
    Reason.BLACK.value: "",
    Reason.TIE.value: "",
}


def _sentence(op: str, reason: str, nodes: list[tuple[Node, str]]) -> str:
    first, detail = nodes[0]
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    way_out = _WAYS_OUT.get(reason, "force_low (--force-low) lowers it all the same.")
    return f"{op} of your white list stays float32 in {first.label!r}{more}: {told(reason, detail)}. {way_out}".rstrip()
