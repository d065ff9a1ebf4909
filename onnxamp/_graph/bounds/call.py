"""A node as the rules of bounds see it: the bounds of its inputs, its attributes, shapes and weights."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxamp._base.records import record
from onnxamp._facts.ops import attribute_in_effect
from onnxamp._graph.bounds.bound import Bound
from onnxamp._graph.bounds.rounding import Rounding
from onnxamp._graph.bounds.weights import largest_stretch
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, width
from onnxamp._graph.view import ABSENT, Node

Stretch: TypeAlias = Callable[[Graph, int], float]
"""Returns how many times a weight may make a vector longer."""


@record
class Call:
    """A node and the bounds of its inputs.

    Attributes:
        graph: the graph of the node.
        node: the node.
        bounds: returns the bound of a value, unknown for one that is omitted. Weights are only measured if asked for.
        shapes: the shapes of all values.
        rounding: how far its results may be off what exact arithmetic gives, and what it adds up to them.
        is_lowered: whether float32 values may be stored in low precision.
        adds_low: whether the target adds up the op's terms in low precision, so that no term makes up for another one.
        spectral: weights whose largest singular value is worth its price.
        stretch: bounds that value.
    """

    graph: Graph
    node: Node
    bounds: Callable[[int], Bound]
    shapes: Sequence[Shape | None]
    rounding: Rounding
    is_lowered: bool = False
    adds_low: bool = False
    spectral: AbstractSet[int] = frozenset()
    stretch: Stretch = largest_stretch

    def __getitem__(self, position: int) -> Bound:
        """Return the bound of an input."""
        return self.bounds(self.node.input(position))

    @property
    def present(self) -> list[Bound]:
        """The bounds of the inputs that are not omitted."""
        return [self.bounds(value) for value in self.node.reads]

    def has(self, position: int) -> bool:
        """Return whether the node has this optional input."""
        return self.node.input(position) != ABSENT

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute, or else the schema's default, or ``default``. Bytes are decoded."""
        node = self.node
        opset = self.graph.book.opsets.get("", 1)
        return attribute_in_effect(node.proto, node.key, opset, name, default)

    def shape(self, position: int) -> Shape | None:
        """Return the shape of an input; None if it is omitted or its rank is unknown."""
        return self.shapes[self.node.input(position)]

    def output_shape(self, position: int = 0) -> Shape | None:
        """Return the shape of an output; None if it is omitted or its rank is unknown."""
        return self.shapes[self.node.output(position)]

    def width(self, position: int = 0) -> int | None:
        """Return the size of an output's last axis; None if it is unknown, 1 for a scalar."""
        return width(self.output_shape(position))

    def integers(self, position: int) -> Sequence[int] | None:
        """Return the integers that a constant input holds; None if it is omitted or computed."""
        return self.graph.constants.integers(self.node.input(position))

    def term(self, bound: Bound) -> Bound:
        """Return the bound of what the node computes before it adds something.

        Its rounding may be far larger than the sum, because terms cancel.
        """
        return bound.rounded(self.rounding)

    def numbers(self, position: int) -> NDArray[np.float32] | None:
        """Return the numbers of a float constant input; None if no tensor stores them."""
        return self.graph.constants.numbers(self.node.input(position))


Rule: TypeAlias = Callable[[Call], "Bound | Sequence[Bound]"]
"""Returns the bound of the first output of a node, or those of its first outputs."""
Rules: TypeAlias = Mapping[str, Rule]
