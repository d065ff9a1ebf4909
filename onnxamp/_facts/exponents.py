"""Relations between the exponents of an op's inputs and outputs.

``_data/exponents.toml`` is read once; its comments define each column.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from onnx import NodeProto

from onnxamp._facts.ops import attribute_of, op_facts
from onnxamp._facts.tables import read_table

ALL: Final = -1
"""The position of a :class:`Term` that stands for all inputs."""


class Term(NamedTuple):
    """``coefficient`` times the exponent of an input or output."""

    coefficient: int
    is_output: bool
    position: int


_LARGEST_POWER: Final = 64
"""Largest power of a Pow that exponents can follow: larger ones leave float32's range for almost any base."""

Sum = tuple[Term, ...]
"""A side of an equation; an empty one is 0."""

_TERM: Final = re.compile(r"([+-]?)\s*(\d*)\s*([xy])(\d+|\*)\s*")


def parse_sum(text: str) -> Sum:
    """Return the terms of ``"2 x0 - x1"``; none of ``"0"``.

    Raises:
        ValueError: the text is not a sum.

    Example:
        >>> parse_sum("-x1")
        (Term(coefficient=-1, is_output=False, position=1),)
    """
    rest = text.strip()
    terms = list[Term]()
    while rest and rest != "0":
        match = _TERM.match(rest)
        if match is None:
            raise ValueError(f"{text!r} is not a sum of exponents.")
        sign, factor, kind, position = match.groups()
        where = ALL if position == "*" else int(position)
        terms.append(Term(int(f"{sign}{factor or 1}"), kind == "y", where))
        rest = rest[match.end() :]
    return tuple(terms)


class ScaledAttribute(NamedTuple):
    """An attribute that is multiplied by 2 to the power of minus ``by``; None if it has no value where it is absent."""

    by: Sum
    default: float | None


class ExponentRule(NamedTuple):
    """A row of the table."""

    same: bool = False
    equations: tuple[tuple[Sum, Sum], ...] = ()
    free: frozenset[tuple[bool, int]] = frozenset()
    """(is output, position) of the ports that may have any exponent."""
    attributes: Mapping[str, ScaledAttribute] | None = None
    power: int | None = None
    needs: Sequence[int] = ()
    without: Sequence[int] = ()
    outputs: int | None = None
    logarithm: bool = False
    when: Mapping[str, Sequence[Any]] | None = None

    def holds(self, node: NodeProto) -> bool:
        """Return whether the node meets the row's conditions."""
        present = {position for position, name in enumerate(node.input) if name}
        if not present.issuperset(self.needs) or not present.isdisjoint(self.without):
            return False
        if self.outputs is not None and len(node.output) > self.outputs:
            return False
        # The first of the allowed values is the attribute's default.
        when = (self.when or {}).items()
        return all(
            attribute_of(node, name, allowed[0]) in allowed for name, allowed in when
        )


@cache
def exponent_rules() -> Mapping[str, ExponentRule]:
    """Return op -> its rule, for all ops that have one."""
    rules: dict[str, ExponentRule] = {}
    for row in read_table("exponents")["rules"]:
        ops = row.pop("ops")
        sides = (equation.split("=") for equation in row.pop("equations", ()))
        free = row.pop("free", ())
        rule = ExponentRule(
            equations=tuple(
                (parse_sum(left), parse_sum(right)) for left, right in sides
            ),
            free=frozenset((text[0] == "y", int(text[1:])) for text in free),
            attributes={
                name: ScaledAttribute(parse_sum(item["by"]), item.get("default"))
                for name, item in row.pop("attributes", {}).items()
            },
            **row,
        )
        rules |= dict.fromkeys(ops, rule)
    return rules


def moving_rule(node: NodeProto, key: str) -> ExponentRule | None:
    """Return the rule of an op that only moves data: the inputs that it moves and all outputs share one exponent."""
    moved = op_facts().moved_inputs.get(key)
    if moved is None:
        return None
    inputs = [place for place in range(len(node.input)) if place in moved]
    first, *others = [
        *(Term(1, False, position) for position in inputs),
        *(Term(1, True, position) for position in range(len(node.output))),
    ]
    return ExponentRule(equations=tuple(((first,), (other,)) for other in others))


def power_rule(power: float | None) -> ExponentRule | None:
    """Return the rule of a Pow by a constant; None if exponents cannot follow the power exactly."""
    if power is None or not 0 < abs(power) <= _LARGEST_POWER:  # infinite ones as well
        return None
    from fractions import Fraction  # noqa: PLC0415 - few runs need it

    # Exponents are integers, so only whole and half powers have an equation: y = x ** (p / 2) gives 2 y0 = p x0.
    ratio = Fraction(power).limit_denominator(2)
    if power != float(ratio):
        return None
    output = Term(ratio.denominator, True, 0)
    base = Term(ratio.numerator, False, 0)
    return ExponentRule(equations=(((output,), (base,)),))
