"""The graph of a model with all analyses of it, each computed once, on first use."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias, TypeVar

from onnx import GraphProto, ModelProto, NodeProto

from onnxamp._base.errors import ModelError
from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, LOW_TENSORS
from onnxamp._facts.ops import is_exact, op_facts, op_key
from onnxamp._facts.signature import Signature, SignatureBook
from onnxamp._graph.constants import Constants
from onnxamp._graph.shapes import (
    Dims,
    Shape,
    read_dims,
    read_shapes,
    same_dims,
    sized_shapes,
    with_shapes,
)
from onnxamp._graph.static_shapes import static_dims
from onnxamp._graph.types import Inferred, Types, infer, same_types
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    Scope,
    Value,
    View,
    inline_functions,
    shadowing,
    stored_tensors,
)
from onnxamp._model.model import Asked, Model
from onnxamp._model.protos import node_bodies, opset_imports
from onnxamp._model.repair import in_order

V = TypeVar("V", bound=View)


class _DisorderError(ModelError):
    """A node stands before one that it depends on; if nodes were sorted before, they form a cycle."""


def resolve(make: Callable[..., V], model: ModelProto) -> V:
    """Resolve the names of a model. Complexity: linear in nodes, names and attributes.

    Args:
        make: constructs a View, or a class derived from it, from the fields of a View.
        model: a ModelProto whose nodes are in order; it must not change while the view is in use.

    Raises:
        ModelError: a name is defined twice or not at all, or a node stands before one that it depends on.
        OpsetError: the installed onnx does not know the opset.
    """
    # From IR version 4 on, an initializer that is listed as an input is a default, which callers may override.
    overridable = model.ir_version >= 4
    builder = _Builder(SignatureBook(opset_imports(model)), overridable)
    pending: deque[_Pending] = deque([(model.graph, ABSENT, ABSENT, "", False)])
    # Breadth first, so that the bodies of a node keep their order.
    while pending:
        pending.extend(builder.define(*pending.popleft()))
    builder.resolve()
    return make(
        model,
        builder.book,
        tuple(builder.scopes),
        tuple(builder.nodes),
        tuple(builder.values),
        builder.results,
        tuple(_topological(builder)),
    )


_Pending: TypeAlias = tuple[GraphProto, int, int, str, bool]


class _Op(NamedTuple):
    """The facts that all nodes of an op share: its op key, its signature, and the kind of its bodies.

    ``has_bodies`` is False only for ops that surely have none, which saves a look at their attributes.
    """

    key: str
    signature: Signature | None
    has_bodies: bool
    is_control_flow: bool


@dataclass(slots=True)
class _Builder:
    """Builds the values, nodes and scopes of a view."""

    book: SignatureBook
    overridable: bool
    values: list[Value] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    unresolved: list[int] = field(default_factory=list)
    """Nodes that have bodies, or read more than what their own scope defines before them."""
    ops: dict[tuple[str, str], _Op] = field(default_factory=dict)
    bodies: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    results: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    def define(
        self, graph: GraphProto, parent: int, owner: int, attribute: str, opaque: bool
    ) -> list[_Pending]:
        """Add a scope with everything it defines, and return the bodies of its nodes."""
        scope = len(self.scopes)
        names: dict[str, int] = {}
        first = len(self.nodes)
        if owner != ABSENT:
            self.bodies.setdefault(owner, []).append((attribute, scope))
        listed = set[str]()
        if scope == 0 and self.overridable:
            listed.update(item.name for item in graph.input)
        stored = Origin.INITIALIZER
        overridable = Origin.DEFAULT
        values = self.values
        # Slices, because protobuf's own iterators are slow.
        tensors = graph.initializer[:]
        first_stored = len(values)
        for item in tensors:
            name = item.name
            if name in names:
                raise self._twice(name, scope)
            names[name] = value = len(values)
            held = overridable if name in listed else stored
            values.append(Value(value, name, scope, held, ABSENT, 0))
        for sparse in graph.sparse_initializer:
            self._add(names, sparse.values.name, scope, Origin.SPARSE)
        for port, entry in enumerate(graph.input):
            if (
                entry.name not in names
                or self.values[names[entry.name]].origin is Origin.INPUT
            ):
                self._add(names, entry.name, scope, Origin.INPUT, port)
        pending = self._define_nodes(graph, scope, names, opaque=opaque)
        self.scopes.append(
            Scope(
                index=scope,
                parent=parent,
                owner=owner,
                proto=graph,
                opaque=opaque,
                names=names,
                nodes=range(first, len(self.nodes)),
                inputs=tuple([names[entry.name] for entry in graph.input]),
                outputs=(),
                stored=tensors,
                first_stored=first_stored,
            )
        )
        return pending

    def _define_nodes(
        self, graph: GraphProto, scope: int, names: dict[str, int], *, opaque: bool
    ) -> list[_Pending]:
        """Add the nodes of a scope and the values that they make, and return the bodies of its nodes."""
        pending: list[_Pending] = []
        origin = Origin.NODE
        values, nodes, ops = self.values, self.nodes, self.ops
        value_of = names.__getitem__
        for index, node in enumerate(graph.node[:], len(nodes)):
            op = ops.get((node.domain, node.op_type)) or self._op(node)
            # Only what is defined so far has a value yet, so the order of nodes is checked as well.
            try:
                inputs = (*map(value_of, node.input[:]),)
                is_unresolved = op.has_bodies
            except KeyError:
                inputs = ()
                is_unresolved = True
            if is_unresolved:
                self.unresolved.append(index)
            outputs: list[int] = []
            for port, output in enumerate(node.output[:]):
                if not output:
                    outputs.append(ABSENT)
                    continue
                if output in names:
                    raise self._twice(output, scope)
                names[output] = value = len(values)
                values.append(Value(value, output, scope, origin, index, port))
                outputs.append(value)
            # By position: keywords take half as long again.
            nodes.append(
                Node(index, scope, node, op.key, op.signature, inputs, (*outputs,), ())
            )
            if op.has_bodies:
                unknown = opaque or not op.is_control_flow
                pending += [
                    (body, scope, index, name, unknown)
                    for name, body in node_bodies(node)
                ]
        return pending

    def _op(self, node: NodeProto) -> _Op:
        """Return the facts that all nodes of the node's op share."""
        key = op_key(node)
        signature = self.book.get(node.domain, node.op_type)
        is_control_flow = key in op_facts().control_flow
        # Ops that onnx does not know, and those of other domains, may have bodies in any attribute.
        has_bodies = is_control_flow or signature is None or "::" in key
        op = _Op(key, signature, has_bodies, is_control_flow)
        self.ops[node.domain, node.op_type] = op
        return op

    def _add(
        self,
        names: dict[str, int],
        name: str,
        scope: int,
        origin: Origin,
        port: int = 0,
    ) -> None:
        if name in names:
            raise self._twice(name, scope)
        names[name] = len(self.values)
        self.values.append(Value(len(self.values), name, scope, origin, ABSENT, port))

    def _twice(self, name: str, scope: int) -> ModelError:
        where = self._where(scope)
        return ModelError(
            f"The value {name!r} is defined twice in {where}: every name must be unique there."
        )

    def _where(self, scope: int) -> str:
        if scope == 0:
            return "the graph"
        owner = self.scopes[scope].owner if scope < len(self.scopes) else ABSENT
        return f"a subgraph of {self.nodes[owner].proto.name!r}"

    def _find(self, name: str, scope: int) -> int:
        """Return the value index of a name as seen from a scope; ABSENT if there is none."""
        reader = len(self.nodes)
        while scope != ABSENT:
            value = self.scopes[scope].names.get(name)
            if value is not None:
                # Nodes are numbered in the file's order, so a producer has to come before its readers.
                if self.values[value].producer >= reader:
                    raise self._cyclic(reader)
                return value
            reader = self.scopes[scope].owner
            scope = self.scopes[scope].parent
        return ABSENT

    def _cyclic(self, reader: int) -> "_DisorderError":
        """Return the error about a node that reads a result of a later node, itself or in a body."""
        node = self.nodes[reader]
        return _DisorderError(
            f"The graph is cyclic: node {_label(node.proto)!r} ({node.key}) depends on its own output, or on a cycle."
        )

    def resolve(self) -> None:
        """Resolve the names that nodes read of outer scopes, attach bodies to nodes, and record results."""
        # The last entry, always empty, is that of ABSENT.
        self.results = [()] * (len(self.values) + 1)
        for index in self.unresolved:
            node = self.nodes[index]
            self.nodes[index] = Node(
                index=index,
                scope=node.scope,
                proto=node.proto,
                key=node.key,
                signature=node.signature,
                inputs=self._inputs(node),
                outputs=node.outputs,
                bodies=tuple(self.bodies.get(index, ())),
            )
        for position, scope in enumerate(self.scopes):
            outputs = tuple(
                [
                    self._result(entry.name, scope, port)
                    for port, entry in enumerate(scope.proto.output)
                ]
            )
            self.scopes[position] = replace(scope, outputs=outputs)

    def _inputs(self, node: Node) -> tuple[int, ...]:
        """Return the values that a node reads, some of which are omitted, of an outer scope, or at fault."""
        own = self.scopes[node.scope].names
        inputs = list[int]()
        for name in node.proto.input[:]:
            value = own.get(name)
            if value is None:
                value = self._outer(name, node.proto, node.scope) if name else ABSENT
            elif self.values[value].producer >= node.index:
                raise self._cyclic(node.index)
            inputs.append(value)
        return tuple(inputs)

    def _outer(self, name: str, proto: NodeProto, home: int) -> int:
        """Return the value that a node reads; ABSENT if an opaque scope does not define it."""
        value = self._find(name, home)
        if value == ABSENT and not self.scopes[home].opaque:
            raise ModelError(
                f"Node {_label(proto)!r} ({proto.op_type}) reads the value {name!r}, which nothing defines."
            )
        return value

    def _result(self, name: str, scope: Scope, port: int) -> int:
        value = self._find(name, scope.index)
        if value != ABSENT:
            self.results[value] += ((scope.index, port),)
        elif not scope.opaque:
            raise ModelError(
                f"Nothing produces the output {name!r} of {self._where(scope.index)}."
            )
        return value


def _label(proto: NodeProto) -> str:
    return proto.name or next(iter(proto.output), "")


def _topological(builder: _Builder) -> Sequence[Node]:
    """Return all nodes, each after those of its bodies."""
    if not builder.bodies:
        return builder.nodes
    result: list[Node] = []
    stack = [(node, False) for node in reversed(builder.scopes[0].nodes)]
    while stack:
        index, is_entered = stack.pop()
        node = builder.nodes[index]
        if is_entered or not node.bodies:
            result.append(node)
            continue
        stack.append((index, True))
        for _, scope in reversed(node.bodies):
            stack += [
                (inner, False) for inner in reversed(builder.scopes[scope].nodes)
            ]
    return result


@dataclass(frozen=True, eq=False)
class Graph(View, Asked):
    """A resolved model and the analyses of it.

    Types, shapes and constants are attributes; higher layers run analyses of their own through :meth:`ask`. Results
    never go stale, because a graph never changes: an edited model gets a graph of its own.
    """

    folder: Path | None = None
    """The folder of the model's external data; None if all weights are in the model."""
    before: "Graph | None" = None
    """A graph whose values, but for weights, have the types and shapes of those of the same names; None if there is
    none."""

    @classmethod
    def of(
        cls,
        model: ModelProto,
        folder: Path | None = None,
        before: "Graph | None" = None,
    ) -> Self:
        """Resolve a model, which must not change from then on. Arguments and errors: see :func:`resolve`.

        If its nodes are out of order, the graph is that of a sorted copy.
        """
        make = partial(cls, folder=folder, before=before)
        # Nearly all models are in order, so they are sorted only where that fails.
        try:
            return resolve(make, model)
        except _DisorderError:
            model = in_order(model)
        try:
            return resolve(make, model)
        except _DisorderError as error:
            raise ModelError(str(error)) from None

    @cached_property
    def _was(self) -> Sequence[int]:
        """Value -> the value of :attr:`before` with its name, if any; empty if a value that is no weight is new."""
        before = self.before
        if before is None or len(self.scopes) > 1 or len(before.scopes) > 1:
            return ()
        names = before.scopes[0].names
        was = [names.get(value.name, ABSENT) for value in self.values]
        weights = [value for value, _ in stored_tensors(self.scopes[0])]
        new = sum(was[value] == ABSENT for value in weights)
        return was if was.count(ABSENT) == new else ()

    @cached_property
    def inferred(self) -> Inferred:
        """The types, see :func:`infer`."""
        before = self.before
        if before is None or before.untyped or not self._was:
            return infer(self)
        return Inferred(same_types(self, self._was, before.types), self.nodes)

    @cached_property
    def types(self) -> Types:
        """Type by value index."""
        return self.inferred.types

    def types_of(self, values: Sequence[int]) -> list[str | None]:
        """Return the types of some values; None for those that are absent or unknown."""
        return [self.types[value] for value in values]

    @cached_property
    def untyped(self) -> frozenset[int]:
        """Values of unknown type, such as outputs of custom ops."""
        kinds = self.types
        return frozenset(
            value.index for value in self.values if kinds[value.index] is None
        )

    @cached_property
    def shapes(self) -> Sequence[Shape | None]:
        """Shape by value index, see :func:`read_shapes`."""
        return self.shapes_at({})

    def shapes_at(self, dims: Mapping[str, int]) -> Sequence[Shape | None]:
        """Return the shapes for these sizes of named dimensions."""
        return sized_shapes(self, self.dims, dims)

    def shapes_of(self, given: Mapping[str, Sequence[int]]) -> Sequence[Shape | None]:
        """Return the shapes for inputs of these shapes."""
        if not given:
            return self.shapes
        return read_shapes(self, with_shapes(self, self.types, given))

    @cached_property
    def dims(self) -> Sequence[Dims | None]:
        """Dimensions by value index, open ones by name: read from a model with inferred shapes, which is not kept."""
        before = self.before
        known = before and self._was and same_dims(self, self._was, before.dims)
        known = known or static_dims(self, self.types)
        return known or read_dims(self, with_shapes(self, self.types))

    @cached_property
    def constants(self) -> Constants:
        """The float32 constants."""
        return Constants(self, self.types, self.folder)

    @cached_property
    def exact(self) -> frozenset[int]:
        """Nodes that commute with rounding, see :func:`is_exact`."""
        return frozenset(
            node.index
            for node in self.nodes_of(op_facts().exact)
            if is_exact(node.proto)
        )

    @cached_property
    def given_floats(self) -> Sequence[int]:
        """The inputs of the model that hold floats, low ones among them; callers give them, or may."""
        return [
            value
            for value in self.scopes[0].inputs
            if self.values[value].origin in (Origin.INPUT, Origin.DEFAULT)
            and self.types[value] in FLOAT_TENSORS
        ]

    @cached_property
    def computing(self) -> Sequence[Node]:
        """The nodes whose output 0 is a float32 tensor, producers first."""
        return [*filter(self.is_float_output, self.order)]

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Values that a body shadows by a value of the same name, see :func:`shadowing`."""
        return frozenset(self.ask(shadowing).values())

    @cached_property
    def passing(self) -> frozenset[int]:
        """Nodes that pass their input on unchanged.

        They are Identities, Casts that change no type, and the Max of one input that protects Casts from fusions.
        """
        able = self.nodes_of(op_facts().passes_on)
        return frozenset(node.index for node in able if self._passes_on(node))

    def _passes_on(self, node: Node) -> bool:
        how = op_facts().passes_on[node.key]
        if how == "same type":
            ends = node.input(0), node.outputs[0]
            return ABSENT not in ends and self.types[ends[0]] == self.types[ends[1]]
        return how == "always" or len(node.inputs) == 1

    @cached_property
    def shields(self) -> frozenset[int]:
        """Nodes that keep an up-cast from a fusion: the Max of one input right after a Cast from a low type."""
        able = (node for node in self.nodes_of({"Max"}) if node.index in self.passing)
        known = ((node.index, self.producer(node.inputs[0], "Cast")) for node in able)
        return frozenset(
            index
            for index, cast in known
            if cast is not None
            and self.types[cast.input(0)] in LOW_TENSORS
            and self.types[cast.outputs[0]] == FLOAT
        )

    def passed_on(self, value: int) -> int:
        """Return the value that is passed on as this one; itself if there is none."""
        while (
            value != ABSENT and (maker := self.values[value].producer) in self.passing
        ):
            value = self.nodes[maker].inputs[0]
        return value

    def float_inputs(self, node: Node) -> list[int]:
        """Return the float32 tensors that the node reads."""
        types = self.types
        return [value for value in node.inputs if types[value] == FLOAT]

    def computed_inputs(self, node: Node) -> list[int]:
        """Return the float32 tensors that the node reads and that are no constants."""
        is_constant = self.constants.is_constant
        return [value for value in self.float_inputs(node) if not is_constant(value)]

    def is_float_output(self, node: Node) -> bool:
        """Return whether output 0 is a float32 tensor."""
        return bool(node.outputs) and self.types[node.outputs[0]] == FLOAT


def inlined(graph: Graph) -> Graph:
    """Return the graph with all functions inlined that can be."""
    if not graph.model.functions:
        return graph
    try:
        return Graph.of(inline_functions(graph.model, partly=True), graph.folder)
    except ModelError:
        return graph


def graph_of(model: Model) -> Graph:
    """Return the graph of a model. ``model.ask(graph_of)`` resolves it once and caches it.

    Raises:
        ModelError, OpsetError: see :func:`resolve`.
    """
    return Graph.of(model.proto, model.folder)
