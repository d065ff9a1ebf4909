"""Bounds of elementwise ops, by the formulas of ``_data/bounds.toml``."""

from dataclasses import replace
from functools import partial
from math import inf, isnan
from typing import Any, Final

from onnxamp._facts.tables import read_table
from onnxamp._graph.bounds.bound import UNKNOWN, Bound, between, hull, whole, within
from onnxamp._graph.bounds.call import Call, Rule, Rules
from onnxamp._graph.bounds.curves import CURVES


def _through(curve: Any, x: Bound) -> Bound:
    return x.through(curve)


def _turning(curve: Any, turn: float, x: Bound) -> Bound:
    return x.through(curve, turn)


def _positive(x: Bound) -> Bound:
    return x.clipped(0.0, float("inf"))


def _negative(x: Bound) -> Bound:
    return x.clipped(float("-inf"), 0.0)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


_FUNCTIONS: Final[dict[str, Any]] = {
    "abs": abs,
    "between": between,
    "given": _given,
    "inf": inf,
    "min": min,
    "hull": hull,
    "negative": _negative,
    "positive": _positive,
    "through": _through,
    "turning": _turning,
    "whole": whole,
    "within": within,
    **CURVES,
}
_INPUTS: Final = "xbc"
"""Names of inputs."""


class _Names(dict[str, Any]):
    """The names that a formula may use; see ``_data/bounds.toml``."""

    def __init__(self, call: Call) -> None:
        super().__init__(_FUNCTIONS)
        self.call = call

    def __missing__(self, name: str) -> Any:
        if name in _INPUTS:
            return self.call[_INPUTS.index(name)]
        if name == "rest":
            return sum(self.call.present[1:], start=between(0.0, 0.0))
        return self.call.attribute(name)


def _by_formula(formula: Any, call: Call) -> Bound:
    """Return the bound that a formula describes; an unknown one where an attribute does not fit it."""
    try:
        bound: Bound = eval(formula, {}, _Names(call))  # noqa: S307 - the formula is our own
    except (ArithmeticError, TypeError):  # 1 / alpha, of an alpha that is zero
        return UNKNOWN
    return UNKNOWN if isnan(bound.low) or isnan(bound.high) else bound


def _rule(op: str, text: str) -> Rule:
    return partial(_by_formula, compile(text.strip(), f"bound of {op}", "eval"))


def _raised(exponent: float, base: Any) -> Any:
    return base**exponent


def _power(call: Call) -> Bound:
    """Return the bound of a power with an exponent that is known, or nearly so.

    Of a positive base, it rises or falls with either, so that it is largest and smallest at the ends of both.
    """
    # Exponents may broadcast the base.
    x, exponent = call[0].spread(call.width()), call[1]
    number = exponent.low
    if number == exponent.high and number == int(number) and number >= 0:
        base = abs(x) if number % 2 == 0 else x
        return replace(
            base.through(partial(_raised, number)), step=min(x.step, 1.0) ** number
        )
    # A negative power of a negative zero is negative.
    if x.low < 0.0 or (x.low == 0.0 and number < 0.0) or exponent.is_unbounded:
        return UNKNOWN
    ends = [x.through(partial(_raised, end)) for end in (number, exponent.high)]
    return hull(ends)


def _product(call: Call) -> Bound:
    """Return the bound of a product; a square is no less than zero."""
    one, other = (call.graph.passed_on(value) for value in call.node.inputs)
    if one != other:
        return call[0] * call[1]
    return abs(call[0]) * abs(call[0])


RULES: Final[Rules] = {
    **{op: _rule(op, text) for op, text in read_table("bounds").items()},
    "Mul": _product,
    "Pow": _power,
}
"""Op -> the rule of its bound."""
