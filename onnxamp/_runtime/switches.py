"""Switches of a graph: the elements of one Boolean input, the mask, as tensors of one element."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import GraphProto, helper, numpy_helper

from onnxamp._graph.names import NewNames

_TOGETHER: Final = 64
"""Switches that are split off the mask together, in front of the first node that needs one of them. With all at once,
ONNX Runtime 1.31 would take quadratic time to load the model."""

_COUNTED: Final = 18
"""Opset from which on Split needs the number of its outputs."""


@dataclass(slots=True)
class Switches:
    """Splits switches off the mask as they are needed.

    Attributes:
        mask: name of the input.
        names: makes further names.
        opset: that of the model.
        main: its main graph, which grows.
        nodes: by element of the mask: the nodes any of which turns it on; empty if unused.
    """

    mask: str
    names: NewNames
    opset: int
    main: GraphProto
    nodes: list[frozenset[int]] = field(default_factory=list)
    _named: dict[frozenset[int], str] = field(default_factory=dict)
    _unused: list[tuple[int, str]] = field(default_factory=list)
    """Elements that are split off already, and have no nodes yet."""

    def switch(self, graph: GraphProto, nodes: frozenset[int]) -> str:
        """The name of the switch of these nodes, for a reader in a graph of the model.

        If none is left, further ones are split off the mask: here, or, in a body, at the start of the main graph.
        """
        if nodes not in self._named:
            if not self._unused:
                self._split(len(self.main.node) if graph is self.main else 0)
            position, self._named[nodes] = self._unused.pop()
            self.nodes[position] = nodes
        return self._named[nodes]

    def enter_bodies(self) -> None:
        """Forget switches that are left: they may be made behind the nodes whose bodies come now."""
        self._unused.clear()

    def _split(self, at: int) -> None:
        """Insert the nodes that split switches off the mask."""
        start = len(self.nodes)
        self.nodes += [frozenset[int]()] * _TOGETHER
        names = [self.names.fresh(f"{self.mask}/{start + i}") for i in range(_TOGETHER)]
        part, positions = (
            self.names.fresh(f"{self.mask}/{start}/{kind}") for kind in ("part", "positions")
        )
        elements = np.arange(start, start + _TOGETHER, dtype=np.int64)
        self.main.initializer.append(numpy_helper.from_array(elements, positions))
        self.main.node.insert(at, helper.make_node("Gather", [self.mask, positions], [part]))
        split = helper.make_node("Split", [part], names)
        if self.opset >= _COUNTED:
            split.attribute.append(helper.make_attribute("num_outputs", _TOGETHER))
        self.main.node.insert(at + 1, split)
        self._unused = list(enumerate(names, start))[::-1]
