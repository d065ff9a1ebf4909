"""Matches of patterns, and the matcher of forms, which compares expressions with nodes from the last node backwards."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isclose
from typing import Any, NamedTuple, TypeAlias

from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.tables import read_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


class Var(NamedTuple):
    """Any value; equal names stand for the same value."""

    name: str


class Number(NamedTuple):
    """A constant with one element."""

    value: float


class Op(NamedTuple):
    """A node of this type whose inputs match."""

    key: str
    inputs: "tuple[Pattern, ...]"
    places: tuple[int, ...]
    """The inputs in the order in which to try them: those that fail fast first; names, which match anything, last."""
    heads: tuple[tuple[int, frozenset[str]], ...]
    """The inputs that must be nodes, each with its possible op types."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of several expressions, all of them nodes."""

    options: "tuple[Pattern, ...]"

    ending_in: "Mapping[str, list[Pattern]]" = field(compare=False)
    """Op type -> the options whose last node may have it."""


Pattern: TypeAlias = Var | Number | Op | Choice


class Form(NamedTuple):
    """One way to write an op as several ops."""

    kind: str
    cores: frozenset[str]
    """The possible op types of the core of a decomposed pattern in which to search for the form."""
    pattern: Pattern


class Kind(NamedTuple):
    """The standard op that forms represent, the opset in which it first appears, and its fixed attributes.

    ``own`` has ONNX Runtime's own op that replaces it if the opset cannot be reached, by target.
    """

    name: str
    called: str
    """Its name in reports."""
    op: str
    opset: int
    attributes: Mapping[str, Any] = {}
    own: Mapping[str, str] = {}


class FormTable(NamedTuple):
    """The table of forms: kinds by name, and forms in the table's order."""

    kinds: Mapping[str, Kind]
    forms: tuple[Form, ...]
    ending_in: Mapping[str, Sequence[Form]]
    """Op type -> the forms whose last node may have it."""


@cache
def form_table() -> FormTable:
    """Return the forms, which are parsed at the first call."""
    data = read_table("folds")
    rules = dict(_rule(head, forms) for head, forms in data.pop("rules").items())
    kinds = dict[str, Kind]()
    forms = list[Form]()
    ending_in = defaultdict[str, list[Form]](list)
    for name, row in data.items():
        texts = row.pop("forms")
        cores = frozenset(row.pop("cores"))
        kinds[name] = Kind(**{"name": name, "called": name, **row})
        for pattern in (parse(text, rules) for text in texts):
            forms.append(Form(name, cores, pattern))
            for key in heads(pattern):
                ending_in[key].append(forms[-1])
    return FormTable(kinds, tuple(forms), ending_in)


Rules: TypeAlias = Mapping[str, tuple[list[str], list[str]]]
"""Rule -> its parameters and alternatives."""


def parse(text: str, rules: Rules) -> Pattern:
    """Return the expression tree of a form, with its rules expanded."""
    return _pattern(_expression(text), {}, rules)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _rule(head: str, forms: list[str]) -> tuple[str, tuple[list[str], list[str]]]:
    """Return the name of "rule(a, b)", its parameters and alternatives."""
    call = _expression(head)
    assert isinstance(call, ast.Call)
    return ast.unparse(call.func), (list(map(ast.unparse, call.args)), forms)


def _pattern(
    expression: ast.expr, given: Mapping[str, Pattern], rules: Rules
) -> Pattern:
    if isinstance(expression, ast.Name):
        return given.get(expression.id, Var(expression.id))
    if not isinstance(expression, ast.Call):
        return Number(float(ast.literal_eval(expression)))
    name = ast.unparse(expression.func)
    inputs = tuple(_pattern(item, given, rules) for item in expression.args)
    if name not in rules:
        kinds = Number, Op | Choice, Var
        places = sorted(
            range(len(inputs)),
            key=lambda n: [isinstance(inputs[n], kind) for kind in kinds].index(True),
        )
        ends = ((n, heads(inputs[n])) for n in places)
        return Op(
            name, inputs, tuple(places), tuple((n, keys) for n, keys in ends if keys)
        )
    params, alternatives = rules[name]
    bound = dict(zip(params, inputs, strict=True))
    options = tuple(_pattern(_expression(text), bound, rules) for text in alternatives)
    ending_in: dict[str, list[Pattern]] = defaultdict(list)
    for option in options:
        for key in heads(option):
            ending_in[key].append(option)
    return options[0] if len(options) == 1 else Choice(options, ending_in)


def heads(pattern: Pattern) -> frozenset[str]:
    """Return the possible op types of the last node of a match; empty for values and numbers."""
    if isinstance(pattern, Choice):
        return frozenset(pattern.ending_in)
    return frozenset({pattern.key}) if isinstance(pattern, Op) else frozenset()


_CLOSE = 1e-6
"""The relative tolerance for numbers of a form, because exporters write few decimals."""


@dataclass(frozen=True, slots=True)
class Match:
    """Nodes that form one decomposed op.

    :mod:`onnxamp._decide.patterns` recognizes nodes that belong together, regardless of other nodes among them.
    Within these, the match of a form can become one op.
    """

    kind: str
    """The kind of the form, such as "LayerNorm", or of the walk, such as "normalization"."""
    core: int
    """The node that messages name: the root, the exponential, or the last node of a form."""
    nodes: frozenset[int]
    values: Mapping[str, int] = field(default_factory=dict)
    """The values of the names in the form."""
    axes: tuple[int, ...] = ()
    """Axes of the reductions of the form, counted from the end."""


def matches(graph: Graph, form: Form, core: Node) -> Iterator[Match]:
    """Yield every match of the form that ends at the node. All its nodes are in one scope, and compute float32.

    The form, not the graph, bounds the depth and the number of steps.
    """
    start = _State(core.scope, frozenset(), {}, ())
    for state in _value(graph, form.pattern, core.outputs[0], start):
        yield Match(form.kind, core.index, state.nodes, state.values, state.axes)


class _State(NamedTuple):
    """The bindings of a match so far."""

    scope: int
    nodes: frozenset[int]
    values: Mapping[str, int]
    axes: tuple[int, ...]


def _value(
    graph: Graph, pattern: Pattern, value: int, state: _State
) -> Iterator[_State]:
    if isinstance(pattern, Op):
        yield from _node(graph, pattern, value, state)
    elif isinstance(pattern, Choice):
        for option in pattern.ending_in.get(_maker_key(graph, value), ()):
            yield from _value(graph, option, value, state)
    elif isinstance(pattern, Var):
        value = graph.passed_on(value)
        if state.values.get(pattern.name, value) == value:
            yield state._replace(values={**state.values, pattern.name: value})
    else:
        number = graph.constants.scalar(graph.passed_on(value))
        if number is not None and isclose(number, pattern.value, rel_tol=_CLOSE):
            yield state


def _node(graph: Graph, pattern: Op, value: int, state: _State) -> Iterator[_State]:
    node = graph.producer(value)
    scope = state.scope
    passing = list[int]()
    while node is not None and node.key != pattern.key and node.index in graph.passing:
        if node.scope != scope:
            return
        passing.append(node.index)
        node = graph.producer(node.inputs[0])
    if node is None or (node.key, node.scope) != (pattern.key, scope):
        return
    if graph.types[node.outputs[0]] != FLOAT:
        return
    is_reduction = node.key in op_facts().reduces_axes
    if not is_reduction and len(node.inputs) != len(pattern.inputs):
        return
    inputs = node.inputs[: len(pattern.inputs)]
    swaps = node.key in op_facts().commutative and inputs[0] != inputs[1]
    orders = [
        order
        for order in ((inputs, inputs[::-1]) if swaps else (inputs,))
        if all(_maker_key(graph, order[at]) in keys for at, keys in pattern.heads)
    ]
    if not orders:
        return
    axes = state.axes
    if is_reduction:
        counted = axes_of(graph, node)
        if counted is None or axes not in ((), counted):
            return
        axes = counted
    here = _State(scope, state.nodes.union(passing, (node.index,)), state.values, axes)
    for order in orders:
        states = [here]
        for place in pattern.places:
            states = [
                further
                for partial in states
                for further in _value(
                    graph, pattern.inputs[place], order[place], partial
                )
            ]
        yield from states


def _maker_key(graph: Graph, value: int) -> str:
    """Return the op type of the value's producer, looking through ops that pass it on; "" if there is none."""
    maker = maker_of(graph, value)
    return "" if maker is None else maker.key


def maker_of(graph: Graph, value: int, *keys: str) -> Node | None:
    """As ``graph.producer``, looking through ops that pass the value on."""
    return graph.producer(graph.passed_on(value), *keys)


def readers_of(graph: Graph, value: int) -> Iterator[Node]:
    """Yield the consumers of the value, looking through ops that pass it on."""
    stack = [value]
    while stack:
        for node, _ in graph.consumers(stack.pop()):
            if node.index in graph.passing:
                stack.append(node.outputs[0])
            else:
                yield node


def only_reader(graph: Graph, value: int) -> tuple[set[int], int, Node | None]:
    """Return the chain of nodes that pass the value on, the value after them, and the only consumer of that value."""
    between: set[int] = set()
    node = graph.only_reader(value)
    while node is not None and node.index in graph.passing:
        between.add(node.index)
        value = node.outputs[0]
        node = graph.only_reader(value)
    return between, value, node


def axes_of(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """Return the axes of a reduction that keeps its dimensions, counted from the end and sorted; None if unknown."""
    if attribute(node.proto, "keepdims") == 0:
        return None
    axes = declared_axes(graph, node)
    shape = graph.shapes[node.inputs[0]]
    takes_none = shape is None or attribute(node.proto, "noop_with_empty_axes")
    if axes is None or (not axes and takes_none):
        return None
    if shape is None:
        return tuple(sorted(axes)) if max(axes) < 0 else None
    rank = len(shape)
    counted = tuple(
        sorted(axis if axis < 0 else axis - rank for axis in axes or range(rank))
    )
    return counted if all(-rank <= axis < 0 for axis in counted) else None


def declared_axes(graph: Graph, node: Node) -> Sequence[int] | None:
    """Return the axes of a reduction as written, empty for all axes; None if they are computed."""
    axes: Sequence[int] | None = attribute(node.proto, "axes")
    if axes is None and node.input(1) != ABSENT:
        return graph.constants.integers(graph.passed_on(node.inputs[1]))
    return axes or ()
