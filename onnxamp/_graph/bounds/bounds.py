"""The bounds of a graph's values, and what is asked of them.

Values that nodes compute are bounded by a walk (:mod:`onnxamp._graph.bounds.walk`). The others, constants and inputs,
are bounded here when a rule first asks for them.
"""

from collections.abc import Mapping
from math import inf, sqrt
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, Format, Range, tensor_type
from onnxamp._graph.bounds import sources
from onnxamp._graph.bounds.bound import (
    UNKNOWN,
    Bound,
    between,
    intersection,
    step_of,
    whole,
)
from onnxamp._graph.bounds.rounding import rounding
from onnxamp._graph.bounds.weights import READABLE, range_of, range_over, sums_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import height, width
from onnxamp._graph.view import ABSENT, Origin, Value, entering_values
from onnxamp._model.weights import read_array

_SMALL: Final = 1 << 16
"""Elements up to which a constant is looked at in float64."""

_MIDDLING: Final = 1 << 20
"""Elements up to which the norms of a constant are looked at; of larger ones, only the range is known."""

_FIRST: Final = 16
"""Numbers of a constant that mostly show that it has no step."""

_MOST_STEPS: Final = 1 << 11
"""Steps up to which a low-precision type holds all multiples: float16 has 11 digits, the others fewer."""


class Bounds:
    """The bounds of the values of a graph that is computed in low precision."""

    def __init__(
        self,
        graph: Graph,
        low: Format,
        ranges: Mapping[str, Range],
        *,
        is_lowered: bool,
    ) -> None:
        self.graph = graph
        self.low = low
        self.is_lowered = is_lowered
        self.of = dict[int, Bound]()
        self.beyond = dict[int, float]()
        """The magnitudes, before rounding, of values that rounding makes infinite."""
        self._numbers = dict[tuple[bytes, tuple[int, ...], str], Bound]()
        """The bounds of single numbers by their bytes, shape and type: large models repeat few."""
        self._seed(ranges)

    def __getitem__(self, value: int) -> Bound:
        """Return the bound of a value; an unknown one if it is omitted."""
        bound = self.of.get(value)
        if bound is None:
            bound = self.of[value] = self._outset(value)
        return bound

    def reach(self, value: int) -> float:
        """Return the magnitude that no input exceeds, before rounding makes it infinite; infinite if none is known."""
        return self.beyond.get(value, self[value].magnitude)

    def is_exact(self, value: int) -> bool:
        """Return whether low precision holds a value as it is, whatever the input."""
        return self[value].is_exact_in(self.low)

    def is_low(self, value: int) -> bool:
        """Return whether a value is stored in low precision, or may be."""
        return self.is_lowered or self.graph.types[value] == self.low.tensor

    def is_safe(self, value: int) -> bool:
        """Return whether no input brings an element of the value out of the range of low precision."""
        tensor = self.graph.constants.tensors.get(value)
        is_asked_for = value in self.of or tensor is None or 0 in tensor.dims
        # Of a weight that no rule has asked for, its range is enough, which takes a fraction of the time.
        if tensor is not None and not is_asked_for and tensor.data_type in READABLE:
            low, high = self.graph.ask(range_over, value)
            return max(-low, high) < self.low.overflow
        return self[value].magnitude < self.low.overflow

    @property
    def at_risk(self) -> list[int]:
        """The values that low precision holds, or may hold if none does yet."""
        types = self.graph.types
        low = [value for value in self.floats if types[value] == self.low.tensor]
        return low or self.floats

    @property
    def floats(self) -> list[int]:
        """The values that are low precision or float32."""
        kinds = {FLOAT, self.low.tensor}
        indices = (value.index for value in self.graph.values)
        return [value for value in indices if self.graph.types[value] in kinds]

    @property
    def unsafe(self) -> set[int]:
        """The values that some input may bring out of the range of low precision."""
        return {value for value in self.at_risk if not self.is_safe(value)}

    def _seed(self, ranges: Mapping[str, Range]) -> None:
        """Record the ranges that are given of the model's inputs."""
        graph = self.graph
        for value in graph.scopes[0].inputs:
            given = ranges.get(graph.values[value].name)
            if given is not None:
                known = between(*given).sized(width(graph.shapes[value]))
                self.of[value] = self._entering(value, known)

    def _outset(self, value: int) -> Bound:
        """Return the bound of what no node computes: a constant, or an input of the model or of a body."""
        if value == ABSENT:
            return UNKNOWN
        graph = self.graph
        size = width(graph.shapes[value])
        tensor = graph.constants.tensors.get(value)
        if tensor is not None:
            return self._stored(value, tensor)
        held = graph.values[value]
        if held.origin is Origin.INPUT and held.scope:
            return self._entered(held).sized(size)
        known = intersection(
            sources.of_type(graph.types[value]), sources.of_indices(graph, value)
        )
        return known.sized(size)

    def _stored(self, value: int, tensor: TensorProto) -> Bound:
        """Return the bound of a constant."""
        graph = self.graph
        size = width(tuple(tensor.dims))
        if tensor.data_type not in READABLE:
            return sources.of_type(graph.types[value]).sized(size)
        array = read_array(tensor, graph.folder)
        if array.size == 1:
            known = self._number(array)
        elif array.size <= _SMALL:
            known = Bound.of_array(array)
        elif array.size <= _MIDDLING:
            known = _bound_of_many(array)
        else:
            known = between(*graph.ask(range_over, value)).sized(size)
        return self._entering(value, known)

    def _number(self, array: NDArray[Any]) -> Bound:
        """Return the bound of a single number, which is the same object for all constants that hold it."""
        number = array.tobytes(), array.shape, array.dtype.str
        if number not in self._numbers:
            self._numbers[number] = Bound.of_array(array)
        return self._numbers[number]

    def _entering(self, value: int, known: Bound) -> Bound:
        """Return the bound of given numbers, after rounding if low precision stores them."""
        kind = self.graph.types[value]
        if (
            kind not in FLOAT_TENSORS
            or not self.is_low(value)
            or known.is_exact_in(self.low)
        ):
            return known
        by = rounding(self.low, kind, 1.0, is_lowered=self.is_lowered)
        return known.rounded(by, height(self.graph.shapes[value]))

    def _entered(self, value: Value) -> Bound:
        """Return the bound of a body's input in the first turn: of what enters it, or of the number of the turn."""
        graph = self.graph
        scope = graph.scopes[value.scope]
        owner = graph.nodes[scope.owner]
        for source, inner in entering_values(owner, scope).items():
            if inner == value.index and source != ABSENT:
                return self[owner.input(source)].bare
        return whole(between(0.0, max(self[owner.input(0)].high, 1.0) - 1.0))


def _bound_of_many(array: NDArray[Any]) -> Bound:
    """Return the bound of many numbers, those of floats by sums in float32: that takes a fifth of the time."""
    is_float = (
        tensor_type(helper.np_dtype_to_tensor_dtype(array.dtype)) in FLOAT_TENSORS
    )
    rows = sums_of(array, [array.ndim - 1]) if is_float else None
    if rows is None:
        return Bound.of_array(array)
    columns = sums_of(array, [array.ndim - 2]) if array.ndim > 1 else None
    low, high = range_of(array)
    # All of them have no larger step than the first ones.
    first = step_of(array.flat[:_FIRST].astype(np.float64))
    is_exact = max(-low, high) <= first * _MOST_STEPS
    return Bound(
        low=low,
        high=high,
        row=sqrt(float(rows.squares.max())),
        column=inf if columns is None else sqrt(float(columns.squares.max())),
        total=float(rows.magnitudes.max()),
        width=array.shape[-1],
        step=step_of(array.astype(np.float64)) if is_exact else 0.0,
    )
