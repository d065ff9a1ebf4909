"""Folds applied to a model: nodes go, one comes, and what nobody reads any more goes with them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnxamp._graph.names import NewNames
from onnxamp._graph.view import ABSENT, Origin, View, scope_graphs
from onnxamp._rewrite.fold.folds import Fold, NewWeight
from onnxamp._rewrite.place import WEIGHTS_ALONE


def apply_folds(view: View, folds: Sequence[Fold], model: ModelProto) -> None:
    """Change ``model``, a copy of the view's model, as the folds say. The view is stale afterwards.

    Complexity: linear in nodes and in what the folds bring.
    """
    going = _Going(view, folds)
    going.find_orphans()
    taken = view.all_names() - {view.values[value].name for value in going.weights}
    names, graphs = NewNames(taken), scope_graphs(view, model)
    made: dict[int, list[NodeProto]] = {}
    for fold in folds:
        made[_place(fold)] = _new_nodes(view, fold, names, graphs, listed=model.ir_version < WEIGHTS_ALONE)
    scopes = {view.nodes[index].scope for index in going.nodes} | {view.values[value].scope for value in going.weights}
    scopes |= {view.nodes[place].scope for place in made}
    for index in sorted(scopes, reverse=True):  # bodies first: rebuilding a node list copies its nodes
        _rebuild(view, index, graphs[index], going, made)


def _place(fold: Fold) -> int:
    """The node in whose place the new one stands."""
    return fold.last if fold.first == ABSENT else fold.first


@dataclass(slots=True)
class _Going:
    """Nodes and weights that go: those of the folds, and those that they alone read."""

    view: View
    folds: Sequence[Fold]
    nodes: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)

    def find_orphans(self) -> None:
        """Follow inputs of what goes back to producers that nobody else reads. Linear in what goes."""
        self.nodes = {node for fold in self.folds for node in fold.nodes}
        reads: Counter[int] = Counter()
        for fold in self.folds:
            reads.update(value for value in fold.inputs if isinstance(value, int))
        lost: Counter[int] = Counter()
        listed = frozenset(self.view.scopes[0].inputs)  # weights of the old style: without them, callers must give one
        pending = [value for node in self.nodes for value in self.view.nodes[node].inputs if value != ABSENT]
        while pending:
            value = pending.pop()
            lost[value] += 1
            if self.view.results[value] or reads[value] or lost[value] < len(self.view.uses[value]):
                continue
            producer = self.view.producer(value)
            if producer is not None and producer.index not in self.nodes and not producer.bodies:
                if all(made == ABSENT or self._unread(made, reads, lost) for made in producer.outputs):
                    self.nodes.add(producer.index)
                    pending += [found for found in producer.inputs if found != ABSENT]
            elif self.view.values[value].origin is Origin.INITIALIZER and value not in listed:
                self.weights.add(value)

    def _unread(self, value: int, reads: Counter[int], lost: Counter[int]) -> bool:
        return not self.view.results[value] and not reads[value] and lost[value] >= len(self.view.uses[value])


def _new_nodes(
    view: View, fold: Fold, names: NewNames, graphs: Sequence[GraphProto], *, listed: bool
) -> list[NodeProto]:
    """The new node, with Constants before it where weights must not come without a graph input."""
    last, place, nodes = view.nodes[fold.last], view.nodes[_place(fold)], []
    inputs = []
    for item in fold.inputs:
        if isinstance(item, int):
            inputs.append(view.values[item].name)
            continue
        tensor = _named(item, names)
        inputs.append(tensor.name)
        if listed:
            nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
        else:
            graphs[place.scope].initializer.append(tensor)
    made = NodeProto()
    if fold.first != ABSENT:
        made.CopyFrom(view.nodes[fold.first].proto)
        kept = [item for item in made.attribute if item.name != "beta"]  # is in the bias
        del made.input[:], made.output[:], made.attribute[:]
        made.attribute.extend(kept)
    else:
        made.CopyFrom(helper.make_node(fold.op, [], [], name=last.proto.name, **fold.attributes))
        made.doc_string = last.proto.doc_string
        made.metadata_props.extend(last.proto.metadata_props)
    made.input.extend(inputs)
    made.output.append(last.proto.output[0])
    return [*nodes, made]


def _named(weight: NewWeight, names: NewNames) -> TensorProto:
    tensor = weight.make()
    tensor.name = names.fresh(weight.base)
    return tensor


def _rebuild(
    view: View, scope: int, graph: GraphProto, going: _Going, made: dict[int, list[NodeProto]]
) -> None:  # fmt: skip
    """One graph without what goes, and with what comes in its place."""
    first = view.scopes[scope].nodes.start
    rebuilt = GraphProto()
    rebuilt.node.extend(_in_order(list(graph.node), first, going, made))
    kept_outputs = {name for node in rebuilt.node for name in node.output}
    gone = {
        name
        for index in view.scopes[scope].nodes
        if index in going.nodes
        for name in view.nodes[index].proto.output
        if name not in kept_outputs
    }
    rebuilt.value_info.extend(entry for entry in graph.value_info if entry.name not in gone)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(rebuilt.node)
    graph.value_info.extend(rebuilt.value_info)
    count = len(view.scopes[scope].proto.initializer)
    for position in reversed(range(count)):
        if view.scopes[scope].names[view.scopes[scope].proto.initializer[position].name] in going.weights:
            del graph.initializer[position]


def _in_order(
    protos: list[NodeProto], first: int, going: _Going, made: dict[int, list[NodeProto]]
) -> Iterator[NodeProto]:  # fmt: skip
    for index, proto in enumerate(protos, first):
        yield from made.get(index, ())
        if index not in going.nodes:
            yield proto
