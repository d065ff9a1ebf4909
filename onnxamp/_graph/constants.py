"""Constants of a model: which values are constant, through data movement and Casts, and what is in them."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import FLOAT
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node, Origin, View
from onnxamp._model.weights import ConstantStats, constant_stats, read_array
from onnxamp._ops.facts import attribute, op_facts

_MAKERS = ("Constant", "ConstantOfShape")
"""Nodes whose output is constant but for its shape."""

_FEW = 64
"""Elements up to which an integer constant may be axes or sizes."""


def constant_tensors(view: View) -> dict[int, TensorProto]:
    """By value: the tensor of an initializer that no caller can override, or of a Constant node.

    Complexity: linear in nodes and initializers.
    """
    tensors: dict[int, TensorProto] = {}
    for scope in view.scopes:
        named = ((scope.names[tensor.name], tensor) for tensor in scope.proto.initializer)
        tensors |= {value: tensor for value, tensor in named if view.values[value].origin is Origin.INITIALIZER}
    for node in view.nodes:
        tensor = attribute(node.proto, "value") if node.key == "Constant" else None
        if isinstance(tensor, TensorProto):
            tensors[node.outputs[0]] = tensor
    return tensors


@dataclass(slots=True)
class Constants:
    """Lazy access to the float32 constants of a view; each tensor is read and measured once at most."""

    view: View
    types: Types
    folder: Path | None
    _tensors: dict[int, TensorProto] = field(default_factory=dict)
    _stats: dict[int, ConstantStats | None] = field(default_factory=dict)
    _sources: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for scope in self.view.scopes:
            for tensor in scope.proto.initializer:
                self._tensors[scope.names[tensor.name]] = tensor
        carriers = op_facts().carriers
        for index in self.view.order:
            node = self.view.nodes[index]
            source = node.input(0) if node.key in carriers else ABSENT
            if source != ABSENT and self.types[source] == FLOAT:
                self._sources |= dict.fromkeys(node.outputs, self.source(source))

    def source(self, value: int) -> int:
        """The value that this one's elements are moved from; itself where it is moved from nothing."""
        return self._sources.get(value, value)

    def stats(self, value: int) -> ConstantStats | None:
        """Statistics of the float32 constant that the value is, or is moved from; None where it is not constant."""
        if value == ABSENT:
            return None
        source = self.source(value)
        if source not in self._stats:
            array = self._array(source) if self.types[source] == FLOAT else None
            self._stats[source] = None if array is None else constant_stats(array)
        return self._stats[source]

    def is_constant(self, value: int) -> bool:
        """Whether the value is a constant that no caller can override."""
        if value == ABSENT:
            return False
        source = self.source(value)
        return self.view.values[source].origin is Origin.INITIALIZER or self._maker(source) in _MAKERS

    def feed(self, node: Node) -> bool:
        """Whether all float32 inputs of the node are constants, and there is one."""
        values = [value for value in node.inputs if value != ABSENT and self.types[value] == FLOAT]
        return bool(values) and all(self.is_constant(value) for value in values)

    def uniform(self, value: int) -> float | None:
        """The number that all elements of the constant have, if it is such a constant."""
        stats = self.stats(value)
        return None if stats is None else stats.uniform

    def integers(self, value: int) -> list[int] | None:
        """Elements of a small integer constant; None where it is not one, or lies outside the model file."""
        tensor, producer = self._tensors.get(value), self.view.producer(value)
        if tensor is None and producer is not None and producer.key == "Constant":
            numbers = attribute(producer.proto, "value_ints")
            found = attribute(producer.proto, "value")
            if numbers is not None:
                return list(numbers)
            tensor = found if isinstance(found, TensorProto) else None
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL or prod(tensor.dims) > _FEW:
            return None
        return [int(number) for number in numpy_helper.to_array(tensor).reshape(-1)]

    def _maker(self, value: int) -> str | None:
        producer = self.view.producer(value)
        return None if producer is None else producer.key

    def _array(self, value: int) -> NDArray[np.float32] | None:
        if self.view.values[value].origin is Origin.INITIALIZER:
            return read_array(self._tensors[value], self.folder)
        maker, producer = self._maker(value), self.view.producer(value)
        if producer is None or maker not in _MAKERS:
            return None
        tensor = attribute(producer.proto, "value")
        if isinstance(tensor, TensorProto):
            return read_array(tensor, self.folder)
        number = attribute(producer.proto, "value_float")
        numbers = attribute(producer.proto, "value_floats") if number is None else [number]
        if maker == "ConstantOfShape":
            numbers = [0.0]
        return None if numbers is None else np.asarray(numbers, np.float32)
