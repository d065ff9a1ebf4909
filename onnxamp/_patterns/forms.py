"""Written-out forms as expression trees, read from ``_data/folds.toml``; the comments there define the language."""

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final, TypeAlias


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


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of several expressions."""

    options: "tuple[Pattern, ...]"


Pattern: TypeAlias = Var | Number | Op | Choice


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write an op out.

    ``roots`` are the types that its last node may have; one of ``anchors`` is in it whatever is chosen.
    """

    kind: str
    pattern: Pattern
    roots: frozenset[str]
    anchors: frozenset[str]


@dataclass(frozen=True, slots=True)
class Kind:
    """The standard op that written-out forms are, the opset it starts at, and attributes that it always has."""

    name: str
    called: str
    """How reports call it."""
    op: str
    opset: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoldFacts:
    """The table of forms: kinds by name, and forms by the type of their last node, in the table's order."""

    kinds: Mapping[str, Kind]
    forms: Mapping[str, tuple[Form, ...]]


_ARITHMETIC: Final = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})


@cache
def fold_facts() -> FoldFacts:
    """The facts, parsed at the first call."""
    data = tomllib.loads(resources.files("onnxamp").joinpath("_data/folds.toml").read_text(encoding="utf-8"))
    rules = {name: (params, forms) for head, forms in data.pop("rules").items() for name, params in [_call(head)]}
    kinds = {
        name: Kind(name, row.get("called", name), row["op"], row["opset"], row.get("attributes", {}))
        for name, row in data.items()
    }
    forms = []
    for name, row in data.items():
        for form in row["forms"]:
            pattern = parse(form, rules)
            forms.append(Form(name, pattern, frozenset(_roots(pattern)), _anchors(pattern)))
    keys = sorted(set().union(*(form.roots for form in forms)))
    return FoldFacts(kinds, {key: tuple(form for form in forms if key in form.roots) for key in keys})


Rules: TypeAlias = Mapping[str, tuple[tuple[str, ...], list[str]]]
"""Rule -> its parameters and alternatives."""


def parse(text: str, rules: Rules) -> Pattern:
    """The expression tree of a form, its rules replaced by what they stand for."""
    return _pattern(_expression(text), {}, rules)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _call(head: str) -> tuple[str, tuple[str, ...]]:
    """Name and parameters of "rule(a, b)"."""
    found = _expression(head)
    assert isinstance(found, ast.Call)
    return ast.unparse(found.func), tuple(ast.unparse(item) for item in found.args)


def _pattern(found: ast.expr, given: Mapping[str, Pattern], rules: Rules) -> Pattern:
    if isinstance(found, ast.Name):
        return given.get(found.id, Var(found.id))
    if not isinstance(found, ast.Call):
        return Number(float(ast.literal_eval(found)))
    name, inputs = ast.unparse(found.func), tuple(_pattern(item, given, rules) for item in found.args)
    if name not in rules:
        return Op(name, inputs)
    params, alternatives = rules[name]
    bound = dict(zip(params, inputs, strict=True))
    options = tuple(_pattern(_expression(text), bound, rules) for text in alternatives)
    return options[0] if len(options) == 1 else Choice(options)


def _roots(pattern: Pattern) -> set[str]:
    if isinstance(pattern, Choice):
        return set().union(*map(_roots, pattern.options))
    assert isinstance(pattern, Op)
    return {pattern.key}


def _anchors(pattern: Pattern) -> frozenset[str]:
    """Types, plain arithmetic apart, of which one at least is in whatever matches; empty where none is sure to be."""
    if isinstance(pattern, Choice):
        found = [_anchors(option) for option in pattern.options]
        return frozenset().union(*found) if all(found) else frozenset()
    if not isinstance(pattern, Op):
        return frozenset()
    if pattern.key not in _ARITHMETIC:
        return frozenset({pattern.key})
    return min(filter(None, map(_anchors, pattern.inputs)), key=len, default=frozenset())
