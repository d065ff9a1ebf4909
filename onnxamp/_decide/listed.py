"""What lists and the level say of ops, and which ops must stay float32 although the user's white list has them."""

from collections import ChainMap
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from onnxamp._decide.ports import HIGH, PortVariables
from onnxamp._decide.problem import Problem
from onnxamp._decide.variables import unknown_floats
from onnxamp._decide.verdicts import Reason, Verdict
from onnxamp._decide.words import told
from onnxamp._errors import ContradictionError
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._options.levels import Level


def listed(
    problem: Problem, node: Node, *, exact: bool, follows: bool, freed: AbstractSet[Reason]
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
    if options.level == Level.O0 or not options.user_white:
        return []
    for node in problem.graph.nodes:
        refusal = _refusal(problem, pins, node) if node.key in options.user_white else None
        if refusal is not None:
            found.setdefault((node.key, refusal.reason), []).append((node, refusal.detail))
    return [_sentence(op, reason, nodes) for (op, reason), nodes in found.items()]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a listed node stays float32."""

    reason: str
    detail: str


_SCHEMA: Final = "schema"
_OF_USER: Final = frozenset({Reason.PATTERN, Reason.RULE})
"""What the user wants of single nodes is no news."""


def _refusal(problem: Problem, pins: Mapping[int, Verdict], node: Node) -> _Refusal | None:
    """Why a listed node stays float32, with all that can be said of it; None if it does not."""
    ports = problem.ports
    variables = ports.of_node.get(node.index, {}).values()
    for variable in variables:
        pin = pins.get(ports.root(variable))
        if pin is not None and not pin.low and pin.reason not in _OF_USER:
            own = ports.variables[pin.variable].node in (node.index, ABSENT)
            return _Refusal(
                pin.reason.value, pin.detail if own else f"{pin.detail} (shares its precision)"
            )
    produced = (ports.produced[value] for value in node.outputs if value != ABSENT)
    if variables or HIGH not in (*ports.consumed[node.index], *produced):
        return None
    if node.signature is None or problem.graph.scopes[node.scope].opaque:
        return _Refusal(_SCHEMA, "its schema is unknown, or that of an op around it")
    if unknown := unknown_floats(problem.graph, node):
        return _Refusal(
            _SCHEMA,
            f"nothing tells the type of {problem.graph.values[unknown[0]].name!r} beside it",
        )
    if node.key in op_facts().pinned_parameters:
        return _Refusal(_SCHEMA, "what it reads must not be rounded")
    return _Refusal(
        _SCHEMA, f"that of opset {node.signature.since} allows no {problem.options.low.name}"
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


@dataclass(slots=True)
class Claims:
    """What facts, the user, lists and the level want of variables, by deciding variable."""

    ports: PortVariables
    target: str
    hard: dict[int, Verdict] = field(default_factory=dict)
    """Float32 by kernels and ties."""
    forced: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    """Low by an override, with the label of its node."""
    kept: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    """Float32 by an override, with the label of its node."""
    high: dict[int, Verdict] = field(default_factory=dict)
    """Float32 by hazards, the user's black list or a plan."""
    asked: dict[int, Verdict] = field(default_factory=dict)
    """Low by the user's white list."""
    default: dict[int, Verdict] = field(default_factory=dict)
    """Float32 by the preset's black list or the level."""
    low: dict[int, Verdict] = field(default_factory=dict)
    """Low by the preset's white list, the level or a plan."""
    implies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (p, q) of variables: if p is low, q must be low."""
    warnings: list[str] = field(default_factory=list)

    def pin(self, variable: int, verdict: Verdict, *, hard: bool = False) -> None:
        """Record a pin; the first of a kind is the explanation."""
        pins = self.hard if hard else self.low if verdict.low else self.high
        pins.setdefault(self.ports.root(variable), verdict)

    def settled(self) -> dict[int, Verdict]:
        """The strongest pin of each variable, implications included.

        Raises:
            ContradictionError: overrides pull a variable both ways.
        """
        self._refuse_contradictions()
        self._spread_forced()
        soft = ChainMap(self.high, self.asked, self.default, self.low)  # the strongest first
        settled: dict[int, Verdict] = {}
        for root in {*self.hard, *self.forced, *self.kept, *soft}:
            if root in self.hard:
                settled[root] = self.hard[root]
                if root in self.forced:
                    label = self.forced[root][1]
                    self.warnings.append(
                        f"{label!r} cannot be forced low: {self.hard[root].detail}."
                    )
            elif root in self.forced or root in self.kept:
                settled[root] = (self.forced.get(root) or self.kept[root])[0]
            else:
                settled[root] = soft[root]
        self._spread_high(settled)
        return settled

    def _refuse_contradictions(self) -> None:
        for root in self.forced.keys() & self.kept.keys():
            (low, first), (high, second) = self.forced[root], self.kept[root]
            raise ContradictionError(
                f"{first!r} ({low.detail}) and {second!r} ({high.detail}) share one precision: drop one of the two."
            )

    def _spread_forced(self) -> None:
        """Force what a forced variable needs in low precision."""
        for first, second in self.implies:
            p, q = self.ports.root(first), self.ports.root(second)
            if p in self.forced and q not in self.kept:
                self.forced.setdefault(q, self.forced[p])

    def _spread_high(self, settled: dict[int, Verdict]) -> None:
        """Pin to float32 what needs a float32 variable in low precision."""
        needed_by: dict[int, list[int]] = {}
        for p, q in self.implies:
            needed_by.setdefault(self.ports.root(q), []).append(p)
        stack = [root for root, verdict in settled.items() if not verdict.low]
        while stack:
            for p in needed_by.get(stack.pop(), ()):
                root = self.ports.root(p)
                if root not in settled or settled[root].low:
                    why = f"no kernel for this mix of types on {self.target}"
                    settled[root] = Verdict(p, False, Reason.NO_KERNEL, why)
                    stack.append(root)
