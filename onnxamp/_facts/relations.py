"""Relations between the inputs and outputs of an op: of their dimensions, and of the exponents that pass through it.

``_data/dimensions.toml`` and ``_data/exponents.toml`` are read once; their comments define each column.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from onnx import NodeProto

from onnxamp._facts.ops import attribute, attribute_of, op_facts
from onnxamp._facts.tables import read_table

D = TypeVar("D")
Terms = tuple[str, ...]

ALIGNED: Final = "..."
"""Stands for any number of dimensions, which broadcast."""
FREE: Final = "*"
"""Stands for any number of unconstrained dimensions."""
_UNSAID: Final = "?"
ALL: Final = -1
"""The position of a :class:`Term` that stands for all inputs."""


class Multiple(NamedTuple):
    """A dimension that is ``factor`` times a size; for a number, the size is named "" and equals 1."""

    size: str
    factor: int


class Related(NamedTuple):
    """The dimensions of a node's inputs.

    Attributes:
        multiples: the multiple that each dimension is.
        aligned: for each input, the dimensions that broadcast against those of the others, counted from the last.
    """

    multiples: Sequence[tuple[Multiple, Any]] = ()
    aligned: Sequence[Sequence[Any]] = ()


@dataclass(frozen=True, slots=True)
class DimensionRule:
    """A row of the table."""

    inputs: tuple[Terms | None, ...] = ()
    """The terms of each input; () if it must be absent, None if it is unconstrained."""
    every: Terms | None = None
    absent: Mapping[str, int] = field(default_factory=dict)
    when: Mapping[str, int] = field(default_factory=dict)
    unless: Sequence[str] = ()
    equation: str = ""
    joined: str = ""
    counted: bool = False

    def related(
        self, node: NodeProto, shapes: Sequence[Sequence[D] | None]
    ) -> Related | None:
        """Return the row's relations for inputs of these shapes; None if the row does not apply.

        Args:
            node: a node of one of its ops.
            shapes: the shape of each input that the node names; None if it is unknown, or if the input is absent.
        """
        terms = self._terms(node)
        if not self._holds(node, terms):
            return None
        if self.joined:
            return _joined(attribute(node, self.joined), shapes)
        multiples = list[tuple[Multiple, D]]()
        aligned = list[Sequence[D]]()
        for wanted, shape in zip(terms, shapes, strict=False):
            if not wanted or shape is None:
                continue
            split = _split(wanted, shape)
            if split is None:
                return None
            aligned.append(split[1])
            for term, dim in split[0]:
                factor = _multiple(term, node, self.absent)
                if factor is None:
                    return None
                multiples.append((factor, dim))
        return Related(multiples, aligned)

    def _holds(self, node: NodeProto, terms: Sequence[Terms | None]) -> bool:
        """Return whether the node has the attributes and the inputs that the row requires."""
        if any(
            (attribute(node, name) or 0) != wanted
            for name, wanted in self.when.items()
        ):
            return False
        if any(_has(node, name) for name in self.unless):
            return False
        inputs = zip(terms, node.input, strict=False)
        return not any(wanted == () and name for wanted, name in inputs)

    def _terms(self, node: NodeProto) -> tuple[Terms | None, ...]:
        if self.equation:
            return _of_equation(attribute(node, self.equation))
        return self.inputs if self.every is None else (self.every,) * len(node.input)


def _of_equation(equation: bytes | None) -> tuple[Terms | None, ...]:
    """Return the terms of an Einsum's inputs, each letter a size."""
    text = (equation or b"").decode(errors="replace").replace(" ", "")
    inputs = text.partition("->")[0].replace(ALIGNED, ".").split(",")
    return tuple(
        tuple(ALIGNED if letter == "." else letter for letter in letters) or None
        for letters in inputs
    )


def _split(
    terms: Terms, shape: Sequence[D]
) -> tuple[list[tuple[str, D]], Sequence[D]] | None:
    """Return each term with its dimension, and the dimensions that "..." stands for; None if the rank does not fit."""
    first = next(
        (place for place, term in enumerate(terms) if term in (ALIGNED, FREE)), None
    )
    if first is None:
        return (
            (list(zip(terms, shape, strict=True)), ())
            if len(terms) == len(shape)
            else None
        )
    last = len(terms) - first - 1
    if len(shape) < first + last:
        return None
    rest = len(shape) - last
    within = [
        *zip(terms[:first], shape, strict=False),
        *zip(terms[first + 1 :], shape[rest:], strict=True),
    ]
    return within, shape[first:rest] if terms[first] == ALIGNED else ()


def _joined(axis: Any, shapes: Sequence[Sequence[D] | None]) -> Related | None:
    """Return the relations if inputs differ only along one axis."""
    known = [shape for shape in shapes if shape is not None]
    ranks = {len(shape) for shape in known}
    if axis is None or len(ranks) != 1 or not -min(ranks) <= axis < min(ranks):
        return None
    axis %= min(ranks)
    named = (
        (str(place), dim)
        for shape in known
        for place, dim in enumerate(shape)
        if place != axis
    )
    return Related([(Multiple(name, 1), dim) for name, dim in named])


def _multiple(
    term: str, node: NodeProto, absent: Mapping[str, int]
) -> Multiple | None:
    """Return the value of a term for a node; None if it names an attribute that is absent or not positive."""
    sizes = ""
    factors = dict[str, int]()
    for name in names_of(term):
        value = attribute(node, name)
        if value is None and len(name) == 1:
            sizes = sizes + name
            value = 1
        factors[name] = absent.get(name, 0) if value is None else value
        if not isinstance(factors[name], int) or factors[name] <= 0:
            return None
    factor: int = eval(term, {}, factors)  # noqa: S307 - the term is our own
    return Multiple(sizes, factor)


def _has(node: NodeProto, name: str) -> bool:
    """Return whether the node has an attribute, which may be a single letter: K of MatMulNBits."""
    return attribute(node, name) is not None


@cache
def names_of(term: str) -> tuple[str, ...]:
    """Return the sizes and attributes that a term names."""
    return compile(term, "term", "eval").co_names


@cache
def dimension_rules() -> Mapping[str, Sequence[DimensionRule]]:
    """Return op -> its rows, in the order in which they are tried."""
    rules: dict[str, list[DimensionRule]] = {}
    for row in read_table("dimensions")["rules"]:
        ops = row.pop("ops")
        inputs = row.pop("inputs", ())
        every = _terms(row.pop("every", _UNSAID))
        rule = DimensionRule(tuple(map(_terms, inputs)), every, **row)
        for op in ops:
            rules.setdefault(op, []).append(rule)
    return rules


def _terms(text: str) -> Terms | None:
    return None if text == _UNSAID else tuple(text.split())


def columns(aligned: Sequence[Sequence[D]]) -> Iterator[list[D]]:
    """Yield the dimensions that broadcast against each other, from the last to the first."""
    for place in range(max(map(len, aligned), default=0)):
        yield [dims[-1 - place] for dims in aligned if place < len(dims)]


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
    made = Term(ratio.denominator, True, 0)
    read = Term(ratio.numerator, False, 0)
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
    found = []
    waiting = [whole]
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
