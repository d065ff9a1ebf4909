"""Claims: what facts, the user, lists and the level demand of variables, each with its strength."""

from collections import ChainMap, defaultdict
from collections.abc import Mapping
from enum import IntEnum
from typing import TypeAlias

from onnxamp._base.errors import ContradictionError
from onnxamp._decide.kinds import HazardKind
from onnxamp._decide.mincut import Question
from onnxamp._decide.overrides import DECIDED
from onnxamp._decide.problem import Problem
from onnxamp._decide.verdicts import Basis, Reason, Verdict

_Pinned: TypeAlias = dict[Question, Verdict]
"""Pins of one strength, by deciding variable; the first one of a variable explains it."""


class Strength(IntEnum):
    """The strength of a pin, the strongest first: a pin beats all those below it."""

    HARD = 0
    """Pinned to float32 by kernels and ties, which no option overrules."""
    FORCED = 1
    """Pinned low by the user's override of a node; an override to float32 of the same variable contradicts it."""
    KEPT = 2
    """Pinned to float32 by an override."""
    HIGH = 3
    """Pinned to float32 by hazards, measurements, the user's black list or a plan."""
    ASKED = 4
    """Pinned low by the user's white list, which hazards overrule."""
    DEFAULT = 5
    """Pinned to float32 by the preset's black list or the level."""
    LOW = 6
    """Pinned low by the preset's white list, the level or a plan."""


class Claims:
    """The precision that is demanded of variables.

    Attributes:
        pinned: strength -> the pins of it.
        implies: pairs (p, q) of variables: if p is low, q must be low; q decides for itself.
        exact, preferred, worthy, warnings: as in :class:`onnxamp._decide.pins.find.Pins`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.options = problem.options
        self.ports = problem.ports
        self.pinned = {strength: _Pinned() for strength in Strength}
        self.implies = list[tuple[Question, Question]]()
        self.exact = set[Question]()
        self.preferred = set[Question]()
        self.worthy = dict[Question, HazardKind]()
        self.warnings = list[str]()

    def pin(
        self,
        strength: Strength,
        variable: Question,
        low: bool,
        reason: Basis,
        why: str,
    ) -> None:
        """Add a pin to those of its strength."""
        verdict = Verdict(variable, low, reason, why)
        self.pinned[strength].setdefault(self.ports.root(variable), verdict)

    def pin_node(
        self, strength: Strength, node: int, low: bool, reason: Basis, why: str
    ) -> None:
        """Pin all variables of a node."""
        for variable in self.ports.of(node):
            self.pin(strength, variable, low, reason, why)

    def imply(self, p: Question, q: Question) -> None:
        """Note that variable ``q`` must be low if ``p`` is."""
        # ``p`` stays as it is, because a verdict is about the variable of a node.
        self.implies.append((p, self.ports.root(q)))

    def settled(self) -> Mapping[Question, Verdict]:
        """Return the strongest pin of each variable, implications included.

        Raises:
            ContradictionError: overrides pull a variable both ways.
        """
        self._check_overrides()
        self._force_implied()
        self._warn_of_unforced()
        # A ChainMap takes each variable from the first map that has it: the strongest.
        settled = dict(ChainMap(*(self.pinned[strength] for strength in Strength)))
        self._spread_high(settled)
        return settled

    def _check_overrides(self) -> None:
        """Check that no override keeps what another one forces; what an earlier decision forced gives way."""
        forced = self.pinned[Strength.FORCED]
        kept = self.pinned[Strength.KEPT]
        for root in forced.keys() & kept.keys():
            if forced[root].detail == DECIDED:
                # No user said so, and in another graph other nodes may share its type.
                del forced[root]
                continue
            pins = forced[root], kept[root]
            one, other = (f"{self._label(pin)!r} ({pin.detail})" for pin in pins)
            raise ContradictionError(
                f"{one} and {other} share one precision: drop one of the two."
            )

    def _force_implied(self) -> None:
        """Force what a variable that is forced low needs in low precision, unless an override keeps it."""
        forced = self.pinned[Strength.FORCED]
        kept = self.pinned[Strength.KEPT]
        needs = defaultdict[Question, list[Question]](list)
        for p, q in self.implies:
            needs[self.ports.root(p)].append(q)
        waiting = list(forced)
        while waiting:
            root = waiting.pop()
            for q in needs.get(root, ()):
                if q in kept:
                    self._warn_of_kept(forced[root], kept[q])
                elif q not in forced:
                    forced[q] = forced[root]
                    waiting.append(q)

    def _warn_of_kept(self, forced: Verdict, kept: Verdict) -> None:
        """Warn of what the user forces low and cannot be low without what another override keeps."""
        if forced.detail != DECIDED:
            self.warnings.append(
                f"{self._label(forced)!r} cannot be forced low without {self._label(kept)!r} ({kept.detail})."
            )

    def _warn_of_unforced(self) -> None:
        """Warn of what the user forces low and facts keep in float32."""
        hard = self.pinned[Strength.HARD]
        forced = self.pinned[Strength.FORCED]
        for root in sorted(hard.keys() & forced.keys()):
            if forced[root].detail != DECIDED:
                label = self._label(forced[root])
                why = hard[root].detail
                self.warnings.append(f"{label!r} cannot be forced low: {why}.")

    def _label(self, verdict: Verdict) -> str:
        """Return the label of the node that a verdict is about."""
        return self.graph.nodes[self.ports.variables[verdict.variable].node].label

    def _spread_high(self, settled: dict[Question, Verdict]) -> None:
        """Pin variables to float32 that may be low only together with a variable that is float32."""
        needed_by: dict[Question, list[Question]] = {}
        for p, q in self.implies:
            needed_by.setdefault(q, []).append(p)
        stack = [root for root, verdict in settled.items() if not verdict.low]
        while stack:
            for p in needed_by.get(stack.pop(), ()):
                root = self.ports.root(p)
                if root not in settled or settled[root].low:
                    why = f"no kernel for this mix of types on {self.options.target}"
                    settled[root] = Verdict(p, False, Reason.NO_KERNEL, why)
                    stack.append(root)
