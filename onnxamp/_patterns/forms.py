"""Forms of decomposed ops as expression trees, read from ``_data/folds.toml``, whose comments define the language."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from onnxamp._ops.tables import read_table


@dataclass(frozen=True, slots=True)
class Var:
    """Any value; the same name is the same value."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A constant of one element."""

    value: float


@dataclass(frozen=True, slots=True)
class Op:
    """A node of this type whose inputs match."""

    key: str
    inputs: "tuple[Pattern, ...]"
    places: tuple[int, ...]
    """The inputs in the order in which to try them: what fails at once first, last a name, which takes anything."""
    heads: tuple[tuple[int, frozenset[str]], ...]
    """The inputs that must be nodes, each with the types that it may have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of several expressions, all of them nodes."""

    options: "tuple[Pattern, ...]"

    ending_in: "Mapping[str, tuple[Pattern, ...]]" = field(compare=False)
    """Op type -> the options whose last node may be of it."""

    @classmethod
    def of(cls, options: "tuple[Pattern, ...]") -> "Choice":
        """The choice of these expressions."""
        keys = frozenset().union(*map(heads, options))
        return cls(
            options,
            {key: tuple(option for option in options if key in heads(option)) for key in keys},
        )


Pattern: TypeAlias = Var | Number | Op | Choice


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write an op as several. ``roots`` are the types that its last node may have."""

    kind: str
    cores: frozenset[str]
    """The types that the core of a decomposed pattern may have in which the form is looked for."""
    pattern: Pattern
    roots: frozenset[str]


@dataclass(frozen=True, slots=True)
class Kind:
    """The standard op that forms are, the opset it starts at, and attributes that it always has."""

    name: str
    called: str
    """How reports call it."""
    op: str
    opset: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FormTable:
    """The table of forms: kinds by name, and forms in the table's order."""

    kinds: Mapping[str, Kind]
    forms: tuple[Form, ...]


@cache
def form_table() -> FormTable:
    """The forms, parsed at the first call."""
    data = read_table("folds")
    rules = {
        name: (params, forms)
        for head, forms in data.pop("rules").items()
        for name, params in [_call(head)]
    }
    kinds = {
        name: Kind(
            name, row.get("called", name), row["op"], row["opset"], row.get("attributes", {})
        )
        for name, row in data.items()
    }
    patterns = [
        (name, row["cores"], parse(text, rules))
        for name, row in data.items()
        for text in row["forms"]
    ]
    forms = (
        Form(name, frozenset(cores), pattern, heads(pattern)) for name, cores, pattern in patterns
    )
    return FormTable(kinds, tuple(forms))


Rules: TypeAlias = Mapping[str, tuple[tuple[str, ...], list[str]]]
"""Rule -> its parameters and alternatives."""


def parse(text: str, rules: Rules) -> Pattern:
    """The expression tree of a form, its rules replaced by what they stand for."""
    return _pattern(_expression(text), {}, rules)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _call(head: str) -> tuple[str, tuple[str, ...]]:
    """Name and parameters of "rule(a, b)"."""
    call = _expression(head)
    assert isinstance(call, ast.Call)
    return ast.unparse(call.func), tuple(ast.unparse(item) for item in call.args)


def _pattern(expression: ast.expr, given: Mapping[str, Pattern], rules: Rules) -> Pattern:
    if isinstance(expression, ast.Name):
        return given.get(expression.id, Var(expression.id))
    if not isinstance(expression, ast.Call):
        return Number(float(ast.literal_eval(expression)))
    name, inputs = (
        ast.unparse(expression.func),
        tuple(_pattern(item, given, rules) for item in expression.args),
    )
    if name not in rules:
        kinds = Number, Op | Choice, Var
        places = sorted(
            range(len(inputs)),
            key=lambda n: [isinstance(inputs[n], kind) for kind in kinds].index(True),
        )
        return Op(
            name,
            inputs,
            tuple(places),
            tuple((n, heads(inputs[n])) for n in places if heads(inputs[n])),
        )
    params, alternatives = rules[name]
    bound = dict(zip(params, inputs, strict=True))
    options = tuple(_pattern(_expression(text), bound, rules) for text in alternatives)
    return options[0] if len(options) == 1 else Choice.of(options)


def heads(pattern: Pattern) -> frozenset[str]:
    """The types that the last node of what matches may have; empty for values and numbers."""
    if isinstance(pattern, Choice):
        return frozenset(pattern.ending_in)
    return frozenset({pattern.key}) if isinstance(pattern, Op) else frozenset()
