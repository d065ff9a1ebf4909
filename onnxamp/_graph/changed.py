"""The view of a model that differs from another model in few nodes, taken over from that one's view.

Nodes that stay keep their op, and read and write the same values. So only new nodes are read, and no name is resolved
again.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnxamp._facts.ops import op_key
from onnxamp._facts.signature import SignatureBook
from onnxamp._graph.view import ABSENT, Node, Origin, Scope, Value, View
from onnxamp._model.protos import opset_imports


class Change(NamedTuple):
    """What became of the main graph of a model: nodes and weights that stay did not change.

    Attributes:
        view: the model as it was.
        nodes: node of the changed model -> its index in ``view``; ABSENT if it is new.
        lost: weights that went, by value of ``view``.
    """

    view: View
    nodes: Sequence[int]
    lost: AbstractSet[int]


V = TypeVar("V", bound=View)


def resolve_changed(
    make: Callable[..., V], model: ModelProto, change: Change
) -> V | None:
    """Return the same view as resolving all names does; None for models with bodies, sparse weights, or new values
    that no initializer holds. Complexity: linear in nodes and values.

    Args:
        make: constructs the result from the fields of a View, and ``was``: value -> the value that it was, ABSENT for
            new weights.
        model: the changed model, in order; it must not change while the view is in use.
        change: what became of the model.
    """
    graph = model.graph
    if len(change.view.scopes) > 1 or graph.sparse_initializer:
        return None
    builder = _Builder(change, SignatureBook(opset_imports(model)))
    builder.weights(graph)
    builder.inputs(graph)
    if not builder.nodes_of(graph):
        return None
    scope = builder.scope(graph)
    nodes = tuple(builder.nodes)
    return make(
        model,
        builder.book,
        (scope,),
        nodes,
        tuple(builder.values),
        builder.results(scope),
        nodes,
        was=builder.was,
    )


@dataclass(slots=True)
class _Builder:
    """Takes over values and nodes one after another, in the order in which a resolver numbers them."""

    change: Change
    book: SignatureBook
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    tensors: Sequence[TensorProto] = ()
    was: list[int] = field(default_factory=list)
    """Value -> the value that it was."""
    now: list[int] = field(init=False)
    """Value of the view before -> the value that it is; the last entry is that of ABSENT."""

    def __post_init__(self) -> None:
        self.now = [ABSENT] * (len(self.change.view.values) + 1)

    def known(self, name: str) -> int:
        """Return the value that had a name and still has it; ABSENT if there is none."""
        value = self.change.view.scopes[0].names.get(name, ABSENT)
        return ABSENT if value in self.change.lost else value

    def add(
        self, name: str, was: int, origin: Origin, producer: int, port: int
    ) -> int:
        """Add a value, and return its index."""
        value = len(self.values)
        self.values.append(Value(value, name, 0, origin, producer, port))
        self.names[name] = value
        self.was.append(was)
        self.now[was] = ABSENT if was == ABSENT else value
        return value

    def weights(self, graph: GraphProto) -> None:
        """Add the initializers."""
        before = self.change.view
        values, names, now, lost = self.values, self.names, self.now, self.change.lost
        known = before.scopes[0].names
        # As :meth:`add` does: many models have as many weights as nodes.
        self.tensors = graph.initializer[:]
        for value, tensor in enumerate(self.tensors):
            name = tensor.name
            was = known.get(name, ABSENT)
            origin = Origin.INITIALIZER
            if was in lost:
                was = ABSENT
            elif was != ABSENT:
                origin = before.values[was].origin
                now[was] = value
            values.append(Value(value, name, 0, origin, ABSENT, 0))
            names[name] = value
            self.was.append(was)

    def inputs(self, graph: GraphProto) -> None:
        """Add the graph inputs that are no initializers."""
        for port, entry in enumerate(graph.input):
            if entry.name not in self.names:
                self.add(
                    entry.name, self.known(entry.name), Origin.INPUT, ABSENT, port
                )

    def nodes_of(self, graph: GraphProto) -> bool:
        """Add the nodes and what they make; return whether all of that had a value before."""
        before = self.change.view
        nodes, values, names, was = self.nodes, self.values, self.names, self.was
        now = self.now
        origin = Origin.NODE
        protos = graph.node[:]
        for index, (proto, kept) in enumerate(
            zip(protos, self.change.nodes, strict=True)
        ):
            if kept == ABSENT:
                if not self.new_node(index, proto):
                    return False
                continue
            node = before.nodes[kept]
            inputs = (*map(now.__getitem__, node.inputs),)
            outputs = list[int]()
            # As :meth:`add` does: nearly all values are made here, and calls would take as long again.
            for port, value in enumerate(node.outputs):
                if value == ABSENT:
                    outputs.append(ABSENT)
                    continue
                now[value] = made = len(values)
                name = before.values[value].name
                names[name] = made
                values.append(Value(made, name, 0, origin, index, port))
                was.append(value)
                outputs.append(made)
            nodes.append(
                Node(
                    index, 0, proto, node.key, node.signature, inputs, (*outputs,), ()
                )
            )
        return True

    def new_node(self, index: int, proto: NodeProto) -> bool:
        """Add a node that is new; return whether all that it makes had a value before."""
        inputs = [self.names[name] if name else ABSENT for name in proto.input]
        made = [self.known(name) for name in proto.output]
        if ABSENT in made:
            return False
        outputs = list[int]()
        for port, (name, value) in enumerate(zip(proto.output, made, strict=True)):
            outputs.append(self.add(name, value, Origin.NODE, index, port))
        self.nodes.append(
            Node(
                index=index,
                scope=0,
                proto=proto,
                key=op_key(proto),
                signature=self.book.get(proto.domain, proto.op_type),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                bodies=(),
            )
        )
        return True

    def results(self, scope: Scope) -> list[tuple[tuple[int, int], ...]]:
        """Return the outputs of the graph that each value is; the last entry, always empty, is that of ABSENT."""
        results: list[tuple[tuple[int, int], ...]] = [()] * (len(self.values) + 1)
        for port, value in enumerate(scope.outputs):
            results[value] += ((0, port),)
        return results

    def scope(self, graph: GraphProto) -> Scope:
        """Return the graph with all that was added."""
        return Scope(
            index=0,
            parent=ABSENT,
            owner=ABSENT,
            proto=graph,
            opaque=False,
            names=self.names,
            nodes=range(len(self.nodes)),
            inputs=tuple([self.names[entry.name] for entry in graph.input]),
            outputs=tuple([self.names[entry.name] for entry in graph.output]),
            stored=self.tensors,
            first_stored=0,
        )
