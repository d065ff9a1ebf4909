"""Move the branches that a run takes into the main graph, so that their values can be observed.

An If hides what its branches compute. If it is known which branch runs, its nodes can replace the If:

==============================  ============================================================================
in the taken branch             in the main graph
==============================  ============================================================================
node                            itself, where the If was; an If among them is replaced in the next round
initializer                     initializer
value                           the same name, or a new one if another value of the result has that name
result that a node computes     the name of the If's output
any other result                Identity, whose output has the name of the If's output
declared type of a value        declared type, unless the main graph declares one itself
==============================  ============================================================================

Ifs in bodies of Loops and Scans, and in model-local functions, stay.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnxamp._base.errors import ArgumentError, ModelError, RuntimeFailure
from onnxamp._facts.providers import Profile
from onnxamp._graph.editor import GraphEditor, NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin, Scope, View, inline_functions
from onnxamp._model.protos import copied, copy_without, drop_named, node_bodies
from onnxamp._runtime.piecewise.choices import (
    Branch,
    Condition,
    has_choices,
    stamp_of,
    stamped,
)
from onnxamp._runtime.piecewise.flow import DataflowGraph, flow_of
from onnxamp._runtime.piecewise.pieces import Execution, Executor, run_alone
from onnxamp._runtime.sessions.session import Provider
from onnxamp._runtime.sessions.shell import WEIGHTS_IN_GRAPH, Shell, take_weights
from onnxamp._runtime.sessions.values import Feed, Feeds, shapes_of

Run: TypeAlias = Callable[[ModelProto, Sequence[str]], Mapping[str, bool]]
"""Runs a model and returns the named values, each of them a truth value. It must neither change nor keep the model."""


def resolve_branches(
    model: ModelProto, run: Run, taken: set[Branch] | None = None
) -> ModelProto:
    """Return a copy of the model without Ifs in its main graph: the branch that ``run`` takes replaces each.

    Args:
        model: it is not changed, and copied once.
        run: called once per level of nesting, unless all conditions of the level are constants, with a model whose main
            graph holds the conditions.
        taken: receives the branches of Ifs that know the keys of their conditions.

    Raises:
        ArgumentError: ``run`` did not return a condition.
        ModelError: the model cannot be resolved, or an If lacks a branch.
    """
    result = copy_without(model)
    while True:
        graph = Graph.of(result)
        ifs = [
            graph.nodes[index]
            for index in graph.scopes[0].nodes
            if graph.nodes[index].key == "If"
        ]
        if not ifs:
            return result
        read = dict.fromkeys(node.input(0) for node in ifs)
        known = _known_conditions(graph, read)
        wanted = [graph.values[value].name for value in read if value not in known]
        conditions = run(result, wanted) if wanted else {}
        missing = [name for name in wanted if name not in conditions]
        if missing:
            raise ArgumentError(
                f"The run did not return the condition {missing[0]!r}."
            )
        known |= {
            graph.scopes[0].names[name]: bool(conditions[name]) for name in wanted
        }
        branches = {node.index: _branch(node, known[node.input(0)]) for node in ifs}
        if taken is not None:
            keys = ((stamp_of(node.proto), known[node.input(0)]) for node in ifs)
            taken.update((key, holds) for key, holds in keys if key is not None)
        result = _Move(graph, branches, GraphEditor(graph, result)).result()


def _known_conditions(graph: Graph, values: Iterable[int]) -> dict[int, bool]:
    """Return the conditions that are constants, but for those in files."""
    tensors = graph.constants.tensors
    known = {}
    for value in values:
        tensor = tensors.get(value)
        if tensor is None or tensor.data_location != TensorProto.EXTERNAL:
            number = graph.constants.scalar(value)
            if number is not None:
                known[value] = bool(number)
    return known


def _branch(node: Node, condition: bool) -> int:
    """Return the scope of the branch that an If takes."""
    name = "then_branch" if condition else "else_branch"
    scopes = dict(node.bodies)
    if name not in scopes:
        raise ModelError(f"The If {node.label!r} has no {name}.")
    return scopes[name]


@dataclass(slots=True)
class _Move:
    """Moves the branches that are taken into the main graph."""

    view: View
    branches: Mapping[int, int]
    """If node -> scope of the branch that is taken."""
    editor: GraphEditor
    names: dict[int, str] = field(default_factory=dict)
    """Value of a moved scope -> its name in the result."""
    copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """If node -> (result of its branch, its own output) pairs that an Identity connects."""

    def name(self, value: int) -> str:
        """Return the name of a value in the result."""
        return self.names.get(value, self.view.values[value].name)

    def result(self) -> ModelProto:
        """Replace the Ifs."""
        staying = self.staying()
        self.name_values([scope for scope in staying if scope.index])
        labels = NewNames({""})
        for scope in staying:
            nodes = (self.view.nodes[index] for index in scope.nodes)
            labels.taken.update(node.proto.name for node in nodes)
        graph = self.editor.graphs[0]
        declared = {
            entry.name for entry in (*graph.input, *graph.output, *graph.value_info)
        }
        for index, branch in self.branches.items():
            self.move_declarations(self.view.scopes[branch], graph, declared)
            moved = self.moved_nodes(self.view.scopes[branch], labels)
            self.editor.replace(index, [*moved, *self.identities(index, labels)])
        return self.editor.finish()

    def staying(self) -> list[Scope]:
        """Return the scopes that stay. Taken branches are moved; others, and the bodies in them, are dropped."""
        gone: set[int] = set()
        for scope in self.view.scopes[1:]:  # a scope comes after the one around it
            replaced = self.branches.get(scope.owner, scope.index) != scope.index
            if replaced or scope.parent in gone:
                gone.add(scope.index)
        gone.update(self.branches.values())
        return [scope for scope in self.view.scopes if scope.index not in gone]

    def name_values(self, bodies: Sequence[Scope]) -> None:
        """Give every moved value a unique name.

        As names are unique in the whole result, no body can hide a moved value from its readers.
        """
        inner = set[str]().union(*(scope.names for scope in bodies))
        used = inner | self.view.scopes[0].names.keys()
        # Results come first: those that get the name of the If's output need no other name.
        for index, branch in self.branches.items():
            self.pass_results(self.view.nodes[index], self.view.scopes[branch], inner)
        for branch in self.branches.values():
            for name, value in self.view.scopes[branch].names.items():
                if value not in self.names:
                    self.names[value] = (
                        self.editor.names.fresh(name) if name in used else name
                    )
                    used.add(self.names[value])

    def pass_results(self, node: Node, branch: Scope, hidden: set[str]) -> None:
        """Give results of a branch the names of the If's outputs, or note that an Identity is needed.

        ``hidden`` are names that bodies define: readers there might not see a value of such a name.
        """
        for output, result in zip(node.outputs, branch.outputs, strict=False):
            if output == ABSENT:
                continue
            name = self.view.values[output].name
            inner = self.view.values[result]
            is_own = inner.scope == branch.index and inner.origin is Origin.NODE
            if is_own and result not in self.names and name not in hidden:
                self.names[result] = name
            else:
                self.copies.setdefault(node.index, []).append((result, output))

    def move_declarations(
        self, branch: Scope, target: GraphProto, declared: set[str]
    ) -> None:
        """Move initializers of a branch, and types of values that are not among the ``declared`` ones, which grow."""
        source = branch.proto
        for tensor in source.initializer:
            target.initializer.append(tensor)
            target.initializer[-1].name = self.name(branch.names[tensor.name])
        for sparse in source.sparse_initializer:
            target.sparse_initializer.append(sparse)
            values = target.sparse_initializer[-1].values
            values.name = self.name(branch.names[values.name])
        for entry in (*source.value_info, *source.output):
            if entry.name not in branch.names or not entry.HasField("type"):
                continue
            name = self.name(branch.names[entry.name])
            if name not in declared:
                target.value_info.add(name=name).type.CopyFrom(entry.type)
                declared.add(name)

    def moved_nodes(self, branch: Scope, labels: NewNames) -> Iterator[NodeProto]:
        """Yield copies of a branch's nodes with the new names of values, in their bodies as well."""
        for index in branch.nodes:
            node = self.view.nodes[index]
            copy = copied(node.proto)
            copy.output[:] = [
                name and self.name(value)
                for value, name in zip(node.outputs, copy.output, strict=True)
            ]
            if copy.name:
                copy.name = labels.fresh(copy.name)
            rename_reads(self.view, self.names, node, copy)
            yield copy

    def identities(self, index: int, labels: NewNames) -> Iterator[NodeProto]:
        """Yield nodes that give the results of a branch the names of the If's outputs."""
        for source, output in self.copies.get(index, ()):
            name = self.name(output)
            label = labels.fresh(f"{name}/taken")
            yield self.editor.make("Identity", [self.name(source)], [name], label)


def rename_reads(
    view: View, names: Mapping[int, str], node: Node, copy: NodeProto
) -> None:
    """Let a copied node read values by their new names, at any depth, in place.

    Args:
        view: the view of the original.
        names: value -> its new name.
        node: the node.
        copy: its copy.
    """
    waiting = [(node, copy)]
    while waiting:
        node, copy = waiting.pop()
        for port, value in enumerate(node.inputs):
            copy.input[port] = names.get(value, copy.input[port])
        for (_, index), (_, body) in zip(node.bodies, node_bodies(copy), strict=True):
            scope = view.scopes[index]
            for value, entry in zip(scope.outputs, body.output, strict=True):
                entry.name = names.get(value, entry.name)
            inner = (view.nodes[position] for position in scope.nodes)
            waiting += zip(inner, body.node, strict=True)


def settled_flow(
    model: ModelProto,
    base_dir: str | PathLike[str] | None,
    feeds: Feeds,
    *,
    emulated: bool,
    provider: Provider = "cpu",
    before: Executor | None = None,
    arithmetic: Profile | None = None,
    forced: Mapping[str, bool] = MappingProxyType({}),
) -> DataflowGraph:
    """Prepare a model for a sample. A sample that meets other conditions, or leaves other inputs empty, needs another
    flow.

    Args:
        model: it is not changed.
        base_dir: folder of external data, if the model has any that is not loaded.
        feeds: a sample that the model accepts.
        emulated: as for :func:`~onnxamp._runtime.piecewise.flow.make_flow`.
        provider: where conditions are computed.
        before: runs the result for an earlier sample, which is returned if this one takes the same branches, and has
            the same sizes where sums depend on them.
        arithmetic: as for :func:`~onnxamp._runtime.piecewise.flow.flow_of`.
        forced: the branches to take whatever the sample says, by the keys of their conditions; the same as before.

    Raises:
        ModelError, OpsetError, ExternalDataError: as :func:`~onnxamp._runtime.piecewise.flow.make_flow`.
        RuntimeFailure: a condition cannot be computed.
    """
    shapes = shapes_of(feeds)
    summed = None if arithmetic is None else shapes
    if before is not None and before.flow.summed != summed:
        before = None
    if before is not None and _takes_same(before, feeds):
        return before.flow
    settled = settle(
        model, base_dir, feeds, emulated=emulated, provider=provider, forced=forced
    )
    if before is not None and before.flow.choices == settled.choices:
        return before.flow
    flow = flow_of(
        settled.shell,
        emulated=emulated,
        shapes=shapes,
        arithmetic=arithmetic,
    )
    return replace(
        flow,
        summed=summed,
        choices=settled.choices,
        conditions=settled.conditions,
        taken=settled.taken,
    )


def _takes_same(executor: Executor, feeds: Feeds) -> bool:
    """Return whether a sample takes the branches of a flow, and leaves the same inputs empty, as far as that is known.

    The flow computes the conditions itself. The first of them that does not hold depends on no other one, so that the
    branches before it are those that the sample takes.
    """
    flow = executor.flow
    known = dict(flow.choices)
    if any(feed is None and name not in known for name, feed in feeds.items()):
        return False
    given = known.keys() & feeds.keys()
    # An input that was left empty is the output of an Optional.
    if any((feeds[name] is None) is not (name in flow.maker) for name in given):
        return False
    if any(_truth(feeds[name]) is not known[name] for name in given):
        return False
    computed = [name for name in known if name not in feeds]
    if not flow.maker.keys() >= set(computed):
        return False
    try:
        execution = run_alone(executor, feeds, computed) if computed else None
    except RuntimeFailure:  # it may be made for other branches
        return False
    return execution is None or all(
        _holds(execution, name) is known[name] for name in computed
    )


def _holds(execution: Execution, name: str) -> bool:
    """Return the value of a condition."""
    return bool(np.asarray(execution.output(name)).reshape(-1)[0])


def _truth(feed: Feed) -> bool | None:
    """Return the value of an input as a condition; None if it is no condition, and True if it is left empty."""
    if feed is None:
        return True
    is_one = isinstance(feed, np.ndarray) and feed.dtype == bool and feed.size == 1
    return bool(feed) if is_one else None


class SettledModel(NamedTuple):
    """A model as one sample runs it, with functions inlined and branches resolved.

    Attributes:
        shell: the model.
        choices: the conditions that were computed, and the inputs that are empty.
        conditions: the conditions of all Ifs of the model that are no constants.
        taken: the branches that the sample takes, apart from those within bodies of loops.
    """

    shell: Shell
    choices: tuple[tuple[str, bool], ...]
    conditions: tuple[Condition, ...] = ()
    taken: frozenset[Branch] = frozenset()


def settle(
    model: ModelProto,
    base_dir: str | PathLike[str] | None,
    feeds: Feeds,
    *,
    emulated: bool,
    provider: Provider = "cpu",
    keep: int = WEIGHTS_IN_GRAPH,
    forced: Mapping[str, bool] = MappingProxyType({}),
) -> SettledModel:
    """Return the model as one sample runs it.

    ``keep`` is as for :func:`~onnxamp._runtime.piecewise.flow.make_flow`; other arguments and errors as
    :func:`settled_flow`.
    """
    shell = take_weights(model, base_dir, keep=keep)
    shell = shell._replace(model=_without_empty(inline_functions(shell.model), feeds))
    choices = {name: True for name, feed in feeds.items() if feed is None}
    conditions: tuple[Condition, ...] = ()
    taken = set[Branch]()
    if has_choices(shell.model):
        marked, conditions = stamped(shell.model, forced)
        shell = shell._replace(model=marked)
        # Bodies of loops take a branch in every trip, so only what is forced there is known.
        inside = {
            condition.key for condition in conditions if condition.repeats
        } & forced.keys()
        taken.update((key, forced[key]) for key in inside)
    if any(node.op_type == "If" for node in shell.model.graph.node):

        def decide(written: ModelProto, names: Sequence[str]) -> dict[str, bool]:
            """Return the values of conditions; only the nodes that they need are run."""
            own = shell._replace(model=copied(written))  # it is edited after this
            flow = flow_of(own, emulated=emulated, shapes=shapes_of(feeds))
            execution = run_alone(Executor(flow, provider), feeds, names)
            computed = {name: _holds(execution, name) for name in names}
            choices.update(computed)
            return computed

        resolved = resolve_branches(shell.model, decide, taken)
        shell = shell._replace(model=resolved)
    return SettledModel(shell, tuple(choices.items()), conditions, frozenset(taken))


def _without_empty(model: ModelProto, feeds: Feeds) -> ModelProto:
    """Return the model with optional inputs that the sample leaves empty computed inside, as they cannot be fed."""
    empty = [
        entry
        for entry in model.graph.input
        if entry.name in feeds and feeds[entry.name] is None
    ]
    if not empty:
        return model
    editor = GraphEditor(Graph.of(model))
    graph = editor.graphs[0]
    start = editor.view.scopes[0].nodes.start
    for entry in empty:
        held = entry.type.optional_type.elem_type
        editor.insert(
            0, start, editor.make("Optional", [], [entry.name], "", type=held)
        )
    drop_named(graph.input, {entry.name for entry in empty})
    return editor.finish()
