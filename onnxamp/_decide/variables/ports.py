"""Precision variables, and the variable of every port of a graph.

A *variable* is one question: low precision or float32? Each port of the graph holds the index of a variable, or one of
the constants below if there is nothing to decide.
"""

from collections.abc import (
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from onnxamp._base.records import record
from onnxamp._decide import mincut
from onnxamp._decide.mincut import Question
from onnxamp._facts.dtypes import Format, holds_float, retyped
from onnxamp._facts.ops import op_facts, type_giver
from onnxamp._facts.signature import Port, Signature
from onnxamp._graph.types import PortTypes, bind
from onnxamp._graph.view import ABSENT, Node

HIGH: Final = mincut.HIGH
"""The port is float32, regardless of the cut."""
LOW: Final = mincut.LOW
"""The port is already low precision: next to a Cast of the original model, or a graph input that is to be low."""
NONE: Final = Question(-3)
"""The port holds no float32."""


@record
class Variable:
    """One question of the cut, which ``index`` is the number of. ``node`` is ABSENT for an initializer: ``value``."""

    index: Question
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


def layout_of(
    node: Node, inputs: PortTypes, outputs: PortTypes, low: Format
) -> Layout:
    """Return the layout of a node with a schema; the same object for all nodes of the op with these types."""
    assert node.signature is not None
    giver = type_giver(node.proto) if node.key in op_facts().dtype_attribute else None
    if giver is None or giver >= len(inputs) or not holds_float(inputs[giver]):
        giver = ABSENT
    return _layout(node.signature, inputs, outputs, giver, low)


@lru_cache(maxsize=1 << 12)
def _layout(
    signature: Signature,
    inputs: PortTypes,
    outputs: PortTypes,
    giver: int,
    low: Format,
) -> Layout:
    """Return the layout of nodes of an op: a float32 parameter that may be low can be if inputs determine it.

    ``giver`` is the input that gives output 0 its type; ABSENT if none does.
    """
    bound = bind(signature, inputs)
    driven = set(bound)
    for position, kind in enumerate(outputs):
        port = signature.output(position)
        if port is not None and kind is not None:
            bound.setdefault(signature.param(port, position), kind)
    facts = op_facts()
    key = signature.key
    params = list[str]()

    def place(port: Port, position: int) -> int:
        """Return the position in ``params`` of the port's parameter; HIGH if schema or facts rule out the low type."""
        param = signature.param(port, position)
        if param not in params:
            kind = bound.get(param)
            allowed = signature.params.get(port.type, ())
            is_pinned = param in facts.pinned_parameters.get(key, ())
            if kind is None or not holds_float(kind) or is_pinned:
                return HIGH
            if retyped(kind, low) not in allowed:
                return HIGH
            params.append(param)
        return params.index(param)

    places: list[int] = [NONE] * len(inputs)
    for position, port in _floats(signature.input, inputs):
        places[position] = place(port, position)
    settable = key in facts.follows_type or key in facts.dtype_attribute
    results: list[int] = [NONE] * len(outputs)
    for position, port in _floats(signature.output, outputs):
        if position == 0 and giver != ABSENT:
            results[position] = places[giver]
        elif signature.param(port, position) in driven or (position == 0 and settable):
            results[position] = place(port, position)
        else:  # the op determines the type, such as that of LayerNormalization's Mean
            results[position] = HIGH
    return Layout(bound, tuple(params), tuple(places), tuple(results))


def _floats(
    formal: Callable[[int], Port | None], types: PortTypes
) -> list[tuple[int, Port]]:
    """Return the ports that hold float32, with their positions."""
    floats = [position for position, kind in enumerate(types) if holds_float(kind)]
    return [
        (position, port)
        for position in floats
        if (port := formal(position)) is not None
    ]


class PortVariables(NamedTuple):
    """The variables of a graph, and their ports.

    Attributes:
        variables: all variables.
        produced: value -> variable of the port that produces it; NONE for ABSENT.
        consumed: node -> variable of each of its inputs.
        read: value -> the distinct variables of the ports that read or return it, HIGH and LOW among them.
        returned: (scope, output position) -> variable.
        of_node: node -> its variables by type parameter.
        free: values that either precision stores or computes at no cost.
        raised_from: output of a Cast from low precision to float32 in the original model -> the Cast's input.
        roots: variable -> the variable that decides for it: ties make variables equal.
        layouts: node -> its layout; nodes of control flow, Casts and Constants have none.
        fixed_high: variables that are tied to a port that is float32 in any case.
        requested_low: parts of the signature that no Cast can follow, and weights, for which the user asks for low
            precision.
    """

    variables: tuple[Variable, ...]
    produced: Sequence[Question]
    consumed: Sequence[Sequence[Question]]
    read: Sequence[Sequence[Question]]
    returned: Mapping[tuple[int, int], Question]
    of_node: Mapping[int, Mapping[str, Question]]
    free: frozenset[int]
    raised_from: Mapping[int, int]
    roots: Sequence[Question]
    layouts: Mapping[int, Layout]
    fixed_high: frozenset[Question]
    requested_low: frozenset[Question]

    def of(self, node: int) -> Collection[Question]:
        """Return the variables of a node."""
        return self.of_node.get(node, {}).values()

    def deciding(self, node: int) -> list[Question]:
        """Return the variables that decide for those of a node."""
        own = self.of_node.get(node)
        return [] if own is None else [*map(self.roots.__getitem__, own.values())]

    def root(self, variable: Question) -> Question:
        """Return the variable that decides for this one; HIGH, LOW and NONE map to themselves."""
        return self.roots[variable] if variable >= 0 else variable

    def roots_of_ports(self) -> list[Question]:
        """Return :meth:`root` by variable, for loops over all ports: HIGH, LOW and NONE count from the end."""
        return [*self.roots, NONE, LOW, HIGH]

    def enters_low(self, value: int) -> bool:
        """Return whether a value enters in low precision, as it is or at the user's request."""
        produced = self.produced[value]
        return produced == LOW or produced in self.requested_low

    def at(self, node: Node, value: int = ABSENT) -> set[Question]:
        """Return the variables of a node: all of them, or those of the ports that carry a value.

        There are none for a value that enters the model in low precision, because it is already rounded.
        """
        if value == ABSENT:
            return {*self.of(node.index)}
        if self.enters_low(value):
            return set()
        variables = {
            self.consumed[node.index][port]
            for port, read in enumerate(node.inputs)
            if read == value
        }
        if value in node.outputs:
            variables.add(self.produced[value])
        return {variable for variable in variables if variable >= 0}
