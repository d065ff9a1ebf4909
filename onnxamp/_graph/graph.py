"""The graph of a model with all analyses of it, each computed once, on first use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Self

from onnx import ModelProto

from onnxamp._dtypes import FLOAT, LOW_TENSORS
from onnxamp._graph.constants import Constants
from onnxamp._graph.resolve import resolve
from onnxamp._graph.shapes import Shape, read_shapes, with_shapes
from onnxamp._graph.types import Types, infer_types
from onnxamp._graph.view import ABSENT, Node, View, shadowing
from onnxamp._model.ask import Asked
from onnxamp._model.model import Model
from onnxamp._ops.facts import is_exact, op_facts

_PASSING: Final = frozenset({"Cast", "Identity", "Max"})


@dataclass(frozen=True, eq=False)
class Graph(View, Asked):
    """A resolved model and the analyses of it.

    Types, shapes and constants are attributes; higher layers run analyses of their own through :meth:`ask`. Results
    never go stale, because a graph never changes: an edited model gets a graph of its own.
    """

    folder: Path | None = None
    """The folder of the model's external data; None if all weights are in the model."""

    @classmethod
    def of(cls, model: ModelProto, folder: Path | None = None) -> Self:
        """Resolve a model, which must not change from then on. Arguments and errors: see :func:`resolve`."""
        return resolve(partial(cls, folder=folder), model)

    @cached_property
    def types(self) -> Types:
        """Type by value index, see :func:`infer_types`."""
        return infer_types(self)

    @cached_property
    def untyped(self) -> frozenset[int]:
        """Values of unknown type, as custom ops make them."""
        return frozenset(value for value, kind in enumerate(self.types) if kind is None)

    @cached_property
    def shapes(self) -> Sequence[Shape | None]:
        """Shape by value index, see :func:`read_shapes`."""
        return self.shapes_at({})

    def shapes_at(self, dims: Mapping[str, int]) -> Sequence[Shape | None]:
        """Shapes for these sizes of named dimensions."""
        return read_shapes(self, self._with_shapes, dims)

    def shapes_of(self, given: Mapping[str, Sequence[int]]) -> Sequence[Shape | None]:
        """Shapes for inputs of these shapes."""
        return read_shapes(self, with_shapes(self, self.types, given)) if given else self.shapes

    @cached_property
    def _with_shapes(self) -> ModelProto:
        return with_shapes(self, self.types)

    @cached_property
    def constants(self) -> Constants:
        """The float32 constants."""
        return Constants(self, self.types, self.folder)

    @cached_property
    def exact(self) -> frozenset[int]:
        """Nodes that commute with rounding, see :func:`is_exact`."""
        return frozenset(node.index for node in self.nodes_of(op_facts().exact) if is_exact(node.proto))

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Values that a body shadows by a value of the same name, see :func:`shadowing`."""
        return frozenset(self.ask(shadowing).values())

    @cached_property
    def passing(self) -> frozenset[int]:
        """Nodes that pass their input on as it is.

        They are Identities, Casts to the type that is there, and the Max of one input that keeps Casts from fusions.
        """
        return frozenset(node.index for node in self.nodes if node.key in _PASSING and self._passes_on(node))

    def _passes_on(self, node: Node) -> bool:
        if node.key == "Cast":
            ends = node.input(0), node.outputs[0]
            return ABSENT not in ends and self.types[ends[0]] == self.types[ends[1]]
        return node.key == "Identity" or len(node.inputs) == 1

    @cached_property
    def shields(self) -> frozenset[int]:
        """Nodes that keep an up-cast from a fusion: the Max of one input right behind a Cast from a low type."""
        known = (
            (index, self.producer(self.nodes[index].inputs[0]))
            for index in self.by_key.get("Max", ())
            if index in self.passing
        )
        return frozenset(index for index, maker in known if maker is not None and self._raises(maker))

    def _raises(self, node: Node) -> bool:
        ends = node.input(0), node.outputs[0]
        is_cast = node.key == "Cast" and ABSENT not in ends
        return is_cast and self.types[ends[0]] in LOW_TENSORS and self.types[ends[1]] == FLOAT

    def passed_on(self, value: int) -> int:
        """The value that is passed on as this one; itself where it is none."""
        while value != ABSENT and (maker := self.values[value].producer) in self.passing:
            value = self.nodes[maker].inputs[0]
        return value

    def float_inputs(self, node: Node) -> list[tuple[int, int]]:
        """(position, value) of the node's float32 tensor inputs."""
        types = self.types
        return [(port, value) for port, value in enumerate(node.inputs) if value != ABSENT and types[value] == FLOAT]

    def is_float_output(self, node: Node) -> bool:
        """Whether output 0 is a float32 tensor."""
        return bool(node.outputs) and node.outputs[0] != ABSENT and self.types[node.outputs[0]] == FLOAT


def graph_of(model: Model) -> Graph:
    """The graph of a model. ``model.ask(graph_of)`` resolves it once and caches it.

    Raises:
        ModelError, OpsetError: see :func:`onnxamp._graph.resolve.resolve`.
    """
    return Graph.of(model.proto, model.folder)
