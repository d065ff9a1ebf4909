"""Relations between the dimensions of an op's inputs, read once from ``_data/dimensions.toml``."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from onnx import NodeProto

from onnxamp._ops.facts import attribute
from onnxamp._ops.targets import read_table

D = TypeVar("D")
Terms = tuple[str, ...]

ALIGNED: Final = "..."
"""Stands for any number of dimensions, which broadcast."""
FREE: Final = "*"
"""Stands for any number of unconstrained dimensions."""
_UNSAID: Final = "?"


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
        multiples, aligned = list[tuple[Multiple, D]](), list[Sequence[D]]()
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
            (attribute(node, name) or 0) != wanted for name, wanted in self.when.items()
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


def _multiple(term: str, node: NodeProto, absent: Mapping[str, int]) -> Multiple | None:
    """Return the value of a term for a node; None if it names an attribute that is absent or not positive."""
    sizes, factors = "", dict[str, int]()
    for name in names_of(term):
        value = attribute(node, name)
        if value is None and len(name) == 1:
            sizes, value = sizes + name, 1
        factors[name] = absent.get(name, 0) if value is None else value
        if not isinstance(factors[name], int) or factors[name] <= 0:
            return None
    return Multiple(sizes, _product(term, factors))


def _has(node: NodeProto, name: str) -> bool:
    """Return whether the node has an attribute, which may be a single letter: K of MatMulNBits."""
    return attribute(node, name) is not None


@cache
def names_of(term: str) -> tuple[str, ...]:
    """Return the sizes and attributes that a term names."""
    return tuple(
        part.id for part in ast.walk(_parsed(term)) if isinstance(part, ast.Name)
    )


@cache
def _parsed(term: str) -> ast.expr:
    return ast.parse(term, mode="eval").body


def _product(term: str, values: Mapping[str, int]) -> int:
    """Return the value of a term, which consists of names, numbers, "+" and "*"."""

    def value(part: ast.expr) -> int:
        if isinstance(part, ast.BinOp):
            left, right = value(part.left), value(part.right)
            return left + right if isinstance(part.op, ast.Add) else left * right
        return values[part.id] if isinstance(part, ast.Name) else int(ast.unparse(part))

    return value(_parsed(term))


@cache
def dimension_rules() -> Mapping[str, Sequence[DimensionRule]]:
    """Return op -> its rows, in the order in which they are tried."""
    rules: dict[str, list[DimensionRule]] = {}
    for row in read_table("dimensions")["rules"]:
        ops, inputs = row.pop("ops"), row.pop("inputs", ())
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
