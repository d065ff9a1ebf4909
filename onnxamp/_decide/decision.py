"""Decisions: which variables are low precision, and why."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple

from onnxamp._decide.hazards import long_products
from onnxamp._decide.pins import Pins
from onnxamp._decide.ports import LOW
from onnxamp._decide.problem import Problem
from onnxamp._decide.verdicts import Reason, Verdict
from onnxamp._decide.words import told

_PRICED = {
    True: (Reason.WHITE, "the error of its float16 sum is worth it"),
    False: (long_products.KIND, "the error of its float16 sum is not worth the Casts"),
}
"""Verdicts on white-listed products whose errors have a price, by whether they are low precision."""


class Prices(NamedTuple):
    """Measurements of nodes, by node index.

    Attributes:
        pins: why a node must stay float32.
        gains: time that a node saves in low precision, in cost units.
        prices: price of the error that a node makes in low precision, in cost units.
        high: nodes that stay float32 unless pinned low; nothing, such as the memory of their weights, outweighs this.
        fusions: pairs of nodes, with the cost of different precisions, in addition to Casts.
    """

    pins: Mapping[int, str] = MappingProxyType({})
    gains: Mapping[int, int] = MappingProxyType({})
    prices: Mapping[int, int] = MappingProxyType({})
    high: AbstractSet[int] = frozenset()
    fusions: Mapping[tuple[int, int], int] = MappingProxyType({})


class Decision(NamedTuple):
    """The optimal assignment: whether each variable is low, and the cost of the cut."""

    low: Sequence[bool]
    cost: int

    def is_low(self, variable: int) -> bool:
        """Return whether a port with this variable is low precision."""
        return variable == LOW or (variable >= 0 and self.low[variable])


def explain(problem: Problem, pins: Pins, decision: Decision) -> list[Verdict]:
    """Return a verdict for each variable."""
    return [
        verdict_on(problem, pins, decision, variable.index)
        for variable in problem.ports.variables
    ]


def verdict_on(
    problem: Problem, pins: Pins, decision: Decision, variable: int
) -> Verdict:
    """Return the verdict for one variable."""
    ports, low, own = (
        problem.ports,
        decision.low[variable],
        problem.ports.variables[variable],
    )
    root = ports.root(variable)
    pin = pins.verdicts.get(root)
    if pin is not None:
        if pin.variable == variable or ports.variables[pin.variable].node == own.node:
            return Verdict(variable, pin.low, pin.reason, pin.detail)
        why = told(pin.reason.value, pin.detail, low=pin.low)
        return Verdict(
            variable, pin.low, Reason.TIE, f"shares its type with another node: {why}"
        )
    if own.param == "value":
        return Verdict(variable, low, Reason.CONSTANT, "follows its readers")
    if root in pins.worthy:
        return Verdict(variable, low, *_PRICED[bool(low)])
    reason = Reason.EXACT if root in pins.exact else Reason.CUT
    return Verdict(variable, low, reason, "fewest Casts")
