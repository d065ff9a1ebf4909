"""A model as one sample runs it, with the bodies of its control flow in the main graph.

Gradients know no bodies. On a sample, it is known which branch an If takes, and how many turns a loop makes: the nodes
of the branch replace the If, and a copy of the loop's nodes for each turn replaces the loop. The result computes the
same on inputs of these sizes that take the same branches and turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.shapes import declared_dims
from onnxamp._graph.view import ABSENT, Node, Scope, inline_functions
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._runtime.piecewise.branches import rename_reads
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp._runtime.sessions.shell import take_weights
from onnxamp._runtime.sessions.values import Feeds, shapes_of

_MOST_NODES: Final = 4000
"""Nodes that bodies may become. Each is differentiated, which takes a millisecond."""

_LEAST_OPSET: Final = 13
"""The opset from which on Squeeze and Unsqueeze take their axes as an input."""

_MOST_ROUNDS: Final = 8
"""Levels of nesting that are flattened, one in each round."""


Run: TypeAlias = tuple[str, str, int]
"""The op of a node with bodies, the name of the body that it runs on a sample, and how often."""


class Flattened(NamedTuple):
    """A model without control flow.

    Attributes:
        model: the model.
        origins: value of its main graph -> the value of a body that it is a copy of.
        runs: what nodes with bodies run, by level of nesting.
    """

    model: Model
    origins: Mapping[str, str]
    runs: tuple[tuple[Run, ...], ...]


class _FlatError(Exception):
    """The control flow cannot be flattened, or becomes too much."""


def without_functions(model: Model) -> Model:
    """Return the model with the bodies of functions in place of their calls, as results have them.

    A function that cannot be inlined stays.
    """
    if not model.proto.functions:
        return model
    return Model(inline_functions(model.proto, partly=True), model.folder)


def sized(model: Model, sample: Feeds) -> Model:
    """Return a model whose inputs have the sizes of a sample, because some gradients depend on them."""
    shapes = shapes_of(sample)
    open_ones = {
        entry.name
        for entry in model.proto.graph.input
        if entry.type.HasField("tensor_type")
        and entry.name in shapes
        and declared_dims(entry.type) != tuple(shapes[entry.name])
    }
    if not open_ones:
        return model
    proto = copied(model.proto)
    for entry in proto.graph.input:
        if entry.name in open_ones:
            elem = entry.type.tensor_type.elem_type
            shape = shapes[entry.name]
            entry.CopyFrom(helper.make_tensor_value_info(entry.name, elem, shape))
    return Model(proto, model.folder)


def flattened(
    model: Model, feeds: Feeds, like: Flattened | None = None
) -> Flattened | None:
    """Return a model as it runs on a sample; None if that is not known, or takes too many nodes.

    Args:
        model: the model. Before opset 13, Unsqueeze has its axes in an attribute, and None is returned.
        feeds: the sample.
        like: the same network in other precision: this model then takes the branches and turns of that one.
    """
    if model.ask(graph_of).book.opsets.get("", 0) < _LEAST_OPSET:
        return None
    origins = dict[str, str]()
    flat = model
    every = list[tuple[Run, ...]]()
    try:
        for level in range(_MOST_ROUNDS):
            graph = flat.ask(graph_of)
            owners = [node for node in graph.at(graph.scopes[0].nodes) if node.bodies]
            if not owners:
                return Flattened(flat, origins, tuple(every))
            runs = (
                _runs_of(flat, owners, feeds)
                if like is None
                else _given(owners, like.runs[level : level + 1])
            )
            every.append(tuple(_named(node, runs[node.index]) for node in owners))
            flat = Model(_Flattening(graph, origins).flat(runs), model.folder)
    except (_FlatError, OnnxAmpError):
        pass
    return None


def _named(node: Node, ran: tuple[int, int]) -> Run:
    """Return what a node runs, by name."""
    names = {body: name for name, body in node.bodies}
    body, turns = ran
    return node.key, names[body], turns


def _given(
    owners: Sequence[Node], levels: Sequence[Sequence[Run]]
) -> dict[int, tuple[int, int]]:
    """Return node -> the scope that it runs and how often, as the same nodes of another model do."""
    runs = levels[0] if levels else ()
    if [node.key for node in owners] != [key for key, _, _ in runs]:
        raise _FlatError
    return {
        node.index: (dict(node.bodies)[body], turns)
        for node, (_, body, turns) in zip(owners, runs, strict=True)
    }


def with_joined(whole: Flattened) -> tuple[Model, dict[str, str]]:
    """Return the model with values that join the elements of all copies of a value.

    Returns:
        The model, and by value in a body of the original: the value that holds its elements, those of all turns.
    """
    model, origins, _ = whole
    graph = model.ask(graph_of)
    editor = GraphEditor(graph)
    scope = graph.scopes[0]
    copies = dict[str, list[str]]()
    for name, origin in origins.items():
        if name in scope.names and graph.types[scope.names[name]] == FLOAT:
            copies.setdefault(origin, []).append(name)
    names = dict[str, str]()
    for origin, several in copies.items():
        if len(several) == 1:
            names[origin] = several[0]
            continue
        nodes = list[NodeProto]()
        flat = list[str]()
        for name in several:
            flat.append(editor.names.fresh(f"{name}/flat"))
            shape = editor.ints([-1], "flat")
            nodes.append(editor.make("Reshape", [name, shape], [flat[-1]], ""))
        names[origin] = editor.names.fresh(f"{origin}/turns")
        nodes.append(editor.make("Concat", flat, [names[origin]], "", axis=0))
        editor.insert(0, scope.nodes.stop, *nodes)
    return Model(editor.finish(), model.folder), names


def _runs_of(
    model: Model, owners: Sequence[Node], feeds: Feeds
) -> dict[int, tuple[int, int]]:
    """Return node -> the scope that it runs on a sample, and how often."""
    graph = model.ask(graph_of)
    editor = GraphEditor(graph)
    outputs = dict[int, str]()
    declared = list[ValueInfoProto]()
    for node in owners:
        if node.key not in {"If", *op_facts().loops}:
            raise _FlatError
        if any(graph.scopes[body].opaque for _, body in node.bodies):
            raise _FlatError
        outputs[node.index] = name = editor.names.fresh(f"{node.key}/run")
        declared.append(ValueInfoProto(name=name))
        if node.key == "Loop":
            _count_turns(graph, editor, node, name)
            continue
        # A condition, or the size of what is scanned. Either may be an input.
        value = graph.values[node.inputs[0 if node.key == "If" else -1]].name
        op = "Identity" if node.key == "If" else "Shape"
        editor.insert_after(node.index, editor.make(op, [value], [name], ""))
    proto = editor.finish()
    proto.graph.output.extend(declared)
    shell = take_weights(proto, model.folder, keep=0)
    session = make_session(shell.fed(), lean=True, optimize=False)
    results = run(session, {**feeds, **shell.arrays()}, list(outputs.values()))
    runs = dict[int, tuple[int, int]]()
    for node in owners:
        result = results[outputs[node.index]]
        bodies = dict(node.bodies)
        if node.key == "If":
            name = "then_branch" if bool(result) else "else_branch"
            runs[node.index] = bodies[name], 1
        else:
            axes = attribute(node.proto, "scan_input_axes") or [0]
            turns = len(result) if node.key == "Loop" else int(result[axes[-1]])
            runs[node.index] = bodies["body"], turns
    total = sum(len(graph.scopes[body].nodes) * turns for body, turns in runs.values())
    if total + len(graph.scopes[0].nodes) > _MOST_NODES:
        raise _FlatError
    return runs


def _count_turns(graph: Graph, editor: GraphEditor, loop: Node, name: str) -> None:
    """Let a loop also return the numbers of its turns."""
    ((_, body),) = loop.bodies
    scope = graph.scopes[body]
    number = editor.names.fresh(f"{name}/number")
    turn = graph.values[scope.inputs[0]].name
    editor.insert(
        body, scope.nodes.stop, editor.make("Identity", [turn], [number], "")
    )
    results = editor.graphs[body].output
    results.append(helper.make_tensor_value_info(number, 7, ()))
    proto = editor.node(loop.index)
    proto.output.extend([""] * (len(results) - 2 - len(proto.output)))
    proto.output.append(name)


class _Flattening:
    """Replaces the control flow of a main graph, one level of nesting."""

    def __init__(self, graph: Graph, origins: dict[str, str]) -> None:
        self.graph = graph
        self.origins = origins
        """Value in the main graph -> the value of a body that it is a copy of."""
        self.editor = GraphEditor(graph)
        self.count = 0

    def flat(self, runs: Mapping[int, tuple[int, int]]) -> ModelProto:
        """Return the model in which copies of bodies, as often as they run, replace nodes."""
        for index, (body, turns) in runs.items():
            node = self.graph.nodes[index]
            scope = self.graph.scopes[body]
            make = {"If": self.branch, "Loop": self.loop, "Scan": self.scan}[node.key]
            self.editor.replace(index, list(make(node, scope, turns)))
        return self.editor.finish()

    def name(self, value: int, names: Mapping[int, str]) -> str:
        """Return the name of a value for the nodes of a copy."""
        return names.get(value) or self.graph.values[value].name

    def op(
        self, kind: str, inputs: Sequence[str], into: str, **more: Any
    ) -> NodeProto:
        """Return a new node."""
        return self.editor.make(kind, inputs, [into], "", **more)

    def results(self, node: Node, sources: Sequence[str]) -> Iterator[NodeProto]:
        """Yield nodes that give values the names of a node's first results."""
        for port, source in enumerate(sources):
            if node.output(port) != ABSENT:
                result = self.graph.values[node.outputs[port]].name
                yield self.op("Identity", [source], result)

    def branch(self, node: Node, scope: Scope, _: int) -> Iterator[NodeProto]:
        """Yield the nodes of the branch that an If takes."""
        names = self.weights(scope)
        yield from self.copy(scope, names)
        ends = [self.name(value, names) for value in scope.outputs]
        yield from self.results(node, ends)

    def loop(self, node: Node, scope: Scope, turns: int) -> Iterator[NodeProto]:
        """Yield the nodes of all turns of a Loop."""
        shared = self.weights(scope)
        states = [self.graph.values[value].name for value in node.inputs[2:]]
        rows: list[list[str]] = []
        go = self.editor.constant(np.array(True), "go")
        for turn in range(turns):
            number = self.editor.constant(np.array(turn, np.int64), "turn")
            entering = dict(zip(scope.inputs, (number, go, *states), strict=True))
            names = {**shared, **entering}
            yield from self.copy(scope, names)
            ends = [self.name(value, names) for value in scope.outputs[1:]]
            states, scanned = ends[: len(states)], ends[len(states) :]
            rows.append(scanned)
        yield from self.results(node, states)
        yield from self.stacks(node, rows, len(states), (), ())

    def scan(self, node: Node, scope: Scope, turns: int) -> Iterator[NodeProto]:
        """Yield the nodes of all turns of a Scan."""
        shared = self.weights(scope)
        count = int(attribute(node.proto, "num_scan_inputs") or 0)
        given = [self.graph.values[value].name for value in node.inputs]
        states, scanned = given[:-count], given[-count:]
        axes = attribute(node.proto, "scan_input_axes") or [0] * count
        reverse = attribute(node.proto, "scan_input_directions") or [0] * count
        rows: list[list[str]] = []
        for turn in range(turns):
            parts = list[str]()
            for name, axis, is_back in zip(scanned, axes, reverse, strict=True):
                at = turns - 1 - turn if is_back else turn
                number = self.editor.constant(np.array(at, np.int64), "turn")
                parts.append(self.editor.names.fresh(f"{name}/part"))
                yield self.op("Gather", [name, number], parts[-1], axis=axis)
            names = {
                **shared,
                **dict(zip(scope.inputs, (*states, *parts), strict=True)),
            }
            yield from self.copy(scope, names)
            ends = [self.name(value, names) for value in scope.outputs]
            states, row = ends[: len(states)], ends[len(states) :]
            rows.append(row)
        yield from self.results(node, states)
        axes = attribute(node.proto, "scan_output_axes") or ()
        reverse = attribute(node.proto, "scan_output_directions") or ()
        yield from self.stacks(node, rows, len(states), axes, reverse)

    def stacks(
        self,
        node: Node,
        rows: Sequence[Sequence[str]],
        first: int,
        axes: Sequence[int],
        reverse: Sequence[int],
    ) -> Iterator[NodeProto]:
        """Yield nodes that stack what each turn adds to the results of a loop after its states."""
        for port in range(first, len(node.outputs)):
            if node.outputs[port] == ABSENT:
                continue
            if not rows:
                raise _FlatError
            place = port - first
            axis = axes[place] if axes else 0
            column = [row[place] for row in rows]
            if reverse and reverse[place]:
                column.reverse()
            at = self.editor.ints([axis], "axis")
            parts = [self.editor.names.fresh(f"{name}/row") for name in column]
            for name, part in zip(column, parts, strict=True):
                yield self.op("Unsqueeze", [name, at], part)
            result = self.graph.values[node.outputs[port]].name
            yield self.op("Concat", parts, result, axis=axis)

    def weights(self, scope: Scope) -> dict[int, str]:
        """Move the initializers of a body to the main graph, and return their names there."""
        if scope.proto.sparse_initializer:
            raise _FlatError
        names = dict[int, str]()
        for tensor in scope.proto.initializer:
            moved = copied(tensor)
            moved.name = self.editor.names.fresh(tensor.name)
            names[scope.names[tensor.name]] = moved.name
            self.editor.add_weight(0, moved)
        return names

    def copy(self, scope: Scope, names: dict[int, str]) -> Iterator[NodeProto]:
        """Yield copies of a body's nodes, and add the names of what they compute."""
        self.count += 1
        for index in scope.nodes:
            node = self.graph.nodes[index]
            proto = copied(node.proto)
            proto.name = ""
            for port, value in enumerate(node.outputs):
                if value == ABSENT:
                    continue
                name = self.graph.values[value].name
                proto.output[port] = names[value] = self.editor.names.fresh(
                    f"{name}/{self.count}"
                )
                self.origins[names[value]] = self.origins.get(name, name)
            rename_reads(self.graph, names, node, proto)
            yield proto
