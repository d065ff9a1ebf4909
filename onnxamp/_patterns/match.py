"""Where written-out forms stand in a graph: expressions matched against nodes, from the last node backwards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, prod
from typing import Any

from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._model.weights import embed
from onnxamp._ops.facts import attribute
from onnxamp._patterns.forms import Choice, Number, Op, Pattern, Var

_COMMUTE = frozenset({"Add", "Mul"})
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceSum"})
_CLOSE = 1e-6
"""How far a number may be from that of the form, relatively: float32 and the decimals that exporters write."""
_FEW = 64
"""Elements up to which a constant may be a number or axes."""


@dataclass(slots=True)
class Reading:
    """A model as the matcher reads it; ``tensors`` are the constants that no caller can override."""

    graph: Graph
    tensors: dict[int, TensorProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for scope in self.graph.scopes:
            for tensor in scope.proto.initializer:
                value = scope.names[tensor.name]
                if self.graph.values[value].origin is Origin.INITIALIZER:
                    self.tensors[value] = tensor
        for node in self.graph.nodes:
            found = attribute(node.proto, "value") if node.key == "Constant" else None
            if isinstance(found, TensorProto) and node.outputs:
                self.tensors[node.outputs[0]] = found

    def is_passing(self, node: Node) -> bool:
        """Whether the node passes its input on as it is.

        That is an Identity, a Cast to the type that is there, or the Max of one input that keeps Casts from fusions.
        """
        if node.key == "Cast":
            return self.graph.types[node.inputs[0]] == self.graph.types[node.outputs[0]]
        return node.key == "Identity" or (node.key == "Max" and len(node.inputs) == 1)

    def passed_on(self, value: int) -> int:
        """The value that is passed on as this one."""
        while (node := self.graph.producer(value)) is not None and self.is_passing(node):
            value = node.inputs[0]
        return value

    def number(self, value: int) -> float | None:
        """The number that a constant of one element is, None where the value is anything else.

        More than one dimension could raise the rank of what it meets, so such a constant is none.
        """
        value = self.passed_on(value)
        tensor, node = self.tensors.get(value), self.graph.producer(value)
        if tensor is None and node is not None and node.key == "Constant":
            single = attribute(node.proto, "value_float")
            single = attribute(node.proto, "value_int") if single is None else single
            return None if single is None else float(single)
        if tensor is None or len(tensor.dims) > 1 or prod(tensor.dims) != 1 or tensor.data_type == TensorProto.STRING:
            return None
        return float(self.array(tensor)[0])

    def integers(self, value: int) -> list[int] | None:
        """Elements of a small constant, as axes are."""
        value = self.passed_on(value)
        tensor, node = self.tensors.get(value), self.graph.producer(value)
        if tensor is None and node is not None and node.key == "Constant":
            found = attribute(node.proto, "value_ints")
            return None if found is None else list(found)
        if tensor is None or prod(tensor.dims) > _FEW or tensor.data_type == TensorProto.STRING:
            return None
        return [int(number) for number in self.array(tensor)]

    def array(self, tensor: TensorProto) -> NDArray[Any]:
        """Elements of a small tensor, wherever they are stored."""
        small = TensorProto()
        small.CopyFrom(tensor)
        embed(small, self.graph.folder)
        return numpy_helper.to_array(small).reshape(-1)

    def only_reader(self, value: int) -> Node | None:
        """The node that alone reads the value, in its own graph, where no graph returns it."""
        if len(self.graph.uses[value]) != 1 or self.graph.results[value]:
            return None
        node = self.graph.nodes[self.graph.uses[value][0][0]]
        return node if node.scope == self.graph.values[value].scope else None


@dataclass(frozen=True, slots=True)
class Match:
    """Nodes of a form, the values that its names stand for, and the axes of its reductions, counted from the end."""

    nodes: frozenset[int]
    values: Mapping[str, int]
    axes: tuple[int, ...] | None

    def with_nodes(self, *nodes: int) -> "Match":
        """The same with more nodes."""
        return Match(self.nodes.union(nodes), self.values, self.axes)


NOTHING = Match(frozenset(), {}, None)


def matches(reading: Reading, pattern: Pattern, value: int, scope: int, so_far: Match = NOTHING) -> Iterator[Match]:
    """Every way in which the float32 value, computed in this scope, is what the pattern says.

    Depth and number of steps are bounded by the pattern, not by the graph.
    """
    if isinstance(pattern, Choice):
        for option in pattern.options:
            yield from matches(reading, option, value, scope, so_far)
    elif isinstance(pattern, Var):
        value = reading.passed_on(value)
        if so_far.values.get(pattern.name, value) == value:
            yield Match(so_far.nodes, {**so_far.values, pattern.name: value}, so_far.axes)
    elif isinstance(pattern, Number):
        found = reading.number(value)
        if found is not None and isclose(found, pattern.value, rel_tol=_CLOSE):
            yield so_far
    else:
        yield from _node(reading, pattern, value, scope, so_far)


def _node(reading: Reading, pattern: Op, value: int, scope: int, so_far: Match) -> Iterator[Match]:
    node = reading.graph.producer(value)
    while node is not None and node.scope == scope and reading.is_passing(node):
        so_far = so_far.with_nodes(node.index)
        node = reading.graph.producer(node.inputs[0])
    if node is None or node.key != pattern.key or node.scope != scope or reading.graph.types[node.outputs[0]] != FLOAT:
        return
    axes = so_far.axes
    if node.key in _REDUCTIONS:
        found = axes_of(reading, node)
        if found is None or axes not in (None, found):
            return
        axes = found
    elif len(node.inputs) != len(pattern.inputs):
        return
    here = Match(so_far.nodes | {node.index}, so_far.values, axes)
    inputs = node.inputs[: len(pattern.inputs)]
    orders = [inputs, inputs[::-1]] if node.key in _COMMUTE and inputs[0] != inputs[1] else [inputs]
    # What fails at once comes first, and last a name alone, which would take anything.
    kinds = Number, Op | Choice, Var
    places = sorted(
        range(len(inputs)), key=lambda place: [isinstance(pattern.inputs[place], k) for k in kinds].index(True)
    )
    for order in orders:
        found_so_far = [here]
        for place in places:
            found_so_far = [
                further
                for match in found_so_far
                for further in matches(reading, pattern.inputs[place], order[place], scope, match)
            ]
        yield from found_so_far


def axes_of(reading: Reading, node: Node) -> tuple[int, ...] | None:
    """Axes of a reduction that keeps its dimensions, counted from the end and sorted; None where they are not known."""
    if attribute(node.proto, "keepdims") == 0:
        return None
    axes, shape = attribute(node.proto, "axes"), reading.graph.shapes[node.inputs[0]]
    if axes is None and node.input(1) != ABSENT:
        axes = reading.integers(node.inputs[1])
        if axes is None:
            return None
    if not axes and (shape is None or attribute(node.proto, "noop_with_empty_axes")):
        return None
    return _from_end(axes, None if shape is None else len(shape))


def _from_end(axes: Sequence[int] | None, rank: int | None) -> tuple[int, ...] | None:
    """The axes as negative numbers, all of them where none is named; None where one is not known to be there."""
    if rank is None:
        return tuple(sorted(axes)) if axes and max(axes) < 0 else None
    found = tuple(sorted(axis if axis < 0 else axis - rank for axis in axes or range(rank)))
    return found if all(-rank <= axis < 0 for axis in found) else None
