"""Matches of patterns, and the matcher of forms, which compares expressions with nodes from the last node backwards."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from math import isclose
from typing import Any, NamedTuple, TypeAlias

from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.tables import read_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


class Var(NamedTuple):
    """Any value; equal names stand for the same value."""

    name: str

    def match(self, search: "FormSearch", value: int, bound: "Bindings") -> "Found":
        """Return the bindings with which the name stands for a value."""
        if search.graph.passing:
            value = search.graph.passed_on(value)
        known = bound.values.get(self.name)
        if known is None:
            return (bound._replace(values={**bound.values, self.name: value}),)
        return (bound,) if known == value else ()


class Scalar(NamedTuple):
    """A constant with one element."""

    value: float

    def match(self, search: "FormSearch", value: int, bound: "Bindings") -> "Found":
        """Return the same bindings if a value is the number."""
        if search.graph.passing:
            value = search.graph.passed_on(value)
        number = search.graph.constants.scalar(value)
        is_equal = number is not None and isclose(number, self.value, rel_tol=_CLOSE)
        return (bound,) if is_equal else ()


class Op(NamedTuple):
    """A node of this type whose inputs match."""

    key: str
    inputs: "tuple[Pattern, ...]"
    places: tuple[int, ...]
    """The inputs in the order in which to try them: those that fail fast first; names, which match anything, last."""
    heads: tuple[tuple[int, frozenset[str]], ...]
    """The inputs that must be nodes, each with its possible op types."""
    commutes: bool
    """Whether its inputs may be swapped."""
    reduces: bool
    """Whether it reduces axes."""

    def match(self, search: "FormSearch", value: int, bound: "Bindings") -> "Found":
        """Return the alternative bindings with which a node and its inputs match a value."""
        if search.makers[value] != self.key:
            return ()
        scope, nodes, values, axes = bound
        graph = search.graph
        node = graph.nodes[graph.values[value].producer]
        # Nodes that pass the value on belong to the match as well.
        while node.key != self.key:
            if node.scope != scope:
                return ()
            nodes = *nodes, node.index
            node = graph.nodes[graph.values[node.inputs[0]].producer]
        if node.scope != scope or not search.may_be(self, node):
            return ()
        orders = search.orders(self, node)
        # All reductions of a form are along the same axes.
        if orders and self.reduces:
            counted = search.axes_of(node)
            if counted is None or axes not in ((), counted):
                return ()
            axes = counted
        matches: list[Bindings] = []
        start = Bindings(scope, (*nodes, node.index), values, axes)
        for order in orders:
            alternatives: Found = (start,)
            for place in self.places:
                part = self.inputs[place]
                if len(alternatives) == 1:
                    alternatives = part.match(search, order[place], alternatives[0])
                    continue
                further: list[Bindings] = []
                for one in alternatives:
                    further += part.match(search, order[place], one)
                alternatives = further
            matches += alternatives
        return matches


@record
class Choice:
    """Any of several expressions, all of them nodes."""

    options: "tuple[Pattern, ...]"

    ending_in: "Mapping[str, list[Pattern]]" = field(compare=False)
    """Op type -> the options whose last node may have it."""

    def match(self, search: "FormSearch", value: int, bound: "Bindings") -> "Found":
        """Return the alternative bindings with which any of the options matches a value."""
        matches: list[Bindings] = []
        for option in self.ending_in.get(search.makers[value], ()):
            matches += option.match(search, value, bound)
        return matches


Pattern: TypeAlias = Var | Scalar | Op | Choice


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
    ending_in: Mapping[str, Sequence[tuple[Form, Sequence[Op]]]]
    """Op type -> the forms whose last node may have it, each with those of its alternatives that end in it."""


@cache
def form_table() -> FormTable:
    """Return the forms, which are parsed at the first call."""
    data = read_table("folds")
    rules = dict(_rule(head, forms) for head, forms in data.pop("rules").items())
    kinds = dict[str, Kind]()
    forms = list[Form]()
    ending_in = defaultdict[str, list[tuple[Form, Sequence[Op]]]](list)
    for name, row in data.items():
        texts = row.pop("forms")
        cores = frozenset(row.pop("cores"))
        kinds[name] = Kind(**{"name": name, "called": name, **row})
        for pattern in (parse(text, rules) for text in texts):
            forms.append(Form(name, cores, pattern))
            for key, ends in _ends(pattern).items():
                ending_in[key].append((forms[-1], ends))
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
    """Return the tree of an expression, in which ``given`` has the arguments of the rule around it, by parameter."""
    if isinstance(expression, ast.Name):
        return given.get(expression.id, Var(expression.id))
    if not isinstance(expression, ast.Call):
        return Scalar(float(ast.literal_eval(expression)))
    name = ast.unparse(expression.func)
    inputs = tuple(_pattern(item, given, rules) for item in expression.args)
    if name not in rules:
        ranks = [*map(_rank, inputs)]
        places = sorted(range(len(inputs)), key=ranks.__getitem__)
        ends = ((n, heads(inputs[n])) for n in places)
        return Op(
            key=name,
            inputs=inputs,
            places=tuple(places),
            heads=tuple((n, keys) for n, keys in ends if keys),
            commutes=name in op_facts().commutative,
            reduces=name in op_facts().reduces_axes,
        )
    params, alternatives = rules[name]
    bound = dict(zip(params, inputs, strict=True))
    options = tuple(_pattern(_expression(text), bound, rules) for text in alternatives)
    ending_in: dict[str, list[Pattern]] = defaultdict(list)
    for option in options:
        for key in heads(option):
            ending_in[key].append(option)
    return options[0] if len(options) == 1 else Choice(options, ending_in)


def _rank(pattern: Pattern) -> int:
    """Return how late to try an input: numbers fail first, names match anything."""
    if isinstance(pattern, Scalar):
        return 0
    return 2 if isinstance(pattern, Var) else 1


def heads(pattern: Pattern) -> frozenset[str]:
    """Return the possible op types of the last node of a match; empty for values and numbers."""
    if isinstance(pattern, Choice):
        return frozenset(pattern.ending_in)
    return frozenset({pattern.key}) if isinstance(pattern, Op) else frozenset()


def _ends(pattern: Pattern) -> Mapping[str, Sequence[Op]]:
    """Return the alternatives of a pattern, by the op type of their last node."""
    ends: dict[str, list[Op]] = defaultdict(list)
    stack = [pattern]
    while stack:
        one = stack.pop()
        if isinstance(one, Choice):
            stack += one.options
        elif isinstance(one, Op):
            ends[one.key].append(one)
    return ends


_CLOSE = 1e-6
"""The relative tolerance for the numbers of a form, because exporters write few decimals."""


@record
class Match:
    """Nodes that form one decomposed op.

    :mod:`onnxamp._decide.patterns.find` recognizes nodes that belong together, regardless of other nodes among them.
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


def maker_keys(graph: Graph) -> Sequence[str]:
    """Return the op type of each value's producer, looking through ops that pass it on; "" if there is none."""
    nodes = graph.nodes
    keys = [
        "" if value.producer == ABSENT else nodes[value.producer].key
        for value in graph.values
    ]
    keys.append("")  # the entry of ABSENT
    for node in graph.order if graph.passing else ():
        if node.index in graph.passing and node.outputs[0] != ABSENT:
            keys[node.outputs[0]] = keys[node.inputs[0]]
    return keys


class Bindings(NamedTuple):
    """The nodes, values and axes that a match has bound to a form so far."""

    scope: int
    nodes: tuple[int, ...]
    values: Mapping[str, int]
    axes: tuple[int, ...]


Found: TypeAlias = Sequence[Bindings]
"""Alternative bindings with which an expression matches a value."""


class FormSearch:
    """Compares forms with the nodes of a graph, from the last node backwards.

    Attributes:
        graph: the graph.
        makers: see :func:`maker_keys`. They rule out most expressions before any node is compared.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers = maker_keys(graph)
        self._axes = dict[int, tuple[int, ...] | None]()

    def may_be_any(self, ends: Sequence[Op], core: Node) -> bool:
        """Return whether a node may be the last of any of these, judged by the op types before it."""
        return any(self.may_be(end, core) and self.orders(end, core) for end in ends)

    def look_of(self, core: Node) -> tuple[object, ...]:
        """Return all that :meth:`may_be_any` of a node depends on."""
        makers = map(self.makers.__getitem__, core.inputs)
        is_square = len(core.inputs) > 1 and core.inputs[0] == core.inputs[1]
        return (self.graph.types[core.outputs[0]], is_square, *makers)

    def matches(self, form: Form, core: Node) -> list[Match]:
        """Return every match of the form that ends at the node. All its nodes are in one scope, and compute float32.

        The form, not the graph, bounds the depth and the number of steps.
        """
        start = Bindings(core.scope, (), {}, ())
        return [
            Match(form.kind, core.index, frozenset(nodes), values, axes)
            for _, nodes, values, axes in form.pattern.match(
                self, core.outputs[0], start
            )
        ]

    def axes_of(self, node: Node) -> tuple[int, ...] | None:
        """Return :func:`axes_of` of a reduction, which forms meet on several ways."""
        if node.index not in self._axes:
            self._axes[node.index] = axes_of(self.graph, node)
        return self._axes[node.index]

    def may_be(self, pattern: Op, node: Node) -> bool:
        """Return whether a node computes float32, and has as many inputs as expected."""
        is_float = self.graph.types[node.outputs[0]] == FLOAT
        return is_float and (
            pattern.reduces or len(node.inputs) == len(pattern.inputs)
        )

    def orders(self, pattern: Op, node: Node) -> list[tuple[int, ...]]:
        """Return the orders of a node's inputs in which they may match: both of a sum or a product."""
        inputs = node.inputs[: len(pattern.inputs)]
        # Equal inputs would match twice.
        is_twofold = pattern.commutes and inputs[0] != inputs[1]
        makers = self.makers
        orders: list[tuple[int, ...]] = []
        for order in (inputs, inputs[::-1]) if is_twofold else (inputs,):
            for place, keys in pattern.heads:
                if makers[order[place]] not in keys:
                    break
            else:
                orders.append(order)
        return orders


def maker_of(graph: Graph, value: int, *keys: str) -> Node | None:
    """Return the same as ``graph.producer``, looking through ops that pass the value on."""
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
    # From the end, so that axes written in either way compare equal.
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


def reduced_axes(graph: Graph, node: Node, rank: int) -> list[int] | None:
    """Return the axes of a reduction of a tensor of this rank, none negative; None if they are computed, or none of
    its axes.
    """
    given = declared_axes(graph, node)
    if given is None or not all(-rank <= axis < rank for axis in given):
        return None
    is_all = not given and not attribute(node.proto, "noop_with_empty_axes")
    return list(range(rank)) if is_all else [axis % rank for axis in given]
