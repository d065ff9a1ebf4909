"""Which pin of a variable wins where several claim it: the strongest, implications included.

Precedence: what kernels and ties rule out; overrides of single nodes; hazards and the user's black list (or a plan);
the user's white list; the preset's black list, and what the level keeps in float32; the preset's white list, and what
the level lowers. Tied variables share their pins.
"""

from collections import ChainMap
from dataclasses import dataclass, field

from onnxamp._decide.ports import PortVariables
from onnxamp._decide.verdicts import Reason, Verdict
from onnxamp._errors import ContradictionError


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
