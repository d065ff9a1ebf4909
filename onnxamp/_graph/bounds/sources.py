"""Bounds that types, attributes and sizes give: integers, positions, quantized numbers, draws, and recurrent states."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf
from typing import Final

import numpy as np
from onnx import helper, numpy_helper

from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, elem_of
from onnxamp._facts.ops import op_facts
from onnxamp._graph.bounds.bound import UNKNOWN, Bound, between, hull, whole
from onnxamp._graph.bounds.call import Call, Rules
from onnxamp._graph.constants import written_numbers
from onnxamp._graph.graph import Graph


@cache
def of_type(kind: str | None) -> Bound:
    """Return the bound of a value of which only the type is known: the range of integers, nothing for floats."""
    elem = elem_of(kind) if kind else 0
    if not elem:
        return UNKNOWN
    try:
        numbers = helper.tensor_dtype_to_np_dtype(elem)
    except KeyError:
        return UNKNOWN
    if numbers.kind == "b":
        return whole(between(0.0, 1.0))
    if numbers.kind not in "iu":
        return UNKNOWN
    limits = np.iinfo(numbers)
    return whole(between(float(limits.min), float(limits.max)))


def of_indices(graph: Graph, value: int) -> Bound:
    """Return the bound of a value by the tables in which it selects rows: other indices are an error.

    Complexity: linear in the nodes that read the value.
    """
    lookups = op_facts().lookups
    size = inf
    for index, port in graph.uses[value]:
        node = graph.nodes[index]
        # A branch may not run, and a loop may end before its first turn.
        is_run = node.scope == graph.values[value].scope
        for lookup in lookups.get(node.key, ()) if is_run else ():
            shape = graph.shapes[node.input(lookup.table)]
            if port == lookup.indices and shape and None not in shape:
                size = min(size, max(filter(None, shape), default=1))
    return between(-size, size - 1.0)


def _cast(call: Call) -> Bound:
    """Return the bound of a Cast. To a bool, it makes 0 and 1; out of the range of an integer, anything."""
    x = call[0]
    target = of_type(call.graph.types[call.node.outputs[0]])
    if target.is_unbounded:
        # Floats of 8 bits round as well, and nothing knows how.
        kind = call.graph.types[call.node.outputs[0]]
        return x if kind in ANY_FLOAT_TENSORS else UNKNOWN
    if target.high == 1.0:
        return target
    is_inside = target.low <= x.low and x.high <= target.high
    return between(np.trunc(x.low), np.trunc(x.high)) if is_inside else target


def _shape(call: Call) -> Bound:
    """Return the bound of the sizes of a tensor."""
    shape = call.shape(0)
    if shape is None or None in shape:
        return between(0.0, inf)
    sizes = [size for size in shape if size is not None] or [0]
    return between(float(min(sizes)), float(max(sizes)))


def _size(call: Call) -> Bound:
    shape = call.shape(0)
    if shape is None or None in shape:
        return between(0.0, inf)
    count = float(np.prod([size or 0 for size in shape]))
    return between(count, count)


def _range(call: Call) -> Bound:
    """Return the bound of equally spaced numbers: they begin at the first input and end before the second."""
    step = min(call[0].step, call[2].step)
    return replace(hull([call[port].bare for port in range(2)]), step=step)


def _position(call: Call) -> Bound:
    """Return the bound of indices along an axis."""
    shape = call.shape(0)
    axis = call.attribute("axis", 0)
    size = shape[axis] if shape else None
    return between(0.0, inf if size is None else max(size - 1.0, 0.0))


def _filled(call: Call) -> Bound:
    """Return the bound of a tensor whose elements an attribute gives, zeros by default."""
    held = call.attribute("value")
    if held is None:
        return between(0.0, 0.0)
    number = float(numpy_helper.to_array(held).reshape(-1)[0])
    return between(number, number)


def _written(call: Call) -> Bound:
    """Return the bound of a constant that is written as numbers."""
    numbers = written_numbers(call.node.proto)
    return UNKNOWN if numbers is None else Bound.of_array(numbers)


def _drawn(call: Call) -> Bound:
    return between(call.attribute("low", 0.0), call.attribute("high", 1.0))


def _eye(_call: Call) -> Bound:
    return whole(between(0.0, 1.0))


def _dequantized(call: Call) -> Bound:
    """Return the bound of integers times their scale."""
    integers = call[0].bare
    if call.has(2):
        integers -= call[2].bare
    return integers * call[1].bare


def _modulo(call: Call) -> Bound:
    """Return the bound of remainders, which are smaller than the divisor."""
    limit = call[1].magnitude
    low = 0.0 if call[0].low >= 0.0 and call[1].low >= 0.0 else -limit
    return Bound(low=low, high=limit, step=min(call[0].step, call[1].step))


def _states(call: Call) -> Sequence[Bound]:
    """Return the bounds of recurrent states: each is a gate times a tanh, or a mean of such products."""
    given = [name.lower() for name in map(_text, call.attribute("activations", []))]
    if any(name not in ("sigmoid", "tanh") for name in given):
        return [UNKNOWN]
    # The gates of a GRU weight a mean only if they are between 0 and 1.
    if call.node.key == "GRU" and "tanh" in given[0::2]:
        return [UNKNOWN]
    states = between(-1.0, 1.0)
    if call.node.key == "GRU" and call.has(
        _INITIAL
    ):  # a mean of the last state and a tanh
        states = hull([states, call[_INITIAL].bare])
    if call.node.key != "LSTM":
        return [states, states]
    return [states, states, _cells(call)]


def _cells(call: Call) -> Bound:
    """Return the bound of an LSTM's cells: each step adds a product of two gates to at most what there was."""
    shape = call.shape(0)
    steps = shape[call.attribute("layout", 0)] if shape else None
    if steps is None:
        return UNKNOWN
    first = call[_INITIAL_CELLS].magnitude if call.has(_INITIAL_CELLS) else 0.0
    return between(-first - steps, first + steps)


_INITIAL: Final = 5
"""Input of a recurrent op with its first state."""
_INITIAL_CELLS: Final = 6
"""Input of an LSTM with its first cells."""


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


RULES: Final[Rules] = {
    "ArgMax": _position,
    "ArgMin": _position,
    "Cast": _cast,
    "CastLike": _cast,
    "Constant": _written,
    "ConstantOfShape": _filled,
    "DequantizeLinear": _dequantized,
    "EyeLike": _eye,
    "GRU": _states,
    "LSTM": _states,
    "Mod": _modulo,
    "RNN": _states,
    "RandomUniform": _drawn,
    "RandomUniformLike": _drawn,
    "Range": _range,
    "Shape": _shape,
    "Size": _size,
    "com.microsoft::DequantizeLinear": _dequantized,
}
"""Op -> the rule of its bound."""
