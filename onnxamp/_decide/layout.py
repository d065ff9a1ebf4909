"""Which ports of a node share a type parameter, and which parameters can be low: alike for all nodes of equal types."""

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

from onnxamp._decide.ports import HIGH, NONE, Layout
from onnxamp._dtypes import Format, holds_float, retyped
from onnxamp._graph.types import bind
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts, type_giver
from onnxamp._ops.signature import Port, Signature

Types: TypeAlias = tuple[str | None, ...]
"""Types of the inputs or of the outputs of a node; None if absent or unknown."""


def layout_of(node: Node, inputs: Types, outputs: Types, low: Format) -> Layout:
    """The layout of a node with a schema; the same object for all nodes of the op with these types."""
    assert node.signature is not None
    giver = type_giver(node.proto) if node.key in op_facts().dtype_attribute else None
    heir = (
        giver
        if giver is not None and giver < len(inputs) and holds_float(inputs[giver])
        else ABSENT
    )
    return _layout(
        key=node.key, signature=node.signature, inputs=inputs, outputs=outputs, heir=heir, low=low
    )


@lru_cache(maxsize=1 << 12)
def _layout(
    key: str, signature: Signature, inputs: Types, outputs: Types, heir: int, low: Format
) -> Layout:
    """A parameter that is float32, and that the schema allows to be low, can be low where inputs drive it.

    ``heir`` is the input that gives output 0 its type; ABSENT if none does.
    """
    bound = bind(signature, inputs)
    driven = set(bound)
    for position, kind in enumerate(outputs):
        port = signature.output(position)
        if port is not None and kind is not None:
            bound.setdefault(signature.param(port, position), kind)
    pinned, params = op_facts().pinned_parameters.get(key, frozenset()), list[str]()

    def place(port: Port, position: int) -> int:
        """The position in ``params`` of the port's parameter; HIGH if schema or facts rule out the low type."""
        param = signature.param(port, position)
        if param in params:
            return params.index(param)
        kind = bound.get(param)
        allowed = signature.params.get(port.type, frozenset())
        if (
            kind is None
            or not holds_float(kind)
            or retyped(kind, low) not in allowed
            or param in pinned
        ):
            return HIGH
        params.append(param)
        return len(params) - 1

    places = [NONE] * len(inputs)
    for position, port in _floats(signature.input, inputs):
        places[position] = place(port, position)
    settable = key in op_facts().follows_type or key in op_facts().dtype_attribute
    results = [NONE] * len(outputs)
    for position, port in _floats(signature.output, outputs):
        if position == 0 and heir != ABSENT:
            results[position] = places[heir]
        elif signature.param(port, position) in driven or (position == 0 and settable):
            results[position] = place(port, position)
        else:  # the op determines the type, as of LayerNormalization's Mean
            results[position] = HIGH
    return Layout(bound, tuple(params), tuple(places), tuple(results))


def _floats(formal: Callable[[int], Port | None], types: Types) -> list[tuple[int, Port]]:
    """The ports that hold float32, with their positions."""
    ports = (
        (position, formal(position)) for position, kind in enumerate(types) if holds_float(kind)
    )
    return [(position, port) for position, port in ports if port is not None]
