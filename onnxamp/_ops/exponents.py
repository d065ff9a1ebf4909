"""Propagation of exponents through ops, read once from ``_data/exponents.toml``, whose comments define each column."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from onnx import NodeProto

from onnxamp._ops.facts import attribute_of, op_facts
from onnxamp._ops.targets import read_table

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
    rest, terms = text.strip(), list[Term]()
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
    first, *others = [
        *(
            Term(1, False, position)
            for position in range(len(node.input))
            if position in moved
        ),
        *(Term(1, True, position) for position in range(len(node.output))),
    ]
    return ExponentRule(equations=tuple(((first,), (other,)) for other in others))


def power_rule(power: float | None) -> ExponentRule | None:
    """Return the rule of a Pow by a constant; None if exponents cannot follow the power exactly."""
    if power is None or not 0 < abs(power) <= _LARGEST_POWER:  # infinite ones as well
        return None
    from fractions import Fraction  # noqa: PLC0415 - few runs need it

    ratio = Fraction(power).limit_denominator(2)
    if power != float(ratio):
        return None
    made, read = Term(ratio.denominator, True, 0), Term(ratio.numerator, False, 0)
    return ExponentRule(equations=(((made,), (read,)),))


T = TypeVar("T")

_OPERATORS: Final = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.Div: "Div",
    ast.USub: "Neg",
}


def compute(formula: str, x: T, step: Callable[[str, Sequence[T | float]], T]) -> T:
    """Apply a formula to x. Equal steps are computed once.

    Args:
        formula: a formula, see the module.
        x: its argument: an array, or the name of a value.
        step: computes one step from an operator's op type in ONNX ("Add", ...) or a function's name, and its operands.
    """
    made: dict[str, T | float] = {"x": x}
    for node in _inner_first(ast.parse(formula, mode="eval").body):
        text = ast.unparse(node)
        if text in made:
            continue
        if isinstance(node, ast.Constant):
            made[text] = float(ast.unparse(node))
            continue
        made[text] = step(
            _kind(node), [made[ast.unparse(part)] for part in _operands(node)]
        )
    found = made[text]
    assert not isinstance(found, float)
    return found


def _inner_first(whole: ast.expr) -> list[ast.expr]:
    found, waiting = [], [whole]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += _operands(node)
    return found[::-1]


def _kind(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    assert isinstance(node, ast.BinOp | ast.UnaryOp)
    return _OPERATORS[type(node.op)]


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return node.args if isinstance(node, ast.Call) else []
