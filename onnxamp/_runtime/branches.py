"""The branches that a run takes, moved into the main graph, so that their values can be observed.

An If hides what its branches compute. Where it is known which branch runs, its nodes can stand in its place:

==============================  ============================================================================
in the taken branch             in the main graph
==============================  ============================================================================
node                            itself, where the If was; an If among them can be taken in the next round
initializer                     initializer
value                           the same name, or a new one where another value of the result has that name
result that a node makes        the name of the If's output
any other result                Identity, whose output has the name of the If's output
declared type of a value        declared type, unless the main graph declares one itself
==============================  ============================================================================

An If is named by its first output. Those in bodies of Loops and Scans, and in model-local functions, stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, TypeAlias

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._errors import ArgumentError, ModelError
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import NewNames
from onnxamp._graph.view import ABSENT, Node, Origin, Scope, View, node_bodies
from onnxamp._model.copying import copy_without

Run: TypeAlias = Callable[[ModelProto, Sequence[str]], Mapping[str, bool]]
"""Runs a model and returns the named values, each a truth value. It must not change or keep the model."""

_BRANCH: Final = {True: "then_branch", False: "else_branch"}


def take_branches(model: ModelProto, taken: Mapping[str, bool]) -> ModelProto:
    """A copy of the model in which some Ifs of the main graph are replaced by one of their branches.

    Args:
        model: it is not changed. Branches that are not taken are not copied.
        taken: first output of an If -> its condition.

    Raises:
        ArgumentError: ``taken`` names something else.
        ModelError: the model cannot be resolved, or an If lacks the branch.

    Complexity: linear in nodes, names and bytes of the result.
    """
    view = Graph.of(model)
    result = copy_without(model, "node")
    _fill(view, taken, result)
    return result


def branch_conditions(model: ModelProto) -> list[str]:
    """Values that decide which branches the main graph's Ifs take, without those that are constants.

    Raises:
        ModelError: the model cannot be resolved.
    """
    return _open_conditions(Graph.of(model))


def resolve_branches(model: ModelProto, run: Run) -> ModelProto:
    """A copy of the model whose main graph holds no If: each is replaced by the branch that ``run`` shows it to take.

    Args:
        model: it is not changed, and copied once.
        run: it is called once per level of nesting, unless all conditions of the level are constants, with a model
            whose main graph holds the conditions.

    Raises:
        ArgumentError: ``run`` did not return a condition.
        ModelError: the model cannot be resolved, or an If lacks a branch.
    """
    result = copy_without(model)
    while True:
        view = Graph.of(result)
        ifs = list(_ifs(view))
        if not ifs:
            return result
        wanted = _open_conditions(view)
        found = run(result, wanted) if wanted else {}
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ArgumentError(f"The run did not return the condition {missing[0]!r}.")
        known = _known_conditions(view)
        known |= {view.scopes[0].names[name]: bool(found[name]) for name in wanted}
        _fill(view, {_key(node): known[node.input(0)] for node in ifs}, result)


def _ifs(view: View) -> Iterator[Node]:
    return (view.nodes[index] for index in view.scopes[0].nodes if view.nodes[index].key == "If")


def _key(node: Node) -> str:
    return next((name for name in node.proto.output if name), "")


def _open_conditions(view: View) -> list[str]:
    known = _known_conditions(view)
    return list(dict.fromkeys(view.values[node.input(0)].name for node in _ifs(view) if node.input(0) not in known))


def _known_conditions(view: View) -> dict[int, bool]:
    """Conditions of Ifs that are constants, with what they always are."""
    initializers = {tensor.name: tensor for tensor in view.scopes[0].proto.initializer}
    known = {}
    for value in {node.input(0) for node in _ifs(view)}:
        tensor, producer = None, view.producer(value)
        if view.values[value].origin is Origin.INITIALIZER:
            tensor = initializers[view.values[value].name]
        elif producer is not None and producer.key == "Constant":
            tensor = next((item.t for item in producer.proto.attribute if item.name == "value"), None)
        if tensor is not None and tensor.data_location != TensorProto.EXTERNAL and prod(tensor.dims) == 1:
            known[value] = bool(numpy_helper.to_array(tensor).reshape(-1)[0])
    return known


@dataclass(slots=True)
class _Move:
    """Which scopes move into the main graph, and what their values are called there."""

    view: View
    branches: Mapping[int, int]
    """If node -> scope of the branch that is taken."""
    names: dict[int, str] = field(default_factory=dict)
    """Value of a moved scope -> its name in the result."""
    copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """If node -> (result of its branch, its own output) between which an Identity stands."""

    def name(self, value: int) -> str:
        return self.names.get(value, self.view.values[value].name)


def _fill(view: View, taken: Mapping[str, bool], target: ModelProto) -> None:
    """Replace the nodes of ``target``, a copy of the view's model with or without its nodes, or that model itself."""
    move = _Move(view, _chosen(view, taken))
    labels = _name_values(move)
    nodes: list[NodeProto] = []
    graph = target.graph
    declared = {entry.name for entry in (*graph.input, *graph.output, *graph.value_info)}
    for index in view.scopes[0].nodes:
        branch = move.branches.get(index)
        if branch is None:
            nodes.append(view.nodes[index].proto)
        else:
            _move_declarations(move, view.scopes[branch], graph, declared)
            nodes += _moved_nodes(move, view.scopes[branch], labels)
            nodes += _identities(move, index, labels)
    del graph.node[:]
    graph.node.extend(nodes)


def _chosen(view: View, taken: Mapping[str, bool]) -> dict[int, int]:
    ifs = {_key(node): node for node in _ifs(view)}
    for key in taken:
        if key not in ifs:
            known = ", ".join(map(repr, ifs)) or "none"
            raise ArgumentError(f"The main graph has no If with the first output {key!r}; it has {known}.")
    chosen = {}
    for key, condition in taken.items():
        scopes = dict(ifs[key].bodies)
        if _BRANCH[condition] not in scopes:
            raise ModelError(f"The If {ifs[key].label!r} has no {_BRANCH[condition]}.")
        chosen[ifs[key].index] = scopes[_BRANCH[condition]]
    return chosen


def _name_values(move: _Move) -> NewNames:
    """Give every moved value a name that no other value of the result has; returns the names for nodes.

    With names that are unique in the whole result, no body can hide a moved value from those who read it.
    """
    view, moved = move.view, set(move.branches.values())
    gone = _dropped(view, move.branches)
    staying = [scope for scope in view.scopes if scope.index not in moved and scope.index not in gone]
    inner = {name for scope in staying if scope.index != 0 for name in scope.names}
    used = inner | view.scopes[0].names.keys()
    for index, branch in move.branches.items():
        _pass_results(move, view.nodes[index], view.scopes[branch], inner)
    names = NewNames(view.all_names())
    for branch in move.branches.values():
        for name, value in view.scopes[branch].names.items():
            if value not in move.names:
                move.names[value] = names.fresh(name) if name in used else name
                used.add(move.names[value])
    return NewNames({view.nodes[index].proto.name for scope in staying for index in scope.nodes} | {""})


def _dropped(view: View, branches: Mapping[int, int]) -> set[int]:
    """Scopes of branches that are not taken, with all that is in them."""
    gone: set[int] = set()
    for scope in view.scopes[1:]:  # a scope stands behind the one around it
        replaced = scope.owner in branches and branches[scope.owner] != scope.index
        if replaced or scope.parent in gone:
            gone.add(scope.index)
    return gone


def _pass_results(move: _Move, node: Node, branch: Scope, hidden: set[str]) -> None:
    """Give results of a branch the names of the If's outputs, or note that this takes an Identity.

    ``hidden`` are names that bodies define: a value of such a name might not be seen by its readers there.
    """
    for output, result in zip(node.outputs, branch.outputs, strict=False):
        if output == ABSENT:
            continue
        name, found = move.view.values[output].name, move.view.values[result]
        is_own = found.scope == branch.index and found.origin is Origin.NODE
        if is_own and result not in move.names and name not in hidden:
            move.names[result] = name
        else:
            move.copies.setdefault(node.index, []).append((result, output))


def _move_declarations(move: _Move, branch: Scope, target: GraphProto, declared: set[str]) -> None:
    """Initializers of a branch, and types of values that are not among the ``declared`` ones, which grow."""
    source = branch.proto
    for tensor in source.initializer:
        target.initializer.append(tensor)
        target.initializer[-1].name = move.name(branch.names[tensor.name])
    for sparse in source.sparse_initializer:
        target.sparse_initializer.append(sparse)
        target.sparse_initializer[-1].values.name = move.name(branch.names[sparse.values.name])
    for entry in (*source.value_info, *source.output):
        name = move.name(branch.names[entry.name]) if entry.name in branch.names else None
        if name is not None and name not in declared and entry.HasField("type"):
            target.value_info.add(name=name).type.CopyFrom(entry.type)
            declared.add(name)


def _moved_nodes(move: _Move, branch: Scope, labels: NewNames) -> Iterator[NodeProto]:
    """Copies of a branch's nodes that read and make values by their new names, in their bodies, too."""
    for index in branch.nodes:
        node = move.view.nodes[index]
        copy = NodeProto()
        copy.CopyFrom(node.proto)
        copy.output[:] = [name and move.name(value) for value, name in zip(node.outputs, copy.output, strict=True)]
        if copy.name:
            copy.name = labels.fresh(copy.name)
        _rename_reads(move, node, copy)
        yield copy


def _rename_reads(move: _Move, node: Node, copy: NodeProto) -> None:
    """Let a copied node read moved values by their new names, at any depth, in place."""
    view, waiting = move.view, [(node, copy)]
    while waiting:
        node, copy = waiting.pop()
        for port, value in enumerate(node.inputs):
            if value in move.names:
                copy.input[port] = move.names[value]
        for (_, index), (_, body) in zip(node.bodies, node_bodies(copy), strict=True):
            scope = view.scopes[index]
            for value, entry in zip(scope.outputs, body.output, strict=True):
                entry.name = move.names.get(value, entry.name)
            waiting += zip((view.nodes[inner] for inner in scope.nodes), body.node, strict=True)


def _identities(move: _Move, index: int, labels: NewNames) -> Iterator[NodeProto]:
    for source, output in move.copies.get(index, ()):
        name = move.name(output)
        yield helper.make_node("Identity", [move.name(source)], [name], labels.fresh(f"{name}/taken"))
