"""What the hazard rules look at."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxamp._dtypes import FLOAT, LowType
from onnxamp._graph.constants import Constants
from onnxamp._graph.shapes import Shape
from onnxamp._graph.types import Types
from onnxamp._graph.view import ABSENT, Node, View


@dataclass(frozen=True, slots=True)
class Scene:
    """A model with all that is known about it."""

    view: View
    types: Types
    shapes: Sequence[Shape | None]
    constants: Constants
    low: LowType
    norms: Sequence[tuple[Node, Sequence[int]]]
    """See :func:`onnxamp._patterns.islands.written_out_norms`."""
    swallowing: Mapping[int, str]
    """See :func:`onnxamp._patterns.islands.cast_swallowing_inputs`."""

    def float_inputs(self, node: Node) -> Iterator[tuple[int, int]]:
        """(position, value) of the node's float32 tensor inputs."""
        for position, value in enumerate(node.inputs):
            if value != ABSENT and self.types[value] == FLOAT:
                yield position, value

    def is_float_output(self, node: Node) -> bool:
        """Whether output 0 is a float32 tensor."""
        return bool(node.outputs) and node.outputs[0] != ABSENT and self.types[node.outputs[0]] == FLOAT
