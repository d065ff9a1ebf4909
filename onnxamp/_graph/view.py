"""The frozen view of a model: scopes, nodes, values and uses, as :mod:`onnxamp._graph.graph` builds it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto

from onnxamp._model.protos import node_bodies, record
from onnxamp._ops.signature import Port, Signature, SignatureBook

ABSENT = -1
"""Index of an omitted optional input or output, and of "no node" and "no scope".

Types, shapes, uses and results have an empty entry for it, at the end.
"""


class Origin(Enum):
    """The origin of a value."""

    INPUT = "graph input"
    DEFAULT = "graph input with a default"
    """An initializer that callers may override (from IR version 4 on): part of the signature."""
    INITIALIZER = "initializer"
    SPARSE = "sparse initializer"
    NODE = "node output"


@record
class Value:
    """A value: output ``port`` of node ``producer``, input ``port`` of its scope, or an initializer."""

    index: int
    name: str
    scope: int
    origin: Origin
    producer: int
    port: int


@record
class Node:
    """A node; ``inputs`` and ``outputs`` are value indices (or ABSENT), ``bodies`` its subgraphs' scopes."""

    index: int
    scope: int
    proto: NodeProto
    key: str
    """Op type as in tables, see :func:`onnxamp._ops.facts.op_key`."""
    signature: Signature | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """Name of the node in messages: its own name, or else its first output."""
        return self.proto.name or self.first_output or f"#{self.index}"

    @property
    def first_output(self) -> str:
        """Name of the first output that is not omitted; "" if there is none."""
        return next(filter(None, self.proto.output), "")

    @property
    def reads(self) -> list[int]:
        """The values of the inputs that are not omitted."""
        return [value for value in self.inputs if value != ABSENT]

    @property
    def writes(self) -> list[int]:
        """The values of the outputs that are not omitted."""
        return [value for value in self.outputs if value != ABSENT]

    def formals(self) -> Iterator[tuple[int, Port | None]]:
        """Yield the values of inputs and outputs, each with its port in the schema, if there is one."""
        signature = self.signature
        for position, value in enumerate(self.inputs):
            yield value, None if signature is None else signature.input(position)
        for position, value in enumerate(self.outputs):
            yield value, None if signature is None else signature.output(position)

    def input(self, position: int) -> int:
        """Value index of an input; ABSENT if it is omitted."""
        return self.inputs[position] if position < len(self.inputs) else ABSENT

    def output(self, position: int) -> int:
        """Value index of an output; ABSENT if it is omitted, or the position is negative."""
        return self.outputs[position] if 0 <= position < len(self.outputs) else ABSENT


class Ports(NamedTuple):
    """Positions of a node's float inputs and outputs that are low precision if the node is."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """A graph or a body. A scope is opaque if it belongs to an op without a schema; it is never changed."""

    index: int
    parent: int
    owner: int
    proto: GraphProto
    opaque: bool
    names: Mapping[str, int]
    nodes: range
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A resolved model.

    Attributes:
        model: the model itself; it must not change.
        book: schemas at the model's opsets.
        scopes: graphs and bodies, outer ones first.
        nodes: nodes of all scopes, in the file's order.
        values: values of all scopes.
        results: value -> (scope, output position) pairs that return it.
        order: the same nodes, each after those that it depends on and after those of its bodies.
    """

    model: ModelProto
    book: SignatureBook
    scopes: tuple[Scope, ...]
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    results: Sequence[Sequence[tuple[int, int]]]
    order: tuple[Node, ...]

    @cached_property
    def uses(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Value -> (node, input position) pairs that read it."""
        uses: list[list[tuple[int, int]]] = [[] for _ in (*self.values, ABSENT)]
        for node in self.nodes:
            for port, value in enumerate(node.inputs):
                uses[value].append((node.index, port))
        uses[ABSENT].clear()
        return uses

    @cached_property
    def by_key(self) -> Mapping[str, Sequence[Node]]:
        """Op type -> its nodes."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.key, []).append(node)
        return found

    def nodes_of(self, keys: Iterable[str]) -> list[Node]:
        """Return the nodes of some op types, in the order of all nodes."""
        return self.at(node.index for key in keys for node in self.by_key.get(key, ()))

    def at(self, indices: Iterable[int]) -> list[Node]:
        """Return some nodes, in the order of all nodes."""
        return [self.nodes[index] for index in sorted(indices)]

    def producer(self, value: int, *keys: str) -> Node | None:
        """Return the node that produces the value; None if there is none, or one of another op type than ``keys``."""
        index = self.values[value].producer if value != ABSENT else ABSENT
        node = None if index == ABSENT else self.nodes[index]
        return None if node is None or (keys and node.key not in keys) else node

    def consumers(self, value: int) -> Iterator[tuple[Node, int]]:
        """Return nodes that read the value, with the input position; none if the value is ABSENT."""
        return ((self.nodes[node], port) for node, port in self.uses[value])

    def readers(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Return nodes that read any output of the node, with the input position."""
        return (use for value in node.outputs for use in self.consumers(value))

    def around(self, value: int) -> Iterator[Node]:
        """Yield the nodes that produce or read a value, and the owners of bodies that it enters or leaves.

        The value is not ABSENT.
        """
        named = self.values[value]
        passed = [scope for scope, _ in self.results[value]]
        if named.origin is Origin.INPUT:
            passed.append(named.scope)
        owners = (self.scopes[scope].owner for scope in passed if scope != 0)
        readers = (node for node, _ in self.uses[value])
        indices = (named.producer, *readers, *owners)
        return (self.nodes[index] for index in indices if index != ABSENT)

    def visible(self, name: str, scope: int) -> int:
        """Return the value of a name in a scope, its own or an outer one; ABSENT if there is none."""
        while scope != ABSENT and name not in self.scopes[scope].names:
            scope = self.scopes[scope].parent
        return ABSENT if scope == ABSENT else self.scopes[scope].names[name]

    def only_reader(self, value: int) -> Node | None:
        """Return the only consumer of a value, in its own graph, if no graph returns the value."""
        if len(self.uses[value]) != 1 or self.results[value]:
            return None
        node = self.nodes[self.uses[value][0][0]]
        return node if node.scope == self.values[value].scope else None

    def all_names(self) -> set[str]:
        """Return names of all values and nodes of all scopes, which new names must avoid."""
        return {value.name for value in self.values} | {
            node.proto.name for node in self.nodes
        }

    def overridable(self) -> list[Value]:
        """Initializers that callers may override."""
        return [value for value in self.values if value.origin is Origin.DEFAULT]


def shadowing(view: View) -> dict[int, int]:
    """Value of a body -> the nearest outer value of the same name, which it hides from the body.

    Complexity: values times nesting depth.
    """
    found = (
        (value, view.visible(name, inner.parent))
        for inner in view.scopes[1:]
        for name, value in inner.names.items()
    )
    return {value: outer for value, outer in found if outer != ABSENT}


def scope_path(view: View, scope: int) -> str:
    """Return the nodes and attributes whose bodies a scope is in, outermost first: ``"loop.body/if.then_branch"``."""
    path: list[str] = []
    while scope:
        owner = view.nodes[view.scopes[scope].owner]
        path.append(
            f"{owner.label}.{next(name for name, body in owner.bodies if body == scope)}"
        )
        scope = owner.scope
    return "/".join(reversed(path))


def scope_graphs(view: View, model: ModelProto) -> list[GraphProto]:
    """Return the graphs of ``model``, a copy or skeleton of the view's model, in the order of the view's scopes."""
    graphs = [model.graph]
    for scope in view.scopes[1:]:
        owner = view.nodes[scope.owner]
        proto = graphs[scope.parent].node[
            scope.owner - view.scopes[scope.parent].nodes.start
        ]
        position = [body for _, body in owner.bodies].index(scope.index)
        graphs.append(node_bodies(proto)[position][1])
    return graphs
