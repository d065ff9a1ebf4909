"""What rewrites of nodes share: names, small constants, and what is known of the node in the old model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import ELEM_NUMBERS, element_name
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.weights import read_array
from onnxamp._ops.facts import attribute

_FEW: Final = 64
"""Elements up to which a constant may be scales."""


class StuckError(Exception):
    """A node cannot take a step; the text ends a sentence."""


@dataclass(slots=True)
class Writer:
    """Constants and names for new nodes. Equal constants are written once, in the main graph, which bodies see."""

    names: NewNames
    constants: dict[tuple[int, tuple[int, ...], bytes], TensorProto] = field(default_factory=dict)

    def constant(self, array: NDArray[Any], base: str, elem: int | None = None) -> str:
        """The name of a constant, ``base`` if it is new; ``elem`` is its element type if it is not the array's."""
        tensor = numpy_helper.from_array(np.asarray(array))
        if elem is not None and elem != tensor.data_type:
            tensor = helper.make_tensor("", elem, array.shape, array.reshape(-1).tolist())
        key = tensor.data_type, tuple(tensor.dims), numpy_helper.to_array(tensor).tobytes()
        if key not in self.constants:
            tensor.name = self.names.fresh(base)
            self.constants[key] = tensor
        return self.constants[key].name

    def ints(self, numbers: Any, base: str) -> str:
        """The name of an int64 constant of the shape of ``numbers``."""
        return self.constant(np.asarray(numbers, np.int64), base)


@dataclass(frozen=True, slots=True)
class Site:
    """A node of the old model that is rewritten, for which new constants and values are named."""

    graph: Graph
    node: Node
    writer: Writer
    values: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        proto, node = self.node.proto, self.node
        pairs = (
            *zip(proto.input, node.inputs, strict=True),
            *zip(proto.output, node.outputs, strict=True),
        )
        object.__setattr__(self, "values", dict(pairs))

    def named(self, what: str) -> str:
        """A name, not used yet, for something that belongs to the node."""
        return f"{self.node.label}/{what}"

    def fresh(self, what: str) -> str:
        """A new name for a node or value that belongs to the node."""
        return self.writer.names.fresh(self.named(what))

    def type_of(self, name: str) -> str | None:
        """The type of a value that the node reads or makes; None if it is not known."""
        value = self.values.get(name, ABSENT)
        return None if value == ABSENT else self.graph.types[value]

    def shape_of(self, name: str) -> Shape | None:
        """The shape of a value that the node reads or makes; None if it is not known."""
        value = self.values.get(name, ABSENT)
        return None if value == ABSENT else self.graph.shapes[value]

    def rank_of(self, name: str) -> int:
        """The number of dimensions of a value.

        Raises:
            StuckError: it is not known.
        """
        shape = self.shape_of(name)
        if shape is None:
            raise StuckError(f"the number of dimensions of {name!r} is unknown")
        return len(shape)

    def floats_of(self, name: str) -> list[float] | None:
        """The elements of a small float32 constant that the node reads; None where it is not one."""
        tensor = self.graph.constants.tensors.get(self.values.get(name, ABSENT))
        if tensor is None or tensor.data_type != TensorProto.FLOAT or prod(tensor.dims) > _FEW:
            return None
        return [float(number) for number in read_array(tensor, self.graph.folder).reshape(-1)]

    def elem_of(self, name: str) -> int:
        """The element type of a tensor that the node reads.

        Raises:
            StuckError: it is not known.
        """
        kind = self.type_of(name)
        if kind is None:
            raise StuckError(f"the type of {name!r} is unknown")
        return ELEM_NUMBERS[element_name(kind)]


def set_attribute(proto: NodeProto, name: str, value: Any) -> None:
    """Give a node an attribute, in place of one of that name."""
    drop_attributes(proto, (name,))
    proto.attribute.append(helper.make_attribute(name, value))


def drop_attributes(proto: NodeProto, names: Any) -> None:
    """Remove attributes of a node."""
    kept = [item for item in proto.attribute if item.name not in names]
    if len(kept) < len(proto.attribute):
        rebuilt = NodeProto()
        rebuilt.attribute.extend(kept)
        del proto.attribute[:]
        proto.attribute.extend(rebuilt.attribute)


def take_attribute(proto: NodeProto, name: str, default: Any = None) -> Any:
    """The value of an attribute, which goes; ``default`` if there is none."""
    value = attribute(proto, name)
    drop_attributes(proto, (name,))
    return default if value is None else value
