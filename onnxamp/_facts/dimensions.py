"""Relations between the dimensions of an op's inputs.

``_data/dimensions.toml`` is read once; its comments define each column.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from onnx import NodeProto

from onnxamp._base.records import record
from onnxamp._facts.ops import attribute
from onnxamp._facts.tables import read_table

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


@record
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
        for name, wanted in self.when.items():
            if (attribute(node, name) or 0) != wanted:
                return False
        if any(attribute(node, name) is not None for name in self.unless):
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
    # "." stands for "..." meanwhile, so that each character is one term.
    inputs = text.partition("->")[0].replace(ALIGNED, ".").split(",")
    terms = list[Terms | None]()
    for letters in inputs:
        named = tuple(ALIGNED if letter == "." else letter for letter in letters)
        terms.append(named or None)
    return tuple(terms)


def _split(
    terms: Terms, shape: Sequence[D]
) -> tuple[list[tuple[str, D]], Sequence[D]] | None:
    """Return each term with its dimension, and the dimensions that "..." stands for; None if the rank does not fit."""
    first = next(
        (place for place, term in enumerate(terms) if term in (ALIGNED, FREE)), None
    )
    if first is None:
        if len(terms) != len(shape):
            return None
        return list(zip(terms, shape, strict=True)), ()
    last = len(terms) - first - 1
    if len(shape) < first + last:
        return None
    rest = len(shape) - last
    named = [
        *zip(terms[:first], shape, strict=False),
        *zip(terms[first + 1 :], shape[rest:], strict=True),
    ]
    return named, shape[first:rest] if terms[first] == ALIGNED else ()


def _joined(axis: Any, shapes: Sequence[Sequence[D] | None]) -> Related | None:
    """Return the relations if inputs differ only along one axis."""
    known = [shape for shape in shapes if shape is not None]
    ranks = {len(shape) for shape in known}
    if axis is None or len(ranks) != 1 or not -min(ranks) <= axis < min(ranks):
        return None
    axis %= min(ranks)
    multiples = list[tuple[Multiple, D]]()
    for shape in known:
        for place, dim in enumerate(shape):
            if place != axis:
                multiples.append((Multiple(str(place), 1), dim))
    return Related(multiples)


def _multiple(
    term: str, node: NodeProto, absent: Mapping[str, int]
) -> Multiple | None:
    """Return the value of a term for a node; None if it names an attribute that is absent or not positive."""
    sizes = ""
    factors = dict[str, int]()
    for name in names_of(term):
        value = attribute(node, name)
        # A single letter that is no attribute of the node names a size.
        if value is None and len(name) == 1:
            sizes += name
            value = 1
        factors[name] = absent.get(name, 0) if value is None else value
        if not isinstance(factors[name], int) or factors[name] <= 0:
            return None
    factor: int = eval(term, {}, factors)  # noqa: S307 - the term is our own
    return Multiple(sizes, factor)


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
        every = _parsed(row.pop("every", _UNSAID))
        rule = DimensionRule(tuple(map(_parsed, inputs)), every, **row)
        for op in ops:
            rules.setdefault(op, []).append(rule)
    return rules


def _parsed(text: str) -> Terms | None:
    return None if text == _UNSAID else tuple(text.split())


def columns(aligned: Sequence[Sequence[D]]) -> Iterator[list[D]]:
    """Yield the dimensions that broadcast against each other, from the last to the first."""
    for place in range(max(map(len, aligned), default=0)):
        yield [dims[-1 - place] for dims in aligned if place < len(dims)]
