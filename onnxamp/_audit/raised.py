"""A model with low nodes, raised to float32: what the hazard rules for float32 models can look at.

The graph stays as it is; only types and constants are raised.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import copysign
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxamp._audit.findings import Finding
from onnxamp._audit.stock import BLOCK, contents_of, low_as_float32, read_low_bits
from onnxamp._dtypes import FLOAT, FLOAT16, LowType
from onnxamp._graph.constants import Constants
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import Types, infer_types
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.weights import ConstantStats, constant_stats
from onnxamp._ops.facts import attribute

_LOWEST: Final = float(np.finfo(np.float32).max)


class RaisedConstants(Constants):
    """Constants of a model seen as float32; a saturated sentinel looks like the sentinel that it stands for."""

    __slots__ = ("_infinite", "low")

    def __init__(self, graph: Graph, types: Types, folder: Path | None, low: LowType) -> None:
        super().__init__(graph, types, folder)
        self.low = low
        self._infinite: dict[int, bool] = {}

    def _tensor(self, value: int) -> TensorProto | None:
        """The tensor in which the constant is stored, if it is stored in one."""
        tensor, producer = self._tensors.get(value), self.view.producer(value)
        if tensor is None and producer is not None and producer.key in ("Constant", "ConstantOfShape"):
            found = attribute(producer.proto, "value")
            tensor = found if isinstance(found, TensorProto) else None
        return tensor

    def stats(self, value: int) -> ConstantStats | None:
        """As the parent says, but for sentinels that a conversion has saturated to the range or to half of it."""
        found = self._stored(value)
        if found is None or found.uniform is None or abs(found.uniform) not in saturated(self.low):
            return found
        return ConstantStats(_LOWEST, copysign(_LOWEST, found.uniform), 0.0)

    def _stored(self, value: int) -> ConstantStats | None:
        """Statistics of the numbers that are stored. Low ones are never raised as a whole: weights may be large."""
        source = self.source(value)
        tensor = None if value == ABSENT else self._tensor(source)
        if tensor is None or tensor.data_type != self.low.elem:
            return super().stats(value)
        if source not in self._stats:
            self._stats[source] = _low_stats(read_low_bits(tensor, self.folder), self.low)
        return self._stats[source]

    def number(self, value: int) -> float | None:
        """The number that all elements have, as it is stored."""
        found = self._stored(value)
        return None if found is None else found.uniform

    def largest(self, value: int) -> float:
        """Largest finite magnitude, as it is stored; 0 where the value is no constant."""
        found = self._stored(value)
        return 0.0 if found is None else found.largest

    def has_infinite(self, value: int) -> bool:
        """Whether infinities are among the elements of the low constant; each tensor is looked at once."""
        source = self.source(value)
        if source not in self._infinite:
            tensor = self._tensor(source)
            contents = None if tensor is None else contents_of(tensor, self.folder)
            self._infinite[source] = contents is not None and contents.infinite > 0
        return self._infinite[source]


def _low_stats(bits: NDArray[np.uint16], low: LowType) -> ConstantStats:
    """Statistics of a low constant, block by block."""
    starts = range(0, max(bits.size, 1), BLOCK)
    parts = [constant_stats(low_as_float32(bits[start : start + BLOCK], low)) for start in starts]
    numbers = {part.uniform for part in parts}
    return ConstantStats(
        max(part.largest for part in parts),
        numbers.pop() if len(numbers) == 1 else None,
        max((part.largest_number for part in parts), key=abs),
    )


@dataclass(frozen=True, eq=False)
class RaisedGraph(Graph):
    """A graph seen as if its low-precision values were float32."""

    low: LowType = FLOAT16

    @cached_property
    def types(self) -> Types:
        """Type by value index, raised."""
        return [None if found is None else found.replace(self.low.tensor, FLOAT) for found in infer_types(self)]

    @cached_property
    def constants(self) -> RaisedConstants:
        """The constants, raised."""
        return RaisedConstants(self, self.types, self.folder, self.low)


@dataclass(frozen=True, slots=True)
class LowScene:
    """A model with low nodes: ``graph`` shows it raised to float32, ``types`` are the true ones."""

    graph: RaisedGraph
    types: Types
    constants: RaisedConstants
    low: LowType

    def is_low(self, node: Node) -> bool:
        """Whether the node computes in the low type: Casts only change it."""
        if node.key == "Cast":
            return False
        return any(self.low.tensor in (self.types[v] or "") for v in (*node.inputs, *node.outputs) if v != ABSENT)

    def low_constants(self, node: Node) -> Iterator[tuple[int, float]]:
        """(position, number) of the node's low inputs that are constants of one number."""
        for position, value in enumerate(node.inputs):
            if value != ABSENT and self.types[value] == self.low.tensor:
                number = self.constants.number(value)
                if number is not None:
                    yield position, number


def make_low_scene(graph: Graph, low: LowType) -> LowScene:
    """The model raised from one low type to float32."""
    fields = (graph.model, graph.book, graph.scopes, graph.nodes, graph.values, graph.uses, graph.results, graph.order)
    raised = RaisedGraph(*fields, graph.folder, low)
    return LowScene(raised, graph.types, raised.constants, low)


def saturated(low: LowType) -> tuple[float, float]:
    """What conversions make of a sentinel: the largest number of the low type, or half of it."""
    return low.max_finite, low.max_finite / 2


LowRule = Callable[[LowScene], Iterator[Finding]]

_KEEP: Final = (
    "Convert the original again with hazards on (onnxamp convert), or keep this node float32 (--keep-fp32 NAME)."
)


def low_hazard(scene: LowScene, node: Node, text: str, severity: str = "warning", action: str = _KEEP) -> Finding:
    """A hazard of a low node; LOW in the text becomes the name of the type."""
    return Finding(severity, "hazard", node.label, node.key, text.replace("LOW", scene.low.name), action)
