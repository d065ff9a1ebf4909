"""The frozen view of a model: scopes, nodes, values and uses, as :mod:`onnxamp._graph.graph` builds it, and the values
that control flow passes into bodies, out of them, and from one iteration of a loop to the next.

:func:`wire` finds which values of the main graph each of its nodes needs, also through bodies.
"""

from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, count
from operator import attrgetter
from typing import NamedTuple

import onnx.checker
import onnx.defs
import onnx.inliner
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnxamp._base.errors import ModelError
from onnxamp._base.records import record
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.signature import Port, Signature, SignatureBook
from onnxamp._graph.calls import adopt_opsets, bind_defaults, drop_shadowing
from onnxamp._model.protos import (
    all_nodes,
    copy_without,
    node_bodies,
    opset_imports,
)
from onnxamp._model.wellformed import check_wellformed
from onnxamp._model.wellformed_functions import check_functions

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

    @property
    def is_stored(self) -> bool:
        """Whether a tensor of the model stores it."""
        return self.origin in (Origin.INITIALIZER, Origin.DEFAULT)


@record
class Node:
    """A node; ``inputs`` and ``outputs`` are value indices (or ABSENT), ``bodies`` its subgraphs' scopes."""

    index: int
    scope: int
    proto: NodeProto
    key: str
    """Op type as in tables, see :func:`onnxamp._facts.ops.op_key`."""
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
        values = self.inputs
        # Nearly all nodes omit none, and a comprehension costs a call.
        if ABSENT not in values:
            return list(values)
        return [value for value in values if value != ABSENT]

    @property
    def writes(self) -> list[int]:
        """The values of the outputs that are not omitted."""
        values = self.outputs
        if ABSENT not in values:
            return list(values)
        return [value for value in values if value != ABSENT]

    def formals(self) -> Iterator[tuple[int, Port | None]]:
        """Yield the values of inputs and outputs, each with its port in the schema, if there is one."""
        signature = self.signature
        for position, value in enumerate(self.inputs):
            yield value, None if signature is None else signature.input(position)
        for position, value in enumerate(self.outputs):
            yield value, None if signature is None else signature.output(position)

    def input(self, position: int) -> int:
        """Return the value index of an input; ABSENT if it is omitted, or the position is negative."""
        return self.inputs[position] if 0 <= position < len(self.inputs) else ABSENT

    def inputs_at(self, positions: Container[int]) -> list[int]:
        """Return the values of the inputs at these positions that are not omitted."""
        return [
            value
            for position, value in enumerate(self.inputs)
            if position in positions and value != ABSENT
        ]

    def output(self, position: int) -> int:
        """Return the value index of an output; ABSENT if it is omitted, or the position is negative."""
        return self.outputs[position] if 0 <= position < len(self.outputs) else ABSENT


class Ports(NamedTuple):
    """Positions of a node's float inputs and outputs that are low precision if the node is."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@record
class Scope:
    """A graph or a body. A scope is opaque if it belongs to an op without a schema; it is never changed.

    Attributes:
        stored: its initializers. Their values are numbered one after another, from ``first_stored`` on.
    """

    index: int
    parent: int
    owner: int
    proto: GraphProto
    opaque: bool
    names: Mapping[str, int]
    nodes: range
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stored: Sequence[TensorProto]
    first_stored: int


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
        nodes_of: dict[str, list[Node]] = {}
        for node in self.nodes:
            nodes_of.setdefault(node.key, []).append(node)
        return nodes_of

    def nodes_of(self, keys: Iterable[str]) -> list[Node]:
        """Return the nodes of some op types, in the order of all nodes."""
        groups = [*filter(None, map(self.by_key.get, keys))]
        if len(groups) == 1:
            return [*groups[0]]
        return sorted(chain.from_iterable(groups), key=attrgetter("index"))

    def at(self, indices: Iterable[int]) -> list[Node]:
        """Return some nodes, in the order of all nodes."""
        return [self.nodes[index] for index in sorted(indices)]

    def producer(self, value: int, *keys: str) -> Node | None:
        """Return the node that produces the value; None if there is none, or one of another op type than ``keys``."""
        index = self.values[value].producer if value != ABSENT else ABSENT
        node = None if index == ABSENT else self.nodes[index]
        return None if node is None or (keys and node.key not in keys) else node

    def consumers(self, value: int) -> list[tuple[Node, int]]:
        """Return nodes that read the value, with the input position; none if the value is ABSENT."""
        nodes = self.nodes
        return [(nodes[node], port) for node, port in self.uses[value]]

    def readers(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that read any output of the node, with the input position."""
        for value in node.outputs:
            yield from self.consumers(value)

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
        """Return names of all values and nodes of all scopes, which new names must avoid, and declared ones."""
        names = {value.name for value in self.values}
        names |= {node.proto.name for node in self.nodes}
        # Some declare values that are gone: a new one of that name would have their type.
        for scope in self.scopes:
            names |= {entry.name for entry in scope.proto.value_info}
        return names

    def overridable(self) -> list[Value]:
        """Return the initializers that callers may override."""
        # They are inputs of the model as well, of which there are fewer than values.
        overridable = list[Value]()
        for index in sorted(self.scopes[0].inputs):
            value = self.values[index]
            if value.origin is Origin.DEFAULT:
                overridable.append(value)
        return overridable


def stored_tensors(scope: Scope) -> Iterator[tuple[int, TensorProto]]:
    """Yield the initializers of a scope with their values."""
    return zip(count(scope.first_stored), scope.stored, strict=False)


def shadowing(view: View) -> dict[int, int]:
    """Return value of a body -> the nearest outer value of the same name, which it hides from the body.

    Complexity: values times nesting depth.
    """
    outer_of = dict[int, int]()
    for inner in view.scopes[1:]:
        for name, value in inner.names.items():
            outer = view.visible(name, inner.parent)
            if outer != ABSENT:
                outer_of[value] = outer
    return outer_of


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


def entering_values(node: Node, body: Scope) -> dict[int, int]:
    """Return position of a node's input -> the value as which its body gets it (ABSENT: a counter).

    Loop passes (iteration, condition, state...), Scan and SequenceMap pass their inputs as they stand.
    """
    inputs = body.inputs
    # Scan before opset 9 has a leading input, sequence_lens, that its body does not get.
    first = len(node.inputs) - len(inputs) if node.key == "Scan" else 0
    positions = [*range(first, first + len(inputs))]
    # The body of a Loop gets the number of the turn instead of that of all turns.
    if node.key == "Loop":
        positions[:1] = [ABSENT] * len(inputs[:1])
    return dict(zip(positions, inputs, strict=True))


def leaving_values(node: Node, body: Scope) -> dict[int, int]:
    """Return position of a node's output -> the value as which its body returns it (ABSENT: Loop's condition).

    They are in the order in which the body returns them.
    """
    first = ABSENT if node.key == "Loop" else 0
    return dict(enumerate(body.outputs, first))


def carried(view: View, node: Node) -> list[tuple[int, int]]:
    """Return the (node input, node output) pairs of the initial and the final values of loop-carried states."""
    if node.key == "Loop":
        return [(2 + k, k) for k in range(max(len(node.inputs) - 2, 0))]
    if node.key == "Scan":
        scans = int(attribute(node.proto, "num_scan_inputs") or 0)
        body_inputs = len(view.scopes[node.bodies[0][1]].inputs) if node.bodies else 0
        offset = len(node.inputs) - body_inputs
        return [(offset + k, k) for k in range(body_inputs - scans)]
    return []


class CarriedState(NamedTuple):
    """A state that a loop carries from one turn to the next.

    Attributes:
        start: the value that enters the loop.
        before: the value before a turn.
        after: the value after it.
        end: the value that leaves the loop.
    """

    start: int
    before: int
    after: int
    end: int


def carried_states(view: View, node: Node) -> Iterator[CarriedState]:
    """Yield the states that a Loop or Scan carries."""
    for _, body in node.bodies:
        entering = entering_values(node, view.scopes[body])
        leaving = leaving_values(node, view.scopes[body])
        for source, target in carried(view, node):
            yield CarriedState(
                start=node.input(source),
                before=entering.get(source, ABSENT),
                after=leaving.get(target, ABSENT),
                end=node.output(target),
            )


def transfers(view: View, node: Node) -> Iterator[tuple[int, int]]:
    """Yield pairs (source, result) of values, ABSENT for none, that If, Loop or Scan passes on: into bodies and out of
    them, and from one turn of a loop to the next.
    """
    states = [*carried_states(view, node)]
    yield from ((state.start, state.end) for state in states)
    for _, body in node.bodies:
        for source, inner in entering_values(node, view.scopes[body]).items():
            yield node.input(source), inner
        for target, inner in leaving_values(node, view.scopes[body]).items():
            yield inner, node.output(target)
    yield from ((state.after, state.before) for state in states)


def passed_values(view: View) -> dict[int, list[int]]:
    """Return value -> the values as which control flow passes it on: into bodies, out of them, and from one turn of a
    loop to the next.

    Complexity: linear in the inputs and outputs of bodies.
    """
    results: dict[int, list[int]] = {}
    for _, source, result in passages(view):
        results.setdefault(source, []).append(result)
    return results


def passages(view: View) -> Iterator[tuple[int, int, int]]:
    """Yield (node, source, result) for the values that control flow passes on, see :func:`transfers`."""
    for node in view.nodes_of(op_facts().control_flow):
        for source, result in transfers(view, node):
            if ABSENT not in (source, result):
                yield node.index, source, result


def passed_from(view: View) -> dict[int, list[int]]:
    """Return value -> the values that control flow passes on as this one.

    Complexity: linear in the inputs and outputs of bodies.
    """
    sources: dict[int, list[int]] = {}
    for _, source, result in passages(view):
        sources.setdefault(result, []).append(source)
    return sources


def passing_port(view: View, source: int, result: int) -> tuple[int, int]:
    """Return the node that passes a value on as another one, and which of both it reads or writes itself."""
    maker = view.values[result].producer
    owner = view.scopes[view.values[result].scope].owner
    return (owner, source) if maker == ABSENT else (maker, result)


def inline_functions(
    model: ModelProto,
    ops: Collection[tuple[str, str]] | None = None,
    *,
    partly: bool = False,
) -> ModelProto:
    """Replace function calls by the bodies of the functions; return the model itself if there is nothing to inline.

    onnx's inliner serializes the model, so it runs on a copy without the weights. The copy declares them as inputs, so
    that the inliner knows their types and avoids their names.

    Args:
        model: the model; it is not changed.
        ops: (domain, op type) of ops to replace by the function bodies of their schemas, at the model's opset; None for
            the model's own functions.
        partly: return a model that still calls functions that cannot be inlined, instead of failing.

    Raises:
        ModelError: a function calls itself, calls grow beyond measure, a function cannot be inlined, or a call leaves
            out an attribute that a node of its function requires.
    """
    if ops is None and not model.functions:
        return model
    check_functions(model)
    shell = copy_without(model, "initializer")
    drop_shadowing(shell)
    adopt_opsets(shell)
    has_gaps = bind_defaults(shell)
    listed = {entry.name for entry in model.graph.input}
    weights = (
        tensor for tensor in model.graph.initializer if tensor.name not in listed
    )
    shell.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, tuple(t.dims))
        for t in weights
    )
    wanted = () if ops is None else ops
    for node in all_nodes(shell.graph.node) if wanted else ():
        if (node.domain, node.op_type) in wanted:
            _fill_defaults(node, opset_imports(model).get(node.domain, 1))
    try:
        if ops is None:
            result = onnx.inliner.inline_local_functions(shell, convert_version=True)
        else:
            result = onnx.inliner.inline_selected_functions(
                shell, sorted(ops), inline_schema_functions=True
            )
    except (onnx.checker.ValidationError, RuntimeError) as error:
        raise ModelError(
            f"The functions of {model.graph.name!r} cannot be inlined: {error}"
        ) from error
    if ops is None and result.functions and not partly:
        function = result.functions[0]
        raise ModelError(
            f"The model-local function {function.domain}::{function.name} cannot be inlined, so its rounding cannot be"
            " emulated: inline it in the model first."
        )
    del result.graph.input[:]
    result.graph.input.extend(model.graph.input)
    result.graph.initializer.extend(model.graph.initializer)
    # A dropped reference may have been an attribute that the op requires, which the check before did not see.
    if has_gaps:
        check_wellformed(result)
    return result


def _fill_defaults(node: NodeProto, version: int) -> None:
    """Write the schema's default attributes into a node, because the inliner drops some of them."""
    given = {item.name for item in node.attribute}
    for name, item in onnx.defs.get_schema(
        node.op_type, version, node.domain
    ).attributes.items():
        if name not in given and item.default_value.type:
            node.attribute.append(item.default_value)
