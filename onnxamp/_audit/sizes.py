"""The sizes at which estimates of data volumes hold: those of given inputs, or assumed ones, which are told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxamp._convert.estimate import shapes_at
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._runtime.sizes import Sizes, dim_name, is_open, listed


@dataclass(frozen=True, slots=True)
class Sized:
    """Shapes of values.

    Attributes:
        shapes: shape by value index.
        assumed: dimension of an input -> the size that is assumed, as for made-up inputs; empty for given inputs.
    """

    shapes: Sequence[Shape | None]
    assumed: Mapping[str, int]

    @property
    def told(self) -> str:
        """At which sizes figures hold, to follow them; "" where nothing is assumed."""
        return f" at {listed(self.assumed)} (assumed)" if self.assumed else ""

    def elements(self, value: int) -> int | None:
        """Return the number of elements of a value; None if a size is unknown."""
        shape = self.shapes[value]
        return None if shape is None or None in shape else elements(shape)


def sized(graph: Graph, given: Mapping[str, Sequence[int]] | None) -> Sized:
    """Return the shapes for given inputs; without any, for inputs of the sizes that made-up ones have."""
    if given:
        return Sized(shapes_at(graph, {name: tuple(shape) for name, shape in given.items()}), {})
    weights = {tensor.name for tensor in graph.model.graph.initializer}
    entries = [
        entry for entry in graph.model.graph.input
        if entry.name not in weights and entry.type.HasField("tensor_type")
        and entry.type.tensor_type.HasField("shape")
    ]  # fmt: skip
    assumed = Sizes.of(entries).resolve({})
    if not assumed:
        return Sized(graph.shapes, {})
    shapes = {
        entry.name: tuple(
            assumed[dim_name(entry.name, axis, dim)] if is_open(dim) else dim.dim_value
            for axis, dim in enumerate(entry.type.tensor_type.shape.dim)
        )
        for entry in entries
    }
    return Sized(shapes_at(graph, shapes), assumed)
