"""Precision variables, and the variable of every port of a graph.

A *variable* is one question: low precision or float32? Each port of the graph holds the index of a variable, or one of
the constants below where there is nothing to decide.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from onnxamp._dtypes import LOW_TENSORS
from onnxamp._graph.bodies import body_sources, body_targets, carried
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.protos import record
from onnxamp._ops.facts import op_facts
from onnxamp._ops.profiles import Profile

HIGH: Final = -1
"""The port is float32, whatever the cut decides."""
LOW: Final = -2
"""The port is low precision already: beside a Cast of the original model, or a graph input that shall be low."""
NONE: Final = -3
"""The port holds no float32."""


@record
class Variable:
    """One yes/no question. ``node`` is ABSENT for an initializer, which is ``value``."""

    index: int
    node: int
    param: str
    value: int = ABSENT


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The type parameters of a node; compared by identity, because equal nodes share one.

    Attributes:
        bound: type by type parameter.
        params: parameters that may be low.
        inputs: for each input the position of its parameter in ``params``, HIGH or NONE.
        outputs: the same for each output.
    """

    bound: Mapping[str, str]
    params: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class PortVariables(NamedTuple):
    """The variables of a graph, and where they apply.

    Attributes:
        variables: all variables.
        produced: value -> variable of the port that produces it.
        consumed: node -> variable of each of its inputs.
        returned: (scope, output position) -> variable.
        of_node: node -> its variables by type parameter.
        free: values that either precision stores or computes at no cost.
        lowered: output of a Cast from low precision to float32 in the original model -> the Cast's input.
        roots: variable -> the variable that decides for it: ties make variables equal.
        layouts: node -> its layout; nodes of control flow, Casts and Constants have none.
        fixed_high: variables that are tied to a port that is float32 in any case.
        requested_low: parts of the signature that no Cast can follow, and weights, for which the user asks for low
            precision.
    """

    variables: tuple[Variable, ...]
    produced: Sequence[int]
    consumed: Sequence[Sequence[int]]
    returned: Mapping[tuple[int, int], int]
    of_node: Mapping[int, Mapping[str, int]]
    free: frozenset[int]
    lowered: Mapping[int, int]
    roots: Sequence[int]
    layouts: Mapping[int, Layout]
    fixed_high: frozenset[int]
    requested_low: frozenset[int]

    def root(self, variable: int) -> int:
        """The variable that decides for this one; HIGH, LOW and NONE stand for themselves."""
        return self.roots[variable] if variable >= 0 else variable

    def at(self, node: Node, value: int = ABSENT) -> set[int]:
        """Variables of a node: all of them, or those of the ports that carry a value.

        None carry one that comes in low, as is or because the user asks for it: no reader can spare it the rounding.
        """
        if value == ABSENT:
            return {*self.of_node.get(node.index, {}).values()}
        if self.produced[value] == LOW or self.produced[value] in self.requested_low:
            return set()
        found = {
            self.consumed[node.index][port]
            for port, read in enumerate(node.inputs)
            if read == value
        }
        if value in node.outputs:
            found.add(self.produced[value])
        return {variable for variable in found if variable >= 0}


class Read(NamedTuple):
    """A value that is read as it was made: by an input of a node, or (``port`` is ABSENT) by an output of its body.

    ``owner`` is the node that cannot read a Cast; ``node`` itself, or one behind data movement.
    """

    owner: Node
    value: int
    node: int
    port: int
    result: tuple[int, int] | None = None
    """Scope and output position where it leaves a body."""


def straight_reads(graph: Graph, profile: Profile) -> Iterator[Read]:
    """All reads of a model that take no Cast from low precision. Complexity: linear in nodes, and in moved data."""
    for node, position in ports_of(graph, profile.uncast_inputs):
        read = Read(node, node.input(position), node.index, position)
        yield from data_movement(graph, profile, read)
    for node in graph.nodes_of(profile.uncast_scans):
        states = len(carried(graph, node))
        for _, body in node.bodies:
            inputs, outputs = graph.scopes[body].inputs, graph.scopes[body].outputs
            sources = body_sources(node, len(inputs)) if node.key == "Scan" else ()
            sliced = dict(zip(inputs, sources, strict=False))
            for position, target in enumerate(body_targets(node, len(outputs))):
                result = Read(
                    node, outputs[position], node.index, ABSENT, (body, position)
                )
                reads = list(data_movement(graph, profile, result))
                if target >= states:
                    yield from reads
                port = sliced.get(reads[-1].value, ABSENT)
                if port != ABSENT:  # what is read slice by slice, and moved
                    read = Read(node, node.input(port), node.index, port)
                    yield from data_movement(graph, profile, read)


def ports_of(
    graph: Graph, positions: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Node, int]]:
    """The ports of nodes, by op type and position."""
    for node in graph.nodes_of(positions):
        yield from ((node, position) for position in positions[node.key])


def data_movement(graph: Graph, profile: Profile, read: Read) -> Iterator[Read]:
    """A read, and what data movement before it reads: also that of a loop, whose last state its body returns."""
    found: Read | None = read
    while found is not None and found.value != ABSENT:
        yield found
        found = _read_before(graph, profile, found)


def _read_before(graph: Graph, profile: Profile, read: Read) -> Read | None:
    """What the node reads, or the body returns, that makes a value, if it only moves data."""
    made = graph.producer(read.value)
    if made is None:
        return None
    if (port := _passes_on(graph, profile, made)) != ABSENT:
        return Read(read.owner, made.input(port), made.index, port)
    states = {
        made.outputs[output]: output
        for _, output in carried(graph, made)
        if output < len(made.outputs)
    }
    for _, body in made.bodies if read.value in states else ():
        outputs = graph.scopes[body].outputs
        position = body_targets(made, len(outputs)).index(states[read.value])
        return Read(read.owner, outputs[position], made.index, ABSENT, (body, position))
    return None


def _passes_on(graph: Graph, profile: Profile, node: Node) -> int:
    """The input that a node passes on as the builder sees it, without computing anything; ABSENT if it computes."""
    if not node.outputs:
        return ABSENT
    kind, facts = graph.types[node.outputs[0]], op_facts()
    alike = {
        value: port
        for port, value in reversed(list(enumerate(node.inputs)))
        if value != ABSENT and graph.types[value] == kind
    }
    if node.key in facts.carriers | facts.eliminated:
        return 0 if node.input(0) in alike else ABSENT
    is_passed = node.key in profile.passing and len(alike) == 1
    return max(alike.values()) if is_passed else ABSENT


def own_casts(graph: Graph, profile: Profile) -> Iterator[tuple[Read, Node]]:
    """(read, Cast) where an input reads a Cast of low precision that the model brings along.

    The builder takes such a Cast if others read it, too.
    """
    for read in straight_reads(graph, profile):
        made = graph.producer(read.value)
        if (
            read.result is not None
            or read.owner.key not in profile.uncast_inputs
            or made is None
        ):
            continue
        source = made.input(0) if made.key == "Cast" else ABSENT
        if source != ABSENT and graph.types[source] in LOW_TENSORS:
            yield read, made


def moved_from(graph: Graph, profile: Profile, value: int) -> list[int]:
    """A value, and all that data movement makes of it."""
    values = [value]
    for moved in values:
        for node, port in graph.consumers(moved):
            if _passes_on(graph, profile, node) == port:
                values += [
                    result
                    for result in node.outputs
                    if graph.types[result] == graph.types[value]
                ]
    return values
