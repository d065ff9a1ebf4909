"""Constants of a model: the values that are constant, also through data movement, and their elements."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, Format
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.moved_numbers import moved
from onnxamp._graph.shapes import DEFAULT_DIMENSION, Shape
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node, View, stored_tensors
from onnxamp._model.constant_stats import (
    ConstantStats,
    constant_stats,
    stats_of_all,
    tensor_stats,
)
from onnxamp._model.data_files import known_stats
from onnxamp._model.weights import read_array

MAKERS = ("Constant", "ConstantOfShape")
"""Ops whose output has constant elements."""

_FEW = 64
"""Largest number of elements of a constant that may be a number, axes or sizes."""


def constant_tensors(view: View) -> dict[int, TensorProto]:
    """Return value -> the tensor of an initializer that no caller can override, or of a Constant node.

    Complexity: linear in nodes and initializers.
    """
    tensors: dict[int, TensorProto] = {}
    for scope in view.scopes:
        tensors.update(stored_tensors(scope))
    for named in view.overridable():
        del tensors[named.index]
    for node in view.nodes_of({"Constant"}):
        tensor = attribute(node.proto, "value")
        if isinstance(tensor, TensorProto) and node.outputs[0] != ABSENT:
            tensors[node.outputs[0]] = tensor
    return tensors


@dataclass(slots=True)
class Constants:
    """Lazy access to the constants of a view; each float32 tensor is read and measured once at most.

    The view itself is not stored: a graph holds its constants, and a cycle of both would outlive its last user.
    """

    view: InitVar[View]
    types: Types
    folder: Path | None
    tensors: Mapping[int, TensorProto] = field(init=False)
    """See :func:`constant_tensors`."""
    _makers: dict[int, Node] = field(init=False)
    """Value -> its producer, if its elements are constant."""
    _known: set[int] = field(init=False)
    """The values that are constant: tensors, what makers make, and what carriers move of both."""
    _sources: dict[int, int] = field(default_factory=dict)
    _moves: dict[int, Node] = field(default_factory=dict)
    """Value -> the node that moves, or raises, another value to make it."""
    _stats: dict[int, ConstantStats | None] = field(default_factory=dict)
    _floats: dict[int, ConstantStats | None] = field(default_factory=dict)
    _scalars: dict[int, float | None] = field(default_factory=dict)

    def __post_init__(self, view: View) -> None:
        self.tensors = constant_tensors(view)
        makers = view.nodes_of(MAKERS)
        self._makers = {}
        for node in makers:
            self._makers |= dict.fromkeys(node.writes, node)
        self._known = {*self.tensors, *self._makers}
        carriers = op_facts().carriers
        # Producers come first, so the source of a chain of carriers is known when its next node is visited.
        for node in view.order:
            if node.key not in carriers:
                continue
            source = node.input(0)
            if self.types[source] not in FLOAT_TENSORS:
                continue
            self._sources |= dict.fromkeys(node.outputs, self.source(source))
            self._moves |= dict.fromkeys(node.outputs, node)
            if source in self._known:
                self._known.update(node.outputs)
        # Omitted outputs share one index, so the entry for it means nothing.
        self._sources.pop(ABSENT, None)
        self._moves.pop(ABSENT, None)
        self._known.discard(ABSENT)

    def source(self, value: int) -> int:
        """Return the value from which this one's elements are moved or raised; the value itself if there is none."""
        return self._sources.get(value, value)

    def stats(self, value: int) -> ConstantStats | None:
        """Return the statistics of the float32 constant that the value is or comes from; None if it is not constant."""
        if value not in self._known or self.types[value] != FLOAT:
            return None
        source = self._sources.get(value, value)
        if source not in self._stats:
            self._stats[source] = self._measured(source)
        return self._stats[source]

    def _measured(self, value: int) -> ConstantStats | None:
        """Return the statistics of a constant, known ones of its data file before those that take reading it."""
        tensor = self.tensors.get(value)
        if tensor is not None:
            return known_stats(tensor, self.folder) or tensor_stats(
                tensor, self.folder
            )
        array = self._array(value)
        return None if array is None else constant_stats(array)

    def floats(self) -> Mapping[int, ConstantStats | None]:
        """Return :meth:`stats` of all float32 values that are constant, or may be because nodes move them."""
        if not self._floats:
            self._measure_all()
            values = {*self.tensors, *self._makers, *self._sources}
            self._floats.update(
                (value, self.stats(value))
                for value in values
                if self.types[value] == FLOAT
            )
        return self._floats

    def _measure_all(self) -> None:
        """Measure the tensors that have no statistics yet, together, because that is faster."""
        unmeasured = dict[int, TensorProto]()
        for value, tensor in self.tensors.items():
            is_float = tensor.data_type == TensorProto.FLOAT
            is_external = tensor.data_location == TensorProto.EXTERNAL
            if is_float and not is_external and value not in self._stats:
                unmeasured[value] = tensor
        stats = stats_of_all([*unmeasured.values()], self.folder)
        self._stats.update(zip(unmeasured, stats, strict=True))

    def is_constant(self, value: int) -> bool:
        """Return whether the value is a constant that no caller can override."""
        return value in self._known

    def feed(self, node: Node, *, whole: bool = False) -> bool:
        """Return whether the node has float inputs, low ones among them, and all (with ``whole`` all inputs) are
        constants.
        """
        values = [value for value in node.inputs if self.types[value] in FLOAT_TENSORS]
        return bool(values) and all(
            self.is_constant(value) for value in (node.reads if whole else values)
        )

    def uniform(self, value: int) -> float | None:
        """Return the number that all elements of the constant equal; None if they differ, or the value is not
        constant. Of integers, such as the exponents of Pow, only scalars are looked at.
        """
        stats = self.stats(value)
        if stats is not None:
            return stats.uniform
        return self.scalar(self.source(value)) if value in self._known else None

    def fits(self, value: int, low: Format) -> bool:
        """Return whether low precision holds every number of a small float32 constant exactly; False of large ones."""
        source = self.source(value)
        array = self._few(source)
        array = self._array(source) if array is None else array
        if array is None:
            return False
        rounded = array.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(
            np.float32
        )
        return bool(np.array_equal(rounded, array.astype(np.float32), equal_nan=True))

    def numbers(
        self, value: int, *, most: int | None = None
    ) -> NDArray[np.float32] | None:
        """Return all numbers of a float constant, in its shape or one that broadcasts to it.

        None if it is not stored, has more than ``most``, or is moved in a way that is not followed.
        """
        moves = list[tuple[Node, int]]()
        while value in self._moves:
            node = self._moves[value]
            moves.append((node, node.outputs.index(value)))
            value = node.input(0)
        tensor = self.tensors.get(value)
        if tensor is None:
            array = self._array(value)
        elif most is not None and prod(tensor.dims) > most:
            return None  # weights may be behind a URL, so that those that are too many are not even read
        else:
            array = read_array(tensor, self.folder)
        for node, port in reversed(moves):
            if array is None:
                break
            given = [self._given(value) for value in node.inputs[1:]]
            try:
                array = moved(node, array, given, port)
            except (ValueError, TypeError, IndexError):
                return None
        return array

    def _given(self, value: int) -> NDArray[Any] | None:
        """Return the elements of a small integer constant in its shape; None for other values."""
        numbers = self._few(value)
        return None if numbers is None else numbers.astype(np.int64)

    def scalar(self, value: int) -> float | None:
        """Return the number in a constant of one element, None for any other value.

        A constant with more than one dimension does not count, because it could raise the rank of the other operand.
        """
        if value not in self._scalars:
            self._scalars[value] = self._scalar(value)
        return self._scalars[value]

    def integers(self, value: int) -> list[int] | None:
        """Return the elements of a small integer constant; None for other values."""
        numbers = self._few(value)
        return None if numbers is None else [int(one) for one in numbers.reshape(-1)]

    def _scalar(self, value: int) -> float | None:
        numbers = self._few(value, most=1)
        if numbers is None or numbers.ndim > 1 or numbers.size != 1:
            return None
        return float(numbers.item())

    def _few(self, value: int, *, most: int = _FEW) -> NDArray[Any] | None:
        """Return the elements of a small constant of numbers that the model stores; None for other values."""
        tensor = self.tensors.get(value)
        if tensor is None:
            maker = self._makers.get(value)
            if maker is None or maker.key != "Constant":
                return None
            return written_numbers(maker.proto)
        if prod(tensor.dims[:]) > most or tensor.data_type == TensorProto.STRING:
            return None
        is_external = tensor.data_location == TensorProto.EXTERNAL
        # Most are float32, which is read without a look at every other type.
        if is_external or tensor.data_type == TensorProto.FLOAT:
            return read_array(tensor, self.folder)
        return numpy_helper.to_array(tensor)

    def _array(self, value: int) -> NDArray[np.float32] | None:
        """Return the elements of a node's output, unless a tensor holds them."""
        maker = self._makers.get(value)
        if maker is None:
            return None
        if maker.key == "ConstantOfShape":
            held = attribute(maker.proto, "value") or numpy_helper.from_array(
                np.zeros(1, np.float32)
            )
            return read_array(held, self.folder)
        return written_numbers(maker.proto)


def written_numbers(constant: NodeProto) -> NDArray[Any] | None:
    """Return the numbers that a Constant has as attributes, and not as a tensor; None if it has none."""
    for item in constant.attribute:
        if item.name in _WRITTEN:
            return np.asarray(helper.get_attribute_value(item), _WRITTEN[item.name])
    return None


_WRITTEN: Final[Mapping[str, type[np.generic]]] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}
"""Attributes of Constant that hold numbers, and their type."""


Shapes: TypeAlias = Sequence[Shape | None] | Mapping[int, Shape | None]
"""Shape by value index, of all values or of those that a node reads."""


def terms_of(node: Node, shapes: Shapes) -> int | None:
    """Return how many products each element of the output sums up; None for other ops, and if sizes are unknown."""
    if node.key not in _TERMS:
        return None
    # Any letter of an Einsum may be that of one factor alone; for other ops, the second factor tells.
    factors = node.inputs if node.key == "Einsum" else [node.input(1)]
    known = (shapes[factor] for factor in factors)
    if any(shape is None or None in shape for shape in known):
        return None
    return expected_terms(node, shapes)


def expected_terms(node: Node, shapes: Shapes) -> int | None:
    """Return the same as :func:`terms_of`, with a guess for sizes that are unknown."""
    terms = _TERMS.get(node.key)
    return None if terms is None else terms(node, shapes)


def summed_terms(node: Node, shapes: Shapes) -> int | None:
    """Return the number of elements that a reduction or pooling combines into one; None if sizes are unknown.

    Sizes that are unknown before and after it, as those of batches, are not summed up.
    """
    if ABSENT in (node.input(0), node.outputs[0]):
        return None
    before = shapes[node.inputs[0]]
    after = shapes[node.outputs[0]]
    if node.key == "AveragePool":
        return prod(attribute(node.proto, "kernel_shape") or ())
    if before is None or after is None:
        return None
    sizes = [size for size in before if size is not None]
    left = [size for size in after if size is not None]
    if node.key == "CumSum":
        # Its axis is an input, so the longest axis bounds the number of terms.
        return max(sizes, default=None)
    same = len(before) - len(sizes) == len(after) - len(left)
    return prod(sizes) // max(prod(left), 1) if same else None


def _inner(node: Node, shapes: Shapes) -> int:
    first = shapes[node.input(0)]
    second = shapes[node.input(1)]
    own = -1
    if first and len(first) > 1 and attribute(node.proto, "transA"):
        own = _row_axis(node, "A")
    if first and (size := first[own]) is not None:
        return size
    if second is not None and len(second) == 1:
        return _axis(second, -1)
    return _axis(
        second, -1 if attribute(node.proto, "transB") else _row_axis(node, "B")
    )


def _row_axis(node: Node, factor: str) -> int:
    """Return the axis of the rows of a factor's matrices, which FusedMatMul may read from the front of the shape."""
    return 0 if attribute(node.proto, f"transBatch{factor}") else -2


def _gemm(node: Node, shapes: Shapes) -> int:
    first = shapes[node.input(0)]
    if first is None or None in first:
        second = shapes[node.input(1)]
        return _axis(second, 1 if attribute(node.proto, "transB") else 0)
    return _axis(first, 0 if attribute(node.proto, "transA") else -1)


def _conv(node: Node, shapes: Shapes) -> int:
    """Return the elements of a filter."""
    weight = shapes[node.input(1)]
    return prod(_axis(weight, axis) for axis in range(1, len(weight))) if weight else 1


def _transposed(node: Node, shapes: Shapes) -> int:
    """Return the input channels of a group, times the elements of a filter that meet one element of the output."""
    weight = shapes[node.input(1)]
    if not weight:
        return 1
    kernel = prod(_axis(weight, axis) for axis in range(2, len(weight)))
    skipped = prod(attribute(node.proto, "strides") or ()) * (
        attribute(node.proto, "group") or 1
    )
    return max(1, _axis(weight, 0) * kernel // skipped)


def _einsum(node: Node, shapes: Shapes) -> int:
    """Return the sizes of all letters that the result lacks."""
    equation = attribute(node.proto, "equation")
    inputs, arrow, result = equation.decode().replace(" ", "").partition("->")
    letters = inputs.replace(",", "").replace("...", "")
    # Without an arrow, the result has the letters that appear once (the implicit form of Einsum).
    kept = (
        result
        if arrow
        else [letter for letter in letters if letters.count(letter) == 1]
    )
    sizes = defaultdict[str, int](int)
    for value, axes in zip(node.inputs, inputs.split(","), strict=False):
        leading, _, trailing = axes.partition("...")
        places = [*enumerate(leading)]
        places += ((-axis, name) for axis, name in enumerate(reversed(trailing), 1))
        for axis, letter in places:
            # A size of 1 is broadcast.
            sizes[letter] = max(sizes[letter], _axis(shapes[value], axis))
    return prod(size for letter, size in sizes.items() if letter not in kept)


def _axis(shape: Shape | None, axis: int) -> int:
    size = shape[axis] if shape and len(shape) > max(axis, 0) else None
    return DEFAULT_DIMENSION if size is None else size


_TERMS: Final[Mapping[str, Callable[[Node, Shapes], int]]] = {
    "MatMul": _inner,
    "com.microsoft::FusedMatMul": _inner,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _transposed,
    "Einsum": _einsum,
}
